"""Backups that are in pieces, and the folder for those on disk. All else is in tests/pytorch."""

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


def test_zero_copy_of_a_backup_in_pieces_is_an_error(folder: Path) -> None:
    script = "amem.pause(); show([attempt(numbers, zero_copy=True), attempt(numbers)[:3]])"
    assert result(script, folder, FAKE_SPLIT="1") == [["InvalidStateError", "fake: status 7"], [0, 1, 2]]


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
