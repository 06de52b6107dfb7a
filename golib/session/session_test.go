package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/simtest"
	"amem/golib/vmm"
)

const (
	kib = uint64(1) << 10
	mib = uint64(1) << 20
)

func TestMain(m *testing.M) { simtest.Main(m) }

// process is a Session as a process of its own would have it.
type process struct {
	*Session
	guard    *atomic.Int32
	launches *atomic.Int32
	own      []buffer // its memory
	theirs   []buffer // of peers, mapped here
}

type buffer struct {
	at     cuda.Ptr
	size   uint64
	handle cuda.Handle
	seed   uint64
}

func (b buffer) fill(seed uint64)  { simtest.Fill(b.at, seed, b.size) }
func (b buffer) intact() bool      { return simtest.Holds(b.at, b.seed, b.size) }
func (p *process) position() Guard { return Guard(p.guard.Load()) }

func (p *process) Pause(tags string) error {
	_, err := p.Session.Pause(tags)
	return err
}

func (p *process) Resume(tags string) error {
	_, err := p.Session.Resume(tags)
	return err
}

func prop() cuda.Prop {
	return cuda.Prop{Type: 1, HandleTypes: cuda.FileDescriptor, LocationType: cuda.LocationDevice}
}

func newProcess(t *testing.T, group int, timeout time.Duration) *process {
	t.Helper()
	p := &process{guard: &atomic.Int32{}, launches: &atomic.Int32{}}
	s, err := New(simtest.Driver(), Options{
		Group: group, Timeout: timeout, Space: vmm.Options{Arena: true, Timeout: timeout},
		SetGuard: func(g Guard) { p.guard.Store(int32(g)) },
		Launches: func() int { return int(p.launches.Load()) },
	})
	require.NoError(t, err)
	p.Session = s
	t.Cleanup(s.Close)
	return p
}

// bare makes processes without any memory; at the test's end the device has all
// of its memory back.
func bare(t *testing.T, count int, timeout time.Duration) []*process {
	t.Helper()
	simtest.On(t, 0)
	empty := func() bool { return simtest.Used(t, 0) == 0 }
	// What the last test's processes sent each other last may still be on its way.
	require.Eventually(t, empty, 5*time.Second, time.Millisecond, "device memory of an earlier test")
	var all []*process
	for range count {
		all = append(all, newProcess(t, 0, timeout))
	}
	t.Cleanup(func() {
		if !t.Failed() {
			require.Eventually(t, empty, 5*time.Second, time.Millisecond, "device memory not given back")
		}
	})
	return all
}

// start makes processes that NCCL allocates a small and a large buffer in; at
// the test's end they free them.
func start(t *testing.T, count int, timeout time.Duration) []*process {
	t.Helper()
	all := bare(t, count, timeout)
	for i, p := range all {
		for k, size := range []uint64{64 * kib, 2 * mib} {
			p.allocate(t, size, uint64(100*i+k+1))
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		for _, p := range all {
			for _, b := range append(p.theirs, p.own...) {
				p.free(t, b)
			}
		}
	})
	return all
}

func (p *process) finish(t *testing.T, b buffer) buffer {
	t.Helper()
	var err error
	s := p.Space()
	b.at, err = s.Reserve(b.size, 64*kib, 0, 0, b.handle)
	require.NoError(t, err)
	require.NoError(t, s.Map(b.at, b.size, 0, b.handle, 0))
	require.NoError(t, s.SetAccess(b.at, b.size, []cuda.Access{{LocationType: cuda.LocationDevice, Flags: cuda.ReadWrite}}))
	return b
}

func (p *process) allocate(t *testing.T, size, seed uint64) {
	t.Helper()
	h, err := p.Space().Create(size, prop(), 0, true)
	require.NoError(t, err)
	b := p.finish(t, buffer{size: size, handle: h, seed: seed})
	b.fill(seed)
	p.own = append(p.own, b)
}

func (p *process) free(t *testing.T, b buffer) {
	t.Helper()
	s := p.Space()
	require.NoError(t, s.Unmap(b.at, b.size))
	require.NoError(t, s.Release(b.handle))
	require.NoError(t, s.AddressFree(b.at))
}

