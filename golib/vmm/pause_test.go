package vmm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/simtest"
)

func TestPauseKeepsContents(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	var buffers, freed []buffer
	for i := range 30 {
		b := n.mustAllocate(t, []uint64{4 * kib, 64 * kib, 192 * kib, 2 * mib, 4 * mib}[i%5])
		if i%6 == 5 {
			freed = append(freed, b)
		} else {
			buffers = append(buffers, b)
		}
	}
	n.mustFree(t, freed...)
	fill(buffers)
	var want uint64
	for _, b := range buffers {
		unit := smallUnit
		if b.size >= largeUnit {
			unit = largeUnit
		}
		want += roundUp(b.size, uint64(unit))
	}
	arena := offload.NewArena(driver)
	for cycle := range 3 {
		used := simtest.Used(t, 0)
		p, err := pause(s, arena)
		require.NoError(t, err)
		require.Equal(t, before, simtest.Used(t, 0), "all of it is given back")
		require.Equal(t, used-before, p.Released)
		require.Equal(t, want, p.Copied, "unused parts are not copied")
		require.Less(t, arena.Bytes(), want+2*mib, "the arena is kept, and no larger than needed")
		r, err := resume(s)
		require.NoError(t, err)
		require.Equal(t, Restored{p.Released, p.Copied}, r)
		require.Equal(t, used, simtest.Used(t, 0))
		require.Equal(t, uint64(cycle+1), s.Generation())
		filled(t, buffers)
		for _, b := range buffers {
			require.True(t, simtest.Writable(t, 0, b.at))
		}
	}
	n.mustFree(t, buffers...)
	empty(t, s)
}

func TestPauseTwoDevices(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	before := [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)}
	var buffers []buffer
	for device := range 2 {
		end := simtest.Use(t, device)
		n := nccl{Space: s, device: device}
		for range 4 {
			buffers = append(buffers, n.mustAllocate(t, 64*kib), n.mustAllocate(t, 4*mib))
		}
		end()
	}
	simtest.On(t, 0)
	require.Equal(t, 18*mib, simtest.Used(t, 0)-before[0])
	require.Equal(t, 18*mib, simtest.Used(t, 1)-before[1])
	fill(buffers)
	arena := offload.NewArena(simtest.Driver())
	for range 2 {
		p, err := pause(s, arena)
		require.NoError(t, err)
		require.Equal(t, 36*mib, p.Released)
		require.Equal(t, before, [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)})
		_, err = resume(s)
		require.NoError(t, err)
		filled(t, buffers)
	}
	usage, _ := s.Usage()
	require.Len(t, usage, 2)
	for i, u := range usage {
		require.Equal(t, int32(i), u.Ordinal)
		require.Equal(t, 18*mib, u.Device)
		require.Zero(t, u.Paused)
		require.EqualValues(t, simtest.Memory, u.Total)
		require.Equal(t, simtest.Memory-simtest.Used(t, i), u.Free)
	}
	nccl{Space: s}.mustFree(t, buffers...)
	empty(t, s)
}

// Only exported buffers lose what stands behind their control region.
func TestControlOnly(t *testing.T) {
	s := newSpace(t, Options{Arena: true, ControlOnly: true})
	n := nccl{Space: s}
	files := openFiles(t)
	buffers := []buffer{n.mustAllocate(t, 4*mib), n.mustAllocate(t, 4*mib), n.mustAllocate(t, 64*kib), n.mustAllocate(t, 128*kib)}
	exported := []bool{true, false, true, false}
	fill(buffers)
	for i, b := range buffers {
		if exported[i] {
			closeFD(t, exportFD(t, s, b.handle))
		}
	}
	p, err := pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.Equal(t, 64*kib+4*mib+64*kib+128*kib, p.Copied)
	_, err = resume(s)
	require.NoError(t, err)
	for i, b := range buffers {
		want := simtest.Random(uint64(i+1), b.size)
		if exported[i] {
			clear(want[64*kib:])
		}
		require.Equal(t, want, simtest.Bytes(b.at, b.size), "buffer %d", i)
	}
	n.mustFree(t, buffers...)
	empty(t, s)
	require.Equal(t, files, openFiles(t), "descriptors of slabs are closed")
}

func exportFD(t *testing.T, s *Space, h cuda.Handle) int {
	t.Helper()
	fd := int32(-1)
	require.NoError(t, s.Export(unsafe.Pointer(&fd), h, cuda.FileDescriptor, 0))
	return int(fd)
}

