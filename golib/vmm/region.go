package vmm

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
)

// The methods of this file are for a Space of a region: its memory is the
// program's own, allocated and freed as with cudaMalloc and cudaFree.

// Allocate answers size bytes of memory on a device. Its contents are any.
func (s *Space) Allocate(size uint64, ordinal int32) (cuda.Ptr, error) {
	d, err := s.device(ordinal)
	if err != nil {
		return 0, err
	}
	prop := cuda.Prop{Type: cuda.Pinned, HandleTypes: cuda.FileDescriptor, LocationType: cuda.LocationDevice, Location: ordinal}
	if d.rdma {
		prop.RDMA = 1
	}
	s.structure.RLock()
	defer s.structure.RUnlock()
	s.mu.Lock()
	h := s.newHandle(size, prop)
	s.mu.Unlock()
	err = s.onDevice(ordinal, func(*Device) error {
		if err := s.place(h, true); err != nil {
			return err
		}
		// Who has got peer access while the block was made has not found it (Reach).
		return s.widen(h.block, s.accessFor(ordinal))
	})
	if err != nil {
		s.mu.Lock()
		h.refs--
		s.mu.Unlock()
		return 0, errors.Join(fmt.Errorf("allocate %d bytes: %w", size, err), s.endUnused(h))
	}
	return h.block.home + cuda.Ptr(h.off), nil
}

// Free gives back what Allocate answered. As with cudaFree, it waits for the
// device: work that uses the memory may be under way on any stream.
func (s *Space) Free(p cuda.Ptr) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.startOf(p)
	if err != nil {
		return err
	}
	err = s.onDevice(h.prop.Location, func(*Device) error {
		if err := s.driver.Synchronize(); err != nil {
			return err
		}
		s.mu.Lock()
		h.refs--
		s.mu.Unlock()
		return s.endUnused(h)
	})
	if err != nil {
		return fmt.Errorf("free %d bytes: %w", h.size, err)
	}
	return nil
}

// startOf answers the own handle whose memory starts at p.
func (s *Space) startOf(p cuda.Ptr) (*handle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, at, _ := s.find(p)
	if h == nil || at != p || h.refs == 0 {
		return nil, fmt.Errorf("no memory starts at %#x: %w", uint64(p), cuda.ErrInvalidValue)
	}
	return h, nil
}

// Live tells whether the memory at p is on its device now. known: it is this
// Space's, in use or not.
func (s *Space) Live(p cuda.Ptr) (live, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.memoryIn(p, 1)
	if len(list) == 0 {
		return false, false
	}
	return list[0].live, true
}

// ErrNoBackup says that nothing is kept of memory.
var ErrNoBackup = errors.New("no backup of it is kept")

// Backup reads what the last pause has kept of size bytes at p, into to, or
// answers where it lies on the host if to is nil: nil if that is not in one piece.
// No pause or resume may go on meanwhile.
func (s *Space) Backup(p cuda.Ptr, size uint64, to []byte) ([]byte, error) {
	c, err := s.kept(p, size)
	if err != nil {
		return nil, err
	}
	if to != nil {
		return nil, c.Read(p, to)
	}
	return c.Piece(p, size), nil
}

// kept answers the contents that hold size bytes at p.
func (s *Space) kept(p cuda.Ptr, size uint64) (*offload.Contents, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, at, _ := s.find(p)
	if h == nil || size > h.size-uint64(p-at) {
		return nil, fmt.Errorf("%d bytes at %#x are not of one allocation: %w", size, uint64(p), cuda.ErrInvalidValue)
	}
	if h.backup == nil || !h.backup.Held() {
		return nil, fmt.Errorf("the memory at %#x: %w", uint64(p), ErrNoBackup)
	}
	return h.backup, nil
}

// Allocated answers how many allocations there are and their bytes.
func (s *Space) Allocated() (count int, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.handles {
		if h.block != nil && h.block.owner == nil {
			count++
			bytes += h.size
		}
	}
	return count, bytes
}

// Shared lists the blocks that peers may have mapped.
func (s *Space) Shared() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []uint64
	for _, b := range s.blocks {
		if b.shared {
			list = append(list, b.id)
		}
	}
	slices.Sort(list)
	return list
}

// Lendable lists those of them that have memory now.
func (s *Space) Lendable() []uint64 {
	list := s.Shared()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(list, func(id uint64) bool { return s.blocks[id] == nil || !s.blocks[id].mem.live })
}

// Owns tells whether the block is this process's and in this Space.
func (s *Space) Owns(block uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blocks[block] != nil
}

