package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
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

// short is how long a launch may be held up: far less than the kernels of these tests run.
const short = 200 * time.Millisecond

// While a kernel runs, the driver's cuMemHostUnregister waits for it and lets nobody
// launch another. So host memory waits for the kernel, and others do not.
func TestFreeHostHoldsUpNoLaunches(t *testing.T) {
	p := start(t, 1, 20*time.Second)[0]
	r := p.region(t, "weights", BackupCPU)
	b := p.torch(t, r, 4*mib, 1)
	require.NoError(t, p.Pause(""))
	require.NoError(t, p.Resume(""))
	end := simtest.Busy(t)
	longest := simtest.Launches(t)
	done := make(chan error, 1)
	go func() { done <- p.FreeHost("") }()
	time.Sleep(2 * short)
	require.Empty(t, done, "it waits")
	require.NotZero(t, p.Stats("").Host.Arena+p.Stats("").Regions[0].Host)
	end()
	require.NoError(t, <-done)
	require.Less(t, longest(), short)
	require.Zero(t, p.Stats("").Host.Arena)
	require.Zero(t, p.Stats("").Regions[0].Host)
	p.give(t, r, b)
}

// Meanwhile another thread may pause and resume.
func TestFreeHostHasADeadline(t *testing.T) {
	p := start(t, 1, 2*short)[0]
	require.NoError(t, p.Pause(""))
	require.NoError(t, p.Resume(""))
	end := simtest.Busy(t)
	longest := simtest.Launches(t)
	time.AfterFunc(20*short, end)
	err := p.FreeHost("")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "work on GPU [0] has not ended")
	require.Less(t, longest(), short)
	require.Equal(t, 4*mib, p.Stats("").Host.Arena)
	turn, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	waiting := make(chan error, 1)
	go func() { waiting <- p.FreeHost("") }()
	time.Sleep(brief + brief/2)
	require.NoError(t, p.take(turn), "it waits without the turn")
	p.Session.give()
	end()
	require.NoError(t, <-waiting)
	require.Zero(t, p.Stats("").Host.Arena)
}

// A region may end while another thread's kernel runs: its host memory goes with the next
// pause, or on request.
func TestTheEndOfARegionHoldsUpNoLaunches(t *testing.T) {
	for name, later := range map[string]func(p *process) error{
		"pause":   func(p *process) error { return p.Pause("nccl") },
		"request": func(p *process) error { return p.FreeHost("") },
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, 1, 20*time.Second)[0]
			number := p.region(t, "weights", BackupCPU)
			r := p.allRegions()[number]
			b := p.torch(t, number, 4*mib, 1)
			require.NoError(t, p.Pause("weights"))
			require.NoError(t, p.Resume("weights"))
			// The kernel begins after Free has waited for the device, and before the turn ends.
			require.NoError(t, r.take(context.Background()))
			p.give(t, number, b)
			end := simtest.Busy(t)
			longest := simtest.Launches(t)
			time.AfterFunc(20*short, end)
			r.give()
			require.Less(t, longest(), short)
			require.Equal(t, 4*mib, p.Stats("").Regions[0].Host)
			end()
			require.NoError(t, later(p))
			require.Zero(t, p.Stats("").Regions[0].Host)
			require.NoError(t, p.Resume(""))
		})
	}
}

// Host memory that is got ahead is pinned in parts, between which the program launches.
func TestPreallocationHoldsUpLaunchesLittle(t *testing.T) {
	p := bare(t, 1, 20*time.Second)[0]
	number := p.region(t, "weights", BackupCPU)
	b := p.torch(t, number, 384*mib, 1)
	simtest.Pinning(t, time.Millisecond) // for a MB
	end := simtest.Busy(t)
	longest := simtest.Launches(t)
	grown, err := p.allRegions()[number].growHost()
	require.NoError(t, err)
	require.True(t, grown)
	require.Less(t, longest(), short, "not for 384 ms")
	require.Equal(t, 384*mib, p.Stats("").Regions[0].Host)
	end()
	p.give(t, number, b)
}

// What was got ahead for memory that is freed meanwhile goes back.
func TestPreallocationOfWhatIsFreedMeanwhile(t *testing.T) {
	anonymous := func() uint64 {
		status, err := os.ReadFile("/proc/self/status")
		require.NoError(t, err)
		_, rest, _ := strings.Cut(string(status), "RssAnon:")
		var n uint64
		_, err = fmt.Sscan(rest, &n)
		require.NoError(t, err)
		return n << 10
	}
	p := alone(t)
	number := p.region(t, "weights", BackupCPU)
	r := p.allRegions()[number]
	var list []cuda.Ptr
	for _, size := range []uint64{512 * mib, 128 * mib} {
		at, err := p.Allocate(number, size, 0)
		require.NoError(t, err)
		list = append(list, at)
	}
	before := anonymous()
	grown, err := r.growHost()
	require.NoError(t, err)
	require.True(t, grown)
	require.Eventually(t, func() bool { return anonymous() > before+600*mib }, 10*time.Second, time.Millisecond, "more is on its way")
	require.NoError(t, p.Free(number, list[1]))
	grown, err = r.growHost()
	require.NoError(t, err)
	require.False(t, grown)
	require.Less(t, anonymous(), before+600*mib)
	require.Equal(t, 512*mib, p.Stats("").Regions[0].Host)
	require.NoError(t, p.Free(number, list[0]))
	require.Zero(t, p.Stats("").Regions[0].Host)
}

// Host memory is got and given back at any time while the program, and its peer, pause
// and resume.
func TestHostMemoryAtRandom(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	stop, ended := make(chan struct{}), make(chan error, 4)
	cycles := func(f func() error) {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			case <-time.After(5 * time.Millisecond):
			}
			if err := f(); err != nil && !errors.Is(err, ErrState) {
				ended <- err
				return
			}
		}
	}
	var regions []int
	var buffers []buffer
	for i, p := range all {
		number := p.region(t, "weights", BackupCPU)
		regions, buffers = append(regions, number), append(buffers, p.torch(t, number, 40*mib, uint64(i+50)))
		go cycles(func() error { return p.FreeHost("") })
		go cycles(func() error {
			_, err := p.growHost()
			_, more := p.allRegions()[number].growHost()
			return errors.Join(err, more)
		})
	}
	for range 6 {
		for _, f := range []func(p *process) error{
			func(p *process) error { return p.Pause("") }, func(p *process) error { return p.Resume("") },
		} {
			done := make(chan error, len(all))
			for _, p := range all {
				go func() { done <- f(p) }()
			}
			for range all {
				require.NoError(t, <-done)
			}
		}
		for i, p := range all {
			require.True(t, buffers[i].intact())
			for _, b := range p.own {
				require.True(t, b.intact())
			}
		}
	}
	close(stop)
	for range 4 {
		require.NoError(t, <-ended)
	}
	for i, p := range all {
		p.give(t, regions[i], buffers[i])
		require.Zero(t, p.Stats("").Regions[0].Host)
	}
}
