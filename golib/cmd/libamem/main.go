// Command libamem is libamem_nccl.so, the core that libamem_hook.so loads. Its
// one exported symbol, amem_core_init, starts the session of this process and
// fills the table of functions that the hook calls.
//
// The functions run on NCCL's and the host program's threads. No panic leaves
// them.
package main

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -fvisibility=hidden
#include <stdlib.h>
#include "../../hook/amem.h"
#include "../../hook/core.h"

static inline void amem_set_guard(int *guard, int value) { __atomic_store_n(guard, value, __ATOMIC_SEQ_CST); }
static inline void amem_add(int *count, int more) { __atomic_add_fetch(count, more, __ATOMIC_SEQ_CST); }
static inline size_t amem_margin(const size_t *margin) { return __atomic_load_n(margin, __ATOMIC_SEQ_CST); }
static inline uint64_t amem_reached(const uint64_t *reached) { return __atomic_load_n(reached, __ATOMIC_SEQ_CST); }
static inline void amem_broken(void (*broken)(const char *), const char *why) { broken(why); }
static inline int amem_launches(const int *launches) { return __atomic_load_n(launches, __ATOMIC_SEQ_CST); }
*/
import "C"

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/rescue"
	"amem/golib/session"
	"amem/golib/vmm"
)

// current is this process's session; set once, before the hook calls anything else.
var current *session.Session

func main() {}

//export amemStart
func amemStart(host *C.struct_amem_host, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	config, broken := host.config, host.broken
	rescue.OnPanic(func(reason string) { C.amem_broken(broken, C.CString(reason)) })
	startLog(int(config.log_level))
	// A guest in somebody's trainer: the host's own threads need the cores.
	runtime.GOMAXPROCS(min(4, runtime.NumCPU()))
	driver, err := cuda.Open("libcuda.so.1")
	if err != nil {
		writeText(text, err.Error())
		return C.AMEM_ERROR_NO_DRIVER
	}
	timeout := time.Duration(float64(config.timeout_seconds) * float64(time.Second))
	guard, launches, paused, margin := host.guard, host.launches, host.paused_regions, host.margin
	reached := unsafe.Slice(host.reached, C.AMEM_DEVICES)
	folder := "/var/tmp" // /tmp may be host memory
	if config.disk_directory != nil {
		folder = C.GoString(config.disk_directory)
	}
	s, err := session.New(driver, session.Options{
		Group:    int(config.group),
		Timeout:  timeout,
		Space:    vmm.Options{Arena: config.arena != 0, ControlOnly: config.control_only != 0, Timeout: timeout},
		SetGuard: func(g session.Guard) { C.amem_set_guard(guard, C.int(g)) },
		Launches: func() int { return int(C.amem_launches(launches)) },
		Paused:   func(more int) { C.amem_add(paused, C.int(more)) },
		Margin:   func() uint64 { return uint64(C.amem_margin(margin)) },
		Reached:  func(device int32) uint64 { return uint64(C.amem_reached(&reached[device])) },
		Prealloc: config.host_prealloc != 0,
		Folder:   folder,
	})
	if err != nil {
		return controlError(err, text)
	}
	current = s
	return C.AMEM_OK
}

// stderr is written to without os.Stderr, which ends the process when the other
// end is closed.
type stderr struct{}

func (stderr) Write(line []byte) (int, error) { return unix.Write(2, line) }

func startLog(level int) {
	levels := []slog.Level{slog.LevelError + 1, slog.LevelError, slog.LevelWarn, slog.LevelInfo, slog.LevelDebug, slog.LevelDebug}
	handler := slog.NewTextHandler(stderr{}, &slog.HandlerOptions{Level: levels[level]})
	slog.SetDefault(slog.New(handler).With("amem", os.Getpid()))
}

//export amemGranularity
func amemGranularity() (granularity C.size_t) {
	defer func() { _ = rescue.Panicked(recover()) }()
	return C.size_t(current.Space().Granularity())
}

// result makes the hook's answer of a driver call's error.
func result(call string, err error) C.CUresult { return resultOf(call, err, slog.LevelError) }

