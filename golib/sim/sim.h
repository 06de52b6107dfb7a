/*
 * What the simulated driver (libcuda.so.1 in this folder) offers beyond the
 * CUDA driver's own interface. The functions are exported, and answered by
 * cuGetProcAddress too. Environment variables are read at cuInit.
 *
 *   AMEM_SIM_DIR          folder shared by all processes that share the devices
 *   AMEM_SIM_DEVICES      number of devices (default 8)
 *   AMEM_SIM_MEMORY       bytes of memory a device (default 4 GiB; sparse)
 *   AMEM_SIM_GRANULARITY  allocation granularity in bytes (default 2 MiB)
 *   AMEM_SIM_DELAYS       "cuMemSetAccess=22,cuMemMap:3=9000000,cuMemUnmap:1=/tmp/go": microseconds
 *                         each call, the third call, the first call until the file exists
 *   AMEM_SIM_FAULTS       "cuMemMap:3:2": the third call from now fails with 2
 *   AMEM_SIM_MULTICAST    1: devices offer multicast (default 1)
 *   AMEM_SIM_FABRIC       1: devices offer FABRIC handles (default 0); 2: they say so, and refuse them with
 *                         CUDA_ERROR_NOT_PERMITTED, as where no IMEX channel is given to the process
 *   AMEM_SIM_P2P          1: devices can reach each other's memory (default 1)
 *   AMEM_SIM_LOG          a file to which each call is written with its result
 */
#ifndef AMEM_SIM_H
#define AMEM_SIM_H

#include "../cuda/driver.h"

/*
 * A kernel is a host function. It runs on its stream's own thread, in stream
 * order, and uses device pointers as plain pointers: unmapped memory, or
 * memory without access, is a fault that kills the process, as an illegal
 * address does on a GPU.
 */
typedef void (*cuSimKernel)(void **params);

/*
 * Makes a function that cuLaunchKernel and cuLaunchKernelEx accept. At launch
 * the driver copies the params' values: nparams values of paramSizes[i] bytes.
 * A function of one param may also get it as `extra`: a buffer of at most that
 * size, what is missing being zeros.
 */
CUresult cuSimFunctionCreate(CUfunction *function, cuSimKernel kernel, int nparams, const size_t *paramSizes);

/*
 * Ends the process with a message when device dev may not read (or, with
 * write, write) all of [ptr, ptr+size). For kernels, since page protection
 * alone can't tell devices of one process apart.
 */
void cuSimCheckAccess(CUdevice dev, CUdeviceptr ptr, size_t size, int write);

/*
 * The n-th call of the named function from now (1: the next) fails with
 * result; n = 0 clears. Where result is negative, the call sends the process
 * the signal -result instead, and goes on if that returns.
 */
CUresult cuSimSetFault(const char *function, unsigned n, CUresult result);

/*
 * The n-th call of the named function from now (1: the next), in this process
 * alone, waits before it does anything: us microseconds, or, with a file's name,
 * until the file exists. While the call waits for FILE, FILE.held exists, so that
 * others know when the call is under way. n = 0 clears, and lets nothing go that
 * waits already.
 */
CUresult cuSimSetDelay(const char *function, unsigned n, unsigned us, const char *file);

/*
 * Work on the stream that takes us microseconds, or, with a file's name, lasts
 * until the file exists; FILE.held exists while it runs. A GPU that is busy: what
 * waits for the stream or for the context waits for this too.
 */
CUresult cuSimWork(CUstream stream, unsigned us, const char *file);

/* From now on, to register host memory makes all launches wait for so many microseconds a MB. */
CUresult cuSimSetPinning(unsigned us);

/* How often the named function was called in this process since cuInit. */
CUresult cuSimCallCount(const char *function, unsigned long long *count);

#endif
