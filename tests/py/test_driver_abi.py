"""golib/cuda/driver.h says what NVIDIA's cuda.h says.

A C program is generated that prints every size, offset and value that
driver.h declares. It is compiled twice, with driver.h and with the cuda.h of
the package nvidia-cuda-runtime, and must print the same.
"""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from built import ROOT, run

DRIVER_H = ROOT / "golib" / "cuda" / "driver.h"
HOOK_C = ROOT / "golib" / "hook" / "driver.c"
FUNCTIONS_H = ROOT / "golib" / "cuda" / "functions.h"


def code(header: Path) -> str:
    """The header without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", " ", header.read_text(), flags=re.S)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def declarations(text: str) -> "list[str]":
    """The declarations at file level, each without its semicolon."""
    found, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == ";" and depth == 0:
            found.append(" ".join(text[start:i].split()))
            start = i + 1
    assert not text[start:].strip(), text[start:]
    return found


def fields(body: str, prefix: str = "") -> "list[str]":
    """The members of a struct, with those of structs inside it."""
    names: list[str] = []
    for member in declarations(body):
        nested = re.fullmatch(r"struct \{(.*)\} (\w+)", member)
        if nested:
            names += [prefix + nested.group(2), *fields(nested.group(1), f"{prefix}{nested.group(2)}.")]
            continue
        for declarator in member.split(","):
            name = re.search(r"(\w+)\s*(?:\[\w+\])?$", declarator)
            assert name, member
            names.append(prefix + name.group(1))
    return names


def expressions(header: Path) -> "list[str]":
    """A C expression for every size, offset and value of the header."""
    found = []
    for declaration in declarations(code(header)):
        enum = re.fullmatch(r"(?:typedef )?enum \{(.*)\} ?(\w*)", declaration)
        struct = re.fullmatch(r"typedef struct (?:\w+ )?\{(.*)\} (\w+)", declaration)
        function = re.fullmatch(r"typedef .*\(\*(\w+)\)\(.*\)", declaration)
        plain = re.fullmatch(r"typedef .*\b(\w+)", declaration)
        if enum:
            found += [item.split("=")[0].strip() for item in enum.group(1).split(",") if item.strip()]
            found += [f"sizeof({enum.group(2)})"] if enum.group(2) else []
        elif struct:
            body, name = struct.groups()
            found += [f"sizeof({name})", f"_Alignof({name})"]
            for field in fields(body):
                found += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
        elif function or plain:
            match = function or plain
            assert match
            found.append(f"sizeof({match.group(1)})")
        else:
            raise AssertionError(f"{header.name}: not understood: {declaration}")
    return found


def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if not found:
        pytest.skip("no C compiler")
    return found


def printed(folder: Path, include: str, flags: "list[str]", found: "list[str]") -> "dict[str, str]":
    source = folder / "abi.c"
    lines = [f'    printf("%s\\t%lld\\n", "{e}", (long long)({e}));' for e in found]
    source.write_text(
        "\n".join(["#include <stddef.h>", "#include <stdio.h>", include, "int main(void)", "{", *lines, "}", ""])
    )
    run(compiler(), "-std=c11", *flags, "-o", folder / "abi", source)
    return dict(line.split("\t") for line in run(folder / "abi").splitlines())


@pytest.fixture(scope="module")
def nvidia_include() -> Path:
    """The folder of NVIDIA's cuda.h."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for include in sorted(Path(place).glob("*/include")):
            if (include / "cuda.h").exists():
                return include
    pytest.skip("no cuda.h: pip install -r scripts/requirements-test.txt")


def test_every_size_offset_and_value_is_nvidias(tmp_path: Path, nvidia_include: Path) -> None:
    found = expressions(DRIVER_H)
    # The parser has seen the kinds of things that matter.
    for expected in (
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CU_MEM_HANDLE_TYPE_FABRIC",
        "sizeof(CUmemGenericAllocationHandle)",
        "offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)",
        "offsetof(CUlaunchConfig, attrs)",
    ):
        assert expected in found
    (tmp_path / "ours").mkdir()
    (tmp_path / "nvidias").mkdir()
    ours = printed(tmp_path / "ours", f'#include "{DRIVER_H}"', [], found)
    nvidias = printed(tmp_path / "nvidias", "#include <cuda.h>", ["-isystem", str(nvidia_include)], found)
    assert len(ours) == len(set(found))
    assert ours == nvidias


def test_a_wrong_value_is_seen(tmp_path: Path, nvidia_include: Path) -> None:
    """The comparison above can fail: in a copy with one field and one value changed, both are seen."""
    text = DRIVER_H.read_text()
    changed = text.replace("CUDA_ERROR_NOT_READY = 600", "CUDA_ERROR_NOT_READY = 601")
    changed = changed.replace("unsigned short usage;", "unsigned int usage;")
    assert changed != text
    copy = tmp_path / "driver.h"
    copy.write_text(changed)
    found = expressions(copy)
    ours = printed(tmp_path, f'#include "{copy}"', [], found)
    nvidias = printed(tmp_path, "#include <cuda.h>", ["-isystem", str(nvidia_include)], found)
    differing = {e for e in found if ours[e] != nvidias[e]}
    assert "CUDA_ERROR_NOT_READY" in differing
    assert "sizeof(((CUmemAllocationProp *)0)->allocFlags.usage)" in differing


def assert_types_are_nvidias(folder: Path, include: Path, head: "list[str]", pairs: "list[tuple[str, str]]") -> None:
    """Compiles with NVIDIA's types in the place of ours: each pair is a type and the function that must have it."""
    lines = ["#define AMEM_DRIVER_H", "#include <cuda.h>", *head]
    for ours, function in pairs:
        same = f"__builtin_types_compatible_p({ours}, __typeof__(&{function}))"
        lines.append(f'_Static_assert({same}, "{function} has other parameters");')
    source = folder / "functions.c"
    source.write_text("\n".join(lines) + "\n")
    run(compiler(), "-std=c11", "-fsyntax-only", "-isystem", include, source)


def test_functions_that_the_core_calls_are_nvidias(tmp_path: Path, nvidia_include: Path) -> None:
    entries = re.findall(r'X\((\w+),\s*"(\w+)"', FUNCTIONS_H.read_text().replace("\\\n", " "))
    assert ("MemCreate", "cuMemCreate") in entries
    pairs = [(f"__typeof__(((struct amem_driver *)0)->{name})", symbol) for name, symbol in entries]
    assert_types_are_nvidias(tmp_path, nvidia_include, [f'#include "{FUNCTIONS_H}"'], pairs)


def test_functions_that_the_hook_wraps_are_nvidias(tmp_path: Path, nvidia_include: Path) -> None:
    block = re.search(r"^static struct \{(.*?)^\} real;", code(HOOK_C), flags=re.S | re.M)
    assert block
    members = re.findall(r"CUresult \(\*(\w+)(?:\[\w+\])?\)\(([^;]*)\);", block.group(1))
    assert len(members) == block.group(1).count(";")
    # cuda.h gives each plain name its newest version, as NCCL gets it. Of
    # cuGetProcAddress that hides the first version, which it declares no more.
    pairs = [(f"CUresult (*)({parameters})", f"cu{name}") for name, parameters in members if name != "GetProcAddress"]
    assert ("CUresult (*)(CUmemGenericAllocationHandle)", "cuMemRelease") in pairs
    assert_types_are_nvidias(tmp_path, nvidia_include, [], pairs)
