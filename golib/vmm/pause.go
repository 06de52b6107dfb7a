package vmm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
)

// controlRegion is what is kept of a shared buffer when only control regions
// are: NCCL's heads, tails and step counters stand in its first pages, and
// what its FIFOs hold is of no use once all ranks are idle.
const controlRegion = 64 << 10

// OutOfMemoryError says that the device lacks memory to resume.
type OutOfMemoryError struct {
	Device int32
	Needed uint64 // bytes, on this device
	Free   uint64 // bytes, on this device
}

func (e *OutOfMemoryError) Error() string {
	return fmt.Sprintf("GPU %d has %d bytes free, %d are needed: free some and resume again; the contents are kept",
		e.Device, e.Free, e.Needed)
}

func (e *OutOfMemoryError) Unwrap() error { return cuda.ErrOutOfMemory }

// onDevice runs f with the device's context current.
func (s *Space) onDevice(ordinal int32, f func(d *Device) error) error {
	s.mu.Lock()
	d := s.devices[ordinal]
	s.mu.Unlock()
	return s.driver.With(d.Context, func() error { return f(d) })
}

// Synchronize waits until no work is left on any device that NCCL has used.
// It fails when ctx ends before, naming the devices.
func (s *Space) Synchronize(ctx context.Context) error {
	devices := s.Devices()
	done := make(chan int32, len(devices))
	failed := make(chan error, len(devices))
	busy := map[int32]bool{}
	for _, d := range devices {
		busy[d.Ordinal] = true
		// The driver's wait has no deadline, so it has a goroutine that may outlive ours.
		go func() {
			if err := s.driver.With(d.Context, s.driver.Synchronize); err != nil {
				failed <- fmt.Errorf("GPU %d: %w", d.Ordinal, err)
				return
			}
			done <- d.Ordinal
		}()
	}
	for len(busy) > 0 {
		select {
		case ordinal := <-done:
			delete(busy, ordinal)
		case err := <-failed:
			return err
		case <-ctx.Done():
			return fmt.Errorf("work on GPU %v has not ended: %w", slices.Sorted(maps.Keys(busy)), ctx.Err())
		}
	}
	return nil
}

// pausable lists the own live blocks that a pause releases, by device and
// then by number. mu is held.
func (s *Space) pausable() []*block {
	var list []*block
	for _, b := range s.blocks {
		if b.live && b.keep == "" {
			list = append(list, b)
		}
	}
	sortBlocks(list)
	return list
}

// plan answers what is to be kept of a block and what is to be cleared. mu is
// held.
func (s *Space) plan(b *block) *offload.Contents {
	c := &offload.Contents{}
	add := func(list *[]offload.Range, off, size uint64) {
		at := b.home + cuda.Ptr(off)
		if k := len(*list); k > 0 && (*list)[k-1].At+cuda.Ptr((*list)[k-1].Size) == at {
			(*list)[k-1].Size += size
			return
		}
		*list = append(*list, offload.Range{At: at, Size: size})
	}
	for _, h := range b.handles {
		size := min(roundUp(h.size, b.class.unit()), b.size-h.off)
		kept := size
		if s.options.ControlOnly && h.exported {
			kept = min(size, controlRegion)
		}
		add(&c.Kept, h.off, kept)
		if kept < size {
			add(&c.Zeroed, h.off+kept, size-kept)
		}
	}
	return c
}

// Paused is what Pause gave back.
type Paused struct {
	Released uint64 // bytes of own physical memory
	Detached uint64 // bytes of peers' memory no longer mapped here
	Copied   uint64 // bytes kept on the host
}

// Leave says whether a pause is under way. What it is about to release is not
// given to peers, who would keep it: one that has paused and resumes already
// waits for the new memory.
func (s *Space) Leave(leaving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaving = leaving
	s.broadcast()
}

