"""The contents of paused tensors, and the folder for those on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fake_library
import fake_torch

SETUP = """
import ctypes, os, torch
with amem.region("weights"):
    numbers = torch.empty(24).write(bytes(range(24)))
    floats = torch.empty(4, dtype="float32").write(bytes(range(16)))
with amem.region("cache", backup="none"):
    lost = torch.empty(10)
ordinary = torch.empty(10)

def attempt(*arguments, **options):
    try:
        return amem.cpu_backup(*arguments, **options).read()
    except amem.AmemError as error:
        return [type(error).__name__, str(error)]

def show(value):
    print(json.dumps(value))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


def result(script: str, folder: Path, **env: str) -> Any:
    return fake_library.result(fake_torch.PRELUDE + SETUP + script, folder, **env)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_paused_tensor_is_read_from_its_backup(folder: Path, zero_copy: bool) -> None:
    script = f"""
amem.pause()
backup = amem.cpu_backup(floats, zero_copy={zero_copy})
show([backup.device.type, backup.dtype, backup.size(), backup.read(), numbers.read() == list(range(24))])
"""
    assert result(script, folder) == ["cpu", "float32", [4], [0, 4, 8, 12], False]


@pytest.mark.parametrize("step", ["pass", "amem.pause()"])
def test_any_view_keeps_its_shape_and_strides(folder: Path, step: str) -> None:
    script = f"""
views = [numbers.as_strided((3, 4), (8, 2), 1), numbers.as_strided((4, 3), (2, 8), 1),
         numbers.as_strided((3, 2), (0, 1), 5), numbers.as_strided((), (), 23)]
wanted = [view.read() for view in views]
{step}
found = []
for view, values in zip(views, wanted):
    backup = amem.cpu_backup(view)
    found.append([backup.size(), backup.stride(), backup.device.type, backup.read() == values])
show(found)
"""
    assert result(script, folder) == [
        [[3, 4], [8, 2], "cpu", True],
        [[4, 3], [2, 8], "cpu", True],
        [[3, 2], [0, 1], "cpu", True],
        [[], [], "cpu", True],
    ]


def test_a_copy_outlives_the_pause_and_the_tensor(folder: Path) -> None:
    script = """
amem.pause()
backup = amem.cpu_backup(numbers)
amem.resume()
numbers.write(bytes(24))
del numbers
show(backup.read() == list(range(24)))
"""
    assert result(script, folder) is True


def test_zero_copy_is_the_backup_itself_and_keeps_its_memory(folder: Path) -> None:
    script = """
amem.pause()
backups = [amem.cpu_backup(numbers, zero_copy=True) for _ in range(2)]
same = backups[0].data_ptr() == backups[1].data_ptr()
del numbers
backups.pop()
torch.cuda.empty_cache()
kept = backups[0].read() == list(range(24))
segment = [s for pool in fake_torch.devices[0].pools.values() for s in pool.segments if s.size == 24][0]
used = segment.used
del backups
show([same, kept, used, segment.used])
"""
    assert result(script, folder) == [True, True, True, False]


def test_zero_copy_of_a_backup_in_pieces_is_an_error(folder: Path) -> None:
    script = "amem.pause(); show([attempt(numbers, zero_copy=True), attempt(numbers)[:3]])"
    assert result(script, folder, FAKE_SPLIT="1") == [["InvalidStateError", "fake: status 7"], [0, 1, 2]]


def test_a_tensor_that_is_not_paused_is_copied(folder: Path) -> None:
    script = """
amem.pause("cache")
backup = amem.cpu_backup(numbers)
numbers.write(bytes(24))
name, message = attempt(numbers, zero_copy=True)
show([backup.device.type, backup.read() == list(range(24)), name, "zero_copy=False" in message])
"""
    assert result(script, folder) == ["cpu", True, "InvalidStateError", True]


def test_without_a_backup_the_error_is_the_librarys(folder: Path) -> None:
    assert result("amem.pause(); show(attempt(lost))", folder) == ["InvalidStateError", "fake: status 7"]


@pytest.mark.parametrize("step", ["pass", "amem.pause()"])
def test_memory_that_is_no_regions_is_an_error(folder: Path, step: str) -> None:
    name, message = result(f"{step}\nshow(attempt(ordinary))", folder)
    assert name == "InvalidArgumentError"
    assert ".cpu()" in message


def test_without_amem_no_memory_is_a_regions(folder: Path) -> None:
    script = "import torch\namem.cpu_backup(torch.empty(10))"
    done = fake_library.run(fake_torch.PRELUDE + script, folder)
    assert "InvalidArgumentError" in done.stderr and ".cpu()" in done.stderr


def test_only_plain_tensors_on_a_gpu(folder: Path) -> None:
    script = """
sparse, conjugate = numbers.as_strided((1,), (1,)), numbers.as_strided((1,), (1,))
sparse.layout, conjugate.conjugate = "sparse", True
show([attempt(tensor)[0] for tensor in (torch.empty(3, device="cpu"), sparse, conjugate)])
"""
    assert result(script, folder) == ["InvalidArgumentError"] * 3


def test_an_empty_tensor_has_an_empty_backup(folder: Path) -> None:
    script = """
backup = amem.cpu_backup(numbers.as_strided((0, 3), (3, 1)))
show([backup.size(), backup.stride(), backup.device.type])
"""
    assert result(script, folder) == [[0, 3], [3, 1], "cpu"]


@pytest.mark.parametrize("path", ["'/some/folder'", "b'/some/folder'", "Path('/some/folder')"])
def test_the_disk_folder_reaches_the_library(folder: Path, path: str) -> None:
    script = f"""
import ctypes
from pathlib import Path
amem.set_disk_directory({path})
library = ctypes.CDLL("libamem_hook.so")
library.fake_directory.restype = ctypes.c_char_p
print(json.dumps(library.fake_directory().decode()))
"""
    assert fake_library.result(script, folder) == "/some/folder"


def test_a_disk_folder_that_can_not_be_used_is_an_error(folder: Path) -> None:
    done = fake_library.run("amem.set_disk_directory('/x')", folder, FAKE_DISK="6")
    assert "InvalidArgumentError: fake: status 6" in done.stderr
