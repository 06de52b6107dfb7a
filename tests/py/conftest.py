"""Without an installed amem, the tests import that of this checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))
