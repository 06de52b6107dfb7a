// Package simtest gives the tests of this module the simulated driver, once in
// each test process. No product code imports it.
package simtest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#include "../cuda/driver.h"

static void *library;

// amem_test_open is called once, by TestMain.
static const char *amem_test_open(const char *path) {
    library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    return library ? NULL : dlerror();
}

#define AMEM_TEST_CALL(symbol, params, args)                          \
    do {                                                              \
        CUresult(*called) params = dlsym(library, symbol);            \
        return called ? called args : CUDA_ERROR_NOT_FOUND;           \
    } while (0)

static CUresult amem_test_init(void) { AMEM_TEST_CALL("cuInit", (unsigned), (0)); }
static CUresult amem_test_retain(CUcontext *context, CUdevice device) {
    AMEM_TEST_CALL("cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice), (context, device));
}
static CUresult amem_test_set_current(CUcontext context) {
    AMEM_TEST_CALL("cuCtxSetCurrent", (CUcontext), (context));
}
static CUresult amem_test_set_fault(const char *name, unsigned n, CUresult result) {
    AMEM_TEST_CALL("cuSimSetFault", (const char *, unsigned, CUresult), (name, n, result));
}
static CUresult amem_test_call_count(const char *name, unsigned long long *count) {
    AMEM_TEST_CALL("cuSimCallCount", (const char *, unsigned long long *), (name, count));
}
static CUresult amem_test_multicast_create(unsigned long long *object, size_t size, unsigned devices) {
    CUmulticastObjectProp prop = {devices, size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0};
    AMEM_TEST_CALL("cuMulticastCreate", (unsigned long long *, const CUmulticastObjectProp *), (object, &prop));
}
static CUresult amem_test_multicast_add(unsigned long long object, CUdevice device) {
    AMEM_TEST_CALL("cuMulticastAddDevice", (unsigned long long, CUdevice), (object, device));
}
static CUresult amem_test_get_access(unsigned long long *flags, int device, CUdeviceptr at) {
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    AMEM_TEST_CALL("cuMemGetAccess", (unsigned long long *, const CUmemLocation *, CUdeviceptr), (flags, &location, at));
}
static CUresult amem_test_address_range(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    AMEM_TEST_CALL("cuMemGetAddressRange_v2", (CUdeviceptr *, size_t *, CUdeviceptr), (base, size, at));
}
static CUresult amem_test_launch_host(CUstream stream, void *function, void *data) {
    AMEM_TEST_CALL("cuLaunchHostFunc", (CUstream, void *, void *), (stream, function, data));
}

// amem_test_held blocks its stream, on the simulator's thread, until *data is not 0.
static void amem_test_held(void *data) {
    while (!__atomic_load_n((int *)data, __ATOMIC_ACQUIRE))
        usleep(1000);
}
static CUresult amem_test_hold(int *released) {
    return amem_test_launch_host(NULL, (void *)amem_test_held, released);
}
static void amem_test_let_go(int *released) { __atomic_store_n(released, 1, __ATOMIC_RELEASE); }
*/
import "C"

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"amem/golib/cuda"
)

// Memory is what each simulated device has, in bytes.
const Memory = 2 << 30

var (
	driver   *cuda.Driver
	contexts [2]cuda.Context
)

// Main is a test package's TestMain: it opens the simulated driver, which has
// two devices, and runs the tests.
func Main(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(run(m))
}

