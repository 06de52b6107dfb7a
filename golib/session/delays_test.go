package session

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/peer"
	"amem/golib/simtest"
)

// hold makes the first step of the name at a socket wait until the returned
// function is called. taken tells whether the step was reached.
func hold(t *testing.T, step string) (taken func() bool, let func()) {
	t.Helper()
	until := make(chan struct{})
	var reached atomic.Bool
	atSockets(t, func(s string, n int) error {
		if s == step && n == 1 {
			reached.Store(true)
			return held{until}
		}
		return nil
	})
	return reached.Load, func() { close(until) }
}

func (s *shared) setTimeout(timeout time.Duration) {
	s.owner.options.Timeout, s.borrower.options.Timeout = timeout, timeout
}

// mapped checks that the borrower maps the owner's memory, and no other.
func (s *shared) mapped(t *testing.T) {
	t.Helper()
	for i, own := range s.own {
		state, known := s.borrower.MemoryState(s.theirs[i].at)
		require.True(t, known && state == Active, "buffer %d", i)
		require.True(t, own.intact() && s.theirs[i].intact(), "contents of buffer %d", i)
		s.theirs[i].fill(own.seed + 1000)
		require.True(t, simtest.Holds(own.at, own.seed+1000, own.size), "both sides have the same memory")
		own.fill(own.seed)
	}
	require.Equal(t, s.used, simtest.Used(t, 0))
}

// cycle checks that the next pauses and resumes of both succeed.
func (s *shared) cycle(t *testing.T) {
	t.Helper()
	s.setTimeout(patient)
	for _, p := range []*process{s.owner, s.borrower} {
		require.NoError(t, p.Pause("weights"))
		if p == s.owner {
			require.Zero(t, simtest.Used(t, 0))
		}
		require.NoError(t, p.Resume("weights"))
		s.mapped(t)
	}
}

// A borrower's GPU is busy until after the owner has given up its pause: the
// borrower does not let go any more.
func TestBorrowerIsLate(t *testing.T) {
	const deadline = 300 * time.Millisecond
	all := bare(t, 2, deadline)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own := a.torch(t, r, 8*mib, 1)
	end := simtest.Use(t, 1) // the borrower's device
	theirs := shares(t, a, b, own)
	s := &shared{owner: a, borrower: b, region: r, own: []buffer{own}, theirs: []buffer{theirs}, used: simtest.Used(t, 0)}
	finish := simtest.Busy(t)
	end()
	var timeout *peer.TimeoutError
	require.ErrorAs(t, a.Pause("weights"), &timeout)
	time.Sleep(deadline / 3) // before two deadlines have passed
	finish()
	for range 20 { // what it does then is done
		s.mapped(t)
		time.Sleep(5 * time.Millisecond)
	}
	s.cycle(t)
	s.end(t)
}

// A recall arrives when the owner has given it up, and has said so already.
func TestRecallThatArrivesLate(t *testing.T) {
	s := newShared(t, BackupCPU)
	for range 3 {
		taken, let := hold(t, "process 1 serves: received leave")
		s.setTimeout(hurried)
		require.Error(t, s.owner.Pause("weights"))
		require.True(t, taken())
		let()
		served(t, "process 1 serves: sent error")
		s.mapped(t)
		s.cycle(t)
	}
	s.end(t)
}

// served waits until the step was made at a socket.
func served(t *testing.T, step string) {
	t.Helper()
	soon(t, func() bool {
		sockets.Lock()
		defer sockets.Unlock()
		return sockets.count[step] > 0
	}, step)
}

// The word that memory is back arrives when the owner has paused it anew: it is not
// mapped while paused, and it is when it is back.
func TestReturnThatArrivesLate(t *testing.T) {
	s := newShared(t, BackupCPU)
	for range 3 {
		require.NoError(t, s.owner.Pause("weights"))
		taken, let := hold(t, "process 1 serves: received return")
		s.setTimeout(hurried)
		require.ErrorContains(t, s.owner.Resume("weights"), "map this process's memory again")
		require.True(t, taken())
		s.setTimeout(patient)
		require.NoError(t, s.owner.Pause("weights"))
		require.Zero(t, simtest.Used(t, 0))
		let()
		served(t, "process 1 serves: sent return")
		require.Zero(t, simtest.Used(t, 0))
		require.NoError(t, s.owner.Resume("weights"))
		s.mapped(t)
		s.cycle(t)
	}
	s.end(t)
}