// maps makes p map all of the owner's buffers.
func (p *process) maps(t *testing.T, owner *process) {
	t.Helper()
	p.imports(t, owner)
	require.NoError(t, p.Arrived())
}

// imports imports the owner's buffers, which may come later.
func (p *process) imports(t *testing.T, owner *process) {
	t.Helper()
	for _, b := range owner.own {
		fd := int32(-1)
		require.NoError(t, owner.Space().Export(unsafe.Pointer(&fd), b.handle, cuda.FileDescriptor, 0))
		h, err := p.Space().Import(int(fd))
		require.NoError(t, err)
		require.NoError(t, unix.Close(int(fd)))
		p.theirs = append(p.theirs, p.finish(t, buffer{size: b.size, handle: h, seed: b.seed}))
	}
}

func together(t *testing.T, a, b *process) {
	t.Helper()
	a.maps(t, b)
	b.maps(t, a)
}

// intact checks that each process sees its own and its peers' contents.
func intact(t *testing.T, all ...*process) {
	t.Helper()
	for i, p := range all {
		require.Equal(t, Active, p.State(), "process %d", i)
		require.Equal(t, Open, p.position(), "guard of process %d", i)
		for k, b := range append(p.own, p.theirs...) {
			require.True(t, b.intact(), "process %d: contents of buffer %d", i, k)
		}
	}
}

// connected checks that what one process writes the other reads, at all of their
// buffers, and leaves them as they were.
func connected(t *testing.T, a, b *process) {
	t.Helper()
	for _, pair := range [][2]*process{{a, b}, {b, a}} {
		for i, own := range pair[1].own {
			mapped := pair[0].theirs[i]
			mapped.fill(own.seed + 5000)
			require.True(t, simtest.Holds(own.at, own.seed+5000, own.size), "a peer's write is seen")
			mapped.fill(own.seed)
		}
	}
}

