#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"

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

static bool parse_int(const char *value, long min, long max, int *out) {
    char *end;
    errno = 0;
    long number = strtol(value, &end, 10);
    if (errno || *end || number < min || number > max) return false;
    *out = (int)number;
    return true;
}

amem_status config_read(struct amem_config *out, char *text) {
    static const char *const levels[] = {"off", "error", "warn", "info", "debug", "trace"};
    struct amem_config c = {.group = 0, .arena = 1, .log_level = LOG_WARN, .timeout_seconds = 60};
    const char *value;

    if ((value = variable("AMEM_GROUPID")) && !parse_int(value, 0, INT_MAX, &c.group))
        return wrong(text, "AMEM_GROUPID", value, "a whole number from 0 to 2147483647");
    if ((value = variable("AMEM_ARENA")) && !parse_int(value, 0, 1, &c.arena))
        return wrong(text, "AMEM_ARENA", value, "0 or 1");
    if ((value = variable("AMEM_HOST_PREALLOC")) && !parse_int(value, 0, 1, &c.host_prealloc))
        return wrong(text, "AMEM_HOST_PREALLOC", value, "0 or 1");
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
    if ((value = variable("GMM_LOG")) && !parse_int(value, 0, 5, &c.log_level))
        return wrong(text, "GMM_LOG", value, "a level from 0 to 5");
    if ((value = variable("AMEM_LOG"))) {
        c.log_level = -1;
        for (int i = 0; i <= 5; i++)
            if (!strcmp(value, levels[i])) c.log_level = i;
        if (c.log_level < 0 && !parse_int(value, 0, 5, &c.log_level))
            return wrong(text, "AMEM_LOG", value, "off, error, warn, info, debug or trace");
    }
    c.disk_directory = variable("AMEM_DISK_DIRECTORY");
    *out = c;
    return AMEM_OK;
}
