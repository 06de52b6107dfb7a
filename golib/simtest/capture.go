package simtest

/*
#define _GNU_SOURCE
#include <dlfcn.h>
#include "../cuda/driver.h"

// The driver is loaded for all to see: it needs no handle here.
#define AMEM_TEST_CALL(symbol, params, args)                                \
    do {                                                                    \
        CUresult(*called) params = dlsym(RTLD_DEFAULT, symbol);             \
        return called ? called args : CUDA_ERROR_NOT_FOUND;                 \
    } while (0)

static CUresult amem_test_begin_capture(CUstream stream) {
    AMEM_TEST_CALL("cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode), (stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
}
static CUresult amem_test_end_capture(CUstream stream, void **graph) {
    AMEM_TEST_CALL("cuStreamEndCapture", (CUstream, void **), (stream, graph));
}
static CUresult amem_test_destroy_graph(void *graph) { AMEM_TEST_CALL("cuGraphDestroy", (void *), (graph)); }
*/
import "C"

import (
	"testing"
	"unsafe"

	"amem/golib/cuda"
)

// Capture captures a graph of the stream, in the mode in which the driver refuses
// what could spoil it on all threads, until the returned function is called on
// the same thread. That answers the capture's error.
func Capture(t testing.TB, stream cuda.Stream) (end func() error) {
	t.Helper()
	s := *(*C.CUstream)(unsafe.Pointer(&stream))
	check(t, "cuStreamBeginCapture", C.amem_test_begin_capture(s))
	return func() error {
		var graph unsafe.Pointer
		if r := C.amem_test_end_capture(s, &graph); r != 0 {
			return cuda.Result(r)
		}
		C.amem_test_destroy_graph(graph)
		return nil
	}
}