// each calls f for all processes at once.
func each(all []*process, f func(p *process) error) error {
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, p := range all {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = f(p)
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}

func pauseAll(all ...*process) error {
	return each(all, func(p *process) error { return p.Pause(Tag) })
}

func resumeAll(all ...*process) error {
	return each(all, func(p *process) error { return p.Resume(Tag) })
}

// hurried calls f with a deadline that is meant to pass.
func (p *process) hurried(f func(tags string) error) error {
	timeout := p.options.Timeout
	p.options.Timeout = 500 * time.Millisecond
	defer func() { p.options.Timeout = timeout }()
	return f("")
}

func TestPauseTogether(t *testing.T) {
	before := simtest.Used(t, 0)
	all := start(t, 2, 10*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	used := simtest.Used(t, 0)
	// The last write before a pause is a peer's.
	a.theirs[1].fill(777)
	a.theirs[1].seed, b.own[1].seed = 777, 777
	for range 3 {
		require.NoError(t, pauseAll(a, b))
		require.Equal(t, before, simtest.Used(t, 0), "all memory is given back")
		for _, p := range all {
			require.Equal(t, Paused, p.State())
			require.Equal(t, Closed, p.position())
			stats := p.Stats("1.0")
			require.Zero(t, stats.DeviceBytes)
			require.Equal(t, 18*mib, stats.PausedBytes)
		}
		require.NoError(t, resumeAll(a, b))
		require.Equal(t, used, simtest.Used(t, 0))
		intact(t, a, b)
		connected(t, a, b)
	}
}

// A launch waits for memory that NCCL has imported just before.
func TestLaunchesWaitForImports(t *testing.T) {
	all := start(t, 2, 10*time.Second)
	a, b := all[0], all[1]
	require.NoError(t, b.Pause(Tag)) // it serves nothing now
	a.imports(t, b)
	require.Equal(t, Arriving, a.position())
	arrived := make(chan error, 1)
	go func() { arrived <- a.Arrived() }()
	select {
	case err := <-arrived:
		require.Fail(t, "it has not come", "%v", err)
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, b.Resume(Tag))
	require.NoError(t, <-arrived)
	intact(t, a, b)
}

// So does one of a process whose turn somebody has, who is not pausing: host memory that
// takes its time is got, or given back.
func TestLaunchesWaitForImportsDuringATurn(t *testing.T) {
	all := start(t, 2, 10*time.Second)
	a, b := all[0], all[1]
	require.NoError(t, b.Pause(Tag)) // it serves nothing now
	registrations := simtest.Calls(t, "cuMemHostRegister")
	simtest.Delay(t, "cuMemHostRegister", 1, 500*time.Millisecond)
	grown := make(chan error, 1)
	go func() {
		_, err := a.growHost()
		grown <- err
	}()
	soon(t, func() bool { return simtest.Calls(t, "cuMemHostRegister") > registrations }, "the turn is held")
	a.imports(t, b)
	require.Equal(t, Arriving, a.position())
	require.Empty(t, grown, "the turn was given up too early for this test")
	require.NoError(t, <-grown)
	require.Equal(t, Arriving, a.position())

	// While the turn is held it opens, too, as soon as the memory is here.
	require.NoError(t, a.take(context.Background()))
	require.NoError(t, b.Resume(Tag))
	require.NoError(t, a.Arrived())
	require.Equal(t, Open, a.position())
	a.Session.give()
	intact(t, a, b)
}

// Memory that does not come in time leaves launches refused, until a resume has mapped it.
func TestImportsThatFail(t *testing.T) {
	all := start(t, 2, 10*time.Second)
	a, b := all[0], all[1]
	simtest.Fault(t, "cuMemImportFromShareableHandle", 1, cuda.ErrUnknown)
	a.imports(t, b)
	require.NoError(t, a.Arrived())
	require.Equal(t, Stale, a.position())
	require.NoError(t, a.Resume(Tag))
	intact(t, a, b)
	b.maps(t, a)
	connected(t, a, b)
	require.NoError(t, pauseAll(a, b))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	connected(t, a, b)
}

// Rounds follow each other at once in each process, with no barrier between.
func TestRoundsWithoutBarrier(t *testing.T) {
	all := start(t, 3, 20*time.Second)
	together(t, all[0], all[1])
	together(t, all[1], all[2])
	together(t, all[0], all[2])
	require.NoError(t, each(all, func(p *process) error {
		for round := range 10 {
			if err := p.Pause(""); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			if err := p.Resume(""); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		return nil
	}))
	intact(t, all...)
	for _, p := range all {
		require.Equal(t, 10, p.Stats("").Pauses)
		require.Equal(t, 10, p.Stats("").Resumes)
	}
}

func TestPauseAlone(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	used := simtest.Used(t, 0)
	for range 2 {
		err := a.hurried(a.Pause)
		require.ErrorContains(t, err, "pause: quiesce: waiting for pid "+fmt.Sprint(os.Getpid()))
		require.Equal(t, used, simtest.Used(t, 0), "nothing was released")
		intact(t, a, b)
		connected(t, a, b)
	}
	require.NoError(t, pauseAll(a, b))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	connected(t, a, b)
}

// b pauses relying on a's stop; a gives up, since c never stops. From then on
// a's mapping of b's memory is not fit to use, until both have resumed.
func TestFailedPauseThatAPeerReliedOn(t *testing.T) {
	all := start(t, 3, 20*time.Second)
	a, b, c := all[0], all[1], all[2]
	together(t, a, b)
	a.maps(t, c)
	failed := make(chan error, 1)
	go func() { failed <- a.hurried(a.Pause) }()
	require.NoError(t, b.Pause(""))
	require.Error(t, <-failed)
	require.Equal(t, Active, a.State())
	require.Equal(t, Stale, a.position())
	require.Equal(t, Open, c.position())

	require.Error(t, a.hurried(a.Resume), "b has not resumed yet")
	require.Equal(t, Stale, a.position())
	require.NoError(t, b.Resume(""))
	require.Equal(t, Open, b.position())
	require.Equal(t, Stale, a.position(), "b's memory is another one now")
	require.NoError(t, a.Resume(""))
	intact(t, a, b, c)
	connected(t, a, b)

	require.NoError(t, pauseAll(a, b, c))
	require.NoError(t, resumeAll(a, b, c))
	intact(t, a, b, c)
}

// An active process that only lends its memory may launch nothing either while a
// peer is paused that has relied on its failed pause: its resume waits for the peer.
func TestResumeWaitsForWhoRelied(t *testing.T) {
	all := start(t, 3, 20*time.Second)
	a, b, c := all[0], all[1], all[2]
	a.maps(t, b)
	together(t, b, c)
	failed := make(chan error, 1)
	go func() { failed <- b.hurried(b.Pause) }()
	require.NoError(t, a.Pause(""))
	require.Error(t, <-failed, "c has not stopped")
	require.Equal(t, Stale, b.position())
	require.ErrorContains(t, b.hurried(b.Resume), "waiting for pid")
	require.Equal(t, Stale, b.position())
	require.NoError(t, a.Resume(""))
	require.NoError(t, b.Resume(""))
	intact(t, a, b, c)
	require.NoError(t, pauseAll(a, b, c))
	require.NoError(t, resumeAll(a, b, c))
	intact(t, a, b, c)
	connected(t, b, c)
}

// A failure to map a peer's replaced memory leaves the guard closed to kernels.
func TestFailedRefresh(t *testing.T) {
	all := start(t, 3, 20*time.Second)
	a, b, c := all[0], all[1], all[2]
	together(t, a, b)
	a.maps(t, c)
	failed := make(chan error, 1)
	go func() { failed <- a.hurried(a.Pause) }()
	require.NoError(t, b.Pause(""))
	require.Error(t, <-failed)
	require.NoError(t, b.Resume(""))
	simtest.Fault(t, "cuMemMap", 1, cuda.ErrUnknown)
	require.ErrorIs(t, a.Resume(""), cuda.ErrUnknown)
	require.Equal(t, Stale, a.position(), "some of b's memory is not mapped")
	require.NoError(t, a.Resume(""))
	intact(t, a, b, c)
	connected(t, a, b)
}

func TestIdempotence(t *testing.T) {
	before := simtest.Used(t, 0)
	p := start(t, 1, 5*time.Second)[0]
	require.NoError(t, p.Resume(""), "an active process is resumed already")
	for range 3 {
		require.NoError(t, p.Pause("nccl"))
		require.Equal(t, Paused, p.State())
		require.Equal(t, before, simtest.Used(t, 0))
	}
	for range 3 {
		require.NoError(t, p.Resume(""))
		intact(t, p)
	}
	stats := p.Stats("1.2.3")
	require.Equal(t, 1, stats.Pauses)
	require.Equal(t, 1, stats.Resumes)
	require.Equal(t, "active", stats.State)
	require.Equal(t, "1.2.3", stats.Version)
	require.Equal(t, 18*mib, stats.LastPause.Released)
	require.Equal(t, 18*mib, stats.LastResume.Restored)
	require.Equal(t, 2*mib+64*kib, stats.LastPause.Copied)
	require.Equal(t, 18*mib, stats.DeviceBytes)
	require.Zero(t, stats.PausedBytes)
}

func TestConcurrentCallers(t *testing.T) {
	p := start(t, 1, 20*time.Second)[0]
	var wg sync.WaitGroup
	errs := make(chan error, 8*10)
	for worker := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 10 {
				if worker%2 == 0 {
					errs <- p.Pause("")
				} else {
					errs <- p.Resume("")
				}
				p.State()
				p.Stats("")
			}
		}()
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.NoError(t, p.Resume(""))
	intact(t, p)
	require.Equal(t, p.Stats("").Pauses, p.Stats("").Resumes)
}

func TestTags(t *testing.T) {
	p := start(t, 1, 5*time.Second)[0]
	for _, tags := range []string{"weights", "nccl,weights", ",", "nccl,", " nccl", "NCCL"} {
		for _, call := range []func(string) error{p.Pause, p.Resume} {
			err := call(tags)
			require.ErrorIs(t, err, ErrArgument, tags)
			require.ErrorContains(t, err, "the tags there are: nccl")
		}
		require.Equal(t, Active, p.State())
	}
	intact(t, p)
}

func TestNothingToPause(t *testing.T) {
	p := newProcess(t, 0, time.Second)
	require.NoError(t, p.Pause(""))
	require.Equal(t, Active, p.State(), "a pause that released nothing is none")
	t.Setenv("NCCL_CUMEM_ENABLE", "0")
	require.ErrorIs(t, p.Pause(""), ErrNoCuMem)
}

func TestSetGroup(t *testing.T) {
	p := newProcess(t, 100, time.Second)
	require.Equal(t, 100, p.Group())
	require.NoError(t, p.SetGroup(200))
	require.Equal(t, 200, p.Group())
	require.Equal(t, 200, p.Stats("").Group)

	late := start(t, 1, time.Second)[0]
	require.NoError(t, late.SetGroup(0), "it is that already")
	err := late.SetGroup(5)
	require.ErrorIs(t, err, ErrState)
	require.ErrorContains(t, err, "before the first communicator")
	require.Zero(t, late.Group())
}

// Processes of another group are not waited for; what is shared with them stays.
func TestGroups(t *testing.T) {
	simtest.On(t, 0)
	before := simtest.Used(t, 0)
	train, rollout := newProcess(t, 100, time.Second), newProcess(t, 200, time.Second)
	train.allocate(t, 2*mib, 1)
	train.allocate(t, 64*kib, 2)
	rollout.allocate(t, 2*mib, 3)
	fd := int32(-1)
	require.NoError(t, train.Space().Export(unsafe.Pointer(&fd), train.own[0].handle, cuda.FileDescriptor, 0))
	h, err := rollout.Space().Import(int(fd))
	require.NoError(t, err)
	require.NoError(t, unix.Close(int(fd)))
	rollout.theirs = append(rollout.theirs, rollout.finish(t, buffer{size: 2 * mib, handle: h, seed: 1}))
	require.NoError(t, rollout.Arrived())
	used := simtest.Used(t, 0)
	require.NoError(t, train.Pause(""))
	require.Equal(t, 2*mib, used-simtest.Used(t, 0), "the slab that is not shared")
	require.True(t, rollout.theirs[0].intact())
	require.Equal(t, Open, rollout.position())
	require.Equal(t, map[string]uint64{vmm.KeepGroup: 16 * mib}, train.Stats("").Resident)
	require.NoError(t, train.Resume(""))
	intact(t, train, rollout)
	rollout.free(t, rollout.theirs[0])
	rollout.free(t, rollout.own[0])
	train.free(t, train.own[0])
	train.free(t, train.own[1])
	soon(t, func() bool { return simtest.Used(t, 0) == before }, "device memory not given back") // or the next test begins with it
}

func TestOutOfMemory(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	require.NoError(t, pauseAll(a, b))
	hogSize := simtest.Memory - simtest.Used(t, 0) - 30*mib
	hog, err := simtest.Driver().Create(hogSize, prop(), 0)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() { // or all later tests fail too
			_ = simtest.Driver().Release(hog)
		}
	})
	used := simtest.Used(t, 0)
	err = each(all, func(p *process) error { return p.hurried(p.Resume) })
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.NoError(t, resumeNone(a, b))
	require.Eventually(t, func() bool { return used == simtest.Used(t, 0) }, 5*time.Second, time.Millisecond,
		"nothing is held after the failure")
	require.NoError(t, simtest.Driver().Release(hog))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	connected(t, a, b)
}