// tried is result for a call with FABRIC handles: NCCL tries it, and does without where
// the driver refuses (allocator.cc, mnnvl.cc, p2p.cc).
func tried(call string, err error) C.CUresult {
	if errors.Is(err, cuda.ErrNotPermitted) || errors.Is(err, cuda.ErrNotSupported) {
		return resultOf(call, err, slog.LevelDebug)
	}
	return result(call, err)
}

// ends are the errors told of processes that have ended: each of their buffers fails alike.
var ends sync.Map

func resultOf(call string, err error, level slog.Level) C.CUresult {
	switch {
	case err == nil:
		return C.CUDA_SUCCESS
	case errors.Is(err, vmm.ErrPass):
		return C.AMEM_PASS
	}
	if errors.Is(err, peer.ErrGone) {
		if _, told := ends.LoadOrStore(err.Error(), true); told {
			level = slog.LevelDebug
		}
	}
	slog.Log(context.Background(), level, call, "error", err)
	var r cuda.Result
	if errors.As(err, &r) {
		return C.CUresult(r)
	}
	return C.CUDA_ERROR_UNKNOWN
}

// guardCall turns a panic into an error of the call.
func guardCall(r any, call string, answer C.CUresult) C.CUresult {
	if rescue.Panicked(r) == nil {
		return answer
	}
	slog.Error(call, "error", "internal")
	return C.CUDA_ERROR_UNKNOWN
}

//export amemCreate
func amemCreate(handle *C.CUmemGenericAllocationHandle, size C.size_t, prop *C.CUmemAllocationProp, flags C.ulonglong,
	own C.int) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemCreate", r) }()
	p := cuda.PropFromC(unsafe.Pointer(prop))
	h, err := current.Space().Create(uint64(size), p, uint64(flags), own != 0)
	if err == nil {
		*handle = C.CUmemGenericAllocationHandle(h)
	}
	if p.HandleTypes&cuda.Fabric != 0 {
		return tried("cuMemCreate", err)
	}
	return result("cuMemCreate", err)
}

//export amemRelease
func amemRelease(handle C.CUmemGenericAllocationHandle) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemRelease", r) }()
	return result("cuMemRelease", current.Space().Release(cuda.Handle(handle)))
}

//export amemRetain
func amemRetain(handle *C.CUmemGenericAllocationHandle, addr C.CUdeviceptr) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemRetainAllocationHandle", r) }()
	if _, region := current.MemoryState(cuda.Ptr(addr)); region {
		// NCCL registers a buffer of the program's. What it mapped by itself would
		// keep the memory during a pause, and be another than the program's after the
		// resume: it does without.
		slog.Debug("NCCL may not register a region's memory", "at", uint64(addr))
		return C.CUDA_ERROR_NOT_SUPPORTED
	}
	h, err := current.Space().Retain(cuda.Ptr(addr))
	if err == nil {
		*handle = C.CUmemGenericAllocationHandle(h)
	}
	return result("cuMemRetainAllocationHandle", err)
}

//export amemReserve
func amemReserve(ptr *C.CUdeviceptr, size, alignment C.size_t, addr C.CUdeviceptr, flags C.ulonglong,
	pending C.CUmemGenericAllocationHandle) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemAddressReserve", r) }()
	p, err := current.Space().Reserve(uint64(size), uint64(alignment), cuda.Ptr(addr), uint64(flags), cuda.Handle(pending))
	if err == nil {
		*ptr = C.CUdeviceptr(p)
	}
	return result("cuMemAddressReserve", err)
}

//export amemAddressFree
func amemAddressFree(ptr C.CUdeviceptr, _ C.size_t) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemAddressFree", r) }()
	return result("cuMemAddressFree", current.Space().AddressFree(cuda.Ptr(ptr)))
}

//export amemMap
func amemMap(ptr C.CUdeviceptr, size, offset C.size_t, handle C.CUmemGenericAllocationHandle, flags C.ulonglong) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemMap", r) }()
	return result("cuMemMap", current.Space().Map(cuda.Ptr(ptr), uint64(size), uint64(offset), cuda.Handle(handle), uint64(flags)))
}

//export amemUnmap
func amemUnmap(ptr C.CUdeviceptr, size C.size_t) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemUnmap", r) }()
	return result("cuMemUnmap", current.Space().Unmap(cuda.Ptr(ptr), uint64(size)))
}

