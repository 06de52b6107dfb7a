/* The public functions of amem.h. Each may be called from any thread. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "hook.h"

#define PUBLIC __attribute__((visibility("default")))

struct amem_config config;

static pthread_mutex_t configuring = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool wanted, enabled; /* amem_enable was called, and succeeded */
static __thread char last_error[AMEM_ERROR_TEXT], last_report[AMEM_REPORT_TEXT];

static __thread char last_figures[AMEM_ERROR_TEXT]; /* of last_error */

amem_status api_fail(amem_status status, const char *text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    last_figures[0] = 0;
    return status;
}

amem_status api_fail_in_core(amem_status status, const char text[static AMEM_ERROR_TEXT]) {
    api_fail(status, text);
    size_t end = strnlen(text, AMEM_ERROR_TEXT) + 1;
    if (end < AMEM_ERROR_TEXT) snprintf(last_figures, sizeof last_figures, "%.*s", (int)(AMEM_ERROR_TEXT - end), text + end);
    return status;
}

PUBLIC const char *amem_last_error(void) { return last_error; }
PUBLIC const char *amem_last_error_json(void) { return last_error[0] ? last_figures : ""; }
PUBLIC const char *amem_last_report(void) { return last_report; }
PUBLIC const char *amem_version(void) { return AMEM_VERSION; }
PUBLIC void amem_free(char *text) { free(text); }

/* Reads the environment once. */
static amem_status configure_locked(void) {
    static bool configured;
    char text[AMEM_ERROR_TEXT] = "";
    if (configured) return AMEM_OK;
    struct amem_config read;
    amem_status status = config_read(&read, text);
    if (status != AMEM_OK) return api_fail(status, text);
    config = read;
    log_level = read.log_level;
    configured = true;
    return AMEM_OK;
}

/*
 * Why amem could not be enabled when that was last tried, or NULL. The texts stay:
 * other threads may be reading them, and there are as many as there are reasons.
 */
static _Atomic(const char *) failure;

static amem_status remember(amem_status status, const char *text) {
    const char *before = failure;
    if (status == AMEM_OK)
        failure = NULL;
    else if (!before || strcmp(before, text))
        failure = strdup(text);
    return status;
}

PUBLIC amem_status amem_enable(void) {
    char text[AMEM_ERROR_TEXT] = "";
    wanted = true;
    amem_status status = api_configure();
    if (status != AMEM_OK) return remember(status, last_error);
    /* No lock is held: this calls the dynamic linker, and twice is as good as once. */
    if (!enabled && (status = watch_start(text)) != AMEM_OK) return remember(api_fail(status, text), text);
    enabled = true;
    return remember(AMEM_OK, NULL);
}

PUBLIC const char *amem_failure(void) {
    static __thread char text[AMEM_ERROR_TEXT];
    const char *why = failure;
    text[0] = 0;
    if (why)
        snprintf(text, sizeof text, "%s", why);
    else
        core_failure(text);
    return text;
}

/* Reads the environment, for regions: they need no amem_enable. */
amem_status api_configure(void) {
    last_error[0] = 0;
    pthread_mutex_lock(&configuring);
    amem_status status = configure_locked();
    pthread_mutex_unlock(&configuring);
    return status;
}

/*
 * In a child of fork(), on its only thread. The lock may be held by a thread
 * that the child does not have, half way through configure_locked, which can be
 * begun again.
 */
static void renew_configuring(void) { pthread_mutex_init(&configuring, NULL); }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, renew_configuring); }

/*
 * Under LD_PRELOAD nobody calls amem_enable: preloading the library is the wish,
 * unless it is there in the place of torch_memory_saver's, which leaves NCCL alone.
 */
