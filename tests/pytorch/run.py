"""Runs the tests in this folder on real releases of PyTorch, and says on which and how many.

    run.py [--only VERSION]... [-- PYTEST ARGUMENTS]

Of each requirements-VERSION.txt there is a folder build/torch/VERSION: in
packages what pip installs by it, which is downloaded once, and in stand-ins the
libraries that stubs.py builds beside it. It must be started by the Python that
has pytest and amem; `make test-torch` does that. What can't be installed is a
failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import stubs

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build"


def versions() -> list[str]:
    found = [path.stem.partition("-")[2] for path in HERE.glob("requirements-*.txt")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join([sys.version.encode(), *(path.read_bytes() for path in paths)])).hexdigest()


def made(stamp: Path, wanted: str) -> bool:
    return stamp.is_file() and stamp.read_text() == wanted


def install(version: str) -> Path:
    """What pip installs for the release."""
    requirements, target = HERE / f"requirements-{version}.txt", BUILD / "torch" / version / "packages"
    stamp, wanted = target.with_suffix(".stamp"), digest(requirements)
    if made(stamp, wanted):
        return target
    print(f"torch {version}: downloading and installing", flush=True)
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    exact = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile"]
    # pip unpacks into a temporary folder first; there, what it moves is not copied.
    env = {**os.environ, "TMPDIR": str(target.parent)}
    subprocess.run([*pip, *exact, "--target", target, "-r", requirements], check=True, env=env, timeout=1800)
    # torch's libraries look there first. Only the headers are wanted.
    shutil.rmtree(target / "nvidia" / "cu13" / "lib")
    stamp.write_text(wanted)
    return target


def build(packages: Path) -> Path:
    """The libraries that torch finds beside its own."""
    out, sim = packages.parent / "stand-ins", BUILD / "sim"
    sources = [*sorted(HERE.glob("*.c")), HERE / "stubs.py", sim / "libcuda.so.1", sim / "libnccl.so.2"]
    stamp, wanted = out.with_suffix(".stamp"), digest(*sources)
    if not made(stamp, wanted):
        shutil.rmtree(out, ignore_errors=True)
        stubs.build(packages / "torch" / "lib", packages / "nvidia" / "cu13" / "include", sim, out)
        stamp.write_text(wanted)
    return out


def run(version: str, arguments: list[str]) -> str | None:
    """What the release has shown, in words; None if a test failed."""
    packages = install(version)
    others = ("AMEM_", "TMS_", "PYTORCH_", "LD_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env.update(LD_LIBRARY_PATH=str(build(packages)), PYTHONPATH=str(packages), PYTHONWARNINGS="ignore")
    results = packages.parent / "results.xml"
    results.unlink(missing_ok=True)
    started = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-rs", f"--junitxml={results}", "-p", "no:cacheprovider", *arguments]
    status = subprocess.run([*pytest, str(HERE)], env=env, check=False).returncode
    if not results.exists():
        print(f"torch {version}: pytest has ended with {status}, without a result", flush=True)
        return None
    suite = next(ElementTree.parse(results).iter("testsuite"))
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    shown = f"torch {version}: {passed} passed, {count['skipped']} skipped, {failed} failed"
    print(f"{shown}, in {time.monotonic() - started:.0f} s", flush=True)
    return shown if status == 0 and passed else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=versions(), help="this release; may be repeated")
    parser.add_argument("arguments", nargs="*", help="pytest's")
    options = parser.parse_args()
    wanted = options.only or versions()
    shown = [run(version, options.arguments) for version in wanted]
    left_out = [version for version in versions() if version not in wanted]
    print(f"test-torch: {'; '.join(text or 'a release FAILED' for text in shown)}")
    if left_out:
        print(f"test-torch: left out as TORCH= says: {', '.join(left_out)}")
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