// Share makes the memory that starts at p available to peers, who Describe it
// by the block's number and the offset. number tells it from what stands there later.
func (s *Space) Share(p cuda.Ptr) (block, offset, number uint64, err error) {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.startOf(p)
	if err != nil {
		return 0, 0, 0, err
	}
	b := h.block
	if b.owner != nil {
		return 0, 0, 0, fmt.Errorf("the memory at %#x is %s's: share it from there: %w", uint64(p), b.owner, cuda.ErrNotSupported)
	}
	if err := s.onDevice(h.prop.Location, func(*Device) error { return s.share(b) }); err != nil {
		return 0, 0, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h.exported = true
	return b.id, h.off, h.number, nil
}

// Describe answers the descriptor of memory that was shared.
func (s *Space) Describe(block, offset uint64) (d Descriptor, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.blocks[block]
	if b == nil || !b.shared {
		return d, false
	}
	h := b.handleAt(offset)
	if h == nil || h.off != offset || !h.exported {
		return d, false
	}
	return s.descriptor(h), true
}

// Open maps memory that a peer has shared, for the calling thread's device. It
// answers the same address each time, until Close was called as often.
func (s *Space) Open(d Descriptor) (cuda.Ptr, error) {
	device, err := s.driver.CurrentDevice()
	if err != nil {
		return 0, err
	}
	if _, err = s.device(device); err != nil {
		return 0, err
	}
	id, err := s.importOf(d)
	if err != nil {
		return 0, err
	}
	if err := s.claimNow(id, d.Owner); err != nil {
		return 0, errors.Join(err, s.AnyDevice(func() error { return s.Release(id) }))
	}
	p, err := s.give(id, device)
	if err != nil {
		return 0, errors.Join(err, s.Release(id))
	}
	return p, nil
}

// accessFor lists who uses memory that is a device's: the device, and those that
// have peer access to it. They are in order, since memory is put together only where
// all have the same access.
func (s *Space) accessFor(device int32) []cuda.Access {
	reached := uint64(1) << device
	if s.options.Reached != nil {
		reached |= s.options.Reached(device)
	}
	var list []cuda.Access
	for ; reached != 0; reached &= reached - 1 {
		list = append(list, cuda.Access{LocationType: cuda.LocationDevice, Location: int32(bits.TrailingZeros64(reached)), Flags: cuda.ReadWrite})
	}
	return list
}

// Reach gives the devices that have peer access to a device access to the memory
// that it uses: its own, and what was opened for it. What is paused, it has
// from the resume on.
func (s *Space) Reach(device int32) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	access := s.accessFor(device)
	own := cuda.Access{LocationType: cuda.LocationDevice, Location: device, Flags: cuda.ReadWrite}
	var list []*block
	s.mu.Lock()
	for _, b := range s.blocks {
		if b.mem.prop.Location == device {
			list = append(list, b)
		}
	}
	for _, b := range s.imports {
		if slices.Contains(b.mem.access, own) {
			list = append(list, b)
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, b := range list {
		if err := s.widen(b, access); err != nil {
			errs = append(errs, fmt.Errorf("give GPUs with peer access to GPU %d its memory: %w", device, err))
			continue
		}
		s.mu.Lock()
		b.mem.access = slices.SortedFunc(slices.Values(b.mem.access), func(a, b cuda.Access) int { return int(a.Location - b.Location) })
		s.mu.Unlock()
	}
	return errors.Join(errs...)
}

// give gives a device, and those with peer access to it, access to a handle's
// memory, and answers where it is.
func (s *Space) give(id cuda.Handle, device int32) (cuda.Ptr, error) {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.lookup(id)
	if err != nil {
		return 0, err
	}
	// The device's own first: from then on Reach finds the memory.
	own := cuda.Access{LocationType: cuda.LocationDevice, Location: device, Flags: cuda.ReadWrite}
	if err := s.widen(h.block, []cuda.Access{own}); err != nil {
		return 0, err
	}
	return h.block.home + cuda.Ptr(h.off), s.widen(h.block, s.accessFor(device))
}

// Close undoes one Open. Like Free, it waits for the device.
func (s *Space) Close(p cuda.Ptr) error {
	h, err := s.startOf(p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	return s.AnyDevice(func() error { return s.Release(h.id) })
}

// Borrows tells whether any of an owner's blocks is imported.
func (s *Space) Borrows(owner peer.Identity, blocks []uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.of(owner, blocks)) > 0
}

// LetGo unmaps blocks of an owner who is about to pause them, if that stands still:
// else the owner would not know. What is being fetched of its memory is not mapped
// either, but fetched again.
func (s *Space) LetGo(owner peer.Identity, blocks []uint64, stands func() bool) error {
	s.structure.Lock()
	defer s.structure.Unlock()
	if !stands() {
		return peer.ErrOver
	}
	s.mu.Lock()
	mapped := s.of(owner, blocks)
	for _, b := range mapped {
		if b.mem.live && b.mem.keep != "" { // it would go on with the memory that was the owner's
			defer s.mu.Unlock()
			return errors.New("the memory is registered with a network interface, or bound to a multicast object, " +
				"in the process that has opened it: deregister it there first")
		}
	}
	s.letGos++
	s.mu.Unlock()
	return s.AnyDevice(func() error {
		for _, b := range mapped {
			if err := s.letGo(b.mem); err != nil {
				return err
			}
		}
		return nil
	})
}

// Missing tells whether memory that was opened is not mapped: its owner has it paused,
// or has not brought it back here.
func (s *Space) Missing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.imports {
		if b.fetching == nil && !b.mem.live {
			return true
		}
	}
	return false
}

// AttachAgain maps blocks of an owner who has resumed them, or has not paused them
// after all. A LetGo of theirs has ended by then, or finds that it does not stand.
func (s *Space) AttachAgain(ctx context.Context, owner peer.Identity, ids []uint64) error {
	s.structure.RLock()
	s.mu.Lock()
	blocks := slices.DeleteFunc(s.of(owner, ids), func(b *block) bool { return !b.stale(never) })
	s.mu.Unlock()
	s.structure.RUnlock()
	if len(blocks) == 0 {
		return nil
	}
	return s.attachFrom(ctx, owner, blocks)
}

// never is the generation of owners who tell when their memory is replaced.
func never(peer.Identity) uint64 { return 0 }

// of lists those of an owner's blocks that are imported. mu is held.
func (s *Space) of(owner peer.Identity, ids []uint64) []*block {
	var list []*block
	for _, id := range ids {
		if b := s.imports[importKey{owner.ID, id}]; b != nil {
			list = append(list, b)
		}
	}
	return list
}
