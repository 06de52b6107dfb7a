#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "hook.h"

/* All of amem's variables, those that only Python reads too. The README has the table of them. */
static const char *const known[] = {
    "AMEM_ENABLE",         "AMEM_GROUPID",  "AMEM_NCCL_OFFLOAD_FREE_TAG",
    "AMEM_HOST_PREALLOC",  "AMEM_LOG",      "AMEM_DISK_DIRECTORY",
    "AMEM_COMPAT_TMS",     "AMEM_ARENA",    "AMEM_NCCL_LIBRARY",
    "AMEM_LIBRARY_DIR",    "AMEM_TIMEOUT_S", "AMEM_SIM_LIBRARY_DIR",
};
enum { KNOWN = sizeof known / sizeof *known };

/* Of the simulator, of tests, and of the wheel's build. */
static const char *const known_beginnings[] = {"AMEM_SIM_", "AMEM_TEST_", "AMEM_WHEEL_", "AMEM_NATIVE_"};

static amem_status wrong(char *text, const char *name, const char *value, const char *allowed) {
    snprintf(text, AMEM_ERROR_TEXT, "%s=\"%.100s\" in the environment: it must be %s; set it so, or unset it", name,
             value, allowed);
    return AMEM_ERROR_INVALID_ARGUMENT;
}

/* The variable's value, or NULL where it is unset or empty. */
static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Warns of a variable; once, since several functions read it, and some often. */
static void warn_once(const char *name, const char *value, const char *allowed, const char *taken) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static const char *warned[KNOWN + 1]; /* GMM_LOG too */
    bool first = false;
    if (pthread_mutex_trylock(&mutex)) return; /* another thread warns, of this one most likely */
    for (int i = 0; i <= KNOWN && !first; i++) {
        if (warned[i] && !strcmp(warned[i], name)) break;
        first = !warned[i];
        if (first) warned[i] = name;
    }
    pthread_mutex_unlock(&mutex);
    if (first)
        log_line(LOG_WARN, "%s=\"%.100s\" in the environment is taken as %s: it must be %s", name, value, taken, allowed);
}

bool config_switch(const char *name, bool otherwise) {
    static const char *const on[] = {"1", "on", "true", "yes"}, *const off[] = {"0", "off", "false", "no"};
    const char *value = variable(name);
    if (!value) return otherwise;
    for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
        if (!strcasecmp(value, on[i])) return true;
        if (!strcasecmp(value, off[i])) return false;
    }
    warn_once(name, value, "1, on, true or yes, or 0, off, false or no", otherwise ? "on" : "off");
    return otherwise;
}

/* How many letters must be put in, taken out or changed to make one name of the other. */
static int distance(const char *a, const char *b) {
    enum { MOST = 64 };
    int row[MOST + 1];
    int n = (int)strnlen(b, MOST);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; i < MOST && a[i]; i++) {
        int diagonal = row[0];
        row[0] = i + 1;
        for (int j = 0; j < n; j++) {
            int least = diagonal + (a[i] != b[j]);
            if (row[j] + 1 < least) least = row[j] + 1;
            if (row[j + 1] + 1 < least) least = row[j + 1] + 1;
            diagonal = row[j + 1];
            row[j + 1] = least;
        }
    }
    return row[n];
}

static bool is_known(const char *name) {
    for (int i = 0; i < KNOWN; i++)
        if (!strcmp(name, known[i])) return true;
    for (size_t i = 0; i < sizeof known_beginnings / sizeof *known_beginnings; i++)
        if (!strncmp(name, known_beginnings[i], strlen(known_beginnings[i]))) return true;
    return false;
}

/* A variable that nobody reads is a setting that its user believes to be in force. */
static void warn_of_unknown(void) {
    static atomic_flag done = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&done)) return;
    for (char **entry = environ; entry && *entry; entry++) {
        char name[64];
        size_t length = strcspn(*entry, "=");
        if (strncmp(*entry, "AMEM_", strlen("AMEM_"))) continue;
        snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name - 1), *entry);
        if (is_known(name)) continue;
        const char *nearest = known[0];
        for (int i = 1; i < KNOWN; i++)
            if (distance(name, known[i]) < distance(name, nearest)) nearest = known[i];
        log_line(LOG_WARN, "%s is set, and amem has no such variable; is %s meant?", name, nearest);
    }
}

static bool parse_int(const char *value, long min, long max, int *out) {
    char *end;
    errno = 0;
    long number = strtol(value, &end, 10);
    if (errno || *end || number < min || number > max) return false;
    *out = (int)number;
    return true;
}

/* AMEM_LOG comes before GMM_LOG. */
static int read_level(void) {
    static const char *const levels[] = {"off", "error", "warn", "info", "debug", "trace"};
    const char *value = variable("AMEM_LOG"), *number = variable("GMM_LOG");
    int level = LOG_WARN;
    if (number && !parse_int(number, 0, 5, &level)) warn_once("GMM_LOG", number, "a level from 0 to 5", "2");
    if (!value || parse_int(value, 0, 5, &level)) return level;
    for (int i = 0; i <= 5; i++)
        if (!strcasecmp(value, levels[i])) return i;
    warn_once("AMEM_LOG", value, "off, error, warn, info, debug or trace", levels[level]);
    return level;
}

amem_status config_read(struct amem_config *out, char *text) {
    struct amem_config c = {.log_level = read_level(), .timeout_seconds = 60};
    const char *value;

    log_level = c.log_level; /* of the warnings that follow */
    warn_of_unknown();
    c.arena = config_switch("AMEM_ARENA", true);
    c.host_prealloc = config_switch("AMEM_HOST_PREALLOC", false);
    if ((value = variable("AMEM_GROUPID")) && !parse_int(value, 0, INT_MAX, &c.group))
        return wrong(text, "AMEM_GROUPID", value, "a whole number from 0 to 2147483647");
    if ((value = variable("AMEM_NCCL_OFFLOAD_FREE_TAG"))) {
        int tag;
        if (!parse_int(value, 0, 7, &tag) || (tag != 0 && tag != 7))
            return wrong(text, "AMEM_NCCL_OFFLOAD_FREE_TAG", value,
                         "7 (keep only the control regions of NCCL's buffers) or 0 (keep everything)");
        c.control_only = tag == 7;
    }
    if ((value = variable("AMEM_TIMEOUT_S"))) {
        char *end;
        errno = 0;
        c.timeout_seconds = strtod(value, &end);
        if (errno || *end || !(c.timeout_seconds > 0 && c.timeout_seconds <= 86400))
            return wrong(text, "AMEM_TIMEOUT_S", value, "a number of seconds above 0, at most 86400");
    }
    c.disk_directory = variable("AMEM_DISK_DIRECTORY");
    *out = c;
    return AMEM_OK;
}