// Save copies the contents of all own memory that a pause releases to the
// arena. Kernels that could write to it must have ended, here and in all peers.
// Until the matching Release or Forget, no block is made or freed.
func (s *Space) Save(arena *offload.Arena) (err error) {
	s.structure.Lock()
	defer func() {
		if err != nil {
			s.Forget()
		}
	}()
	s.mu.Lock()
	blocks := s.pausable()
	var total uint64
	for _, b := range blocks {
		b.contents = s.plan(b)
		total += b.contents.Bytes()
	}
	s.mu.Unlock()
	arena.Reset()
	err = s.byDevice(blocks, func(d *Device, blocks []*block) error {
		if err := arena.Grow(total); err != nil {
			return err
		}
		for _, b := range blocks {
			if err := b.contents.Save(s.driver, arena, d.stream); err != nil {
				return err
			}
		}
		return nil
	})
	return errors.Join(err, s.waitStreams())
}

// Forget undoes Save.
func (s *Space) Forget() {
	s.mu.Lock()
	for _, b := range s.blocks {
		if b.live {
			b.contents = nil
		}
	}
	s.mu.Unlock()
	s.structure.Unlock()
}

// byDevice calls f for each device's blocks, which are sorted by device, with
// its context current and a stream. The work that f starts may go on after.
func (s *Space) byDevice(blocks []*block, f func(d *Device, blocks []*block) error) error {
	for len(blocks) > 0 {
		ordinal := blocks[0].prop.Location
		n := slices.IndexFunc(blocks, func(b *block) bool { return b.prop.Location != ordinal })
		if n < 0 {
			n = len(blocks)
		}
		err := s.onDevice(ordinal, func(d *Device) error {
			if err := s.stream(d); err != nil {
				return err
			}
			return f(d, blocks[:n])
		})
		if err != nil {
			// Copies that were started must not go on into memory that is used otherwise.
			return errors.Join(err, s.waitStreams())
		}
		blocks = blocks[n:]
	}
	return nil
}

// stream makes the device's stream if there is none yet. structure is held for
// writing.
func (s *Space) stream(d *Device) (err error) {
	if d.stream == 0 {
		d.stream, err = s.driver.NewStream()
	}
	return err
}

// waitStreams waits until all copies that were started have ended.
func (s *Space) waitStreams() error {
	var errs []error
	for _, d := range s.Devices() {
		if d.stream != 0 {
			errs = append(errs, s.driver.With(d.Context, func() error { return s.driver.StreamSynchronize(d.stream) }))
		}
	}
	return errors.Join(errs...)
}

// Vacate gives back what Save has copied, and lets go of peers' memory. If the
// driver refuses, all is put back and the process is as before Save. If even
// that fails, Whole is false, and Restore brings back what is missing.
func (s *Space) Vacate() (Paused, error) {
	defer s.structure.Unlock()
	var p Paused
	s.mu.Lock()
	blocks := s.saved()
	s.mu.Unlock()
	err := s.anyDevice(func() error {
		for i, b := range blocks {
			p.Released += b.size
			p.Copied += b.contents.Bytes()
			if err := s.evaporate(b); err != nil {
				return errors.Join(err, s.putBack(blocks[:i]), s.waitStreams())
			}
			s.freeDirty(b)
		}
		for _, b := range s.attached() {
			// A peer's memory that can't be let go stays mapped: nothing is
			// lost, and the next resume replaces it.
			if err := s.evaporate(b); err != nil {
				slog.Warn("peer's memory stays mapped", "peer", b.owner.String(), "error", err)
				continue
			}
			p.Detached += b.size
		}
		return nil
	})
	if err != nil {
		s.Resumed()
		return Paused{}, err
	}
	return p, nil
}

// freeDirty makes what is dirty free, uncleared: the block's next memory is new,
// and Save has kept nothing of it.
func (s *Space) freeDirty(b *block) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, part := range b.dirty {
		b.uncarve(part)
	}
	b.dirty = nil
}

// saved lists the own live blocks whose contents are in the arena. mu is held.
func (s *Space) saved() []*block {
	return slices.DeleteFunc(s.pausable(), func(b *block) bool { return b.contents == nil })
}

// attached lists the peers' blocks that are mapped and may be let go.
func (s *Space) attached() []*block {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*block
	for _, b := range s.imports {
		// Of an owner that has ended or has freed it, this mapping is all that
		// holds the memory: what can't be had again is kept.
		if b.live && b.keep == "" && b.fetching == nil && !s.peers.Gone(*b.owner) {
			list = append(list, b)
		}
	}
	return list
}

