#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "hook.h"

int log_level = LOG_WARN;

void log_line(int level, const char *format, ...) {
    static const char *const names[] = {"off", "error", "warn", "info", "debug", "trace"};
    if (level > log_level) return;
    char line[AMEM_ERROR_TEXT + 64];
    int n = snprintf(line, sizeof line, "amem[%d] %s: ", (int)getpid(), names[level]);
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, sizeof line - (size_t)n - 1, format, args);
    va_end(args);
    strcat(line, "\n");
    /* One write, so that the lines of several ranks do not mix. */
    ssize_t written = write(STDERR_FILENO, line, strlen(line));
    (void)written;
}
