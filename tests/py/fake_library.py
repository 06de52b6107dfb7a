"""A libamem_hook.so that does as the tests tell it, and a Python that loads it.

A process can load the library only once, so each test has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import amem

ROOT = Path(__file__).resolve().parents[2]

# A tag "status=N" makes pause and resume answer status N.
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int state, group = 100, frees;
static char error[200];

static int number(const char *name) {
    const char *value = getenv(name);
    return value ? atoi(value) : 0;
}

static int answer(int status) {
    error[0] = 0;
    if (status && !number("FAKE_SILENT")) snprintf(error, sizeof error, "fake: status %d", status);
    return status;
}

int amem_enable(void) {
    int status = number("FAKE_ENABLE");
    if (!status && !state) state = 2;
    return answer(status);
}

static int transit(const char *tags, int to) {
    if (tags && !strncmp(tags, "status=", 7)) return answer(atoi(tags + 7));
    if (tags && strcmp(tags, "nccl")) return answer(6);
    if (!state) return answer(1);
    if (to == 2 && number("FAKE_RESUME")) return answer(number("FAKE_RESUME"));
    state = to;
    return answer(0);
}

int amem_pause(const char *tags) { return transit(tags, 3); }
int amem_resume(const char *tags) { return transit(tags, 2); }
int amem_state(void) { return state; }

char *amem_stats_json(void) {
    if (answer(number("FAKE_STATS"))) return NULL;
    return strdup("{\"state\": \"active\","
                  " \"last_pause\": {\"seconds\": 0.25, \"bytes\": 4096, \"copied_bytes\": 512},"
                  " \"last_resume\": {\"seconds\": 0.5, \"bytes\": 8192, \"copied_bytes\": 1024}}");
}

void amem_free(char *text) {
    frees++;
    free(text);
}

int fake_frees(void) { return frees; }

int amem_free_host_memory(void) { return answer(state == 3 ? 7 : 0); }

int amem_set_group_id(int to) {
    if (to < 0) return answer(6);
    if (state == 3) return answer(7);
    group = to;
    return answer(0);
}

int amem_get_group_id(int *to) {
    *to = group;
    return answer(0);
}

const char *amem_last_error(void) { return error; }
const char *amem_version(void) { return VERSION; }
"""


def build(folder: Path, release: str = "") -> Path:
    """Compiles the library into the folder, as of a release (default: the package's)."""
    source = folder / "fake.c"
    source.write_text(SOURCE)
    target = folder / "libamem_hook.so"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", f'-DVERSION="{release or amem.__version__}"']
    command += ["-Wl,-soname,libamem_hook.so", "-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return target


def run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with `import amem` done, and the libraries of the folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AMEM_", "NCCL_", "FAKE_", "LD_PRELOAD"))}
    return subprocess.run(
        # Without site, what other packages' .pth files import is not seen.
        [sys.executable, "-S", "-c", "import amem, json, sys\n" + script],
        env={
            **clean,
            "PYTHONPATH": os.path.dirname(os.path.dirname(amem.__file__)),
            "AMEM_LIBRARY_DIR": str(folder),
            **env,
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def result(script: str, folder: Path, **env: str) -> Any:
    """What the script printed as JSON on its last line."""
    done = run(script, folder, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