__attribute__((constructor)) static void enable_when_preloaded(void) {
    const char *preload = getenv("LD_PRELOAD");
    if (!preload || !strstr(preload, "libamem_hook.so")) return;
    if (!config_switch("AMEM_ENABLE", !config_switch("AMEM_COMPAT_TMS", false))) return;
    if (amem_enable() != AMEM_OK) log_line(LOG_ERROR, "not enabled: %s", last_error);
}

static bool cumem_off(void) {
    const char *value = getenv("NCCL_CUMEM_ENABLE");
    return value && !strcmp(value, "0");
}

static amem_status no_cumem(void) {
    return api_fail(AMEM_ERROR_NO_CUMEM,
                "NCCL_CUMEM_ENABLE=0 makes NCCL allocate with cudaMalloc, so its memory can't be paused: unset it, or set "
                "it to 1, before the first NCCL communicator; to pause regions alone, name their tags");
}

static bool names(const char *tags, const char *tag) {
    size_t length = strlen(tag);
    for (const char *at = tags; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, tag, length) && (at[length] == ',' || !at[length])) return true;
    return false;
}

/*
 * The core, for a call about the memory of these tags, of all if there are
 * none. NULL with *status AMEM_OK: NCCL has not been used yet, so there is no
 * memory to speak of.
 */
static const struct amem_core *need_core(const char *tags, amem_status *status) {
    char text[AMEM_ERROR_TEXT] = "";
    *status = AMEM_OK;
    if (core_forked()) {
        *status = api_fail(AMEM_ERROR_FORKED,
                       "this process was forked from one that had NCCL in use, and CUDA does not work in it: use the "
                       "start method spawn, or forkserver started before NCCL is used");
        return NULL;
    }
    bool all = !tags || !*tags, nccl = names(tags, "nccl");
    const struct amem_core *core = core_loaded();
    if ((all || nccl) && watch_too_late() && (wanted || !core)) {
        watch_start(text);
        *status = api_fail(AMEM_ERROR_TOO_LATE, text);
        return NULL;
    }
    if (core && (enabled || !nccl)) return core; /* regions need no amem_enable */
    if (!core && (*status = core_failure(text)) != AMEM_OK) {
        api_fail(*status, text);
        return NULL;
    }
    const char *why = enabled ? NULL : failure;
    if (why) {
        snprintf(text, sizeof text, "amem could not be enabled in this process: %.900s", why);
        *status = api_fail(AMEM_ERROR_NOT_ENABLED, text);
        return NULL;
    }
    if (!all && !nccl) {
        *status = api_fail(AMEM_ERROR_INVALID_ARGUMENT, "no such tag; the tags there are: nccl");
        return NULL;
    }
    if (!enabled) {
        *status = api_fail(AMEM_ERROR_NOT_ENABLED,
                       "amem is not enabled in this process: call amem.enable(), or set AMEM_ENABLE=1 in the "
                       "environment, before the first NCCL communicator");
        return NULL;
    }
    watch_start(text); /* libnccl may have come by a way that the watch does not see */
    if (watch_too_late()) {
        *status = api_fail(AMEM_ERROR_TOO_LATE, text);
    } else if (cumem_off()) {
        *status = no_cumem();
    } else if (!watch_found()) {
        *status = api_fail(AMEM_ERROR_NO_NCCL, "no libnccl.so.2 is loaded in this process, so there is nothing to pause: "
                                           "import torch, or load NCCL, first; AMEM_NCCL_LIBRARY names another file");
    } else if (!dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) && !dlopen("libcuda.so.1", RTLD_LAZY)) {
        *status = api_fail(AMEM_ERROR_NO_DRIVER,
                       "no libcuda.so.1: the CUDA driver is not installed, or not on the library path");
    }
    return NULL;
}