func TestAllocateAndFreeWhilePaused(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	before := simtest.Used(t, 0)
	kept, freed := n.mustAllocate(t, 64*kib), n.mustAllocate(t, 64*kib)
	whole := n.mustAllocate(t, 4*mib) // the only chunk of its slab
	buffers := []buffer{kept, freed, whole}
	fill(buffers)
	arena := offload.NewArena(simtest.Driver())
	_, err := pause(s, arena)
	require.NoError(t, err)

	made := n.mustAllocate(t, 64*kib)
	require.Equal(t, 2*mib, simtest.Used(t, 0)-before, "new memory is live, in a slab of its own")
	simtest.Fill(made.at, 77, made.size)
	n.mustFree(t, freed, whole)
	require.Equal(t, 2*mib, simtest.Used(t, 0)-before)
	usage, _ := s.Usage()
	require.Equal(t, 2*mib, usage[0].Paused, "what was freed needs no memory at resume")

	_, err = resume(s)
	require.NoError(t, err)
	require.True(t, simtest.Holds(kept.at, 1, kept.size))
	require.True(t, simtest.Holds(made.at, 77, made.size))
	require.Equal(t, 4*mib, simtest.Used(t, 0)-before)

	_, err = pause(s, arena)
	require.NoError(t, err)
	require.Equal(t, before, simtest.Used(t, 0), "a later pause releases the new memory too")
	n.mustFree(t, kept, made)
	empty(t, s)
	r, err := resume(s)
	require.NoError(t, err)
	require.Equal(t, Restored{}, r)
	require.Equal(t, before, simtest.Used(t, 0))
}

// NCCL runs while contents are still being copied in: what it frees then must
// not go back to the device, or to another buffer, under the copy.
func TestFreeWhileFilling(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	before := simtest.Used(t, 0)
	kept, freed := n.mustAllocate(t, 64*kib), n.mustAllocate(t, 64*kib)
	whole := n.mustAllocate(t, 16*mib)
	fill([]buffer{kept, freed, whole})
	_, err := pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	_, err = s.Restore()
	require.NoError(t, err)
	n.mustFree(t, freed, whole)
	require.Len(t, s.ended, 1)
	require.Equal(t, 18*mib, simtest.Used(t, 0)-before, "still there until the copy has ended")
	made := n.mustAllocate(t, 64*kib)
	require.NotEqual(t, freed.at, made.at, "no chunk of a slab that is being filled")
	simtest.Fill(made.at, 9, made.size)
	require.NoError(t, s.Fill())
	s.Resumed(false)
	require.Equal(t, 4*mib, simtest.Used(t, 0)-before)
	require.True(t, simtest.Holds(kept.at, 1, kept.size))
	require.True(t, simtest.Holds(made.at, 9, made.size))
	var again []buffer
	for range 30 + 31 + 1 { // the rest of both slabs, and then what was freed
		again = append(again, n.mustAllocate(t, 64*kib))
	}
	require.Equal(t, freed.at, again[61].at, "used again once it is filled")
	n.mustFree(t, kept, made)
	n.mustFree(t, again...)
	empty(t, s)
}

func TestOutOfMemoryAtResume(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	buffers := make([]buffer, 4)
	for i := range buffers {
		buffers[i] = n.mustAllocate(t, 8*mib)
	}
	fill(buffers)
	p, err := pause(s, offload.NewArena(driver))
	require.NoError(t, err)
	hogSize := simtest.Memory - before - 20*mib
	hog, err := driver.Create(hogSize, prop(0), 0)
	require.NoError(t, err)
	for range 2 {
		_, err = resume(s)
		var oom *OutOfMemoryError
		require.ErrorAs(t, err, &oom)
		require.Equal(t, OutOfMemoryError{Device: 0, Needed: p.Released, Free: 20 * mib}, *oom)
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
		require.Equal(t, before+hogSize, simtest.Used(t, 0), "nothing is held after the failure")
	}
	require.NoError(t, driver.Release(hog))
	_, err = resume(s)
	require.NoError(t, err)
	filled(t, buffers)
	n.mustFree(t, buffers...)
	empty(t, s)
}

func TestHostMemoryFails(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 4*mib)
	fill([]buffer{b})
	arena := offload.NewArena(simtest.Driver())
	simtest.Fault(t, "cuMemHostRegister", 1, cuda.ErrOutOfMemory)
	_, err := pause(s, arena)
	var host *offload.HostMemoryError
	require.ErrorAs(t, err, &host)
	require.Equal(t, 4*mib, host.Bytes)
	require.Zero(t, arena.Bytes())
	filled(t, []buffer{b})
	_, err = pause(s, arena)
	require.NoError(t, err)
	_, err = resume(s)
	require.NoError(t, err)
	filled(t, []buffer{b})
	n.mustFree(t, b)
	empty(t, s)
}

