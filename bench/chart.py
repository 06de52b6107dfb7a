"""Draws bench.json as bars: `chart.py bench.json bench.png`. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["modes"] if row.get("pause_s") is not None]
    if not rows:
        print("no mode finished a cycle: no chart")
        return
    parts = (
        ("pause_s", "pause", "#4878a8"),
        ("resume_s", "resume", "#e0883a"),
        ("first_collective_s", "next collectives, connecting included", "#8c8c8c"),
    )
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.9 * len(rows)))
    height = 0.26
    for place, (key, label, colour) in enumerate(parts):
        values = [1e3 * (row[key] or 0) for row in rows]
        positions = [index + (place - 1) * height for index in range(len(rows))]
        bars = axes.barh(positions, values, height, label=label, color=colour)
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.invert_yaxis()
    # From tens of milliseconds to tens of seconds.
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds (logarithmic), slowest rank, median of cycles")
    communicators = results["params"]["communicators"]
    axes.set_title(f"{communicators} communicators, {results['gpus']} GPUs, NCCL {results['found']['nccl_version']}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