static amem_status change(const char *tags, bool pause) {
    last_error[0] = last_report[0] = 0;
    amem_status status = AMEM_OK;
    bool all = !tags || !*tags;
    /* What is paused is resumed, whether NCCL's memory can be paused or not. */
    const struct amem_core *core = all && !pause ? core_loaded() : NULL;
    if (!core) core = need_core(tags, &status);
    if (pause && core && all && watch_unhooked())
        return api_fail(AMEM_ERROR_TOO_LATE,
                        "NCCL is in use in this process and amem was not enabled before, so its memory can't be paused: call "
                        "amem.enable(), or set AMEM_ENABLE=1 in the environment, before the first NCCL communicator; or name "
                        "the tags to pause, and NCCL's memory stays");
    if (pause && core && all && driver_asked() && cumem_off()) return no_cumem();
    if (!core) {
        if (status != AMEM_OK) return status;
        if (tags && strcmp(tags, "nccl"))
            return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "no such tag; the tags there are: nccl");
        log_line(LOG_WARN, "%s: NCCL has no memory in this process yet: nothing to do", pause ? "pause" : "resume");
        strcpy(last_report, "{\"changed\":false,\"seconds\":0,\"bytes\":0,\"copied_bytes\":0,\"tags\":[],\"held_bytes\":0,\"held_by\":[]}");
        return status;
    }
    char text[AMEM_REPORT_TEXT];
    text[0] = 0;
    status = (amem_status)(pause ? core->pause : core->resume)(tags, text);
    if (status == AMEM_ERROR_NO_CUMEM && cumem_off()) return no_cumem();
    if (status != AMEM_OK) return api_fail_in_core(status, text);
    strcpy(last_report, text);
    return AMEM_OK;
}

PUBLIC amem_status amem_pause(const char *tags) { return change(tags, true); }
PUBLIC amem_status amem_resume(const char *tags) { return change(tags, false); }

PUBLIC amem_status amem_free_host_memory(const char *tags) {
    last_error[0] = 0;
    amem_status status;
    const struct amem_core *core = need_core(NULL, &status);
    if (!core) return status;
    char text[AMEM_ERROR_TEXT] = "";
    status = (amem_status)core->free_host(tags ? tags : "", text);
    return status == AMEM_OK ? AMEM_OK : api_fail(status, text);
}

PUBLIC amem_state_t amem_state(void) {
    const struct amem_core *core = core_loaded();
    if (core) return (amem_state_t)core->state("");
    return enabled && !core_forked() && core_failure(NULL) == AMEM_OK ? AMEM_STATE_WAITING : AMEM_STATE_OFF;
}

PUBLIC amem_state_t amem_tag_state(const char *tag) {
    const struct amem_core *core = core_loaded();
    bool nccl = tag && !strcmp(tag, "nccl");
    if (nccl && (!enabled || core_forked() || watch_unhooked())) return AMEM_STATE_OFF;
    if (core && tag && *tag) return (amem_state_t)core->state(tag);
    return nccl ? amem_state() : AMEM_STATE_OFF;
}

PUBLIC char *amem_stats_json(void) {
    last_error[0] = 0;
    const struct amem_core *core = core_loaded();
    if (core) return core->stats();
    char why[AMEM_ERROR_TEXT];
    if (!core_forked() && core_failure(why) == AMEM_ERROR_INTERNAL) { /* it stopped: what it holds is not known */
        api_fail(AMEM_ERROR_INTERNAL, why);
        return NULL;
    }
    char *text = NULL;
    /* The core's fields, of which there is nothing to tell yet. */
    if (asprintf(&text,
                 "{\"version\":\"%s\",\"state\":\"%s\",\"pid\":%d,\"process_id\":\"\",\"group\":%d,\"device_bytes\":0,"
                 "\"paused_bytes\":0,\"devices\":[],\"resident\":{},\"host\":{\"arena_bytes\":0},\"peers\":[],"
                 "\"regions\":[],\"sharers\":[],\"pauses\":0,\"resumes\":0,"
                 "\"last_pause\":{\"seconds\":0,\"quiesce_seconds\":0,\"copy_seconds\":0,\"release_seconds\":0,"
                 "\"freed_seconds\":0,\"bytes\":0,\"detached_bytes\":0,\"copied_bytes\":0,\"held_bytes\":0,\"held_by\":[]},"
                 "\"last_resume\":{\"seconds\":0,\"create_seconds\":0,\"peers_seconds\":0,\"copy_seconds\":0,"
                 "\"ready_seconds\":0,\"bytes\":0,\"copied_bytes\":0},"
                 "\"driver_calls\":{},\"messages_sent\":0}",
                 AMEM_VERSION, amem_state() == AMEM_STATE_WAITING ? "waiting" : "off", (int)getpid(), config.group) < 0)
        return NULL;
    return text;
}

