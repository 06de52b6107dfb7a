// Package cuda calls the CUDA driver, found by dlopen: nothing of CUDA is
// needed to build or to load it. Sizes are bytes. A call that needs a context
// runs inside [Driver.With], or on a thread of NCCL's that has one current.
//
// The package holds no state but the table of the driver's functions and the
// counts of the calls made. It is the only one, beside the exports, with cgo.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
#include "functions.h"

// The descriptors of exported memory, by number. A child of fork() closes
// them: it lives on while memory is paused, and would keep that memory.
static volatile unsigned char amem_exported[1 << 16];

static void amem_mark_exported(int fd, unsigned char is) {
    if (fd >= 0 && fd < (int)sizeof amem_exported) amem_exported[fd] = is;
}

static void amem_close_exported(void) {
    for (int fd = 0; fd < (int)sizeof amem_exported; fd++)
        if (amem_exported[fd]) close(fd);
}

static void amem_watch_fork(void) { pthread_atfork(NULL, NULL, amem_close_exported); }

static struct amem_driver driver;

// amem_driver_load fills the table. It answers the name of the function that
// the library lacks, and leaves the table as it was, or NULL.
static const char *amem_driver_load(void *library) {
    struct amem_driver loaded;
#define AMEM_LOAD(name, symbol, params, args)          \
    *(void **)&loaded.name = dlsym(library, symbol);   \
    if (!loaded.name) return symbol;
    AMEM_DRIVER_FUNCTIONS(AMEM_LOAD)
#undef AMEM_LOAD
    driver = loaded;
    return NULL;
}

#define AMEM_CALL(name, symbol, params, args) \
    static inline CUresult amem_##name params { return driver.name args; }
AMEM_DRIVER_FUNCTIONS(AMEM_CALL)
#undef AMEM_CALL