// A launch that began before the guard was closed ends before memory is given back.
func TestPauseWaitsForLaunches(t *testing.T) {
	p := start(t, 1, 5*time.Second)[0]
	used := simtest.Used(t, 0)
	p.launches.Store(1)
	paused := make(chan error, 1)
	go func() { paused <- p.Pause("") }()
	require.Eventually(t, func() bool { return p.position() == Closed }, 5*time.Second, time.Millisecond)
	time.Sleep(20 * time.Millisecond) // time for a pause that does not wait
	require.Equal(t, used, simtest.Used(t, 0))
	p.launches.Store(0)
	require.NoError(t, <-paused)
	require.Less(t, simtest.Used(t, 0), used)
	require.NoError(t, p.Resume(""))
	intact(t, p)
}

// resumeNone says whether all processes are paused, with the guard closed.
func resumeNone(all ...*process) error {
	return each(all, func(p *process) error {
		if p.State() != Paused || p.position() != Closed {
			return fmt.Errorf("state %v, guard %v", p.State(), p.position())
		}
		return nil
	})
}

func TestResumeAlone(t *testing.T) {
	before := simtest.Used(t, 0)
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	require.NoError(t, pauseAll(a, b))
	err := a.hurried(a.Resume)
	require.ErrorContains(t, err, "pid "+fmt.Sprint(os.Getpid()))
	require.NoError(t, resumeNone(a, b))
	require.Equal(t, before, simtest.Used(t, 0), "what it had restored is released again")
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	connected(t, a, b)
}

