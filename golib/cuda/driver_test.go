package cuda_test

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

const size = 2 << 20

func TestMain(m *testing.M) { simtest.Main(m) }

func deviceProp(device int32) cuda.Prop {
	return cuda.Prop{Type: 1, HandleTypes: cuda.FileDescriptor, LocationType: cuda.LocationDevice, Location: device, Usage: 3, RDMA: 1}
}

func TestOpen(t *testing.T) {
	_, err := cuda.Open("/nonexistent/libcuda.so.1")
	require.ErrorContains(t, err, "load the CUDA driver")
	_, err = cuda.Open("libm.so.6")
	require.ErrorContains(t, err, "lacks cuGetErrorName")
	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, []byte("no library"), 0o600))
	_, err = cuda.Open(text)
	require.ErrorContains(t, err, text)
	// A failed Open leaves no function that is not there.
	path := os.Getenv("AMEM_SIM_LIBRARY_DIR")
	if path == "" {
		path = filepath.Join("..", "..", "build", "sim")
	}
	_, err = cuda.Open(filepath.Join(path, "libcuda.so.1"))
	require.NoError(t, err)
}

func TestErrors(t *testing.T) {
	require.Equal(t, "CUDA_ERROR_OUT_OF_MEMORY", cuda.ErrOutOfMemory.Error())
	require.Equal(t, "CUDA error 12345", cuda.Result(12345).Error())
	simtest.On(t, 0)
	_, err := simtest.Driver().Create(1, deviceProp(0), 0)
	var call *cuda.CallError
	require.ErrorAs(t, err, &call)
	require.Equal(t, cuda.CallError{Call: "cuMemCreate", Result: cuda.ErrInvalidValue}, *call)
	require.ErrorIs(t, err, cuda.ErrInvalidValue)
}

func TestPropBothWays(t *testing.T) {
	want := cuda.Prop{Type: 1, HandleTypes: 9, LocationType: 1, Location: 5, Compression: 1, RDMA: 1, Usage: 3}
	var raw [8]uint64 // aligned as C has it
	want.ToC(unsafe.Pointer(&raw))
	require.Equal(t, want, cuda.PropFromC(unsafe.Pointer(&raw)))
}

func TestContexts(t *testing.T) {
	driver := simtest.Driver()
	end := simtest.Use(t, 1)
	defer end()
	current, err := driver.CurrentContext()
	require.NoError(t, err)
	require.Equal(t, simtest.Context(1), current)
	device, err := driver.CurrentDevice()
	require.NoError(t, err)
	require.Equal(t, int32(1), device)
	for device := range 2 {
		ctx, err := driver.ContextOf(int32(device))
		require.NoError(t, err)
		require.Equal(t, simtest.Context(device), ctx)
	}
	require.NoError(t, driver.With(simtest.Context(0), func() error {
		inner, err := driver.CurrentContext()
		require.Equal(t, simtest.Context(0), inner)
		return err
	}))
	current, err = driver.CurrentContext()
	require.NoError(t, err)
	require.Equal(t, simtest.Context(1), current, "With leaves the thread as it was")
	require.ErrorIs(t, driver.With(simtest.Context(0), func() error { return cuda.ErrNotSupported }), cuda.ErrNotSupported)
	require.Error(t, driver.With(0, func() error { t.Error("without a context"); return nil }))

	first, err := driver.UUID(0)
	require.NoError(t, err)
	second, err := driver.UUID(1)
	require.NoError(t, err)
	require.NotEqual(t, first, second)
}

// A capture on another thread neither refuses what With runs nor is spoiled by it.
// What the thread does after With is as it was.
func TestWithDuringCapture(t *testing.T) {
	const unsupported = cuda.Result(900) // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
	simtest.On(t, 0)
	driver := simtest.Driver()
	captured, err := driver.NewStream()
	require.NoError(t, err)
	other, err := driver.NewStream()
	require.NoError(t, err)
	wait := func() error { return driver.StreamSynchronize(other) }
	errs := make(chan error)

	end := simtest.Capture(t, captured)
	go func() { errs <- driver.With(simtest.Context(0), wait) }()
	inside := <-errs
	require.NoError(t, end(), "the capture")
	require.NoError(t, inside)

	end = simtest.Capture(t, captured)
	go func() {
		defer simtest.Use(t, 0)()
		if err := driver.With(simtest.Context(0), wait); err != nil {
			errs <- err
			return
		}
		errs <- wait()
	}()
	after := <-errs
	require.Error(t, end(), "a call that the mode does not allow spoils the capture")
	require.ErrorIs(t, after, unsupported)
}

func TestMemory(t *testing.T) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	granularity, err := driver.Granularity(deviceProp(0))
	require.NoError(t, err)
	require.EqualValues(t, size, granularity)
	h, err := driver.Create(size, deviceProp(0), 0)
	require.NoError(t, err)
	require.EqualValues(t, size, simtest.Used(t, 0)-before)
	fd, err := driver.ExportFD(h)
	require.NoError(t, err)
	again, err := driver.ImportFD(fd)
	require.NoError(t, err)
	require.NoError(t, unix.Close(fd))
	var at [2]cuda.Ptr
	for i, h := range []cuda.Handle{h, again} {
		at[i], err = driver.Reserve(size, 0, 0, 0)
		require.NoError(t, err)
		require.NoError(t, driver.Map(at[i], size, 0, h, 0))
		require.NoError(t, driver.SetAccess(at[i], size, []cuda.Access{{LocationType: cuda.LocationDevice, Flags: cuda.ReadWrite}}))
	}
	simtest.Fill(at[0], 1, size)
	require.True(t, simtest.Holds(at[1], 1, size), "the imported handle is the same memory")
	stream, err := driver.NewStream()
	require.NoError(t, err)
	require.NoError(t, driver.Zero(at[1], 4096, stream))
	require.NoError(t, driver.StreamSynchronize(stream))
	require.Equal(t, make([]byte, 4096), simtest.Bytes(at[0], 4096))
	calls := driver.Calls()
	for i, h := range []cuda.Handle{h, again} {
		require.NoError(t, driver.Unmap(at[i], size))
		require.NoError(t, driver.Release(h))
		require.NoError(t, driver.AddressFree(at[i], size))
	}
	require.Equal(t, before, simtest.Used(t, 0))
	require.Equal(t, calls["cuMemUnmap"]+2, driver.Calls()["cuMemUnmap"])
}

// A failed export is no descriptor at all: 0 would be somebody's.
func TestFailedExport(t *testing.T) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	h, err := driver.Create(size, deviceProp(0), 0)
	require.NoError(t, err)
	simtest.Fault(t, "cuMemExportToShareableHandle", 1, cuda.ErrUnknown)
	fd, err := driver.ExportFD(h)
	require.ErrorIs(t, err, cuda.ErrUnknown)
	require.Equal(t, -1, fd)
	require.NoError(t, driver.Release(h))
	_, err = driver.ImportFD(int(^uint32(0) >> 1))
	require.Error(t, err)
}
