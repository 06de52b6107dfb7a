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

# A tag "status=N" makes pause and resume answer status N. A region's memory is
# the host's: a pause overwrites it, after a copy if there is a backup.
SOURCE = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int state, group = 100, frees, retain;
static __thread char error[200], report[200];
static char directory[200], directory_of_names[200];

static int number(const char *name) {
    const char *value = getenv(name);
    return value ? atoi(value) : 0;
}

static int answer(int status) {
    error[0] = 0;
    if (status && !number("FAKE_SILENT")) {
        const char *text = getenv("FAKE_MESSAGE");
        if (text) snprintf(error, sizeof error, "%s", text);
        else snprintf(error, sizeof error, "fake: status %d", status);
    }
    return status;
}

int amem_enable(void) {
    int status = number("FAKE_ENABLE");
    if (!status && !state) state = 2;
    return answer(status);
}

/* Regions. */

enum { REGIONS = 6, BLOCKS = 1000 };
static struct region { char tag[80]; int backup, paused, allocations, frees; } regions[REGIONS];
static int count;
static struct block { char *at, *copy; ssize_t size; int device, region, gone; } blocks[BLOCKS];

static void *allocate(int region, ssize_t size, int device) {
    if (number("FAKE_FULL")) return NULL;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (blocks[i].at)
        if (++i == BLOCKS) abort();
    blocks[i] = (struct block){.at = calloc(1, size), .size = size, .device = device, .region = region};
    regions[region].allocations++;
    pthread_mutex_unlock(&lock);
    return blocks[i].at;
}

static void deallocate(int region, void *at) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (blocks[i].at != at)
        if (++i == BLOCKS) abort();
    if (blocks[i].region != region) abort();
    free(blocks[i].copy);
    free(at);
    blocks[i].at = NULL;
    regions[region].frees++;
    pthread_mutex_unlock(&lock);
}

#define FUNCTIONS(n)                                                                                  \
    static void *allocate##n(ssize_t size, int device, void *stream) {                               \
        return allocate(n, size, device);                                                             \
    }                                                                                                 \
    static void deallocate##n(void *at, ssize_t size, int device, void *stream) { deallocate(n, at); }
FUNCTIONS(0) FUNCTIONS(1) FUNCTIONS(2) FUNCTIONS(3) FUNCTIONS(4) FUNCTIONS(5)

typedef struct {
    void *(*allocate)(ssize_t, int, void *);
    void (*deallocate)(void *, ssize_t, int, void *);
} functions;
static const functions table[REGIONS] = {{allocate0, deallocate0}, {allocate1, deallocate1},
                                         {allocate2, deallocate2}, {allocate3, deallocate3},
                                         {allocate4, deallocate4}, {allocate5, deallocate5}};

int amem_region(const char *tag, int backup, functions *to) {
    if (!strcmp(tag, "nccl") || strlen(tag) > 64) return answer(6);
    int i = 0;
    while (i < count && (strcmp(regions[i].tag, tag) || regions[i].backup != backup)) i++;
    if (i == REGIONS) return answer(7);
    if (i == count) {
        strcpy(regions[i].tag, tag);
        regions[i].backup = backup;
        count++;
    }
    *to = table[i];
    return answer(0);
}

/* cudaMalloc and cudaFree, as the hook has them. */
static struct { char tag[80]; int backup, set; } wanted;

int amem_default_region(const char *tag, int backup) {
    if (tag && !strcmp(tag, "nccl")) return answer(6);
    wanted.set = tag != NULL;
    if (tag) strcpy(wanted.tag, tag);
    wanted.backup = backup;
    return answer(0);
}

void *fake_malloc(ssize_t size, int device) {
    functions to;
    if (!wanted.set || amem_region(wanted.tag, wanted.backup, &to)) return NULL;
    return to.allocate(size, device, NULL);
}

int fake_free(void *at) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at == at) {
            deallocate(blocks[i].region, at);
            return 1;
        }
    return 0;
}

static void *allocate_ordinary(ssize_t size, int device, void *stream) { return calloc(1, size); }
static void deallocate_ordinary(void *at, ssize_t size, int device, void *stream) { free(at); }

int amem_ordinary_memory(functions *to) {
    *to = (functions){allocate_ordinary, deallocate_ordinary};
    return answer(0);
}

static size_t margin;
void amem_set_memory_margin(size_t bytes) { margin = bytes; }
size_t fake_margin(void) { return margin; }

static struct block *find(const void *at) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at && (char *)at >= blocks[i].at && (char *)at < blocks[i].at + blocks[i].size) return &blocks[i];
    return NULL;
}

int amem_memory_state(const void *at) {
    struct block *block = find(at);
    return !block ? 0 : block->gone ? 3 : 2;
}

int amem_backup_pointer(const void *at, size_t size, const void **to) {
    struct block *block = find(at);
    if (!block || (char *)at + size > block->at + block->size || !block->copy) return answer(7);
    if (number("FAKE_SPLIT")) return answer(7);
    *to = block->copy + ((char *)at - block->at);
    return answer(0);
}

int amem_read_backup(const void *at, size_t size, void *to) {
    struct block *block = find(at);
    if (!block || (char *)at + size > block->at + block->size || !block->copy) return answer(7);
    memcpy(to, block->copy + ((char *)at - block->at), size);
    return answer(0);
}

