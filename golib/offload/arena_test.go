package offload

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

const mib = uint64(1) << 20

func TestMain(m *testing.M) { simtest.Main(m) }

// always lets a store give host memory back: no kernel runs.
func always() error { return nil }

func length(pieces [][]byte) uint64 {
	var n uint64
	for _, p := range pieces {
		n += uint64(len(p))
	}
	return n
}

// grow makes the arena hold total bytes, as a pause does.
func grow(a *Arena, total uint64) error {
	if err := a.Begin(total); err != nil {
		return err
	}
	for {
		if grown, err := a.Grow(); !grown {
			return err
		}
	}
}

func take(t *testing.T, a *Arena, size uint64) [][]byte {
	t.Helper()
	pieces, err := a.Take(size)
	require.NoError(t, err)
	return pieces
}

func TestGrow(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.Zero(t, a.Bytes())
	require.NoError(t, grow(a, 0))
	require.Zero(t, a.Bytes())
	require.NoError(t, grow(a, 1))
	require.Equal(t, 2*mib, a.Bytes(), "in huge pages")
	pins := simtest.Calls(t, "cuMemHostRegister")
	require.NoError(t, grow(a, 2*mib))
	require.Equal(t, 2*mib, a.Bytes())
	require.Equal(t, pins, simtest.Calls(t, "cuMemHostRegister"), "pinned once")
	require.NoError(t, grow(a, 9*mib))
	require.Equal(t, 10*mib, a.Bytes(), "by what was missing")
	require.NoError(t, grow(a, 3*mib))
	require.Equal(t, 10*mib, a.Bytes(), "it does not shrink")
	require.NoError(t, a.Free(always))
	require.Zero(t, a.Bytes())
	require.NoError(t, a.Free(always))
	require.NoError(t, grow(a, 3*mib))
	require.Equal(t, 4*mib, a.Bytes(), "and again")
	require.NoError(t, a.Free(always))
}

// What is more than a piece is populated by several threads, and ahead.
func TestGrowByPieces(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	total := maxPiece + 6*mib
	pins := simtest.Calls(t, "cuMemHostRegister")
	require.NoError(t, a.Begin(total))
	first := take(t, a, mib)[0]
	require.EqualValues(t, maxPiece, a.Bytes(), "no further than what was taken")
	rest := take(t, a, total-mib)
	require.Len(t, rest, 2)
	require.Equal(t, total, a.Bytes())
	require.Equal(t, pins+maxPiece/pinSize+1, simtest.Calls(t, "cuMemHostRegister"), "in small parts, which hold up launches little")
	first[0], rest[0][0], rest[1][6*mib-1] = 1, 2, 3
	_, err := a.Take(1)
	require.ErrorContains(t, err, "more than was said")
	require.NoError(t, a.Free(always))
}

// A pause that stops half way has populated a piece that nobody takes.
func TestFreeWhatWasPopulatedAhead(t *testing.T) {
	simtest.On(t, 0)
	resident := func() uint64 {
		n, ok := field("proc/self/status", "VmRSS:")
		require.True(t, ok)
		return n << 10
	}
	before := resident()
	a := NewArena(simtest.Driver())
	require.NoError(t, a.Begin(2*maxPiece))
	take(t, a, mib)
	require.NotNil(t, a.ahead)
	require.NoError(t, a.Free(always))
	require.Nil(t, a.ahead)
	require.Less(t, resident(), before+maxPiece/2)
}

// What a pause that has failed got ahead goes back at once, and other processes can have it.
func TestDone(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, a.Begin(2*maxPiece))
	take(t, a, mib)
	require.NotNil(t, a.ahead)
	a.Done()
	require.Nil(t, a.ahead)
	require.Zero(t, a.claim.bytes)
	require.EqualValues(t, maxPiece, a.Bytes())
	_, err := a.Take(maxPiece)
	require.ErrorContains(t, err, "more than was said")
	require.NoError(t, a.Free(always))
}