// b's memory can be mapped, but its contents are not in yet: a's memory stays,
// its guard stays closed, and the next resume goes on from there.
func TestUnfinishedResume(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	require.NoError(t, pauseAll(a, b))
	_, err := b.space.Restore()
	require.NoError(t, err)
	err = a.hurried(a.Resume)
	require.ErrorContains(t, err, "this process's memory is back, a peer's is not")
	require.NoError(t, resumeNone(a))
	require.NoError(t, b.space.Fill())
	require.NoError(t, b.space.Attach(context.Background(), b.node.Generation))
	b.space.Resumed(false)
	b.node.Ready(context.Background(), b.space.Generation())
	require.NoError(t, a.Resume(""))
	require.NoError(t, b.Resume(""))
	intact(t, a, b)
	connected(t, a, b)
}

// From an unfinished resume, a pause goes back.
func TestPauseAfterUnfinishedResume(t *testing.T) {
	before := simtest.Used(t, 0)
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	require.NoError(t, pauseAll(a, b))
	_, err := b.space.Restore()
	require.NoError(t, err)
	require.ErrorContains(t, a.hurried(a.Resume), "a peer's is not")
	require.NoError(t, errors.Join(b.space.Fill(), b.space.Abandon()))
	require.NoError(t, a.Pause(""), "b has stopped and stays so")
	require.Equal(t, before, simtest.Used(t, 0))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	connected(t, a, b)
}

