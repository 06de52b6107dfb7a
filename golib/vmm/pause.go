package vmm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/rescue"
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
		rescue.Go(func() {
			synchronize := func() error { return s.driver.With(d.Context, s.driver.Synchronize) }
			if err := rescue.Err(synchronize); err != nil {
				failed <- fmt.Errorf("GPU %d: %w", d.Ordinal, err)
				return
			}
			done <- d.Ordinal
		})
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

// pausable lists the own memory that a pause releases, by device and then by
// address. mu is held.
func (s *Space) pausable() []*memory {
	return s.own(func(m *memory) bool { return m.live && m.keep == "" })
}

// added lists that of it that was allocated since the last pause, if that has not been
// resumed: nothing is kept of it. mu is held.
func (s *Space) added() []*memory {
	return slices.DeleteFunc(s.pausable(), func(m *memory) bool { return len(m.contents()) > 0 })
}

// Pausable tells whether there is own memory that a pause would release, in spite of the
// last one.
func (s *Space) Pausable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.added()) > 0
}

// unkeep has a pause release what processes of other groups have mapped, and map no
// more. None of them gets it meanwhile: see Leave. mu is held.
func (s *Space) unkeep() {
	for _, m := range s.own(func(m *memory) bool { return m.keep == KeepGroup }) {
		if !slices.ContainsFunc(m.blocks, func(b *block) bool { return s.peers.Outside(b.id) }) {
			s.unkept(m)
		}
	}
}

// own lists the own memory for which choose answers true, by device and then by
// address. mu is held.
func (s *Space) own(choose func(m *memory) bool) []*memory {
	var list []*memory
	for _, b := range s.blocks {
		if b.mem.blocks[0] == b && choose(b.mem) {
			list = append(list, b.mem)
		}
	}
	slices.SortFunc(list, func(a, b *memory) int {
		return cmp.Or(cmp.Compare(a.prop.Location, b.prop.Location), cmp.Compare(a.blocks[0].home, b.blocks[0].home),
			cmp.Compare(a.blocks[0].id, b.blocks[0].id))
	})
	return list
}

// imported lists peers' memory. mu is held.
func (s *Space) imported() []*memory {
	var list []*memory
	for _, b := range s.imports {
		if len(b.mem.blocks) > 0 && b.mem.blocks[0] == b { // else it is being fetched
			list = append(list, b.mem)
		}
	}
	return list
}

// plan answers what is to be kept of a block and what is to be cleared. mu is
// held.
func (s *Space) plan(b *block) *offload.Contents {
	c := &offload.Contents{}
	if s.options.Discard {
		return c
	}
	zero := false
	for _, h := range b.handles {
		size := min(roundUp(h.size, b.class.unit()), b.size-h.off)
		kept := size
		if s.options.ControlOnly && h.exported {
			kept = min(size, controlRegion)
		}
		c.Keep(b.home+cuda.Ptr(h.off), kept)
		zero = zero || kept < size
	}
	if zero { // in one call, before what is kept is copied in
		c.Zeroed = []offload.Range{{At: b.home, Size: b.size, Rows: 1}}
	}
	return c
}

