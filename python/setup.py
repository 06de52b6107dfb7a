"""Adds to the package what is not Python: the native libraries, the C header and amem.pth."""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent

# site runs a line that starts with "import" in every Python process. Where both
# variables are unset it must cost nothing, so it looks before it imports.
PTH = (
    'import os; any(os.environ[name] not in ("", "0") or name not in ("AMEM_ENABLE", "AMEM_COMPAT_TMS") '
    'for name in os.environ if name.startswith("AMEM_")) and __import__("amem._autoenable")\n'
)


def native_dir(build_temp: Path) -> Path:
    """The folder with lib/, include/ and sim/: AMEM_NATIVE_DIR, or built here with gcc and Go."""
    given = os.environ.get("AMEM_NATIVE_DIR")
    if given:
        return Path(given)
    script = HERE.parent / "scripts" / "build_native.sh"
    if not script.exists():
        raise SystemExit(f"{script} is missing: install from a checkout of amem, with pip 21.3 or later")
    subprocess.run(["bash", str(script), str(build_temp)], check=True)
    return build_temp


class BuildWithNative(build_py):
    def run(self) -> None:
        target = Path(self.build_lib)
        # A module that has been removed since the last build must not get in.
        shutil.rmtree(target / "amem", ignore_errors=True)
        super().run()
        native = native_dir(Path(self.get_finalized_command("build").build_temp).resolve())
        for folder in ("lib", "include", "sim"):
            shutil.copytree(native / folder, target / "amem" / folder)
        (target / "amem.pth").write_text(PTH)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the libraries are loaded with ctypes."""

    def get_tag(self) -> "tuple[str, str, str]":
        return ("py3", "none", os.environ.get("AMEM_WHEEL_PLATFORM") or super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


readme = next((p for p in (HERE / "README.md", HERE.parent / "README.md") if p.exists()), None)

setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel},
    long_description=readme.read_text() if readme else "",
    long_description_content_type="text/markdown",
)