// A pause that fails once copies are under way waits for them: NCCL may free what they read.
func TestFailedPauseWaitsForItsCopies(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 4*mib)
	fill([]buffer{b})
	waits := simtest.Calls(t, "cuStreamSynchronize")
	simtest.Fault(t, "cuCtxPushCurrent", 2, cuda.ErrUnknown) // the first is for the copies
	_, err := pause(s, offload.NewArena(simtest.Driver()))
	require.ErrorIs(t, err, cuda.ErrUnknown)
	require.Equal(t, waits+1, simtest.Calls(t, "cuStreamSynchronize"))
	filled(t, []buffer{b})
	n.mustFree(t, b)
	empty(t, s)
}

func TestSynchronizeNamesTheDevice(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 2*mib)
	require.NoError(t, s.Synchronize(context.Background()))
	end := simtest.Busy(t)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := s.Synchronize(ctx)
	end()
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "GPU [0]")
	require.NoError(t, s.Synchronize(context.Background()))
	n.mustFree(t, b)
}

// world is a process with memory of all kinds: slabs on two devices, memory of
// single handles that is mapped twice, shared memory, and memory of a peer.
type world struct {
	net      *network
	own      *Space
	peer     *Space
	arena    *offload.Arena
	buffers  []buffer // of own, and mapped by it
	imported []buffer
	used     [2]uint64
	twice    []cuda.Ptr
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{net: newNetwork(), arena: offload.NewArena(simtest.Driver())}
	options := Options{Arena: true, ControlOnly: true, Timeout: 5 * time.Second}
	w.peer, w.own = w.net.space(0, options), w.net.space(0, options)
	for device := range 2 {
		end := simtest.Use(t, device)
		n := nccl{Space: w.own, device: device}
		for _, size := range []uint64{64 * kib, 192 * kib, 2 * mib, 4 * mib} {
			w.buffers = append(w.buffers, n.mustAllocate(t, size))
		}
		end()
	}
	simtest.On(t, 0)
	h, err := w.own.Create(2*mib, prop(0), 0, true)
	require.NoError(t, err)
	for range 2 {
		p, err := simtest.Driver().Reserve(2*mib, 0, 0, 0)
		require.NoError(t, err)
		require.NoError(t, nccl{Space: w.own}.finish(buffer{p, 2 * mib, h}))
		w.twice = append(w.twice, p)
	}
	w.buffers = append(w.buffers, buffer{w.twice[0], 2 * mib, h})
	closeFD(t, exportFD(t, w.own, w.buffers[0].handle))
	closeFD(t, exportFD(t, w.own, h))

	for _, size := range []uint64{64 * kib, 2 * mib} {
		theirs := nccl{Space: w.peer}.mustAllocate(t, size)
		fd := exportFD(t, w.peer, theirs.handle)
		w.imported = append(w.imported, importFD(t, w.own, fd, theirs.size))
		closeFD(t, fd)
		simtest.Fill(theirs.at, 1000+theirs.size, theirs.size)
	}
	fill(w.buffers)
	w.check(t)
	w.used = [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)}
	return w
}

// check says whether all of the process's memory is as an active process has it.
func (w *world) check(t *testing.T) {
	t.Helper()
	for i, b := range w.buffers {
		want := simtest.Random(uint64(i+1), b.size)
		if w.own.handles[b.handle].exported && w.own.Generation() > 0 {
			clear(want[64*kib:])
		}
		got := simtest.Bytes(b.at, b.size)
		if !bytes.Equal(want[:64*kib], got[:64*kib]) || !bytes.Equal(want, got) && !simtest.Holds(b.at, uint64(i+1), b.size) {
			t.Fatalf("contents of buffer %d", i)
		}
	}
	require.True(t, bytes.Equal(simtest.Bytes(w.twice[0], 2*mib), simtest.Bytes(w.twice[1], 2*mib)))
	for _, b := range w.imported {
		require.True(t, simtest.Holds(b.at, 1000+b.size, b.size), "peer's memory")
	}
}

func (w *world) resume() error {
	if _, err := w.own.Restore(); err != nil {
		return errors.Join(err, w.own.Fill())
	}
	err := w.own.Attach(context.Background(), w.net.generation)
	if err = errors.Join(err, w.own.Fill()); err != nil {
		return errors.Join(err, w.own.Abandon())
	}
	w.own.Resumed(false)
	return nil
}

func (w *world) end(t *testing.T) {
	t.Helper()
	n := nccl{Space: w.own}
	for _, p := range w.twice {
		require.NoError(t, w.own.Unmap(p, 2*mib))
		require.NoError(t, simtest.Driver().AddressFree(p, 2*mib))
	}
	last := len(w.buffers) - 1
	require.NoError(t, w.own.Release(w.buffers[last].handle))
	n.mustFree(t, w.buffers[:last]...)
	for _, b := range w.imported {
		n.mustFree(t, b)
	}
	empty(t, w.own)
	w.peer.mu.Lock()
	var theirs []cuda.Ptr
	for _, h := range w.peer.handles {
		theirs = append(theirs, h.block.home+cuda.Ptr(h.off))
	}
	w.peer.mu.Unlock()
	for _, p := range theirs {
		require.NoError(t, nccl{Space: w.peer}.free(p))
	}
	empty(t, w.peer)
}