int amem_set_disk_directory(const char *path) {
    if (number("FAKE_DISK")) return answer(number("FAKE_DISK"));
    snprintf(directory, sizeof directory, "%s", path);
    return answer(0);
}

int amem_set_named_disk_directory(const char *path) {
    snprintf(directory_of_names, sizeof directory_of_names, "%s", path);
    return answer(0);
}

const char *fake_directory(void) { return directory; }
const char *fake_named_directory(void) { return directory_of_names; }

/* "tag/backup: allocations-frees, bytes on each of four devices" */
const char *fake_regions(void) {
    static char text[2000];
    char *end = text;
    end += sprintf(end, "{");
    for (int r = 0; r < count; r++) {
        long bytes[4] = {0};
        for (int i = 0; i < BLOCKS; i++)
            if (blocks[i].at && blocks[i].region == r) bytes[blocks[i].device] += blocks[i].size;
        end += sprintf(end, "%s\"%s/%d\": [%d, %d, [%ld, %ld, %ld, %ld]]", r ? ", " : "", regions[r].tag,
                       regions[r].backup, regions[r].allocations, regions[r].frees, bytes[0], bytes[1], bytes[2],
                       bytes[3]);
    }
    sprintf(end, "}");
    return text;
}

/* Pause and resume. */

static int named(const char *tags, const char *tag) {
    size_t length = strlen(tag);
    for (const char *at = tags; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, tag, length) && (!at[length] || at[length] == ',')) return 1;
    return !tags;
}

static int known(const char *tags) {
    for (const char *at = tags; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char tag[80] = "";
        strncpy(tag, at, strcspn(at, ",") < 79 ? strcspn(at, ",") : 79);
        int found = !strcmp(tag, "nccl");
        for (int r = 0; r < count; r++) found |= !strcmp(tag, regions[r].tag);
        if (!found) return 0;
    }
    return 1;
}

static void move(struct block *block, int out) {
    if (block->gone == out) return;
    if (out) {
        if (regions[block->region].backup) {
            if (!block->copy) block->copy = malloc(block->size);
            memcpy(block->copy, block->at, block->size);
        }
        memset(block->at, 0xdd, block->size);
    } else if (block->copy) {
        memcpy(block->at, block->copy, block->size);
        if (retain) return (void)(block->gone = 0);
        free(block->copy);
        block->copy = NULL;
    }
    block->gone = out;
}

static int transit(const char *tags, int to) {
    int changed = 0;
    report[0] = 0;
    if (tags && !strncmp(tags, "status=", 7)) return answer(atoi(tags + 7));
    if (!known(tags)) return answer(6);
    if (!state && !count) return answer(1);
    if (to == 2 && number("FAKE_RESUME")) return answer(number("FAKE_RESUME"));
    if (state && named(tags, "nccl")) {
        changed = state != to;
        state = to;
    }
    for (int r = 0; r < count; r++)
        if (named(tags, regions[r].tag)) {
            changed |= regions[r].paused != (to == 3);
            regions[r].paused = to == 3;
            for (int i = 0; i < BLOCKS; i++)
                if (blocks[i].at && blocks[i].region == r) move(&blocks[i], to == 3);
        }
    if (!changed) strcpy(report, "{\"changed\": false, \"seconds\": 0, \"bytes\": 0, \"copied_bytes\": 0}");
    else if (to == 3)
        strcpy(report, "{\"changed\": true, \"seconds\": 0.25, \"bytes\": 4096, \"copied_bytes\": 512,"
                       " \"tags\": [\"nccl\"], \"held_bytes\": 1024,"
                       " \"held_by\": [{\"pid\": 7, \"group\": 1, \"bytes\": 1024}]}");
    else strcpy(report, "{\"changed\": true, \"seconds\": 0.5, \"bytes\": 8192, \"copied_bytes\": 1024}");
    return answer(0);
}

static int locked(const char *tags, int to) {
    pthread_mutex_lock(&lock);
    int status = transit(tags, to);
    pthread_mutex_unlock(&lock);
    return status;
}

void amem_retain_backups(int on) { retain = on; }
int amem_pause(const char *tags) { return locked(tags, 3); }
int amem_resume(const char *tags) { return locked(tags, 2); }
const char *amem_last_report(void) { return number("FAKE_SILENT") ? "" : report; }

int amem_state(void) {
    for (int r = 0; r < count; r++)
        if (regions[r].paused) return 3;
    return state ? state : count ? 2 : 0;
}

int amem_tag_state(const char *tag) {
    if (!strcmp(tag, "nccl")) return state;
    for (int r = 0; r < count; r++)
        if (!strcmp(tag, regions[r].tag)) return regions[r].paused ? 3 : 2;
    return 0;
}

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

static char freed[100];

const char *fake_freed(void) { return freed; }

int amem_free_host_memory(const char *tags) {
    snprintf(freed + strlen(freed), sizeof freed - strlen(freed), "[%s]", tags ? tags : "");
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at && !blocks[i].gone && named(tags, regions[blocks[i].region].tag)) {
            free(blocks[i].copy);
            blocks[i].copy = NULL;
        }
    return answer(state == 3 ? 7 : 0);
}

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
    command += ["-pthread", "-Wl,-soname,libamem_hook.so", "-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return target


def run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with `import amem` done, and the libraries of the folder."""
    given = ("AMEM_", "NCCL_", "FAKE_", "LD_PRELOAD", "PYTORCH_", "TMS_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(given)}
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