// putBack restores blocks whose contents are in the arena, up to the copies,
// which it only starts: see Fill.
func (s *Space) putBack(blocks []*block) error {
	if len(blocks) == 0 {
		return nil
	}
	s.mu.Lock()
	s.generation++ // importers are to fetch the new memory
	s.mu.Unlock()
	for i, b := range blocks {
		if b.live { // an earlier attempt could not release it again
			continue
		}
		if err := s.materialise(b); err != nil {
			return s.needed(b.prop.Location, blocks[:i], err)
		}
	}
	s.mu.Lock()
	for _, b := range blocks {
		b.filling = true
	}
	s.broadcast() // peers may fetch them now, though they are not to use them before they are told
	s.mu.Unlock()
	return s.byDevice(blocks, func(d *Device, blocks []*block) error {
		for _, b := range blocks {
			if err := b.contents.Restore(s.driver, d.stream); err != nil {
				return err
			}
		}
		return nil
	})
}

// needed makes an out of memory error say how much is needed and free once
// the blocks made so far have been released again.
func (s *Space) needed(ordinal int32, made []*block, err error) error {
	if !errors.Is(err, cuda.ErrOutOfMemory) {
		return err
	}
	oom := &OutOfMemoryError{Device: ordinal}
	s.mu.Lock()
	for _, b := range s.blocks {
		if !b.live && b.prop.Location == ordinal {
			oom.Needed += b.size
		}
	}
	var again uint64
	for _, b := range made {
		if b.prop.Location == ordinal {
			again += b.size
		}
	}
	s.mu.Unlock()
	return errors.Join(oom, s.onDevice(ordinal, func(*Device) error {
		free, _, err := s.driver.MemInfo()
		oom.Needed, oom.Free = oom.Needed+again, free+again
		return err
	}))
}

// Restored is what Restore brought back.
type Restored struct {
	Bytes  uint64 // of own physical memory
	Copied uint64 // from the host
}

// Restore gives all own memory back its physical memory, and starts to copy
// its contents in: Fill waits for that, and must follow. On failure all of it
// is released again, and the contents are still kept.
func (s *Space) Restore() (Restored, error) {
	s.structure.Lock()
	defer s.structure.Unlock()
	var r Restored
	s.mu.Lock()
	var blocks []*block
	for _, b := range s.blocks {
		if !b.live || b.contents != nil {
			blocks = append(blocks, b)
			r.Bytes += b.size
			r.Copied += b.contents.Bytes()
		}
	}
	s.mu.Unlock()
	sortBlocks(blocks)
	return r, s.anyDevice(func() error {
		err := s.putBack(blocks)
		for _, b := range blocks {
			if err != nil && b.live {
				err = errors.Join(err, s.evaporate(b))
			}
		}
		return err
	})
}

// Fill waits until the contents that Restore copies are in.
func (s *Space) Fill() error {
	err := s.waitStreams()
	s.structure.Lock()
	defer s.structure.Unlock()
	s.mu.Lock()
	ended := s.ended
	s.ended = nil
	for _, b := range s.blocks {
		b.filling = false
	}
	s.mu.Unlock()
	for _, b := range ended {
		err = errors.Join(err, s.discard(b))
	}
	return err
}

func sortBlocks(blocks []*block) {
	slices.SortFunc(blocks, func(a, b *block) int {
		return cmp.Or(cmp.Compare(a.prop.Location, b.prop.Location), cmp.Compare(a.id, b.id))
	})
}

// Abandon undoes a Restore whose process can't resume after all. The contents
// are still kept: nobody was told to use the memory.
func (s *Space) Abandon() error {
	s.structure.Lock()
	defer s.structure.Unlock()
	blocks := s.attached()
	s.mu.Lock()
	blocks = append(blocks, s.saved()...)
	s.mu.Unlock()
	return s.anyDevice(func() error {
		var errs []error
		for _, b := range blocks {
			errs = append(errs, s.evaporate(b))
		}
		return errors.Join(errs...)
	})
}

