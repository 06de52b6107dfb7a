"""The libraries offer the symbols on the lists and no others, and ask little of glibc."""

import re
from pathlib import Path

import pytest

from built import ROOT, run, unpacked, wheel

HOOK = {
    "amem_enable",
    "amem_pause",
    "amem_resume",
    "amem_last_report",
    "amem_state",
    "amem_tag_state",
    "amem_region",
    "amem_default_region",
    "amem_ordinary_memory",
    "amem_set_memory_margin",
    "amem_memory_state",
    "amem_read_backup",
    "amem_backup_pointer",
    "amem_set_disk_directory",
    "amem_set_named_disk_directory",
    "amem_retain_backups",
    "amem_stats_json",
    "amem_free",
    "amem_free_host_memory",
    "amem_set_group_id",
    "amem_get_group_id",
    "amem_last_error_json",
    "amem_last_error",
    "amem_failure",
    "amem_version",
    "ncclPause",
    "ncclResume",
    "ncclMemStats",
    "ncclSetGroupID",
    "ncclGetGroupID",
    "tms_pause",
    "tms_resume",
    "amem_hook_driver_table",
}
CORE = {"amem_core_init"}


@pytest.fixture(scope="module", params=["wheel", "build"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries of the wheel, then those that make built with the system's compiler."""
    if request.param == "wheel":
        return unpacked(tmp_path_factory.mktemp("wheel")) / "amem"
    if not (ROOT / "build" / "lib" / "libamem_hook.so").exists():
        pytest.skip("no libraries in build/lib: run make")
    return ROOT / "build"


def exported(library: Path) -> "set[str]":
    names = set()
    for line in run("readelf", "--wide", "--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK", "UNIQUE") and fields[6] != "UND":
            names.add(fields[7].split("@")[0])
    return names


def test_hook_exports_exactly_the_list(package: Path) -> None:
    assert exported(package / "lib" / "libamem_hook.so") == HOOK


def test_core_exports_exactly_its_entry(package: Path) -> None:
    assert exported(package / "lib" / "libamem_nccl.so") == CORE


def test_header_declares_what_the_hook_exports(package: Path) -> None:
    header = (package / "include" / "amem.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = set(re.findall(r"\b((?:amem_|tms_|nccl[A-Z])\w*)\(", code))
    # The entry for a patched NCCL is not for programs.
    assert declared == HOOK - {"amem_hook_driver_table"}


def test_the_library_of_torch_memory_savers_name_finds_the_hook_beside_it(package: Path) -> None:
    library = package / "lib" / "torch_memory_saver_hook_mode_preload.abi3.so"
    dynamic = run("readelf", "--wide", "--dynamic", library)
    assert re.search(r"NEEDED\).*\[libamem_hook\.so\]", dynamic)
    assert re.search(r"RUNPATH\).*\[\$ORIGIN\]", dynamic)
    assert exported(library) - {"_init", "_fini"} == {"amem_preload_variables"}


@pytest.mark.parametrize("name", ["libamem_hook.so", "libamem_nccl.so"])
def test_library_stays_loaded_and_names_itself(package: Path, name: str) -> None:
    dynamic = run("readelf", "--wide", "--dynamic", package / "lib" / name)
    assert f"[{name}]" in dynamic
    assert re.search(r"FLAGS_1\).*\bNODELETE\b", dynamic)


def test_core_runs_without_asynchronous_preemption(package: Path) -> None:
    # A setting of the Go runtime is a string in its data.
    assert b"asyncpreemptoff=1" in (package / "lib" / "libamem_nccl.so").read_bytes()


def test_libraries_need_only_glibc(package: Path) -> None:
    for library in sorted([*(package / "lib").glob("*.so"), *(package / "sim").glob("*.so.*")]):
        dynamic = run("readelf", "--wide", "--dynamic", library)
        needed = set(re.findall(r"NEEDED\).*\[(.+)\]", dynamic))
        allowed = {"libamem_hook.so"} if library.name.startswith("torch_memory_saver") else set()
        allowed |= {"libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "ld-linux-x86-64.so.2"}
        assert needed <= allowed, library


def test_wheel_needs_no_newer_glibc_than_its_tag(tmp_path: Path) -> None:
    tag = re.search(r"manylinux_(\d+)_(\d+)_x86_64", wheel().name)
    assert tag
    newest = (int(tag.group(1)), int(tag.group(2)))
    package = unpacked(tmp_path) / "amem"
    libraries = sorted([*(package / "lib").glob("*.so"), *(package / "sim").glob("*.so.*")])
    assert len(libraries) == 5
    for library in libraries:
        versions = re.findall(r"\bGLIBC_(\d+)\.(\d+)", run("readelf", "--wide", "--version-info", library))
        assert versions or library.name.startswith("torch_memory_saver"), library
        assert max(((int(a), int(b)) for a, b in versions), default=newest) <= newest, library