// Memory that its owner has recalled is mapped nowhere here: the hook looks at copies
// as long as it is, and is told that it is gone.
func TestRecalledMemoryIsLookedAt(t *testing.T) {
	all := bare(t, 2, 5*time.Second)
	var looks [2]atomic.Int32
	for i, p := range all {
		p.options.Paused = func(more int) { looks[i].Add(int32(more)) }
	}
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own, other := a.torch(t, r, 8*mib, 1), a.torch(t, r, 200*mib, 2)
	theirs, others := shares(t, a, b, own), shares(t, a, b, other)
	looked := func(at buffer, wanted State, counts ...int32) {
		t.Helper()
		state, known := b.MemoryState(at.at)
		require.True(t, known)
		require.Equal(t, wanted, state)
		require.Equal(t, counts, []int32{looks[0].Load(), looks[1].Load()})
	}
	looked(theirs, Active, 0, 0)
	for range 2 {
		require.NoError(t, a.Pause("weights"))
		looked(theirs, Paused, 1, 1)
		require.NoError(t, b.Pause("weights"))
		looked(theirs, Paused, 1, 1)
		require.NoError(t, b.Resume("weights"))
		looked(theirs, Paused, 1, 1)
		require.NoError(t, a.Resume("weights"))
		looked(theirs, Active, 0, 0)
	}
	// The owner's pause fails: nothing is missing.
	simtest.Fault(t, "cuMemUnmap", 1, cuda.ErrUnknown)
	require.Error(t, a.Pause("weights"))
	looked(theirs, Active, 0, 0)
	require.NoError(t, a.Pause("weights"))
	b.closes(t, theirs)
	looked(others, Paused, 1, 1)
	b.closes(t, others)
	require.Zero(t, looks[1].Load(), "there is nothing left to look at")
	require.NoError(t, a.Resume("weights"))
	require.Zero(t, looks[0].Load())
	a.give(t, r, own, other)
}

// refuse makes all steps of the name at sockets fail until the sockets are watched otherwise.
func refuse(t *testing.T, step string) {
	t.Helper()
	atSockets(t, func(s string, _ int) error {
		if s == step {
			return errInjected
		}
		return nil
	})
}

// b has freed what it mapped of a's memory, and a does not hear of it for a while: a's
// pauses succeed all the same, and a hears of it in the end.
func TestDropThatIsLost(t *testing.T) {
	all := start(t, 2, 2*time.Second)
	a, b := all[0], all[1]
	b.maps(t, a)
	watchSockets(t, a.node, b.node)
	refuse(t, "process 0 is asked: send drop")
	for _, x := range b.theirs {
		b.free(t, x)
	}
	b.theirs = nil
	require.Len(t, a.Stats("").Peers, 1, "or this shows nothing")
	require.NoError(t, pauseAll(a, b))
	require.NoError(t, resumeAll(a, b))
	require.NoError(t, a.Pause(""), "b does not map its memory")
	require.NoError(t, a.Resume(""))
	require.Len(t, a.Stats("").Peers, 1)
	intact(t, a, b)
	atSockets(t, nil)
	soon(t, func() bool { return len(a.Stats("").Peers) == 0 }, "a counts b")
}

// a has answered, and counted, what b asked for, and b did not get it: both pause and
// resume, and b maps it then.
func TestFetchWhoseAnswerIsLost(t *testing.T) {
	all := start(t, 2, 2*time.Second)
	a, b := all[0], all[1]
	watchSockets(t, a.node, b.node)
	refuse(t, "process 0 serves: send fetch")
	b.imports(t, a)
	require.NoError(t, b.Arrived())
	require.Equal(t, Stale, b.position())
	atSockets(t, nil)
	require.NoError(t, each(all, func(p *process) error {
		if p == b {
			time.Sleep(50 * time.Millisecond) // so that a waits for b, if it does
		}
		return p.Pause("")
	}))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	require.Len(t, a.Stats("").Peers, 1)
	var timeout *peer.TimeoutError
	require.ErrorAs(t, a.hurried(a.Pause), &timeout, "b maps its memory now")
	require.NoError(t, pauseAll(a, b))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
}
