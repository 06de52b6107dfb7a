"""Each test in a process of its own, forked after torch is imported and before it has used a GPU.

So each has a CUDA that has not started, simulated devices of its own, and a
process whose death is the failure of one test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

# In seconds. Nothing here takes longer unless it hangs.
LIMIT = 90
DEVICES = {"AMEM_SIM_DEVICES": "2", "AMEM_SIM_MEMORY": str(512 << 20), "AMEM_TIMEOUT_S": "30"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "env(**variables): of the test's process")


def pytest_report_header() -> str:
    return f"torch {torch.__version__} of {Path(torch.__file__).parent}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    env = dict(DEVICES)
    for mark in reversed(list(pyfuncitem.iter_markers("env"))):
        env.update(mark.kwargs)
    # Nobody else's processes are peers.
    group = str(int.from_bytes(os.urandom(3), "big") + 1)
    folder = tempfile.mkdtemp(prefix="amem-torch-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        outcome, text = _in_a_fork(pyfuncitem.obj, arguments, {"AMEM_GROUPID": group, **env, "AMEM_SIM_DIR": folder})
    finally:
        shutil.rmtree(folder)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


def _in_a_fork(function: Any, arguments: dict[str, Any], env: dict[str, str]) -> tuple[str, str]:
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(function, arguments, env, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer, late = b"", time.monotonic() + LIMIT
        while select.select([pipe], [], [], max(0.0, late - time.monotonic()))[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                break
            answer += part
        else:
            os.kill(child, signal.SIGABRT)  # shows where its threads are
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started and left
    if answer:
        outcome, text = pickle.loads(answer)
        return outcome, text
    return "failed", f"the test's process ended with {status} and said nothing"


def _child(function: Any, arguments: dict[str, Any], env: dict[str, str], writer: int) -> None:
    os.environ.update(env)
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    faulthandler.enable(sys.__stderr__ or 2, all_threads=True)
    try:
        function(**arguments)
        answer = ("passed", "")
    except pytest.skip.Exception as skipped:
        answer = ("skipped", str(skipped))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(writer, pickle.dumps(answer))
    os._exit(0)