// Paused is what Vacate gave back.
type Paused struct {
	Released uint64        // bytes of own physical memory
	Detached uint64        // bytes of peers' memory no longer mapped here
	Copied   uint64        // bytes kept on the host
	Copying  time.Duration // until the last copy had ended
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

// Vacate copies the contents of all own memory that a pause releases to the
// store and gives the memory back, and lets go of peers' memory. Kernels that
// could write to it must have ended, here and in all peers. Of a paused Space that is
// what was allocated since, beside what is kept already.
//
// While the copies run, peers' memory is let go of, and own memory as soon as
// it is copied, so that little is left to do after the last copy. If a copy or
// the driver fails, own memory is put back. If even that fails, Whole is false,
// and Restore brings back what is missing. Peers' memory is to be attached
// again.
func (s *Space) Vacate(store offload.Store) (p Paused, err error) {
	s.structure.Lock()
	defer s.structure.Unlock()
	already, done := s.paused, false
	s.paused = true
	var list []*memory
	defer func() {
		if !done { // or a panic
			p = Paused{}
			s.forget(list)
			s.paused = already || !s.Whole()
		}
	}()
	s.store = store
	s.mu.Lock()
	s.letGos++
	s.unkeep()
	list = s.added()
	keeps := slices.ContainsFunc(slices.Collect(maps.Values(s.blocks)), func(b *block) bool { return b.contents != nil })
	for _, m := range list {
		for _, b := range m.blocks {
			b.contents = s.plan(b)
			p.Copied += b.contents.Bytes()
			for _, h := range b.handles {
				h.backup = b.contents
			}
		}
	}
	s.mu.Unlock()
	started := time.Now()
	begin := store.Begin
	if keeps {
		begin = store.More
	}
	if err := s.copyOut(list, store, begin, p.Copied); err != nil {
		return p, fmt.Errorf("copy out: %w", err)
	}
	if err := s.AnyDevice(func() error {
		s.discardStuck()
		p.Detached = s.detach()
		return nil
	}); err != nil {
		return p, errors.Join(err, s.waitStreams())
	}
	var released []*memory
	err = s.byDevice(list, func(_ *Device, m *memory) error {
		if m.copied != 0 {
			if err := s.driver.Wait(m.copied); err != nil {
				return fmt.Errorf("copy out: %w", err)
			}
		}
		p.Copying = time.Since(started)
		if err := s.evaporate(m); err != nil {
			return fmt.Errorf("release: %w", err)
		}
		released = append(released, m)
		p.Released += m.size
		return nil
	})
	if err != nil {
		err = errors.Join(err, s.putBack(released), s.waitStreams())
		if s.options.Discard && p.Released > 0 {
			err = fmt.Errorf("%w; %d bytes had been given back: they are back, but their contents are lost", err, p.Released)
		}
		return p, err
	}
	s.endUnusedSlabs(list)
	done = true
	return p, nil
}

// copyOut starts to copy out the contents of the memory, which is sorted by
// device. On failure no copy is under way.
func (s *Space) copyOut(list []*memory, store offload.Store, begin func(total uint64) error, total uint64) error {
	defer store.Done()
	store.Prefer(s.node())
	if err := begin(total); err != nil {
		return err
	}
	used := map[*Device]int{}
	return s.byDevice(list, func(d *Device, m *memory) error {
		var kept uint64
		for _, c := range m.contents() {
			kept += c.Bytes()
			if err := store.Save(c, d.stream); err != nil {
				return err
			}
		}
		if kept == 0 {
			m.copied = 0
			return nil
		}
		if used[d] == len(d.events) {
			e, err := s.driver.NewEvent()
			if err != nil {
				return err
			}
			d.events = append(d.events, e)
		}
		m.copied = d.events[used[d]]
		used[d]++
		return s.driver.Record(m.copied, d.stream)
	})
}

// node answers the memory node next to all devices, -1 where they differ.
func (s *Space) node() int {
	node := -1
	for i, d := range s.Devices() {
		if i > 0 && d.node != node {
			return -1
		}
		node = d.node
	}
	return node
}

// detach lets go of peers' memory and answers how many bytes of it. What the
// driver refuses to let go stays mapped: nothing is lost, and the next resume
// replaces it.
func (s *Space) detach() (bytes uint64) {
	defer s.tellOwners(s.mapped())
	for _, m := range s.attached() {
		if err := s.evaporate(m); err != nil {
			slog.Warn("peer's memory stays mapped", "peer", m.owner.String(), "error", err)
			continue
		}
		bytes += m.size
	}
	return bytes
}

// mapped lists the memory that is mapped of peers who may wait until it is not.
func (s *Space) mapped() []*memory {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(s.imported(), func(m *memory) bool {
		return !m.live || m.owner.Group != s.peers.Self().Group || s.peers.Gone(*m.owner)
	})
}

// endUnusedSlabs ends slabs without memory that nobody needs. What else of the
// slabs' memory was freed is free, uncleared: their next memory is new, and
// nothing was kept of it.
func (s *Space) endUnusedSlabs(list []*memory) {
	for _, m := range list {
		s.mu.Lock()
		blocks := slices.Clone(m.blocks)
		for _, b := range blocks {
			for _, part := range b.dirty {
				b.uncarve(part)
			}
			b.dirty = nil
		}
		s.mu.Unlock()
		for _, b := range blocks {
			if err := s.endEmpty(b); err != nil {
				slog.Warn("end a slab", "error", err)
			}
		}
	}
}

// byDevice calls f for each memory of the list, which is sorted by device,
// with the device's context current and a stream. The work that f starts may go
// on after, unless one fails.
func (s *Space) byDevice(list []*memory, f func(d *Device, m *memory) error) error {
	for len(list) > 0 {
		ordinal := list[0].prop.Location
		n := slices.IndexFunc(list, func(m *memory) bool { return m.prop.Location != ordinal })
		if n < 0 {
			n = len(list)
		}
		err := s.onDevice(ordinal, func(d *Device) error {
			if err := s.stream(d); err != nil {
				return err
			}
			for _, m := range list[:n] {
				if err := f(d, m); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			// Copies that were started must not go on into memory that is used otherwise.
			return errors.Join(err, s.waitStreams())
		}
		list = list[n:]
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

// waitStreams waits until all copies that were started have ended. A wait that
// fails is made once more: after a failure, the memory that copies use is let go.
func (s *Space) waitStreams() error {
	var errs []error
	for _, d := range s.Devices() {
		if d.stream == 0 {
			continue
		}
		wait := func() error { return s.driver.StreamSynchronize(d.stream) }
		if err := s.driver.With(d.Context, wait); err != nil {
			errs = append(errs, err, s.driver.With(d.Context, wait))
		}
	}
	return errors.Join(errs...)
}

// attached lists the peers' memory that is mapped and may be let go.
func (s *Space) attached() []*memory {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Of an owner that has ended or has freed it, this mapping is all that
	// holds the memory: what can't be had again is kept.
	return slices.DeleteFunc(s.imported(), func(m *memory) bool {
		return !m.live || m.keep != "" || s.peers.Gone(*m.owner) ||
			slices.ContainsFunc(m.blocks, func(b *block) bool { return b.fetching != nil })
	})
}

// putBack makes own memory again whose contents are in the store, and starts to
// copy them in: see Fill.
func (s *Space) putBack(list []*memory) error {
	if len(list) == 0 {
		return nil
	}
	s.mu.Lock()
	s.generation++ // importers are to fetch the new memory
	s.mu.Unlock()
	var made []*memory
	err := s.byDevice(list, func(d *Device, m *memory) error {
		if !m.live { // else an earlier attempt could not release it again
			if err := s.materialise(m); err != nil {
				return s.needed(m.prop.Location, made, err)
			}
			made = append(made, m)
		}
		s.mu.Lock()
		m.filling = true
		contents := m.contents()
		s.mu.Unlock()
		for _, c := range contents {
			if err := s.store.Restore(c, d.stream); err != nil {
				return err
			}
		}
		return nil
	})
	s.mu.Lock()
	s.broadcast() // peers may fetch it now, though they are not to use it before they are told
	s.mu.Unlock()
	return err
}

// needed makes an out of memory error say how much is needed and free once
// the blocks made so far have been released again.
func (s *Space) needed(ordinal int32, made []*memory, err error) error {
	if !errors.Is(err, cuda.ErrOutOfMemory) {
		return err
	}
	oom := &OutOfMemoryError{Device: ordinal}
	s.mu.Lock()
	for _, b := range s.blocks {
		if !b.mem.live && b.mem.prop.Location == ordinal {
			oom.Needed += b.size
		}
	}
	var again uint64
	for _, m := range made {
		if m.prop.Location == ordinal {
			again += m.size
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
	s.regroup()
	list := s.own(func(m *memory) bool { return !m.live || len(m.contents()) > 0 })
	for _, m := range list {
		r.Bytes += m.size
		for _, c := range m.contents() {
			r.Copied += c.Bytes()
		}
	}
	// Peers get none before all of it is there: what fails must be released again.
	// Those who have opened a region's memory, not before the resume has succeeded.
	s.leaving = true
	s.mu.Unlock()
	if s.options.Region == "" {
		defer s.Leave(false)
	}
	err := s.AnyDevice(func() error {
		err := s.putBack(list)
		for _, m := range list {
			if err != nil && m.live {
				err = errors.Join(err, s.evaporate(m))
			}
		}
		return err
	})
	s.paused = err != nil
	return r, err
}

// Fill waits until the contents that Restore copies are in.
func (s *Space) Fill() error {
	err := s.waitStreams()
	s.structure.Lock()
	defer s.structure.Unlock()
	s.mu.Lock()
	ended := s.ended
	s.ended = nil
	for _, m := range s.own(func(*memory) bool { return true }) {
		m.filling = false
	}
	for _, b := range ended {
		b.mem.filling = false
	}
	s.mu.Unlock()
	for _, b := range ended {
		err = errors.Join(err, s.discard(b))
	}
	return err
}

// Abandon undoes a Restore whose process can't resume after all. The contents
// are still kept: nobody was told to use the memory.
func (s *Space) Abandon() error {
	s.structure.Lock()
	defer s.structure.Unlock()
	s.paused = true
	defer s.tellOwners(s.mapped())
	list := s.attached()
	s.mu.Lock()
	list = append(list, s.own(func(m *memory) bool { return m.live && len(m.contents()) > 0 })...)
	s.mu.Unlock()
	return s.AnyDevice(func() error {
		var errs []error
		for _, m := range list {
			errs = append(errs, s.evaporate(m))
		}
		return errors.Join(errs...)
	})
}

// Resumed forgets the contents kept of memory that is there: it is what counts.
// With retain, Backup goes on to answer them, until the store forgets them.
func (s *Space) Resumed(retain bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.blocks {
		if b.mem.live {
			b.contents = nil
		}
		for _, h := range b.handles {
			if b.mem.live && !retain {
				h.backup = nil
			}
		}
		b.mem.filling = false
	}
}

// forget forgets the contents kept of the memory that is there, after a pause of it that
// has failed.
func (s *Space) forget(list []*memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range list {
		for _, b := range m.blocks {
			if !m.live {
				continue
			}
			b.contents = nil
			for _, h := range b.handles {
				h.backup = nil
			}
		}
		m.filling = false
	}
}

// Empty tells whether there is no own memory, paused or not.
func (s *Space) Empty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.blocks) == 0
}

// Whole tells whether all own memory is there.
func (s *Space) Whole() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.blocks {
		if !b.mem.live {
			return false
		}
	}
	return true
}

// Absent lists the own blocks whose memory a pause has given back.
func (s *Space) Absent() map[uint64]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := map[uint64]bool{}
	for _, b := range s.blocks {
		if !b.mem.live {
			list[b.id] = true
		}
	}
	return list
}

// Sizes answers how many bytes of memory the own blocks stand on, all of which is mapped
// by who maps any of it.
func (s *Space) Sizes(ids []uint64) (bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counted := map[*memory]bool{}
	for _, id := range ids {
		if b := s.blocks[id]; b != nil && !counted[b.mem] {
			counted[b.mem] = true
			bytes += b.mem.size
		}
	}
	return bytes
}

// Generation answers how often this process's memory was restored.
func (s *Space) Generation() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation
}

// Footprint answers how many bytes a pause would keep on the host now.
func (s *Space) Footprint() (bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.pausable() {
		for _, b := range m.blocks {
			bytes += s.plan(b).Bytes()
		}
	}
	return bytes
}

// Changed answers a channel that is closed when memory is made, shared or freed.
func (s *Space) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Attach maps peers' memory again: what is not mapped, and what is mapped of a
// generation that the owner has replaced since. It claims what was imported meanwhile. current answers the generation
// that an owner has said is ready.
func (s *Space) Attach(ctx context.Context, current func(owner peer.Identity) uint64) error {
	missing := map[peer.Identity][]*block{}
	s.mu.Lock()
	for _, b := range s.imports {
		if b.behind(current) {
			missing[*b.owner] = append(missing[*b.owner], b)
		}
	}
	s.mu.Unlock()
	errs := make(chan error, len(missing))
	for owner, blocks := range missing {
		rescue.Go(func() {
			errs <- rescue.Err(func() error {
				if err := s.attachFrom(ctx, owner, s.staleOf(blocks, current)); err != nil {
					return err
				}
				return s.claim(ctx, owner)
			})
		})
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
	return !b.mem.live || (b.mem.keep == "" && b.mem.generation < current(*b.owner))
}

// behind tells whether a peer's block is to be mapped again, or what was imported of
// it to be claimed. mu is held.
func (b *block) behind(current func(owner peer.Identity) uint64) bool {
	return b.stale(current) || (b.claims > 0 && b.fetching == nil && !b.lost)
}

// staleOf chooses the blocks that are to be mapped again.
func (s *Space) staleOf(blocks []*block, current func(owner peer.Identity) uint64) []*block {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(blocks, func(b *block) bool { return !b.stale(current) })
}

// Stale tells whether any peer's memory is to be mapped again, or claimed.
func (s *Space) Stale(current func(owner peer.Identity) uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.imports {
		if b.behind(current) {
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
	if len(blocks) == 0 {
		return nil
	}
	ids := make([]uint64, len(blocks))
	for i, b := range blocks {
		ids[i] = b.id
	}
	// A region's owner pauses it when it likes, and says when it is back.
	err := s.fetched(ctx, owner, ids, s.options.Region != "", func(list []peer.Memory, generation uint64) error {
		if s.paused {
			return nil // the resume does it
		}
		return s.AnyDevice(func() error {
			// All that was mapped before goes first: what comes may span it.
			var errs []error
			for _, b := range blocks {
				if m, here := s.memoryOf(b, generation); !here {
					errs = append(errs, s.letGo(m))
				}
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			for _, got := range list {
				errs = append(errs, s.attach(owner, blocks, got, generation))
			}
			return errors.Join(errs...)
		})
	})
	s.dropEnded(owner, blocks)
	paused := errors.Is(err, peer.ErrPaused)
	if !errors.Is(err, peer.ErrGone) && !paused {
		return err
	}
	if !paused && s.peers.Gone(owner) {
		s.mourn(owner, blocks)
		return nil
	}
	if len(blocks) > 1 {
		for _, b := range blocks { // one of them is gone, or paused: find out which
			if err := s.attachFrom(ctx, owner, []*block{b}); err != nil {
				return err
			}
		}
		return nil
	}
	if paused {
		return nil
	}
	// Who uses it frees it too, as soon as it learns of it; until then its
	// addresses stay reserved.
	slog.Debug("peer's memory is freed", "peer", owner.String(), "block", ids[0])
	s.mu.Lock()
	defer s.mu.Unlock()
	blocks[0].lost = true
	return nil
}

// mourn notes that an owner has ended, and blocks that are not mapped here with it.
func (s *Space) mourn(owner peer.Identity, blocks []*block) {
	s.mu.Lock()
	var bytes uint64
	for _, b := range blocks {
		b.lost = true
		bytes += b.size
	}
	level := slog.LevelWarn
	if s.mourned[owner.ID] {
		level = slog.LevelDebug
	}
	s.mourned[owner.ID] = true
	s.mu.Unlock()
	slog.Log(context.Background(), level, "peer has ended: what is not mapped here of its memory is gone",
		"peer", owner.String(), "blocks", len(blocks), "bytes", bytes)
}

// dropEnded tells the owner of blocks that have ended while they were fetched: the
// fetch has it count this process among those that map them.
func (s *Space) dropEnded(owner peer.Identity, blocks []*block) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range blocks {
		if s.imports[importKey{owner.ID, b.id}] == nil {
			s.peers.Drop(owner, b.id)
		}
	}
}

// letGo unmaps a peer's memory of an earlier generation. structure is held.
func (s *Space) letGo(m *memory) error {
	m.rights.Lock()
	defer m.rights.Unlock()
	s.mu.Lock()
	live := m.live
	s.mu.Unlock()
	if !live {
		return nil
	}
	return s.evaporate(m)
}

// memoryOf answers the memory of a peer's block, and whether that is mapped and of the
// owner's generation.
func (s *Space) memoryOf(b *block, generation uint64) (m *memory, here bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return b.mem, b.here(generation)
}

// here tells whether a peer's block is mapped as of the owner's generation. mu is held.
func (b *block) here(generation uint64) bool { return b.mem.live && b.mem.generation == generation }

// AnyDevice runs f with some device's context current.
func (s *Space) AnyDevice(f func() error) error {
	devices := s.Devices()
	if len(devices) == 0 {
		return f()
	}
	return s.driver.With(devices[0].Context, f)
}
