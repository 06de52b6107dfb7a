package session

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

// A peer has paused and resumed before it maps what a paused process has allocated since: that
// is not given back while the peer is active.
func TestPauseOfWhatIsNewSinceOfAPeerThatHasPausedBefore(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	watchSockets(t, a.node, b.node)
	b.maps(t, a)
	for _, theirs := range b.theirs { // they know each other, and share nothing
		b.free(t, theirs)
	}
	b.theirs = nil
	soon(t, func() bool { return len(a.node.Peers())+len(b.node.Peers()) == 0 }, "told")
	require.NoError(t, a.Pause(Tag))
	require.NoError(t, b.Pause(Tag))
	require.NoError(t, b.Resume(Tag))
	endConnections()
	old := a.own
	a.own = nil
	a.allocate(t, 3*mib, 77)
	b.maps(t, a)
	a.own = append(old, a.own...)
	require.Equal(t, Open, b.position())
	require.ErrorContains(t, a.hurried(a.Pause), "waiting for pid")
	require.NoError(t, a.Resume(Tag))
	require.Equal(t, Stale, b.position(), "the owner's memory may have been replaced")
	finish := simtest.Busy(t) // by a kernel that was launched before
	unmapped := simtest.Calls(t, "cuMemUnmap")
	err := b.hurried(b.Resume)
	finish()
	require.ErrorContains(t, err, "work on GPU")
	require.Equal(t, unmapped, simtest.Calls(t, "cuMemUnmap"), "the kernel may use it")
	require.NoError(t, b.Resume(Tag))
	intact(t, a, b)
}

// A pause of what is new since fails: who had let go of that for it maps it again.
func TestPauseOfARegionsNewMemoryFails(t *testing.T) {
	s := newShared(t, BackupCPU)
	require.NoError(t, s.owner.Pause("weights"))
	x := s.owner.torch(t, s.region, 6*mib, 50)
	theirs := shares(t, s.owner, s.borrower, x)
	for _, call := range []string{"cuMemcpyDtoHAsync", "cuCtxSynchronize"} {
		simtest.Fault(t, call, 1, cuda.ErrUnknown)
		require.ErrorIs(t, s.owner.Pause("weights"), cuda.ErrUnknown)
		simtest.Fault(t, call, 0, cuda.Success)
		require.True(t, x.intact())
		state, known := s.borrower.MemoryState(theirs.at)
		require.True(t, known && state == Active, "what is there is mapped, after a fault of %s", call)
		require.True(t, theirs.intact())
	}
	require.NoError(t, s.owner.Pause("weights"))
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, s.owner.Resume("weights"))
	require.True(t, theirs.intact())
	s.borrower.closes(t, theirs)
	s.owner.give(t, s.region, x)
	require.NoError(t, s.owner.Pause("weights")) // the slabs had been put together
	require.NoError(t, s.owner.Resume("weights"))
	s.mapped(t)
	s.cycle(t)
	s.end(t)
}

// Of a tag without backup, a pause that fails has lost the contents of what it had given back.
// Its error says so.
func TestFailedPauseSaysWhatItHasLost(t *testing.T) {
	p := alone(t)
	r := p.region(t, "kv_cache", BackupNone)
	list := []buffer{p.torch(t, r, 128*mib, 1), p.torch(t, r, 128*mib, 2)}
	simtest.Fault(t, "cuMemUnmap", 1, cuda.ErrUnknown)
	err := p.Pause("")
	require.ErrorIs(t, err, cuda.ErrUnknown)
	require.NotContains(t, err.Error(), "contents are lost")
	require.True(t, list[0].intact() && list[1].intact())
	simtest.Fault(t, "cuMemUnmap", 2, cuda.ErrUnknown)
	require.ErrorContains(t, p.Pause(""), "134217728 bytes had been given back: they are back, but their contents are lost")
	p.give(t, r, list...)
}