PUBLIC amem_status amem_set_group_id(int group) {
    last_error[0] = 0;
    if (group < 0) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "a group ID is a whole number from 0 to 2147483647");
    if (core_forked()) {
        amem_status status;
        need_core(NULL, &status);
        return status;
    }
    const struct amem_core *core = core_loaded();
    if (!core) {
        amem_status status = amem_enable();
        if (status != AMEM_OK) return status;
        config.group = group;
        return AMEM_OK;
    }
    char text[AMEM_ERROR_TEXT] = "";
    amem_status status = (amem_status)core->set_group(group, text);
    return status == AMEM_OK ? AMEM_OK : api_fail(status, text);
}

PUBLIC amem_status amem_get_group_id(int *group) {
    last_error[0] = 0;
    if (!group) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "amem_get_group_id: no place for the answer");
    const struct amem_core *core = core_loaded();
    *group = core ? core->get_group() : config.group;
    return AMEM_OK;
}

/* ncclResult_t of the five extensions. */
enum {
    NCCL_SUCCESS = 0,
    NCCL_UNHANDLED_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6
};

static int nccl_result(const char *function, amem_status status) {
    if (status == AMEM_OK) return NCCL_SUCCESS;
    log_line(LOG_ERROR, "%s: %s", function, last_error);
    switch (status) {
    case AMEM_ERROR_INVALID_ARGUMENT: return NCCL_INVALID_ARGUMENT;
    case AMEM_ERROR_CUDA:
    case AMEM_ERROR_OUT_OF_MEMORY: return NCCL_UNHANDLED_CUDA_ERROR;
    case AMEM_ERROR_TIMEOUT:
    case AMEM_ERROR_PEER: return NCCL_REMOTE_ERROR;
    case AMEM_ERROR_HOST_MEMORY:
    case AMEM_ERROR_CORE:
    case AMEM_ERROR_INTERNAL:
    case AMEM_ERROR_NO_DRIVER: return NCCL_SYSTEM_ERROR;
    default: return NCCL_INVALID_USAGE;
    }
}

PUBLIC int ncclPause(amem_ncclComm_t *comm) {
    (void)comm;
    return nccl_result("ncclPause", amem_pause("nccl"));
}

PUBLIC int ncclResume(amem_ncclComm_t *comm) {
    (void)comm;
    return nccl_result("ncclResume", amem_resume("nccl"));
}

PUBLIC int ncclMemStats(void) {
    char *text = amem_stats_json();
    if (!text) return NCCL_SYSTEM_ERROR;
    fprintf(stderr, "amem statistics: %s\n", text);
    amem_free(text);
    return NCCL_SUCCESS;
}

PUBLIC int ncclSetGroupID(int group) { return nccl_result("ncclSetGroupID", amem_set_group_id(group)); }
PUBLIC int ncclGetGroupID(int *group) { return nccl_result("ncclGetGroupID", amem_get_group_id(group)); }

/*
 * For an NCCL that is built to call amem from its own symbol loader: answers
 * the function to use in place of the driver's function of this name.
 */
PUBLIC void *amem_hook_driver_table(const char *name, void *function);
PUBLIC void *amem_hook_driver_table(const char *name, void *function) {
    return amem_enable() == AMEM_OK ? driver_wrap(name, function) : function;
}
