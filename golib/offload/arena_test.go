package offload

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

const mib = uint64(1) << 20

func TestMain(m *testing.M) { simtest.Main(m) }

func length(pieces [][]byte) uint64 {
	var n uint64
	for _, p := range pieces {
		n += uint64(len(p))
	}
	return n
}

func TestGrow(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.Zero(t, a.Bytes())
	require.NoError(t, a.Grow(0))
	require.Zero(t, a.Bytes())
	require.NoError(t, a.Grow(1))
	require.Equal(t, 2*mib, a.Bytes(), "in huge pages")
	pins := simtest.Calls(t, "cuMemHostRegister")
	require.NoError(t, a.Grow(2*mib))
	require.Equal(t, 2*mib, a.Bytes())
	require.Equal(t, pins, simtest.Calls(t, "cuMemHostRegister"), "pinned once")
	require.NoError(t, a.Grow(9*mib))
	require.Equal(t, 10*mib, a.Bytes(), "by what was missing")
	require.NoError(t, a.Grow(3*mib))
	require.Equal(t, 10*mib, a.Bytes(), "it does not shrink")
}

// More than one thread's share is populated in parallel.
func TestGrowLarge(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, a.Grow(minShare+6*mib))
	require.Equal(t, minShare+6*mib, a.Bytes())
	piece := a.Take(minShare + 6*mib)[0]
	piece[0], piece[len(piece)-1] = 1, 2
}

func TestTake(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, a.Grow(2*mib))
	require.NoError(t, a.Grow(6*mib))
	for range 2 {
		first := a.Take(mib)
		require.Len(t, first, 1)
		across := a.Take(3 * mib)
		require.Len(t, across, 2, "over two segments")
		last := a.Take(2 * mib)
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
		require.Empty(t, a.Take(0))
		a.Reset()
		require.Equal(t, 6*mib, a.Bytes(), "the memory stays")
	}
}

func TestHostMemoryError(t *testing.T) {
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	require.NoError(t, a.Grow(2*mib))
	kept := a.Take(mib)[0]
	kept[0] = 42
	simtest.Fault(t, "cuMemHostRegister", 1, cuda.ErrOutOfMemory)
	err := a.Grow(8 * mib)
	var host *HostMemoryError
	require.ErrorAs(t, err, &host)
	require.Equal(t, 6*mib, host.Bytes)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorContains(t, err, "host memory")
	require.Equal(t, 2*mib, a.Bytes(), "as it was")
	require.Equal(t, byte(42), kept[0])
	require.Len(t, a.Take(mib), 1)

	err = a.Grow(1 << 60)
	require.ErrorAs(t, err, &host)
	require.Equal(t, 2*mib, a.Bytes())
	require.NoError(t, a.Grow(8*mib))
	require.Equal(t, 8*mib, a.Bytes())
}

// Contents come back whole, though they lie in several segments; ranges to be
// cleared are; all else is left alone.
func TestContents(t *testing.T) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	at := deviceMemory(t, 8*mib)
	a := NewArena(driver)
	require.NoError(t, a.Grow(2*mib))
	require.NoError(t, a.Grow(4*mib))
	stream, err := driver.NewStream()
	require.NoError(t, err)
	simtest.Fill(at, 1, 8*mib)
	want := bytes.Clone(simtest.Bytes(at, 8*mib))
	c := Contents{
		Kept:   []Range{{at, 3 * mib}, {at + cuda.Ptr(5*mib), 4096}, {at + cuda.Ptr(6*mib), mib - 4096}},
		Zeroed: []Range{{at + cuda.Ptr(3*mib), mib}},
	}
	require.Equal(t, 4*mib, c.Bytes())
	require.NoError(t, c.Save(driver, a, stream))
	require.NoError(t, driver.StreamSynchronize(stream))

	after := simtest.Random(2, 8*mib)
	copy(simtest.Bytes(at, 8*mib), after)
	require.NoError(t, c.Restore(driver, stream))
	require.NoError(t, driver.StreamSynchronize(stream))
	for _, r := range c.Kept {
		off := uint64(r.At - at)
		copy(after[off:off+r.Size], want[off:])
	}
	clear(after[3*mib : 4*mib])
	require.True(t, bytes.Equal(after, simtest.Bytes(at, 8*mib)))

	for _, call := range []string{"cuMemcpyHtoDAsync", "cuMemsetD8Async"} {
		simtest.Fault(t, call, 1, cuda.ErrUnknown)
		require.ErrorIs(t, c.Restore(driver, stream), cuda.ErrUnknown, call)
	}
	require.NoError(t, driver.StreamSynchronize(stream))
}

func deviceMemory(t *testing.T, size uint64) cuda.Ptr {
	t.Helper()
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	h, err := driver.Create(size, cuda.Prop{Type: 1, LocationType: cuda.LocationDevice}, 0)
	require.NoError(t, err)
	at, err := driver.Reserve(size, 0, 0, 0)
	require.NoError(t, err)
	require.NoError(t, driver.Map(at, size, 0, h, 0))
	require.NoError(t, driver.SetAccess(at, size, []cuda.Access{{LocationType: cuda.LocationDevice, Flags: cuda.ReadWrite}}))
	t.Cleanup(func() {
		require.NoError(t, driver.Unmap(at, size))
		require.NoError(t, driver.Release(h))
		require.NoError(t, driver.AddressFree(at, size))
		require.Equal(t, before, simtest.Used(t, 0))
	})
	return at
}
