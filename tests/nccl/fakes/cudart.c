/*
 * A stand-in for libcudart.so: the two functions by which a library that links
 * the CUDA runtime dynamically finds the driver's functions.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "../../../golib/cuda/driver.h"

#define API __attribute__((visibility("default")))

enum { CUDA_ERROR_NO_LIBRARY = 999 };

API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                         unsigned long long flags, int *status);
API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status);

static CUresult (*get)(const char *symbol, void **function, int version, cuuint64_t flags,
                       CUdriverProcAddressQueryResult *status);

static void reach_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol = library != NULL ? dlsym(library, "cuGetProcAddress_v2") : NULL;
    memcpy(&get, &symbol, sizeof get);
}

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    pthread_once(&once, reach_driver);
    *function = NULL;
    if (get == NULL) return CUDA_ERROR_NO_LIBRARY;
    CUresult result = get(symbol, function, (int)version, flags, &found);
    *status = (int)found;
    return result;
}

int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, status);
}