func TestPeerEndsWhilePaused(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	require.NoError(t, pauseAll(a, b))
	b.Close()
	require.NoError(t, a.Resume(""))
	require.Equal(t, Active, a.State())
	require.Equal(t, Open, a.position())
	for _, own := range a.own {
		require.True(t, own.intact())
	}
	require.NoError(t, a.Pause(""), "who has ended is not waited for")
	require.NoError(t, a.Resume(""))
}

func TestPeerEndsWhileActive(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	b.Close()
	require.Eventually(t, func() bool { return len(a.Stats("").Peers) == 0 }, 5*time.Second, time.Millisecond)
	require.NoError(t, a.Pause(""))
	require.NoError(t, a.Resume(""))
	require.Equal(t, Open, a.position())
	for _, own := range append(a.own, a.theirs...) {
		require.True(t, own.intact(), "an ended peer's memory too")
	}
}

// unevenly makes b's pause take longer than a's by the time that the first piece of host
// memory takes, before b lets go of a's memory.
func unevenly(t *testing.T, a *process, longer time.Duration) {
	t.Helper()
	_, err := a.growHost()
	require.NoError(t, err)
	simtest.Delay(t, "cuMemHostRegister", 1, longer)
}

// When a pause returns, the memory is free on the device, though a peer is slower.
func TestPausedMemoryIsFree(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	unevenly(t, a, 700*time.Millisecond)
	paused := make(chan error, 1)
	go func() { paused <- b.Pause(Tag) }()
	done, err := a.Session.Pause(Tag)
	require.NoError(t, err)
	require.LessOrEqual(t, simtest.Used(t, 0), 18*mib, "none but b's own memory is in use")
	require.Zero(t, done.Held)
	require.Equal(t, []string{Tag}, done.Tags)
	require.NoError(t, <-paused)
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	connected(t, a, b)
}