func run(m *testing.M) int {
	folder, err := os.MkdirTemp(shared(), "amem-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(folder)
	if err := open(folder); err != nil {
		fmt.Fprintln(os.Stderr, "the simulated driver:", err)
		return 1
	}
	return m.Run()
}

// shared answers a folder in memory, if there is one: the simulator's memory is files.
func shared() string {
	const folder = "/dev/shm"
	if info, err := os.Stat(folder); err == nil && info.IsDir() {
		return folder
	}
	return ""
}

func open(folder string) error {
	for name, value := range map[string]string{
		"AMEM_SIM_DIR": folder, "AMEM_SIM_DEVICES": "2", "AMEM_SIM_MEMORY": fmt.Sprint(Memory), "CUDA_VISIBLE_DEVICES": "0,1",
		"AMEM_SIM_FABRIC": "1",
	} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	libraries := os.Getenv("AMEM_SIM_LIBRARY_DIR")
	if libraries == "" {
		libraries = filepath.Join("..", "..", "build", "sim") // from the folder of the package under test
	}
	path := filepath.Join(libraries, "libcuda.so.1")
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("%w: run `make lib` first", err)
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if text := C.amem_test_open(name); text != nil {
		return fmt.Errorf("%s: run `make lib` again", C.GoString(text))
	}
	if r := C.amem_test_init(); r != 0 {
		return fmt.Errorf("cuInit: %d", r)
	}
	for i := range contexts {
		var ctx C.CUcontext
		if r := C.amem_test_retain(&ctx, C.CUdevice(i)); r != 0 {
			return fmt.Errorf("context of device %d: %d", i, r)
		}
		contexts[i] = cuda.Context(uintptr(unsafe.Pointer(ctx)))
	}
	var err error
	driver, err = cuda.Open(path)
	return err
}

func check(t testing.TB, call string, r C.CUresult) {
	t.Helper()
	if r != 0 {
		t.Fatalf("%s: %v", call, cuda.Result(r))
	}
}

// Driver answers the simulated driver.
func Driver() *cuda.Driver { return driver }

// Context answers a device's primary context.
func Context(device int) cuda.Context { return contexts[device] }

// Use makes the device's context current on the calling goroutine, which stays
// on its thread until the returned function is called.
func Use(t testing.TB, device int) (end func()) {
	t.Helper()
	runtime.LockOSThread()
	ctx := contexts[device]
	check(t, "cuCtxSetCurrent", C.amem_test_set_current(*(*C.CUcontext)(unsafe.Pointer(&ctx))))
	return func() {
		C.amem_test_set_current(nil)
		runtime.UnlockOSThread()
	}
}

// On makes the device's context current until the test ends.
func On(t testing.TB, device int) {
	t.Helper()
	t.Cleanup(Use(t, device))
}

// Fault makes the n-th call of the driver's function from now fail; 0 undoes it.
func Fault(t testing.TB, function string, n int, result cuda.Result) {
	t.Helper()
	name := C.CString(function)
	defer C.free(unsafe.Pointer(name))
	check(t, "cuSimSetFault", C.amem_test_set_fault(name, C.uint(n), C.CUresult(result)))
	t.Cleanup(func() {
		name := C.CString(function)
		defer C.free(unsafe.Pointer(name))
		C.amem_test_set_fault(name, 0, 0)
	})
}

// Calls answers how often the driver's function was called.
func Calls(t testing.TB, function string) int {
	t.Helper()
	name := C.CString(function)
	defer C.free(unsafe.Pointer(name))
	var n C.ulonglong
	check(t, "cuSimCallCount", C.amem_test_call_count(name, &n))
	return int(n)
}

// Used answers how much of a device's memory is in use, by anybody, in bytes.
func Used(t testing.TB, device int) uint64 {
	t.Helper()
	var free, total uint64
	err := driver.With(contexts[device], func() (err error) {
		free, total, err = driver.MemInfo()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return total - free
}

// Bytes answers simulated device memory, which is memory of this process.
func Bytes(p cuda.Ptr, size uint64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), size)
}

// Random answers bytes that only the same seed gives again.
func Random(seed, size uint64) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	// Repeated with a period that is no multiple of any chunk's or page's size.
	period := make([]byte, min(size, 65521))
	_, _ = rand.NewChaCha8(key).Read(period) // never fails
	return bytes.Repeat(period, int(size/uint64(max(1, len(period))))+1)[:size]
}

// Fill writes Random to device memory.
func Fill(p cuda.Ptr, seed, size uint64) { copy(Bytes(p, size), Random(seed, size)) }

// Holds tells whether device memory holds what Fill wrote.
func Holds(p cuda.Ptr, seed, size uint64) bool {
	return bytes.Equal(Bytes(p, size), Random(seed, size))
}

// Writable tells whether the device may write at the address.
func Writable(t testing.TB, device int, p cuda.Ptr) bool {
	t.Helper()
	var flags C.ulonglong
	r := C.amem_test_get_access(&flags, C.int(device), C.CUdeviceptr(p))
	return r == 0 && flags == cuda.ReadWrite
}

// AddressRange returns where the mapping that holds p starts, and its size, as NCCL asks
// before it registers a buffer.
func AddressRange(t testing.TB, p cuda.Ptr) (base cuda.Ptr, size uint64) {
	t.Helper()
	var at C.CUdeviceptr
	var bytes C.size_t
	check(t, "cuMemGetAddressRange", C.amem_test_address_range(&at, &bytes, C.CUdeviceptr(p)))
	return cuda.Ptr(at), uint64(bytes)
}

// Multicast makes a multicast object with both devices in it.
func Multicast(t testing.TB, size uint64) cuda.Handle {
	t.Helper()
	var object C.ulonglong
	check(t, "cuMulticastCreate", C.amem_test_multicast_create(&object, C.size_t(size), 2))
	for i := range contexts {
		check(t, "cuMulticastAddDevice", C.amem_test_multicast_add(object, C.CUdevice(i)))
	}
	return cuda.Handle(object)
}

// Busy puts work on the current context's default stream that ends when the
// returned function is called.
func Busy(t testing.TB) (end func()) {
	t.Helper()
	released := (*C.int)(C.calloc(1, C.sizeof_int))
	check(t, "cuLaunchHostFunc", C.amem_test_hold(released))
	return func() { C.amem_test_let_go(released) }
}