// The driver takes the number of the descriptor itself as the pointer, which
// Go must never hold as one.
static inline CUresult amem_import_fd(CUmemGenericAllocationHandle *handle, int fd) {
    return amem_MemImportFromShareableHandle(handle, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static void amem_touch(volatile char *memory, size_t size, size_t page) {
    for (size_t at = 0; at < size; at += page) memory[at] = 0;
}
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Result is a CUresult; 0 is success. It implements error.
type Result int32

// The results that amem tells apart or answers itself (cuda.h).
const (
	Success            Result = C.CUDA_SUCCESS
	ErrInvalidValue    Result = C.CUDA_ERROR_INVALID_VALUE
	ErrOutOfMemory     Result = C.CUDA_ERROR_OUT_OF_MEMORY
	ErrOperatingSystem Result = C.CUDA_ERROR_OPERATING_SYSTEM
	ErrNotPermitted    Result = C.CUDA_ERROR_NOT_PERMITTED
	ErrNotSupported    Result = C.CUDA_ERROR_NOT_SUPPORTED
	ErrUnknown         Result = C.CUDA_ERROR_UNKNOWN
)

func (r Result) Error() string {
	var name *C.char
	if C.amem_GetErrorName(C.CUresult(r), &name) != 0 || name == nil {
		return fmt.Sprintf("CUDA error %d", int32(r))
	}
	return C.GoString(name)
}

// CallError says which driver call failed, and how.
type CallError struct {
	Call   string
	Result Result
}

func (e *CallError) Error() string { return e.Call + ": " + e.Result.Error() }
func (e *CallError) Unwrap() error { return e.Result }

type (
	// Handle is a physical allocation as the driver knows it.
	Handle uint64
	// Ptr is an address in the devices' common address space.
	Ptr uint64
	// Context is a CUcontext.
	Context uintptr
	// Stream is a CUstream.
	Stream uintptr
	// Event is a CUevent.
	Event uintptr
)

// Prop says what kind of memory an allocation is; it is comparable.
type Prop struct {
	Type         int32
	HandleTypes  int32 // FileDescriptor, Fabric, or both
	LocationType int32
	Location     int32 // the device's ordinal where LocationType is a device
	Compression  uint8
	RDMA         uint8
	Usage        uint16
}

// Values of the fields above, and of Access.
const (
	FileDescriptor = C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	Fabric         = C.CU_MEM_HANDLE_TYPE_FABRIC
	Pinned         = C.CU_MEM_ALLOCATION_TYPE_PINNED
	LocationDevice = C.CU_MEM_LOCATION_TYPE_DEVICE
	ReadWrite      = C.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
)

// PropFromC reads a CUmemAllocationProp.
func PropFromC(p unsafe.Pointer) Prop {
	c := (*C.CUmemAllocationProp)(p)
	return Prop{
		Type: int32(c._type), HandleTypes: int32(c.requestedHandleTypes),
		LocationType: int32(c.location._type), Location: int32(c.location.id),
		Compression: uint8(c.allocFlags.compressionType), RDMA: uint8(c.allocFlags.gpuDirectRDMACapable),
		Usage: uint16(c.allocFlags.usage),
	}
}

func (p Prop) c() C.CUmemAllocationProp {
	var c C.CUmemAllocationProp
	p.ToC(unsafe.Pointer(&c))
	return c
}

// ToC writes a CUmemAllocationProp.
func (p Prop) ToC(to unsafe.Pointer) {
	c := (*C.CUmemAllocationProp)(to)
	*c = C.CUmemAllocationProp{}
	c._type = C.CUmemAllocationType(p.Type)
	c.requestedHandleTypes = C.CUmemAllocationHandleType(p.HandleTypes)
	c.location._type = C.CUmemLocationType(p.LocationType)
	c.location.id = C.int(p.Location)
	c.allocFlags.compressionType = C.uchar(p.Compression)
	c.allocFlags.gpuDirectRDMACapable = C.uchar(p.RDMA)
	c.allocFlags.usage = C.ushort(p.Usage)
}

// Access is the right of one location to a mapping.
type Access struct {
	LocationType int32
	Location     int32
	Flags        int32
}

// AccessFromC reads count CUmemAccessDesc.
func AccessFromC(p unsafe.Pointer, count int) []Access {
	list := make([]Access, count)
	for i, c := range unsafe.Slice((*C.CUmemAccessDesc)(p), count) {
		list[i] = Access{LocationType: int32(c.location._type), Location: int32(c.location.id), Flags: int32(c.flags)}
	}
	return list
}

// Driver is the CUDA driver of this process.
type Driver struct {
	calls sync.Map // name -> *atomic.Int64
}

// Open loads the driver from libcuda.so.1, or from the file named path. There
// is one driver in a process: a second Open must name the same.
func Open(path string) (*Driver, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	library := C.dlopen(name, C.RTLD_NOW|C.RTLD_GLOBAL)
	if library == nil {
		return nil, fmt.Errorf("load the CUDA driver: %s", C.GoString(C.dlerror()))
	}
	if missing := C.amem_driver_load(library); missing != nil {
		return nil, fmt.Errorf("the CUDA driver %s lacks %s: amem needs CUDA 12 or later", path, C.GoString(missing))
	}
	watchFork()
	return &Driver{}, nil
}

var watchFork = sync.OnceFunc(func() { C.amem_watch_fork() })

func (d *Driver) done(call string, r C.CUresult) error {
	counter, ok := d.calls.Load(call)
	if !ok {
		counter, _ = d.calls.LoadOrStore(call, new(atomic.Int64))
	}
	counter.(*atomic.Int64).Add(1)
	if r != C.CUDA_SUCCESS {
		return &CallError{Call: call, Result: Result(r)}
	}
	return nil
}

// Calls answers how often each function of the driver was called.
func (d *Driver) Calls() map[string]int64 {
	calls := map[string]int64{}
	d.calls.Range(func(name, count any) bool {
		calls[name.(string)] = count.(*atomic.Int64).Load()
		return true
	})
	return calls
}

// With runs f with the context current on its thread, and without regard to
// captures of other threads, which f's calls have nothing to do with: they would
// be refused, and would spoil the capture.
func (d *Driver) With(ctx Context, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.done("cuCtxPushCurrent", C.amem_CtxPushCurrent(contextC(ctx))); err != nil {
		return err
	}
	mode := C.CUstreamCaptureMode(C.CU_STREAM_CAPTURE_MODE_RELAXED)
	C.amem_ThreadExchangeStreamCaptureMode(&mode)
	defer func() {
		var old C.CUcontext
		C.amem_ThreadExchangeStreamCaptureMode(&mode)
		C.amem_CtxPopCurrent(&old)
	}()
	return f()
}

// contextC makes the opaque pointer that the driver gave us of its number.
func contextC(ctx Context) C.CUcontext { return *(*C.CUcontext)(unsafe.Pointer(&ctx)) }
func streamC(s Stream) C.CUstream      { return *(*C.CUstream)(unsafe.Pointer(&s)) }
func eventC(e Event) C.CUevent         { return *(*C.CUevent)(unsafe.Pointer(&e)) }

// CurrentContext answers the calling thread's context, 0 where it has none.
func (d *Driver) CurrentContext() (Context, error) {
	var ctx C.CUcontext
	err := d.done("cuCtxGetCurrent", C.amem_CtxGetCurrent(&ctx))
	return Context(uintptr(unsafe.Pointer(ctx))), err
}

// CurrentDevice answers the device of the calling thread's context.
func (d *Driver) CurrentDevice() (int32, error) {
	var device C.CUdevice
	err := d.done("cuCtxGetDevice", C.amem_CtxGetDevice(&device))
	return int32(device), err
}

// ContextOf answers the calling thread's context if it is of the device, or
// else the device's primary context, which then stays for the process's life.
func (d *Driver) ContextOf(device int32) (Context, error) {
	if current, err := d.CurrentDevice(); err == nil && current == device {
		return d.CurrentContext()
	}
	var ctx C.CUcontext
	err := d.done("cuDevicePrimaryCtxRetain", C.amem_DevicePrimaryCtxRetain(&ctx, C.CUdevice(device)))
	return Context(uintptr(unsafe.Pointer(ctx))), err
}

// DeviceCount answers how many devices there are. It fails where the driver
// could not be initialised, as without any.
func (d *Driver) DeviceCount() (int, error) {
	var count C.int
	err := d.done("cuDeviceGetCount", C.amem_DeviceGetCount(&count))
	return int(count), err
}

// UUID answers the device's 16 bytes.
func (d *Driver) UUID(device int) ([16]byte, error) {
	var c C.CUuuid
	err := d.done("cuDeviceGetUuid", C.amem_DeviceGetUuid(&c, C.CUdevice(device)))
	return *(*[16]byte)(unsafe.Pointer(&c)), err
}

// Synchronize waits until all work of the current context has ended.
func (d *Driver) Synchronize() error {
	return d.done("cuCtxSynchronize", C.amem_CtxSynchronize())
}

// NewStream makes a stream that does not wait for the default stream.
func (d *Driver) NewStream() (Stream, error) {
	var s C.CUstream
	err := d.done("cuStreamCreate", C.amem_StreamCreate(&s, C.CU_STREAM_NON_BLOCKING))
	return Stream(uintptr(unsafe.Pointer(s))), err
}

// StreamSynchronize waits until the stream's work has ended.
func (d *Driver) StreamSynchronize(s Stream) error {
	return d.done("cuStreamSynchronize", C.amem_StreamSynchronize(streamC(s)))
}

// NewEvent makes an event.
func (d *Driver) NewEvent() (Event, error) {
	var e C.CUevent
	err := d.done("cuEventCreate", C.amem_EventCreate(&e, C.CU_EVENT_DISABLE_TIMING))
	return Event(uintptr(unsafe.Pointer(e))), err
}

// Record makes the event stand for what the stream was given until now.
func (d *Driver) Record(e Event, s Stream) error {
	return d.done("cuEventRecord", C.amem_EventRecord(eventC(e), streamC(s)))
}

// Wait waits until what the event stands for has ended.
func (d *Driver) Wait(e Event) error {
	return d.done("cuEventSynchronize", C.amem_EventSynchronize(eventC(e)))
}

// NUMANode answers the host's memory node next to the device, -1 where it has none.
func (d *Driver) NUMANode(device int32) int {
	node := C.int(-1)
	if d.done("cuDeviceGetAttribute", C.amem_DeviceGetAttribute(&node, C.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, C.CUdevice(device))) != nil {
		return -1 // before CUDA 12.2
	}
	return int(node)
}

// RDMA tells whether the device's memory can be made such that a NIC reaches it.
func (d *Driver) RDMA(device int32) bool {
	var value C.int
	err := d.done("cuDeviceGetAttribute", C.amem_DeviceGetAttribute(&value,
		C.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, C.CUdevice(device)))
	return err == nil && value != 0
}

// MemInfo answers the free and total bytes of the current context's device.
func (d *Driver) MemInfo() (free, total uint64, err error) {
	var f, t C.size_t
	err = d.done("cuMemGetInfo", C.amem_MemGetInfo(&f, &t))
	return uint64(f), uint64(t), err
}

// Touch writes to each page of host memory, so that it is there. The threads that do so
// in C at one time may be more than Go runs itself, which are few (GOMAXPROCS).
func Touch(memory []byte) {
	C.amem_touch((*C.char)(unsafe.Pointer(&memory[0])), C.size_t(len(memory)), C.size_t(os.Getpagesize()))
}

// HostRegister pins host memory, for all contexts.
func (d *Driver) HostRegister(memory unsafe.Pointer, size uint64) error {
	return d.done("cuMemHostRegister", C.amem_MemHostRegister(memory, C.size_t(size), C.CU_MEMHOSTREGISTER_PORTABLE))
}

// HostUnregister undoes HostRegister.
func (d *Driver) HostUnregister(memory unsafe.Pointer) error {
	return d.done("cuMemHostUnregister", C.amem_MemHostUnregister(memory))
}

// CopyOut copies device memory to pinned host memory, in stream order.
func (d *Driver) CopyOut(to unsafe.Pointer, from Ptr, size uint64, s Stream) error {
	return d.done("cuMemcpyDtoHAsync", C.amem_MemcpyDtoHAsync(to, C.CUdeviceptr(from), C.size_t(size), streamC(s)))
}

// CopyIn copies pinned host memory to device memory, in stream order.
func (d *Driver) CopyIn(to Ptr, from unsafe.Pointer, size uint64, s Stream) error {
	return d.done("cuMemcpyHtoDAsync", C.amem_MemcpyHtoDAsync(C.CUdeviceptr(to), from, C.size_t(size), streamC(s)))
}

// CopyRowsOut copies rows of width bytes, pitch apart in device memory, to
// pinned host memory, where they follow each other; in stream order.
func (d *Driver) CopyRowsOut(to unsafe.Pointer, from Ptr, width, rows, pitch uint64, s Stream) error {
	c := C.CUDA_MEMCPY2D{
		srcMemoryType: C.CU_MEMORYTYPE_DEVICE, srcDevice: C.CUdeviceptr(from), srcPitch: C.size_t(pitch),
		dstMemoryType: C.CU_MEMORYTYPE_HOST, dstHost: to, dstPitch: C.size_t(width),
		WidthInBytes: C.size_t(width), Height: C.size_t(rows),
	}
	return d.done("cuMemcpy2DAsync", C.amem_Memcpy2DAsync(&c, streamC(s)))
}

// CopyRowsIn undoes CopyRowsOut.
func (d *Driver) CopyRowsIn(to Ptr, from unsafe.Pointer, width, rows, pitch uint64, s Stream) error {
	c := C.CUDA_MEMCPY2D{
		srcMemoryType: C.CU_MEMORYTYPE_HOST, srcHost: from, srcPitch: C.size_t(width),
		dstMemoryType: C.CU_MEMORYTYPE_DEVICE, dstDevice: C.CUdeviceptr(to), dstPitch: C.size_t(pitch),
		WidthInBytes: C.size_t(width), Height: C.size_t(rows),
	}
	return d.done("cuMemcpy2DAsync", C.amem_Memcpy2DAsync(&c, streamC(s)))
}

// Zero clears device memory, in stream order.
func (d *Driver) Zero(ptr Ptr, size uint64, s Stream) error {
	return d.done("cuMemsetD8Async", C.amem_MemsetD8Async(C.CUdeviceptr(ptr), 0, C.size_t(size), streamC(s)))
}

// Granularity answers the smallest unit of an allocation.
func (d *Driver) Granularity(p Prop) (uint64, error) {
	var bytes C.size_t
	c := p.c()
	err := d.done("cuMemGetAllocationGranularity",
		C.amem_MemGetAllocationGranularity(&bytes, &c, C.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
	return uint64(bytes), err
}

// Create makes a physical allocation.
func (d *Driver) Create(size uint64, p Prop, flags uint64) (Handle, error) {
	var h C.CUmemGenericAllocationHandle
	c := p.c()
	err := d.done("cuMemCreate", C.amem_MemCreate(&h, C.size_t(size), &c, C.ulonglong(flags)))
	return Handle(h), err
}

// Release gives up the reference that Create or Import gave.
func (d *Driver) Release(h Handle) error {
	return d.done("cuMemRelease", C.amem_MemRelease(C.CUmemGenericAllocationHandle(h)))
}

// Reserve takes an address range; alignment 0 is the driver's, at 0 anywhere.
func (d *Driver) Reserve(size, alignment uint64, at Ptr, flags uint64) (Ptr, error) {
	var p C.CUdeviceptr
	err := d.done("cuMemAddressReserve", C.amem_MemAddressReserve(&p, C.size_t(size), C.size_t(alignment),
		C.CUdeviceptr(at), C.ulonglong(flags)))
	return Ptr(p), err
}

// AddressFree gives an address range back.
func (d *Driver) AddressFree(p Ptr, size uint64) error {
	return d.done("cuMemAddressFree", C.amem_MemAddressFree(C.CUdeviceptr(p), C.size_t(size)))
}

// Map puts the whole allocation at an address. The driver refuses an offset
// into the allocation other than 0, and a size smaller than it.
func (d *Driver) Map(p Ptr, size, offset uint64, h Handle, flags uint64) error {
	return d.done("cuMemMap", C.amem_MemMap(C.CUdeviceptr(p), C.size_t(size), C.size_t(offset),
		C.CUmemGenericAllocationHandle(h), C.ulonglong(flags)))
}

// Unmap undoes Map.
func (d *Driver) Unmap(p Ptr, size uint64) error {
	return d.done("cuMemUnmap", C.amem_MemUnmap(C.CUdeviceptr(p), C.size_t(size)))
}

// SetAccess gives the locations rights to whole mappings.
func (d *Driver) SetAccess(p Ptr, size uint64, access []Access) error {
	descs := make([]C.CUmemAccessDesc, len(access))
	for i, a := range access {
		descs[i].location._type = C.CUmemLocationType(a.LocationType)
		descs[i].location.id = C.int(a.Location)
		descs[i].flags = C.CUmemAccess_flags(a.Flags)
	}
	return d.done("cuMemSetAccess", C.amem_MemSetAccess(C.CUdeviceptr(p), C.size_t(size),
		unsafe.SliceData(descs), C.size_t(len(descs))))
}

// ExportFD makes a file descriptor of an allocation, to be ended by CloseFD.
func (d *Driver) ExportFD(h Handle) (int, error) {
	var fd C.int
	if err := d.ExportTo(unsafe.Pointer(&fd), h, FileDescriptor, 0); err != nil {
		return -1, err
	}
	C.amem_mark_exported(fd, 1)
	return int(fd), nil
}

// CloseFD closes what ExportFD made.
func (d *Driver) CloseFD(fd int) {
	C.amem_mark_exported(C.int(fd), 0)
	C.close(C.int(fd))
}

// ExportTo writes a shareable handle of the given type to where the caller of
// the driver's own function wants it.
func (d *Driver) ExportTo(shareable unsafe.Pointer, h Handle, handleType int, flags uint64) error {
	return d.done("cuMemExportToShareableHandle", C.amem_MemExportToShareableHandle(shareable,
		C.CUmemGenericAllocationHandle(h), C.CUmemAllocationHandleType(handleType), C.ulonglong(flags)))
}

// ImportFD makes a handle of another process's file descriptor, which stays
// the caller's to close.
func (d *Driver) ImportFD(fd int) (Handle, error) {
	var h C.CUmemGenericAllocationHandle
	err := d.done("cuMemImportFromShareableHandle", C.amem_import_fd(&h, C.int(fd)))
	return Handle(h), err
}

// BindMulticast binds an allocation to a multicast object.
func (d *Driver) BindMulticast(multicast Handle, multicastOffset uint64, h Handle, offset, size, flags uint64) error {
	return d.done("cuMulticastBindMem", C.amem_MulticastBindMem(C.CUmemGenericAllocationHandle(multicast),
		C.size_t(multicastOffset), C.CUmemGenericAllocationHandle(h), C.size_t(offset), C.size_t(size),
		C.ulonglong(flags)))
}