//export amemSetAccess
func amemSetAccess(ptr C.CUdeviceptr, size C.size_t, desc *C.CUmemAccessDesc, count C.size_t) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemSetAccess", r) }()
	access := cuda.AccessFromC(unsafe.Pointer(desc), int(count))
	return result("cuMemSetAccess", current.Space().SetAccess(cuda.Ptr(ptr), uint64(size), access))
}

//export amemAddressRange
func amemAddressRange(base *C.CUdeviceptr, size *C.size_t, ptr C.CUdeviceptr) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemGetAddressRange", r) }()
	b, n, err := current.Space().AddressRange(cuda.Ptr(ptr))
	if err == nil && base != nil {
		*base = C.CUdeviceptr(b)
	}
	if err == nil && size != nil {
		*size = C.size_t(n)
	}
	return result("cuMemGetAddressRange", err)
}

//export amemProperties
func amemProperties(prop *C.CUmemAllocationProp, handle C.CUmemGenericAllocationHandle) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemGetAllocationPropertiesFromHandle", r) }()
	p, err := current.Space().Properties(cuda.Handle(handle))
	if err == nil {
		p.ToC(unsafe.Pointer(prop))
	}
	return result("cuMemGetAllocationPropertiesFromHandle", err)
}

//export amemExport
func amemExport(shareable unsafe.Pointer, handle C.CUmemGenericAllocationHandle, handleType C.CUmemAllocationHandleType,
	flags C.ulonglong) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemExportToShareableHandle", r) }()
	err := current.Space().Export(shareable, cuda.Handle(handle), int(handleType), uint64(flags))
	if handleType == cuda.Fabric {
		return tried("cuMemExportToShareableHandle", err)
	}
	return result("cuMemExportToShareableHandle", err)
}

//export amemImport
func amemImport(handle *C.CUmemGenericAllocationHandle, fd C.int) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMemImportFromShareableHandle", r) }()
	h, err := current.Space().Import(int(fd))
	if err == nil {
		*handle = C.CUmemGenericAllocationHandle(h)
	}
	return result("cuMemImportFromShareableHandle", err)
}

//export amemBindMulticast
func amemBindMulticast(multicast C.CUmemGenericAllocationHandle, multicastOffset C.size_t,
	handle C.CUmemGenericAllocationHandle, offset, size C.size_t, flags C.ulonglong) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuMulticastBindMem", r) }()
	return result("cuMulticastBindMem", current.Space().BindMulticast(cuda.Handle(multicast), uint64(multicastOffset),
		cuda.Handle(handle), uint64(offset), uint64(size), uint64(flags)))
}

//export amemArrived
func amemArrived() (r C.CUresult) {
	defer func() { r = guardCall(recover(), "launch", r) }()
	return result("launch", current.Arrived())
}

//export amemKeep
func amemKeep(ptr C.CUdeviceptr, size C.size_t, why C.int) C.uint64_t {
	defer func() { guardCall(recover(), "keep", 0) }()
	reason := vmm.KeepNIC
	if why == C.AMEM_KEEP_MULTICAST {
		reason = vmm.KeepMulticast
	}
	return C.uint64_t(current.Keep(cuda.Ptr(ptr), uint64(size), reason, why == C.AMEM_KEEP_BUFFER))
}

//export amemRegistered
func amemRegistered(kept C.uint64_t, registration C.uintptr_t) {
	defer func() { guardCall(recover(), "registered", 0) }()
	current.Registered(uint64(kept), uintptr(registration))
}

//export amemDeregister
func amemDeregister(registration C.uintptr_t) C.uint64_t {
	defer func() { guardCall(recover(), "deregister", 0) }()
	return C.uint64_t(current.Deregister(uintptr(registration)))
}

//export amemPause
func amemPause(tags, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	done, err := current.Pause(C.GoString(tags))
	return report(done, err, text)
}

//export amemResume
func amemResume(tags, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	done, err := current.Resume(C.GoString(tags))
	return report(done, err, text)
}