// Memory is given back part by part, as long as that disturbs nobody; what is left can
// still be used.
func TestFreeStopsWhileADeviceIsBusy(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, grow(a, pinSize+6*mib))
	require.NoError(t, grow(a, 2*pinSize+6*mib))
	busy := errors.New("busy")
	parts := 1
	ready := func() error {
		if parts--; parts < 0 {
			return busy
		}
		return nil
	}
	require.ErrorIs(t, a.Free(ready), busy)
	require.EqualValues(t, pinSize+6*mib, a.Bytes())
	parts = 1
	require.ErrorIs(t, a.Free(ready), busy)
	require.EqualValues(t, pinSize, a.Bytes())
	require.NoError(t, a.Begin(pinSize+mib))
	pieces := take(t, a, pinSize+mib)
	require.Len(t, pieces, 2)
	pieces[0][pinSize-1], pieces[1][mib-1] = 1, 2
	require.NoError(t, a.Free(always))
	require.Zero(t, a.Bytes())
}

// What was pinned before a failure is kept: to unpin it may hold up launches.
func TestPinFails(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	unpinned := simtest.Calls(t, "cuMemHostUnregister")
	simtest.Fault(t, "cuMemHostRegister", 2, cuda.ErrOutOfMemory)
	var host *HostMemoryError
	require.ErrorAs(t, grow(a, 3*pinSize), &host)
	require.EqualValues(t, pinSize, a.Bytes())
	require.Equal(t, unpinned, simtest.Calls(t, "cuMemHostUnregister"))
	require.NoError(t, grow(a, 3*pinSize))
	require.EqualValues(t, 3*pinSize, a.Bytes())
	require.NoError(t, a.Free(always))
}

// The driver refuses a copy of host memory that was pinned in two parts: runs and rows
// that cross from one to the next come back whole.
func TestCopiesStayWithinWhatIsPinnedTogether(t *testing.T) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	size := uint64(3*pinSize + 6*mib)
	at := deviceMemory(t, size)
	stream, err := driver.NewStream()
	require.NoError(t, err)
	run := &Contents{}
	run.Keep(at+4096, size-8192)
	rows := &Contents{}
	const row = 640 << 10
	for from := uint64(0); from+mib <= size; from += mib {
		rows.Keep(at+cuda.Ptr(from), row)
	}
	for name, c := range map[string]*Contents{"a run": run, "rows": rows} {
		a := NewArena(driver)
		// All of it lies behind something else, so that it begins within a part.
		require.NoError(t, a.Begin(mib+c.Bytes()))
		take(t, a, mib)
		simtest.Fill(at, 1, size)
		require.NoError(t, a.Save(c, stream), name)
		require.Len(t, c.host, 1, "one piece for who reads it")
		require.NoError(t, driver.StreamSynchronize(stream))
		simtest.Fill(at, 2, size)
		require.NoError(t, a.Restore(c, stream), name)
		require.NoError(t, driver.StreamSynchronize(stream))
		want, was := simtest.Random(2, size), simtest.Random(1, size)
		for _, r := range c.Kept {
			for i := range r.Rows {
				from := uint64(r.At-at) + i*r.Pitch
				copy(want[from:from+r.Size], was[from:])
			}
		}
		require.True(t, bytes.Equal(want, simtest.Bytes(at, size)), name)
		require.NoError(t, a.Free(always))
	}
}

// A child of fork() must neither copy pinned memory nor keep what is given back here.
func TestChildrenOfForkDoNotGetIt(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, grow(a, 2*mib))
	maps, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	start := uintptr(unsafe.Pointer(&a.segments[0].memory[0]))
	inside := false
	var flags []string
	for line := range strings.Lines(string(maps)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			inside = from <= start && start < to
		} else if words := strings.Fields(line); inside && words[0] == "VmFlags:" {
			flags = words[1:]
		}
	}
	require.Contains(t, flags, "dc", "not copied at fork: proc(5)")
	require.NoError(t, a.Free(always))
}

