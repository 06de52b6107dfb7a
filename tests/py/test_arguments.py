"""Whatever a public function is given, it raises amem's own errors or none."""

from __future__ import annotations

from pathlib import Path

import pytest

import fake_library
import fake_torch
from fake_library import result, run

VALUES = r"""
import enum, pathlib
class Text(str):
    pass
class Tag(str, enum.Enum):
    KV = "kv"
VALUES = [
    None, True, 0, -1, 2**31, 2**64, -(2**100), 1.5, float("nan"), 1j,
    "", "kv", "a,b", "a\0b", "\ud800", "x" * 65, "x" * 100_000, Text("kv"), Text(""), Tag.KV, "nccl", "cpu", "none",
    b"", b"kv", b"\0", b"\xff", bytearray(b"kv"), memoryview(b"kv"),
    [], ["kv"], (), ("kv", "weights"), (1, 2), (None, None), {}, {"kv": 1}, set(), frozenset({"kv"}),
    object(), object, len, lambda: None, pathlib.Path("/nowhere"),
]
found = []
def attempt(name, function):
    for value in VALUES:
        try:
            context = function(value)
            if hasattr(context, "__enter__"):
                with context:
                    pass
        except amem.AmemError as error:
            assert str(error)
        except OSError:
            pass  # the system's, of a path
        except Exception as error:
            found.append([name, repr(value)[:60], repr(error)])
"""

PLAIN = """
amem.enable()
for function in (amem.pause, amem.resume, amem.paused, amem.state, amem.free_host_memory, amem.set_group_id):
    attempt(function.__name__, function)
    attempt(function.__name__ + ", second", lambda value: function("nccl", value) if function in (
        amem.pause, amem.resume, amem.paused, amem.free_host_memory) else None)
    amem.resume()
for function in (amem.set_disk_directory, amem.region, amem.Region, amem.default_region, amem.cpu_backup):
    attempt(function.__name__, lambda value: function(*([value] if function is not amem.Region else [value, "cpu"])))
print(json.dumps(found))
"""

TORCH = """
import torch
amem.enable()
graph = lambda: torch.cuda.CUDAGraph()
on_gpu = torch.empty(4)
attempt("region", lambda value: amem.region(value))
attempt("backup", lambda value: amem.region("kv", value))
attempt("Region", lambda value: amem.Region(value, "cpu"))
attempt("Region's backup", lambda value: amem.Region("kv", value))
attempt("default_region", lambda value: amem.default_region(value))
attempt("default_region's backup", lambda value: amem.default_region("kv", value))
amem.default_region(None)
attempt("graph", lambda value: amem.cuda_graph(value, "graphs"))
attempt("graph's tag", lambda value: amem.cuda_graph(graph(), value))
attempt("graph's backup", lambda value: amem.cuda_graph(graph(), "graphs", value))
attempt("pool", lambda value: amem.cuda_graph(graph(), "graphs", pool=value))
attempt("stream", lambda value: amem.cuda_graph(graph(), "graphs", stream=value))
attempt("mode", lambda value: amem.cuda_graph(graph(), "graphs", capture_error_mode=value))
attempt("tensor", amem.cpu_backup)
attempt("CPU tensor", lambda value: amem.cpu_backup(torch.empty(4, device="cpu"), value))
attempt("ordinary tensor", lambda value: amem.cpu_backup(on_gpu, value))
print(json.dumps(found))
"""

COMPAT = """
import torch, amem.compat
amem.compat.install()
from torch_memory_saver import torch_memory_saver as saver
attempt("region", lambda value: saver.region(value))
attempt("backend", lambda value: saver.region("kv", enable_cpu_backup=True, cpu_backup_backend=value))
attempt("pause", saver.pause)
attempt("resume", saver.resume)
attempt("tensor", saver.get_cpu_backup)
attempt("folder", saver.set_disk_backup_dir)
attempt("margin", lambda value: setattr(saver, "memory_margin_bytes", value))
attempt("hook mode", lambda value: setattr(saver, "hook_mode", value))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


def test_without_torch(folder: Path) -> None:
    assert result(VALUES + PLAIN, folder) == []


def test_with_torch(folder: Path) -> None:
    assert result(fake_torch.PRELUDE + VALUES + TORCH, folder) == []


def test_in_the_place_of_torch_memory_saver(folder: Path, tmp_path: Path) -> None:
    script = fake_torch.PRELUDE + f"import os; os.chdir({str(tmp_path)!r})\n" + VALUES + COMPAT
    assert result(script, folder) == []


@pytest.mark.parametrize(
    "call",
    [
        "amem.pause(['kv'])",
        "amem.pause(None)",
        "amem.state(b'kv')",
        "amem.region(5)",
        "amem.region('kv', None)",
        "amem.set_group_id('7')",
        "amem.set_disk_directory(None)",
        "amem.cpu_backup(None)",
    ],
)
def test_a_wrong_type_is_a_type_error_too(folder: Path, call: str) -> None:
    script = f"""
try:
    {call}
except TypeError as error:
    assert isinstance(error, (amem.InvalidArgumentError)) and isinstance(error, ValueError), type(error)
    print("as it should")
"""
    assert run(script, folder).stdout == "as it should\n"