// report writes what a pause or a resume did, or why it failed.
func report(done session.Transition, err error, text *C.char) C.int {
	if err != nil {
		return controlError(err, text)
	}
	if done.Tags == nil {
		done.Tags = []string{}
	}
	// The largest holders only, if there are many: held_bytes counts all.
	slices.SortStableFunc(done.HeldBy, func(a, b session.Holder) int { return cmp.Compare(b.Bytes, a.Bytes) })
	done.HeldBy = append([]session.Holder{}, done.HeldBy[:min(len(done.HeldBy), maxHolders)]...)
	body, err := json.Marshal(done)
	if err == nil && len(body) >= C.AMEM_REPORT_TEXT {
		done.Tags = nil // of many odd bytes: none are told
		body, err = json.Marshal(done)
	}
	if err != nil {
		return controlError(err, text)
	}
	writeTo(text, string(body), C.AMEM_REPORT_TEXT)
	return C.AMEM_OK
}

// maxHolders bounds the holders of a report.
const maxHolders = 32

//export amemState
func amemState(tag *C.char) (answer C.int) {
	defer func() { _ = rescue.Panicked(recover()) }()
	state, known := current.TagState(C.GoString(tag))
	if !known {
		return C.AMEM_STATE_OFF
	}
	return C.int(state)
}

//export amemStats
func amemStats() (text *C.char) {
	defer func() {
		if guardCall(recover(), "stats", 0) != 0 {
			text = nil
		}
	}()
	body, err := json.Marshal(current.Stats(C.AMEM_VERSION))
	if err != nil {
		slog.Error("stats", "error", err)
		return nil
	}
	return C.CString(string(body))
}

//export amemFreeHost
func amemFreeHost(tags, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	return controlError(current.FreeHost(C.GoString(tags)), text)
}

//export amemSetGroup
func amemSetGroup(group C.int, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	return controlError(current.SetGroup(int(group)), text)
}

//export amemGetGroup
func amemGetGroup() (group C.int) {
	defer func() { _ = rescue.Panicked(recover()) }()
	return C.int(current.Group())
}

//export amemRegion
func amemRegion(tag *C.char, backup C.int, number *C.int, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	_, n, err := current.Region(C.GoString(tag), session.Backup(backup))
	*number = C.int(n)
	return controlError(err, text)
}

//export amemAllocate
func amemAllocate(region C.int, size C.size_t, device C.int, ptr *C.CUdeviceptr, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	p, err := current.Allocate(int(region), uint64(size), int32(device))
	*ptr = C.CUdeviceptr(p)
	return controlError(err, text)
}

//export amemDeallocate
func amemDeallocate(region C.int, ptr C.CUdeviceptr, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	return controlError(current.Free(int(region), cuda.Ptr(ptr)), text)
}

//export amemFreeMemory
func amemFreeMemory(ptr C.CUdeviceptr, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	known, err := current.FreeMemory(cuda.Ptr(ptr))
	return shared(known, err, text)
}

//export amemMemoryState
func amemMemoryState(ptr C.CUdeviceptr) (answer C.int) {
	defer func() { _ = rescue.Panicked(recover()) }()
	state, known := current.MemoryState(cuda.Ptr(ptr))
	if !known {
		return C.AMEM_STATE_OFF
	}
	return C.int(state)
}

//export amemReach
func amemReach(device C.int, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	return controlError(current.Reach(int32(device)), text)
}

//export amemDeviceOf
func amemDeviceOf(context C.CUcontext, device *C.int) (r C.CUresult) {
	defer func() { r = guardCall(recover(), "cuCtxEnablePeerAccess", r) }()
	found, err := current.DeviceOf(cuda.Context(uintptr(unsafe.Pointer(context))))
	*device = C.int(found)
	return result("cuCtxEnablePeerAccess", err)
}

//export amemReadBackup
func amemReadBackup(ptr C.CUdeviceptr, size C.size_t, to unsafe.Pointer, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	if int(size) < 0 {
		return controlError(fmt.Errorf("%w: a size of %d bytes", session.ErrArgument, uint64(size)), text)
	}
	return controlError(current.ReadBackup(cuda.Ptr(ptr), unsafe.Slice((*byte)(to), int(size))), text)
}

//export amemFindBackup
func amemFindBackup(ptr C.CUdeviceptr, size C.size_t, backup *unsafe.Pointer, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	found, err := current.FindBackup(cuda.Ptr(ptr), uint64(size))
	if err == nil {
		*backup = unsafe.Pointer(unsafe.SliceData(found)) // the arena's, not Go's
	}
	return controlError(err, text)
}