func TestTake(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, grow(a, 2*mib))
	for range 2 {
		require.NoError(t, a.Begin(6*mib))
		first := take(t, a, mib)
		require.Len(t, first, 1)
		across := take(t, a, 3*mib)
		require.Len(t, across, 2, "over two segments")
		last := take(t, a, 2*mib)
		require.Len(t, last, 1)
		require.Equal(t, 6*mib, length(first)+length(across)+length(last))
		for i, pieces := range [][][]byte{first, across, last} {
			for _, p := range pieces {
				for k := range p {
					p[k] = byte(i)
				}
			}
		}
		for i, pieces := range [][][]byte{first, across, last} {
			for _, p := range pieces {
				require.Equal(t, len(p), bytes.Count(p, []byte{byte(i)}), "pieces do not overlap")
			}
		}
		require.Empty(t, take(t, a, 0))
		require.Equal(t, 6*mib, a.Bytes(), "the memory stays")
	}
	require.NoError(t, a.Free(always))
}

func TestHostMemoryError(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, grow(a, 2*mib))
	kept := take(t, a, mib)[0]
	kept[0] = 42
	simtest.Fault(t, "cuMemHostRegister", 1, cuda.ErrOutOfMemory)
	err := grow(a, 8*mib)
	var host *HostMemoryError
	require.ErrorAs(t, err, &host)
	require.Equal(t, 6*mib, host.Bytes)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "host memory")
	require.Equal(t, 2*mib, a.Bytes(), "as it was")
	require.Equal(t, byte(42), kept[0])

	err = grow(a, 1<<60)
	require.ErrorAs(t, err, &host)
	require.ErrorContains(t, err, "leaves")
	require.Equal(t, 2*mib, a.Bytes())
	require.NoError(t, grow(a, 8*mib))
	require.Equal(t, 8*mib, a.Bytes())
	simtest.Fault(t, "cuMemHostUnregister", 1, cuda.ErrUnknown)
	require.ErrorIs(t, a.Free(always), cuda.ErrUnknown)
	require.Equal(t, 8*mib, a.Bytes(), "what can't be unpinned stays")
	require.NoError(t, a.Free(always))
}

// Contents come back whole, though they lie in several segments; ranges to be
// cleared are; all else is left alone.
func TestContents(t *testing.T) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	at := deviceMemory(t, 8*mib)
	a := NewArena(driver)
	require.NoError(t, grow(a, 2*mib))
	require.NoError(t, grow(a, 4*mib))
	stream, err := driver.NewStream()
	require.NoError(t, err)
	simtest.Fill(at, 1, 8*mib)
	want := bytes.Clone(simtest.Bytes(at, 8*mib))
	c := &Contents{
		Kept:   []Range{{at, 3 * mib, 1, 0}, {at + cuda.Ptr(5*mib), 4096, 1, 0}, {at + cuda.Ptr(6*mib), mib - 4096, 1, 0}},
		Zeroed: []Range{{at + cuda.Ptr(3*mib), mib, 1, 0}},
	}
	require.Equal(t, 4*mib, c.Bytes())
	require.NoError(t, a.Save(c, stream))
	require.NoError(t, driver.StreamSynchronize(stream))

	after := simtest.Random(2, 8*mib)
	copy(simtest.Bytes(at, 8*mib), after)
	require.NoError(t, a.Restore(c, stream))
	require.NoError(t, driver.StreamSynchronize(stream))
	for _, r := range c.Kept {
		off := uint64(r.At - at)
		copy(after[off:off+r.Size], want[off:])
	}
	clear(after[3*mib : 4*mib])
	require.True(t, bytes.Equal(after, simtest.Bytes(at, 8*mib)))

	for _, call := range []string{"cuMemcpyHtoDAsync", "cuMemsetD8Async"} {
		simtest.Fault(t, call, 1, cuda.ErrUnknown)
		require.ErrorIs(t, a.Restore(c, stream), cuda.ErrUnknown, call)
	}
	require.NoError(t, driver.StreamSynchronize(stream))
}