// Past its deadline a pause stands, and says how much is not free, and because of whom.
func TestHeldPastTheDeadline(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	unevenly(t, a, 1500*time.Millisecond)
	paused := make(chan error, 1)
	go func() { paused <- b.Pause(Tag) }()
	soon(t, func() bool { return a.Stats("").Peers[0].Stopped }) // a would wait no longer for that
	a.options.Timeout = 300 * time.Millisecond
	done, err := a.Session.Pause(Tag)
	a.options.Timeout = 20 * time.Second
	require.NoError(t, err)
	require.Empty(t, paused, "b was too fast for this test")
	want := []Holder{{PID: os.Getpid(), Group: 0, Bytes: 18 * mib}}
	require.Equal(t, 18*mib, done.Held)
	require.Equal(t, want, done.HeldBy)
	require.Equal(t, Paused, a.State())
	require.Equal(t, want, a.Stats("").LastPause.HeldBy)
	require.Equal(t, 36*mib, simtest.Used(t, 0))
	require.NoError(t, <-paused)
	require.Zero(t, simtest.Used(t, 0))
	for range 2 {
		require.NoError(t, resumeAll(a, b))
		intact(t, a, b)
		connected(t, a, b)
		require.NoError(t, pauseAll(a, b))
		require.Zero(t, a.Stats("").LastPause.Held+b.Stats("").LastPause.Held)
	}
	require.NoError(t, resumeAll(a, b))
}

// What a peer can't unmap is held, and its owner does not wait for it.
func TestHeldByWhoCannotUnmap(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	b, a := all[0], all[1] // a's unmapping comes second
	b.maps(t, a)
	_, err := b.growHost()
	require.NoError(t, err)
	simtest.Delay(t, "cuMemHostRegister", 1, 500*time.Millisecond)
	simtest.Fault(t, "cuMemUnmap", 1, cuda.ErrUnknown)
	begun := time.Now()
	require.NoError(t, pauseAll(a, b))
	require.Less(t, time.Since(begun), 10*time.Second)
	held := a.Stats("").LastPause.Held
	require.Contains(t, []uint64{2 * mib, 16 * mib}, held)
	require.Equal(t, held, simtest.Used(t, 0))
	require.Zero(t, b.Stats("").LastPause.Held)
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	require.NoError(t, pauseAll(a, b))
	require.Zero(t, a.Stats("").LastPause.Held)
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
}

// What NCCL has allocated, and peers have mapped, since a pause is given back by the next,
// and comes back with all else.
func TestPauseOfWhatIsNewSince(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	together(t, a, b)
	require.NoError(t, pauseAll(a, b))
	for range 3 {
		for i, p := range all {
			p.allocate(t, 3*mib, uint64(1000*len(p.own)+i))
		}
		require.NotZero(t, simtest.Used(t, 0))
		done, err := a.Session.Pause(Tag)
		require.NoError(t, err)
		require.True(t, done.Changed)
		require.Empty(t, done.Tags, "it was paused before")
		require.NotZero(t, done.Bytes)
		require.NoError(t, b.Pause(""))
		require.Zero(t, simtest.Used(t, 0))
		done, err = a.Session.Pause(Tag)
		require.NoError(t, err)
		require.False(t, done.Changed)
	}
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
	require.NoError(t, pauseAll(a, b))
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
}

// A pause of what is new fails where a peer that maps it is active, and what was paused
// stays so, with its contents.
func TestPauseOfWhatIsNewSinceFails(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	require.NoError(t, a.Pause(Tag))
	old := a.own
	a.own = nil
	a.allocate(t, 3*mib, 77)
	b.maps(t, a)
	a.own = append(old, a.own...)
	used := simtest.Used(t, 0)
	err := a.hurried(a.Pause)
	require.ErrorContains(t, err, "waiting for pid")
	require.ErrorContains(t, err, "what it has allocated since")
	require.Equal(t, Paused, a.State())
	require.Equal(t, used, simtest.Used(t, 0))
	simtest.Fault(t, "cuMemcpyDtoHAsync", 1, cuda.ErrUnknown)
	require.ErrorIs(t, pauseAll(a, b), cuda.ErrUnknown)
	require.NoError(t, pauseAll(a, b))
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, resumeAll(a, b))
	intact(t, a, b)
}
