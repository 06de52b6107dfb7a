/* cuGetProcAddress: functions by name without suffix, and version. */
#include <string.h>

#include "internal.h"

/* The newest spelling that a program written for the version knows. */
static CUresult find(const char *symbol, void **out, int version, CUdriverProcAddressQueryResult *status)
{
    if (!symbol || !out || version > DRIVER_VERSION)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sim_function *best = NULL;
    bool known = false;
    for (const struct sim_function *f = sim_functions; f; f = f->next) {
        if (strcmp(f->name, symbol))
            continue;
        known = true;
        if (f->since <= version && (!best || f->since > best->since))
            best = f;
    }
    *out = best ? best->address : NULL;
    if (status)
        *status = best    ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return best || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static bool is_known(cuuint64_t flags)
{
    return flags <= CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
}

SIM_FUNCTION(cuGetProcAddress, cuGetProcAddress, 11030, NEEDS_NOTHING,
             (const char *symbol, void **function, int version, cuuint64_t flags),
             is_known(flags) ? find(symbol, function, version, NULL) : CUDA_ERROR_INVALID_VALUE)
SIM_FUNCTION(cuGetProcAddress, cuGetProcAddress_v2, 12000, NEEDS_NOTHING,
             (const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),
             is_known(flags) ? find(symbol, function, version, status) : CUDA_ERROR_INVALID_VALUE)