// faults calls try with each driver call that a first, faultless run of it has
// made failing in turn.
func faults(t *testing.T, run func() error, undo func(), try func(t *testing.T), except ...string) {
	t.Helper()
	before := simtest.Driver().Calls()
	require.NoError(t, run())
	after := simtest.Driver().Calls()
	undo()
	for _, call := range slices.Sorted(maps.Keys(after)) {
		if slices.Contains(except, call) {
			continue
		}
		for n := 1; n <= int(after[call]-before[call]); n++ {
			ok := t.Run(fmt.Sprintf("%s %d", call, n), func(t *testing.T) {
				simtest.Fault(t, call, n, cuda.ErrUnknown)
				try(t)
			})
			require.True(t, ok)
		}
	}
}

// Whichever driver call of a pause fails: the process is as it was, or paused.
func TestFaultsInPause(t *testing.T) {
	givesBack(t)
	files := openFiles(t)
	w := newWorld(t)
	cycle := func() error {
		_, err := pause(w.own, w.arena)
		return err
	}
	undo := func() { require.NoError(t, w.resume()) }
	require.NoError(t, cycle())
	undo()
	failures := 0
	faults(t, cycle, undo, func(t *testing.T) {
		simtest.On(t, 0)
		if err := cycle(); err != nil {
			failures++
			require.NoError(t, w.own.Attach(context.Background(), w.net.generation), "peers' memory was let go of first")
			w.check(t)
			require.Equal(t, w.used, [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)})
			require.NoError(t, cycle(), "the second attempt")
		}
		undo()
		w.check(t)
		require.Equal(t, w.used, [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)})
	})
	require.Greater(t, failures, 20)
	w.end(t)
	require.Equal(t, files, openFiles(t))
}

// Whichever driver call of a resume fails: the process is paused as before,
// with its contents, or has resumed.
func TestFaultsInResume(t *testing.T) {
	givesBack(t)
	files := openFiles(t)
	w := newWorld(t)
	undo := func() {
		_, err := pause(w.own, w.arena)
		require.NoError(t, err)
	}
	undo()
	paused := [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)}
	pausedFiles := openFiles(t)
	failures := 0
	faults(t, w.resume, undo, func(t *testing.T) {
		simtest.On(t, 0)
		if err := w.resume(); err != nil {
			failures++
			require.Equal(t, paused, [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)})
			require.Equal(t, pausedFiles, openFiles(t))
			require.NoError(t, w.resume(), "the second attempt")
		}
		w.check(t)
		require.Equal(t, w.used, [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)})
		undo()
	})
	require.Greater(t, failures, 20)
	require.NoError(t, w.resume())
	w.end(t)
	require.Equal(t, files, openFiles(t))
}

// When the driver also refuses to take memory back, the next resume must not
// take half-filled memory for the contents.
func TestFaultInRollback(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	buffers := []buffer{n.mustAllocate(t, 64*kib), n.mustAllocate(t, 2*mib)}
	fill(buffers)
	_, err := pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	simtest.Fault(t, "cuMemMap", 2, cuda.ErrUnknown)
	simtest.Fault(t, "cuMemUnmap", 1, cuda.ErrUnknown)
	_, err = resume(s)
	require.ErrorIs(t, err, cuda.ErrUnknown)
	_, err = resume(s)
	require.NoError(t, err)
	filled(t, buffers)
	n.mustFree(t, buffers...)
	empty(t, s)
}

// What the driver refuses to give back when it is freed goes back with the next pause.
func TestFreeThatFails(t *testing.T) {
	for _, call := range []string{"cuMemUnmap", "cuMemRelease"} {
		t.Run(call, func(t *testing.T) {
			s := newSpace(t, Options{Arena: true})
			n := nccl{Space: s}
			before := simtest.Used(t, 0)
			kept, freed := n.mustAllocate(t, 64*kib), n.mustAllocate(t, 16*mib)
			simtest.Fill(kept.at, 1, kept.size)
			simtest.Fault(t, call, 1, cuda.ErrUnknown)
			require.ErrorIs(t, n.free(freed.at), cuda.ErrUnknown)
			require.Equal(t, before+18*mib, simtest.Used(t, 0))
			_, err := pause(s, offload.NewArena(simtest.Driver()))
			require.NoError(t, err)
			require.Equal(t, before, simtest.Used(t, 0))
			_, err = resume(s)
			require.NoError(t, err)
			require.Equal(t, before+2*mib, simtest.Used(t, 0))
			require.True(t, simtest.Holds(kept.at, 1, kept.size))
			n.mustFree(t, kept)
			empty(t, s)
		})
	}
}