// Resumed forgets the contents kept of memory that is there: it is what counts.
func (s *Space) Resumed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.blocks {
		if b.live {
			b.contents = nil
		}
		b.filling = false
	}
}

// Whole tells whether all own memory is there.
func (s *Space) Whole() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.blocks {
		if !b.live {
			return false
		}
	}
	return true
}

// Generation answers how often this process's memory was restored.
func (s *Space) Generation() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation
}

// Attach maps peers' memory again: what is not mapped, and what is mapped of a
// generation that the owner has replaced since. current answers the generation
// that an owner has said is ready.
func (s *Space) Attach(ctx context.Context, current func(owner peer.Identity) uint64) error {
	missing := map[peer.Identity][]*block{}
	s.mu.Lock()
	for _, b := range s.imports {
		if b.stale(current) {
			missing[*b.owner] = append(missing[*b.owner], b)
		}
	}
	s.mu.Unlock()
	errs := make(chan error, len(missing))
	for owner, blocks := range missing {
		go func() { errs <- s.attachFrom(ctx, owner, blocks) }()
	}
	var all []error
	for range missing {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// stale tells whether a peer's block is to be mapped again: it is not mapped,
// or its owner has replaced the memory. mu is held.
func (b *block) stale(current func(owner peer.Identity) uint64) bool {
	if b.fetching != nil || b.lost {
		return false
	}
	return !b.live || (b.keep == "" && b.generation < current(*b.owner))
}

// Stale tells whether any peer's memory is to be mapped again.
func (s *Space) Stale(current func(owner peer.Identity) uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.imports {
		if b.stale(current) {
			return true
		}
	}
	return false
}

// Owners lists the processes whose memory is mapped here.
func (s *Space) Owners() []peer.Identity {
	s.mu.Lock()
	defer s.mu.Unlock()
	owners := map[peer.Identity]bool{}
	for _, b := range s.imports {
		owners[*b.owner] = true
	}
	return slices.Collect(maps.Keys(owners))
}

func (s *Space) attachFrom(ctx context.Context, owner peer.Identity, blocks []*block) error {
	ids := make([]uint64, len(blocks))
	for i, b := range blocks {
		ids[i] = b.id
	}
	fds, generation, err := s.peers.Fetch(ctx, owner, ids)
	if errors.Is(err, peer.ErrGone) && len(blocks) > 1 {
		for _, b := range blocks { // one of them is gone: find out which
			if err := s.attachFrom(ctx, owner, []*block{b}); err != nil {
				return err
			}
		}
		return nil
	}
	if errors.Is(err, peer.ErrGone) {
		// NCCL frees it too, as soon as it learns of it; until then its
		// addresses stay reserved.
		level := slog.LevelDebug
		if s.peers.Gone(owner) {
			level = slog.LevelWarn
		}
		slog.Log(ctx, level, "peer's memory is gone", "peer", owner.String(), "block", ids[0])
		s.mu.Lock()
		defer s.mu.Unlock()
		blocks[0].lost = true
		return nil
	}
	if err != nil {
		return err
	}
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	s.structure.RLock()
	defer s.structure.RUnlock()
	return s.anyDevice(func() error {
		var errs []error
		for i, b := range blocks {
			errs = append(errs, s.reattach(b, fds[i], generation))
		}
		return errors.Join(errs...)
	})
}

// reattach maps a peer's memory again, unless NCCL has freed it meanwhile.
// structure is held.
func (s *Space) reattach(b *block, fd int, generation uint64) error {
	s.mu.Lock()
	freed := s.imports[importKey{b.owner.ID, b.id}] != b
	s.mu.Unlock()
	if freed {
		return nil
	}
	b.rights.Lock()
	defer b.rights.Unlock()
	if b.live { // of an earlier generation
		if err := s.evaporate(b); err != nil {
			return err
		}
	}
	return s.attach(b, fd, generation)
}

// anyDevice runs f with some device's context current.
func (s *Space) anyDevice(f func() error) error {
	devices := s.Devices()
	if len(devices) == 0 {
		return f()
	}
	return s.driver.With(devices[0].Context, f)
}
