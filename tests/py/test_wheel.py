"""The wheel: what it holds, what its tag promises, and what it does once pip has installed it."""

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from built import ROOT, clean_env, run, tool, wheel

# Printed as one line each: modules of amem, and libraries of amem in the process.
REPORT = """
import sys
{before}
print(sorted(m for m in sys.modules if m.split(".")[0] == "amem"))
with open("/proc/self/maps") as maps:
    print(sorted({{line.split("/")[-1].strip() for line in maps if "libamem_" in line}}))
"""


@pytest.fixture(scope="module")
def archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel())


@pytest.fixture(scope="module")
def dist_info(archive: zipfile.ZipFile) -> str:
    return next(n.split("/")[0] for n in archive.namelist() if n.split("/")[0].endswith(".dist-info"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but pip and the wheel."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel(), env=clean_env())
    return python


def site_packages(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))", env=clean_env()).strip())


def report(python: Path, before: str = "", **env: str) -> "list[str]":
    return run(python, "-c", REPORT.format(before=before), env=clean_env(**env)).splitlines()


def version_of_the_header() -> str:
    found = re.search(r'^#define AMEM_VERSION "(.+)"$', (ROOT / "golib" / "hook" / "amem.h").read_text(), re.M)
    assert found
    return found.group(1)


def test_one_version_everywhere(archive: zipfile.ZipFile, dist_info: str, fresh: Path) -> None:
    version = version_of_the_header()
    assert f"\nVersion: {version}\n" in archive.read(f"{dist_info}/METADATA").decode()
    assert wheel().name.split("-")[1] == version
    assert run(fresh, "-c", "import amem; print(amem.__version__)", env=clean_env()).strip() == version


def test_tag_is_for_every_python_3_on_linux(archive: zipfile.ZipFile, dist_info: str) -> None:
    lines = archive.read(f"{dist_info}/WHEEL").decode().splitlines()
    assert "Root-Is-Purelib: false" in lines
    tags = [line for line in lines if line.startswith("Tag: ")]
    assert len(tags) == 1
    found = re.fullmatch(r"Tag: (py3-none-manylinux_2_(\d+)_x86_64)", tags[0])
    assert found
    assert wheel().name.endswith(f"-{found.group(1)}.whl")
    # PyTorch's own wheels ask for 2.28.
    assert int(found.group(2)) <= 28


def test_auditwheel_confirms_the_tag() -> None:
    said = " ".join(run(*tool("auditwheel"), "show", wheel()).split())
    allowed = re.search(r'following platform tag: "manylinux_2_(\d+)_x86_64"', said)
    tagged = re.search(r"manylinux_2_(\d+)_x86_64", wheel().name)
    assert allowed and tagged, said
    assert int(allowed.group(1)) <= int(tagged.group(1)), said


def test_record_lists_every_file_with_its_hash(archive: zipfile.ZipFile, dist_info: str) -> None:
    recorded = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(f"{dist_info}/RECORD").decode()))}
    assert set(recorded) == set(archive.namelist())
    for name, expected in recorded.items():
        if name == f"{dist_info}/RECORD":
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
        assert expected == f"sha256={digest}", name


def test_wheel_holds_the_package_and_nothing_else(archive: zipfile.ZipFile, dist_info: str) -> None:
    names = {n for n in archive.namelist() if not n.startswith(f"{dist_info}/")}
    sources = (ROOT / "python" / "amem").rglob("*.py")
    modules = {str(p.relative_to(ROOT / "python")) for p in sources}
    assert names == modules | {
        "amem.pth",
        "amem/py.typed",
        "amem/include/amem.h",
        "amem/lib/libamem_hook.so",
        "amem/lib/libamem_nccl.so",
        "amem/lib/torch_memory_saver_hook_mode_preload.abi3.so",
        "amem/sim/libcuda.so.1",
        "amem/sim/libnccl.so.2",
    }
    assert archive.read("amem/include/amem.h") == (ROOT / "golib" / "hook" / "amem.h").read_bytes()
    assert f"{dist_info}/licenses/LICENSE" in archive.namelist()


def test_pth_lands_where_site_reads_it(fresh: Path) -> None:
    lines = (site_packages(fresh) / "amem.pth").read_text().splitlines()
    assert len(lines) == 1
    # site runs only lines that start like this, others are folders for sys.path.
    assert lines[0].startswith("import ")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_unset_costs_no_import(fresh: Path, value: "str | None") -> None:
    env = {} if value is None else {"AMEM_ENABLE": value}
    assert report(fresh, **env) == ["[]", "[]"]


def test_a_misspelt_name_is_one_line_and_loads_no_library(fresh: Path) -> None:
    done = subprocess.run(
        [fresh, "-c", "import sys; print('ctypes' in sys.modules)"],
        env=clean_env(AMEM_ENABEL="1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert done.stderr == "amem: AMEM_ENABEL is set, and amem has no such variable; is AMEM_ENABLE meant?\n"


def test_importing_the_package_loads_no_library(fresh: Path) -> None:
    modules, libraries = report(fresh, before="import amem")
    assert "'amem'" in modules
    assert libraries == "[]"


def test_enabled_by_the_environment_loads_the_hook_and_no_go(fresh: Path) -> None:
    modules, libraries = report(fresh, AMEM_ENABLE="1")
    assert "'amem._autoenable'" in modules
    assert libraries == "['libamem_hook.so']"
    # AMEM_STATE_WAITING of amem.h: NCCL is not there yet.
    state = "import ctypes; print(ctypes.CDLL('libamem_hook.so').amem_state())"
    assert run(fresh, "-c", state, env=clean_env(AMEM_ENABLE="1")).strip() == "1"


def test_enabled_says_nothing_when_it_works(fresh: Path) -> None:
    done = subprocess.run(
        [fresh, "-c", "pass"], env=clean_env(AMEM_ENABLE="1"), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_failing_to_enable_is_one_line_and_python_starts(fresh: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [fresh, "-c", "print('alive')"],
        env=clean_env(AMEM_ENABLE="1", AMEM_LIBRARY_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(tmp_path) in done.stderr


def test_uninstalling_takes_the_pth_away(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path)
    python = tmp_path / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel(), env=clean_env())
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "amem", env=clean_env())
    folder = site_packages(python)
    assert not (folder / "amem.pth").exists()
    assert not (folder / "amem").exists()