func TestKeep(t *testing.T) {
	c := &Contents{}
	for _, off := range []uint64{0, 64, 128, 192 + 1000, 192 + 3000, 192 + 5000, 192 + 7001, 192 + 7065} {
		c.Keep(cuda.Ptr(off), 64)
	}
	c.Keep(20000, 100)
	c.Keep(1<<40, 100)
	require.Equal(t, []Range{
		{0, 192, 1, 0}, {1192, 64, 3, 2000}, {7193, 128, 1, 0}, {20000, 100, 1, 0}, {1 << 40, 100, 1, 0},
	}, c.Kept)
	require.EqualValues(t, 192+192+128+200, c.Bytes())
}

// Rows are copied whole, also where the host's memory for them is in pieces
// that end within a row.
func TestRows(t *testing.T) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	at := deviceMemory(t, 32*mib)
	stream, err := driver.NewStream()
	require.NoError(t, err)
	size := 192 * uint64(1024)
	for name, first := range map[string]uint64{"one piece": 0, "ends within a row": 2 * mib, "ends with a row": 6 * mib} {
		a := NewArena(driver)
		require.NoError(t, grow(a, first))
		c := &Contents{Zeroed: []Range{{at, 32 * mib, 1, 0}}}
		for row := range uint64(40) {
			c.Keep(at+cuda.Ptr(4096+row*800*1024), size)
		}
		require.Len(t, c.Kept, 1, name)
		simtest.Fill(at, 5, 32*mib)
		want := make([]byte, 32*mib)
		for row := range uint64(40) {
			copy(want[4096+row*800*1024:][:size], simtest.Bytes(at+cuda.Ptr(4096+row*800*1024), size))
		}
		copies := simtest.Calls(t, "cuMemcpy2DAsync") + simtest.Calls(t, "cuMemcpyDtoHAsync")
		require.NoError(t, a.Begin(c.Bytes()))
		require.NoError(t, a.Save(c, stream))
		require.LessOrEqual(t, simtest.Calls(t, "cuMemcpy2DAsync")+simtest.Calls(t, "cuMemcpyDtoHAsync")-copies, 4, name)
		require.NoError(t, driver.StreamSynchronize(stream))
		simtest.Fill(at, 6, 32*mib)
		require.NoError(t, a.Restore(c, stream))
		require.NoError(t, driver.StreamSynchronize(stream))
		require.True(t, bytes.Equal(want, simtest.Bytes(at, 32*mib)), name)
		require.NoError(t, a.Free(always))
	}
	simtest.Fault(t, "cuMemcpy2DAsync", 1, cuda.ErrUnknown)
	c := &Contents{}
	c.Keep(at, size)
	c.Keep(at+cuda.Ptr(mib), size)
	a := NewArena(driver)
	require.NoError(t, a.Begin(c.Bytes()))
	require.ErrorIs(t, a.Save(c, stream), cuda.ErrUnknown)
	require.NoError(t, a.Free(always))
}

func deviceMemory(t *testing.T, size uint64) cuda.Ptr {
	t.Helper()
	return deviceMemoryOf(t, 0, size)
}

func deviceMemoryOf(t *testing.T, device int, size uint64) cuda.Ptr {
	t.Helper()
	driver := simtest.Driver()
	location := int32(device)
	before := simtest.Used(t, device)
	h, err := driver.Create(size, cuda.Prop{Type: 1, LocationType: cuda.LocationDevice, Location: location}, 0)
	require.NoError(t, err)
	at, err := driver.Reserve(size, 0, 0, 0)
	require.NoError(t, err)
	require.NoError(t, driver.Map(at, size, 0, h, 0))
	require.NoError(t, driver.SetAccess(at, size, []cuda.Access{{LocationType: cuda.LocationDevice, Location: location, Flags: cuda.ReadWrite}}))
	t.Cleanup(func() {
		require.NoError(t, driver.Unmap(at, size))
		require.NoError(t, driver.Release(h))
		require.NoError(t, driver.AddressFree(at, size))
		require.Equal(t, before, simtest.Used(t, device))
	})
	return at
}
