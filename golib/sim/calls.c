/* What happens around each driver function: counts, faults, delays, the log. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum { LONGEST_HOLD_MS = 600 * 1000, LONGEST_SPIN_US = 200, LARGEST_RESULT = 1000, LONGEST_NAME = 64, LONGEST_DELAY_US = 600 * 1000 * 1000 };

struct sim_function *sim_functions;
_Thread_local bool sim_in_callback;
static int log_fd = -1;

/* Called by the constructors, on the thread that loads the library. */
void sim_register(struct sim_function *function)
{
    function->next = sim_functions;
    sim_functions = function;
}

static bool is_named(const struct sim_function *function, const char *name)
{
    return !strcmp(function->name, name) || !strcmp(function->symbol, name);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Spins for the delays of a driver call, which a sleep would overshoot many times. */
static void delay(unsigned us)
{
    if (us > LONGEST_SPIN_US) {
        struct timespec rest = {us / 1000000, (long)(us % 1000000) * 1000};
        while (nanosleep(&rest, &rest) && errno == EINTR)
            ;
        return;
    }
    for (uint64_t end = now_ns() + us * UINT64_C(1000); now_ns() < end;)
        ;
}

/* Says that the wait has begun, so that who makes the file knows when. */
static void wait_for_file(const char *file)
{
    char held[4096];
    snprintf(held, sizeof held, "%s.held", file);
    int fd = open(held, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
    for (int ms = 0; access(file, F_OK); ms++) {
        if (ms == LONGEST_HOLD_MS) {
            fprintf(stderr, "simulated driver: no file %s after %d s: going on\n", file, LONGEST_HOLD_MS / 1000);
            break;
        }
        delay(1000);
    }
    unlink(held);
}

void sim_pause_end(struct sim_pause pause)
{
    if (pause.file)
        wait_for_file(pause.file);
    else
        delay(pause.us);
    free(pause.file);
}

/* Counts a call down. True for the call that was counted for. */
static bool is_due(atomic_uint *calls)
{
    unsigned left = atomic_load(calls);
    while (left && !atomic_compare_exchange_weak(calls, &left, left - 1))
        ;
    return left == 1;
}

static pthread_mutex_t waits_lock = PTHREAD_MUTEX_INITIALIZER;

static bool set_wait(const char *name, unsigned n, unsigned us, const char *file)
{
    bool copied = true;
    pthread_mutex_lock(&waits_lock);
    for (struct sim_function *f = sim_functions; f; f = f->next)
        if (is_named(f, name)) {
            atomic_store(&f->wait_in, 0);
            free(f->wait.file);
            f->wait = (struct sim_pause){us, file ? strdup(file) : NULL};
            copied = copied && (!file || f->wait.file);
            atomic_store(&f->wait_in, n);
        }
    pthread_mutex_unlock(&waits_lock);
    return copied;
}

static void wait_if_due(struct sim_function *function)
{
    if (!is_due(&function->wait_in))
        return;
    pthread_mutex_lock(&waits_lock);
    struct sim_pause pause = function->wait;
    function->wait.file = NULL;
    pthread_mutex_unlock(&waits_lock);
    sim_pause_end(pause);
}

/* Says whether to run the function's body; if not, call->result says why. */
bool sim_call_begin(struct sim_call *call)
{
    struct sim_function *function = call->function;
    if (function->needs == NEEDS_NOTHING && atomic_load(&sim_state) != SIM_READY)
        return true;
    if (atomic_load(&sim_forked) || (function->needs != NEEDS_NOTHING && atomic_load(&sim_state) != SIM_READY)) {
        call->result = CUDA_ERROR_NOT_INITIALIZED;
        return function->needs == NEEDS_NOTHING;
    }
    atomic_fetch_add(&function->calls, 1);
    unsigned us = atomic_load(&function->delay_us);
    if (us)
        delay(us);
    wait_if_due(function);
    if (is_due(&function->fault_in)) {
        call->result = atomic_load(&function->fault_result);
        if (call->result > 0)
            return false;
        raise(-call->result);
        call->result = CUDA_SUCCESS;
    }
    if (function->needs == NEEDS_NOTHING)
        return true;
    if (sim_in_callback)
        call->result = CUDA_ERROR_NOT_PERMITTED;
    else if (function->needs == NEEDS_CONTEXT)
        call->result = sim_current_context(&call->context);
    return call->result == CUDA_SUCCESS;
}

CUresult sim_call_end(struct sim_call *call)
{
    if (log_fd >= 0 && !atomic_load(&sim_forked)) {
        char line[128];
        int length = snprintf(line, sizeof line, "%d %ld %s %d\n", (int)getpid(), (long)syscall(SYS_gettid),
                              call->function->symbol, call->result);
        /* A log that can't be written must not change what the program does. */
        if (write(log_fd, line, (size_t)length) < 0)
            return call->result;
    }
    return call->result;
}

static unsigned count_named(const char *name)
{
    unsigned count = 0;
    for (struct sim_function *f = sim_functions; f; f = f->next)
        count += is_named(f, name);
    return count;
}

static void set_fault(const char *name, unsigned n, CUresult result)
{
    for (struct sim_function *f = sim_functions; f; f = f->next)
        if (is_named(f, name)) {
            atomic_store(&f->fault_in, 0);
            atomic_store(&f->fault_result, result);
            atomic_store(&f->fault_in, n);
        }
}

static bool parse_number(const char **text, unsigned most, unsigned *value)
{
    char *end;
    errno = 0;
    unsigned long number = strtoul(*text, &end, 10);
    if (errno || **text < '0' || **text > '9' || number > most)
        return false;
    *text = end;
    *value = (unsigned)number;
    return true;
}

/* One "name<separator>rest" of a comma-separated list; false if the name is unknown. */
static bool parse_name(const char **text, char separator, char name[LONGEST_NAME])
{
    const char *end = strchr(*text, separator);
    if (!end || end - *text >= LONGEST_NAME)
        return false;
    memcpy(name, *text, (size_t)(end - *text));
    name[end - *text] = 0;
    *text = end + 1;
    return count_named(name) > 0;
}

/* The value of one "name=value" or "name:n=value": a time, or of an n-th call also a file's name. n is 0 for each call. */
static bool parse_delay(const char **text, const char *name, unsigned n)
{
    char file[4096];
    size_t length = strcspn(*text, ",");
    unsigned us;
    if (n && **text == '/' && length < sizeof file) {
        memcpy(file, *text, length);
        file[length] = 0;
        *text += length;
        return set_wait(name, n, 0, file);
    }
    if (!parse_number(text, LONGEST_DELAY_US, &us))
        return false;
    if (n)
        return set_wait(name, n, us, NULL);
    for (struct sim_function *f = sim_functions; f; f = f->next)
        if (is_named(f, name))
            atomic_store(&f->delay_us, us);
    return true;
}

static bool parse_delays(const char *text)
{
    while (*text) {
        char name[LONGEST_NAME];
        unsigned n = 0;
        bool numbered = text[strcspn(text, ":=")] == ':';
        if (!parse_name(&text, numbered ? ':' : '=', name)
            || (numbered && (!parse_number(&text, 1u << 30, &n) || !n || *text++ != '='))
            || !parse_delay(&text, name, n) || (*text && (*text++ != ',' || !*text)))
            return false;
    }
    return true;
}

static bool parse_faults(const char *text)
{
    while (*text) {
        char name[LONGEST_NAME];
        unsigned n, result;
        if (!parse_name(&text, ':', name) || !parse_number(&text, 1u << 30, &n) || *text++ != ':'
            || !parse_number(&text, LARGEST_RESULT, &result) || !n || !result || (*text && (*text++ != ',' || !*text)))
            return false;
        set_fault(name, n, (CUresult)result);
    }
    return true;
}

/* Called by cuInit once. */
bool sim_calls_configure(const char *delays, const char *faults, const char *log)
{
    if (delays && !parse_delays(delays)) {
        fprintf(stderr, "simulated driver: AMEM_SIM_DELAYS=%s: expected cuFunction=MICROSECONDS, cuFunction:N=MICROSECONDS or cuFunction:N=/FILE,... of known functions\n",
                delays);
        return false;
    }
    if (faults && !parse_faults(faults)) {
        fprintf(stderr, "simulated driver: AMEM_SIM_FAULTS=%s: expected cuFunction:N:RESULT,... of known functions\n",
                faults);
        return false;
    }
    if (log && *log) {
        log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log_fd < 0) {
            fprintf(stderr, "simulated driver: AMEM_SIM_LOG=%s: %s\n", log, strerror(errno));
            return false;
        }
    }
    return true;
}

static CUresult set_named_fault(const char *name, unsigned n, CUresult result)
{
    if (!name || !count_named(name))
        return CUDA_ERROR_NOT_FOUND;
    if (n && !result)
        return CUDA_ERROR_INVALID_VALUE;
    set_fault(name, n, result);
    return CUDA_SUCCESS;
}

static CUresult set_named_delay(const char *name, unsigned n, unsigned us, const char *file)
{
    if (!name || !count_named(name))
        return CUDA_ERROR_NOT_FOUND;
    if (us > LONGEST_DELAY_US || (file && (us || !*file)))
        return CUDA_ERROR_INVALID_VALUE;
    return set_wait(name, n, us, file) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult call_count(const char *name, unsigned long long *count)
{
    if (!name || !count)
        return CUDA_ERROR_INVALID_VALUE;
    if (!count_named(name))
        return CUDA_ERROR_NOT_FOUND;
    *count = 0;
    for (struct sim_function *f = sim_functions; f; f = f->next)
        if (is_named(f, name))
            *count += atomic_load(&f->calls);
    return CUDA_SUCCESS;
}

SIM_FUNCTION(cuSimSetFault, cuSimSetFault, 0, NEEDS_NOTHING, (const char *function, unsigned n, CUresult result),
             set_named_fault(function, n, result))
SIM_FUNCTION(cuSimSetDelay, cuSimSetDelay, 0, NEEDS_NOTHING, (const char *function, unsigned n, unsigned us, const char *file),
             set_named_delay(function, n, us, file))
SIM_FUNCTION(cuSimCallCount, cuSimCallCount, 0, NEEDS_NOTHING, (const char *function, unsigned long long *count),
             call_count(function, count))
