package vmm

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/simtest"
)

// Memory of a region made before and after peer access was enabled is the peer's,
// over pauses, and is put together as if it had been made at one time.
func TestReach(t *testing.T) {
	var peers atomic.Uint64
	reached := func(device int32) uint64 {
		if device == 0 {
			return peers.Load()
		}
		return 0
	}
	s := newSpace(t, Options{Arena: true, Region: "weights", Reached: reached})
	allocate := func(device int32, size uint64) cuda.Ptr {
		p, err := s.Allocate(size, device)
		require.NoError(t, err)
		return p
	}
	old, direct, elsewhere := allocate(0, 16*mib), allocate(0, 70*mib), allocate(1, 16*mib)
	sets := simtest.Calls(t, "cuMemSetAccess")
	require.NoError(t, s.Reach(0))
	require.Equal(t, sets, simtest.Calls(t, "cuMemSetAccess"), "without peers it costs nothing")
	require.False(t, simtest.Writable(t, 1, old) || simtest.Writable(t, 1, direct))

	peers.Store(1 << 1)
	require.NoError(t, s.Reach(0))
	require.True(t, simtest.Writable(t, 1, old) && simtest.Writable(t, 1, old+cuda.Ptr(16*mib)-1) && simtest.Writable(t, 1, direct))
	require.False(t, simtest.Writable(t, 0, elsewhere), "the other direction was not enabled")
	sets = simtest.Calls(t, "cuMemSetAccess")
	require.NoError(t, s.Reach(0))
	require.Equal(t, sets, simtest.Calls(t, "cuMemSetAccess"))
	young := allocate(0, 16*mib)
	require.Equal(t, sets+1, simtest.Calls(t, "cuMemSetAccess"))
	require.True(t, simtest.Writable(t, 1, young))

	all := []cuda.Ptr{old, direct, elsewhere, young}
	for i, p := range all {
		simtest.Fill(p, uint64(i+1), 16*mib)
	}
	arena := offload.NewArena(simtest.Driver())
	for range 2 {
		_, err := pause(s, arena)
		require.NoError(t, err)
		require.False(t, simtest.Writable(t, 1, old))
		_, err = s.Restore()
		require.NoError(t, err)
		require.NoError(t, s.Fill())
		s.Resumed(false)
		for i, p := range all {
			require.True(t, simtest.Holds(p, uint64(i+1), 16*mib))
		}
		require.True(t, simtest.Writable(t, 1, old) && simtest.Writable(t, 1, direct) && simtest.Writable(t, 1, young))
		require.False(t, simtest.Writable(t, 0, elsewhere))
	}
	require.Same(t, s.blockAt(old).mem, s.blockAt(young).mem, "adjacent, with the same access")

	_, err := pause(s, arena)
	require.NoError(t, err)
	peers.Store(0b11) // as it is when both know of each other; the own bit changes nothing
	require.NoError(t, s.Reach(0))
	_, err = s.Restore()
	require.NoError(t, err)
	require.NoError(t, s.Fill())
	s.Resumed(false)
	require.True(t, simtest.Writable(t, 1, young))
	for _, p := range all {
		require.NoError(t, s.Free(p))
	}
	require.NoError(t, s.AnyDevice(func() error { return arena.Free(func() error { return nil }) }))
}

// blockAt returns the block that an address is in.
func (s *Space) blockAt(p cuda.Ptr) *block {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, _ := s.rangeAt(p)
	return r.block
}

// Peer access that is enabled while memory is being made holds for that too.
func TestReachWhileMemoryIsMade(t *testing.T) {
	var asked atomic.Int32
	s := newSpace(t, Options{Arena: true, Region: "weights", Reached: func(int32) uint64 {
		if asked.Add(1) == 1 {
			return 0
		}
		return 1 << 1
	}})
	p, err := s.Allocate(16*mib, 0)
	require.NoError(t, err)
	require.True(t, simtest.Writable(t, 1, p))
	require.NoError(t, s.Free(p))

	asked.Store(0)
	held := simtest.Used(t, 0)
	simtest.Fault(t, "cuMemSetAccess", 2, cuda.ErrUnknown)
	_, err = s.Allocate(16*mib, 0)
	require.ErrorIs(t, err, cuda.ErrUnknown)
	require.Equal(t, held, simtest.Used(t, 0), "no memory that a peer can't reach is given out")
	require.Empty(t, s.handles)
}