//export amemPinned
func amemPinned(at C.uintptr_t) (size C.size_t) {
	defer func() { _ = rescue.Panicked(recover()) }()
	return C.size_t(offload.Pinned(uintptr(at)))
}

//export amemSetDiskFolder
func amemSetDiskFolder(path *C.char, named C.int, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	return controlError(current.SetDiskFolder(C.GoString(path), named != 0), text)
}

//export amemRetainBackups
func amemRetainBackups(on C.int) {
	defer func() { _ = rescue.Panicked(recover()) }()
	current.RetainBackups(on != 0)
}

// handle is a cudaIpcMemHandle_t.
type handle = [session.HandleSize]byte

// shared answers the status of a call about a handle, or memory, AMEM_PASS where
// it is not amem's.
func shared(known bool, err error, text *C.char) C.int {
	if !known && err == nil {
		return C.AMEM_PASS
	}
	return controlError(err, text)
}

//export amemIPCGet
func amemIPCGet(to unsafe.Pointer, ptr C.CUdeviceptr, enabled C.int, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	h, known, err := current.ShareHandle(cuda.Ptr(ptr), enabled != 0)
	if known && err == nil {
		*(*handle)(to) = h
	}
	return shared(known, err, text)
}

//export amemIPCOpen
func amemIPCOpen(ptr *C.CUdeviceptr, from unsafe.Pointer, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	p, known, err := current.OpenHandle(*(*handle)(from))
	*ptr = C.CUdeviceptr(p)
	return shared(known, err, text)
}

//export amemIPCClose
func amemIPCClose(ptr C.CUdeviceptr, text *C.char) (status C.int) {
	defer func() { status = guardControl(recover(), status, text) }()
	known, err := current.CloseHandle(cuda.Ptr(ptr))
	return shared(known, err, text)
}

// writeFailure writes why a call failed, shortened if need be, and then its figures, "" if it has none.
func writeFailure(text *C.char, why, figures string) {
	room := C.AMEM_ERROR_TEXT - 2 - len(figures)
	writeText(text, why[:min(len(why), room)]+"\x00"+figures)
}

// controlError makes an amem_status of an error, and writes its text.
func controlError(err error, text *C.char) C.int {
	if err == nil {
		return C.AMEM_OK
	}
	writeFailure(text, err.Error(), session.FiguresOf(err))
	var timeout *peer.TimeoutError
	var oom *vmm.OutOfMemoryError
	var host *offload.HostMemoryError
	var disk *offload.DiskError
	var call *cuda.CallError
	switch {
	case errors.Is(err, session.ErrArgument):
		return C.AMEM_ERROR_INVALID_ARGUMENT
	case errors.Is(err, session.ErrState):
		return C.AMEM_ERROR_INVALID_STATE
	case errors.Is(err, session.ErrNoCuMem):
		return C.AMEM_ERROR_NO_CUMEM
	case errors.Is(err, session.ErrNoDevice):
		return C.AMEM_ERROR_NO_DRIVER
	case errors.As(err, &oom):
		return C.AMEM_ERROR_OUT_OF_MEMORY
	case errors.As(err, &host), errors.As(err, &disk):
		return C.AMEM_ERROR_HOST_MEMORY
	case errors.As(err, &timeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return C.AMEM_ERROR_TIMEOUT
	case errors.Is(err, cuda.ErrOutOfMemory): // of an allocation
		return C.AMEM_ERROR_OUT_OF_MEMORY
	case errors.As(err, &call):
		return C.AMEM_ERROR_CUDA
	case errors.Is(err, peer.ErrGone), errors.Is(err, peer.ErrBroken):
		return C.AMEM_ERROR_PEER
	}
	return C.AMEM_ERROR_INTERNAL
}

func guardControl(r any, status C.int, text *C.char) C.int {
	err := rescue.Panicked(r)
	if err == nil {
		return status
	}
	writeFailure(text, err.Error(), "")
	return C.AMEM_ERROR_INTERNAL
}

// writeText writes to a buffer of AMEM_ERROR_TEXT bytes.
func writeText(text *C.char, what string) { writeTo(text, what, C.AMEM_ERROR_TEXT) }

func writeTo(text *C.char, what string, size int) {
	to := unsafe.Slice((*byte)(unsafe.Pointer(text)), size)
	n := copy(to[:len(to)-1], what)
	to[n] = 0
}
