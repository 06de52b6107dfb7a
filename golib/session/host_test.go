package session

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

func TestFreeHost(t *testing.T) {
	p := start(t, 1, 20*time.Second)[0]
	require.NoError(t, p.FreeHost(""), "there is none")
	require.NoError(t, p.Pause(""))
	require.ErrorIs(t, p.FreeHost(""), ErrState)
	require.ErrorContains(t, p.FreeHost(""), "resume it first")
	require.NoError(t, p.Resume(""))
	require.Equal(t, 4*mib, p.Stats("").Host.Arena)
	require.NoError(t, p.FreeHost(""))
	require.Zero(t, p.Stats("").Host.Arena)
	require.NoError(t, p.Pause(""))
	require.NoError(t, p.Resume(""))
	for _, b := range p.own {
		require.True(t, b.intact())
	}
}

// Once NCCL's memory has settled, the host memory is there, and a pause gets none.
func TestPreallocate(t *testing.T) {
	p := start(t, 1, 20*time.Second)[0]
	p.options.Prealloc = true
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.preallocate(p.space, p.growHost)
	}()
	held := func(bytes uint64) func() bool { return func() bool { return p.Stats("").Host.Arena == bytes } }
	require.Eventually(t, held(4*mib), 10*time.Second, 10*time.Millisecond)
	pins := simtest.Calls(t, "cuMemHostRegister")
	require.NoError(t, p.Pause(""))
	require.Equal(t, pins, simtest.Calls(t, "cuMemHostRegister"))
	require.NoError(t, p.Resume(""))

	p.allocate(t, 16*mib, 7)
	require.Eventually(t, held(20*mib), 10*time.Second, 10*time.Millisecond, "as much as there is now")
	pins = simtest.Calls(t, "cuMemHostRegister")
	require.NoError(t, p.Pause(""))
	require.Equal(t, pins, simtest.Calls(t, "cuMemHostRegister"))
	require.NoError(t, p.Resume(""))
	for _, b := range p.own {
		require.True(t, b.intact())
	}
	p.Close()
	<-ended
}

func TestPreallocateForARegion(t *testing.T) {
	p := bare(t, 1, 20*time.Second)[0]
	p.options.Prealloc = true
	kept, lost := p.region(t, "weights", BackupCPU), p.region(t, "kv_cache", BackupNone)
	a, b := p.torch(t, kept, 20*mib, 1), p.torch(t, lost, 20*mib, 2)
	held := func() uint64 {
		regions := p.Stats("").Regions
		require.Zero(t, regions[1].Host)
		return regions[0].Host
	}
	require.Eventually(t, func() bool { return held() == 20*mib }, 10*time.Second, 10*time.Millisecond)
	pins := simtest.Calls(t, "cuMemHostRegister")
	require.NoError(t, p.Pause(""))
	require.Equal(t, pins, simtest.Calls(t, "cuMemHostRegister"))
	require.NoError(t, p.Resume(""))
	require.True(t, a.intact())
	p.give(t, kept, a)
	p.give(t, lost, b)
}

// What can't be got ahead is got by the pause, or said by it.
func TestPreallocateFails(t *testing.T) {
	p := start(t, 1, 20*time.Second)[0]
	simtest.Fault(t, "cuMemHostRegister", 1, cuda.ErrOutOfMemory)
	_, err := p.growHost()
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.Zero(t, p.Stats("").Host.Arena)
	require.NoError(t, p.Pause(""))
	grown, err := p.growHost()
	require.NoError(t, err)
	require.False(t, grown, "not while paused")
	require.NoError(t, p.Resume(""))
}
