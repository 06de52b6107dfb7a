"""Builds the libraries that PyTorch's want beside them, from what those lack.

    stubs.py TORCH_LIB INCLUDE SIM OUT

TORCH_LIB is torch/lib of an installed wheel, INCLUDE the folder of the CUDA
runtime's headers, SIM that of the simulated driver and of the stand-in for NCCL.
In OUT there is then a library of each name that the wheel's own ask for. In
libcudart, libcublas and libnvidia-ml are the functions of cudart.c, cublas.c and
nvml.c; every other function writes its name and ends the process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Who is wanted without a version of a symbol is in this one, which all others need.
REST = "libstubs.so"
# Written by hand, besides what is generated.
SOURCES = {"libcudart.so": "cudart.c", "libcublas.so": "cublas.c"}
# Asked for by name at run time, by nothing that can be read out of a library.
NVML = "libnvidia-ml.so.1"
# The others are the system's.
OF_CUDA = re.compile(r"lib(cu|nv|nccl)")
FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]

STUBS = """
#include <stdio.h>
#include <stdlib.h>
static void missing(const char *name) {
    fprintf(stderr, "tests/pytorch: %s was called, which the stand-ins do not have\\n", name);
    abort();
}
"""
STUB = '__attribute__((visibility("default"))) void {0}(void);\nvoid {0}(void) {{ missing("{0}"); }}\n'


class Wanted:
    """What the libraries of a folder ask others for."""

    def __init__(self, folder: Path) -> None:
        self.libraries: set[str] = set()
        self.versions: dict[str, str] = {}  # of symbols -> the library
        self.versioned: dict[str, set[str]] = defaultdict(set)  # version -> symbols
        undefined: set[str] = set()
        defined: set[str] = set()
        for path in sorted(folder.glob("*.so*")):
            undefined |= self._read(path)
            defined |= {name for name, _ in _symbols(path, defined=True)}
        self.libraries = {name for name in self.libraries if OF_CUDA.match(name)}
        self.rest = undefined - defined
        self.versioned = {
            version: names for version, names in self.versioned.items() if self.versions[version] in self.libraries
        }

    def _read(self, path: Path) -> set[str]:
        self.libraries |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("-d", path)))
        library = ""
        for line in _readelf("-V", path).splitlines():
            if found := re.search(r"\bFile: (\S+)", line):
                library = found[1]
            elif library and (found := re.search(r"\bName: (\S+)\s+Flags:", line)):
                self.versions[found[1]] = library
        plain = set()
        for name, version in _symbols(path, defined=False):
            if version:
                self.versioned[version].add(name)
            # The C++ ABI's and the linker's own names are the system's.
            elif not re.match(r"_Z|__|_ITM_|_?Py", name):
                plain.add(name)
        return plain


def _readelf(option: str, path: Path) -> str:
    done = subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def _symbols(path: Path, defined: bool, table: str = "--dyn-syms") -> set[tuple[str, str]]:
    """Names and versions of the symbols. Weak ones need not be there."""
    found = set()
    for line in _readelf(table, path).splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[4] not in ("GLOBAL", "WEAK") or (fields[6] == "UND") == defined:
            continue
        if not defined and fields[4] == "WEAK":
            continue
        name, _, version = fields[7].partition("@")
        found.add((name, version.lstrip("@")))
    return found


def _compile(
    target: Path, names: set[str], source: Path | None, include: Path, versions: list[str], *more: str
) -> None:
    """A library with the functions of source, and stubs of what those are not."""
    objects = []
    work = target.parent / "build"
    work.mkdir(exist_ok=True)
    if source is not None:
        objects.append(work / f"{source.stem}.o")
        compile_only = [flag for flag in FLAGS if flag != "-shared"]
        _gcc(*compile_only, "-I", str(include), "-c", "-o", str(objects[0]), str(source))
        names = names - {name for name, _ in _symbols(objects[0], defined=True, table="--syms")}
    stubs = work / f"{target.name}.c"
    stubs.write_text("".join([STUBS if names else "", *map(STUB.format, sorted(names))]))
    script = work / f"{target.name}.map"
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
    linking = [f"-Wl,--version-script={script}"] if versions else []
    _gcc(*FLAGS, f"-Wl,-soname,{target.name}", *linking, "-o", str(target), *map(str, [*objects, stubs]), *more)


def _gcc(*arguments: str) -> None:
    subprocess.run([os.environ.get("CC", "gcc"), *arguments], check=True, timeout=120)


def build(torch_lib: Path, include: Path, sim: Path, out: Path) -> None:
    wanted = Wanted(torch_lib)
    out.mkdir(parents=True, exist_ok=True)
    there = [sim / "libcuda.so.1", sim / "libnccl.so.2"]
    stubs = wanted.rest.difference(*({name for name, _ in _symbols(library, defined=True)} for library in there))
    _compile(out / REST, stubs, None, include, [])
    for name in sorted(wanted.libraries):
        if name in [library.name for library in there]:
            continue
        versions = [version for version, library in wanted.versions.items() if library == name]
        names = set().union(*(wanted.versioned.get(version, set()) for version in versions))
        source = next((HERE / file for stem, file in SOURCES.items() if name.startswith(f"{stem}.")), None)
        rest = ["-Wl,--no-as-needed", str(out / REST), "-ldl", "-lpthread"]
        _compile(out / name, names, source, include, versions, *rest)
    _compile(out / NVML, set(), HERE / "nvml.c", include, [])
    for library in there:
        link = out / library.name
        link.unlink(missing_ok=True)
        link.symlink_to(library.resolve())


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:5]))
