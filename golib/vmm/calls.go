package vmm

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
)

// The methods of this file are the driver's functions as NCCL calls them, on
// its own threads. Each answers ErrPass for memory that is not amem's.

// handle is what NCCL holds: a part of a block, or no memory yet.
type handle struct {
	id   cuda.Handle
	size uint64
	prop cuda.Prop

	// Guarded by Space.mu. A handle ends when all three counts are 0.
	refs     int // created, imported and retained, less released
	reserved int // its home address given out as a reservation, less freed
	mapped   int

	block    *block // nil until NCCL shows what it wants
	off      uint64
	exported bool // own: peers may know it
	owed     bool // imported: its owner has freed it, and waits for its end here

	backup *offload.Contents // own: what the last pause has kept of its block, while that may be read
}

const handleTag = 0xA3E0 << 48

// newHandle makes a handle with one reference. mu is held.
func (s *Space) newHandle(size uint64, prop cuda.Prop) *handle {
	s.nextHandle++
	h := &handle{id: cuda.Handle(handleTag | s.nextHandle), size: size, prop: prop, refs: 1}
	s.handles[h.id] = h
	return h
}

// lookup answers the handle that NCCL names.
func (s *Space) lookup(id cuda.Handle) (*handle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.handles[id]
	if h == nil || h.refs == 0 {
		return nil, fmt.Errorf("handle %#x: %w", uint64(id), cuda.ErrInvalidValue)
	}
	return h, nil
}

// bound answers the handle that NCCL names; if it has no memory yet, it gets a
// block of its own. structure is held.
func (s *Space) bound(id cuda.Handle) (*handle, error) {
	h, err := s.lookup(id)
	if err == nil && h.block == nil {
		err = s.place(h, false)
	}
	return h, err
}

// Create answers a handle. own: NCCL's own allocator asks, and the handle gets
// memory when it is reserved or mapped; other memory (users', windows') is the
// driver's at once, and stays where it is.
func (s *Space) Create(size uint64, prop cuda.Prop, flags uint64, own bool) (cuda.Handle, error) {
	if _, err := s.device(prop.Location); err != nil {
		return 0, err
	}
	if own && flags == 0 && prop.HandleTypes&cuda.Fabric == 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		h := s.newHandle(size, prop)
		return h.id, nil
	}
	phys, err := s.driver.Create(size, prop, flags)
	if err != nil {
		return 0, err
	}
	keep := KeepUser
	if own {
		keep = KeepFabric
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.newHandle(size, prop)
	b := &block{id: s.options.Numbers.Add(1), size: size, handles: []*handle{h}}
	b.mem = &memory{prop: prop, size: size, blocks: []*block{b}, keep: keep, live: true, phys: phys, fd: -1}
	s.blocks[b.id] = b
	h.block = b
	return h.id, nil
}

// place gives an unbound handle memory: a chunk of a slab, or a block of its
// own. structure is held.
func (s *Space) place(h *handle, carve bool) error {
	c := class{prop: h.prop, large: h.size >= largeUnit}
	size := roundUp(h.size, c.unit())
	if !carve || !s.options.Arena || size > maxChunk {
		granularity, err := s.driver.Granularity(h.prop)
		if err != nil {
			return err
		}
		return s.newBlock(c, roundUp(h.size, granularity), false, h)
	}
	for {
		s.mu.Lock()
		if s.carve(c, h, size) {
			s.mu.Unlock()
			return nil
		}
		if wait := s.growing[c]; wait != nil { // another thread makes room for us too
			s.mu.Unlock()
			<-wait
			continue
		}
		done := make(chan struct{})
		s.growing[c] = done
		dirty := s.takeDirty(c)
		next := slabSize(c, s.held(c), size)
		s.mu.Unlock()
		var err error
		if len(dirty) > 0 {
			err = s.clear(dirty)
		} else {
			err = s.newBlock(c, next, true, h)
			if alone := roundUp(size, largeUnit); next > alone && errors.Is(err, cuda.ErrOutOfMemory) {
				err = s.newBlock(c, alone, true, h)
			}
		}
		s.mu.Lock()
		delete(s.growing, c)
		s.mu.Unlock()
		close(done)
		if err != nil || len(dirty) == 0 {
			return err
		}
	}
}

// carve finds room in a live slab of the class. mu is held.
func (s *Space) carve(c class, h *handle, size uint64) bool {
	for _, b := range s.slabs[c] {
		if !b.mem.live || b.mem.filling {
			continue
		}
		if off, ok := b.carve(size); ok {
			h.block, h.off = b, off
			b.addHandle(h)
			return true
		}
	}
	return false
}

// held answers the bytes of the class's slabs, by which the next is sized. Where NICs
// are used it answers none: a chunk that a NIC registers keeps all of its slab, nothing
// tells before which will be, and small slabs keep the least. mu is held.
func (s *Space) held(c class) uint64 {
	var n uint64
	if s.network {
		return 0
	}
	for _, b := range s.slabs[c] {
		n += b.size
	}
	return n
}

// Reserve answers the address of the pending handle's memory, if that is what
// NCCL reserves for: the size is the handle's, and no special address is asked.
func (s *Space) Reserve(size, alignment uint64, at cuda.Ptr, flags uint64, pending cuda.Handle) (cuda.Ptr, error) {
	if pending == 0 || at != 0 || flags != 0 {
		return 0, ErrPass
	}
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.lookup(pending)
	if err != nil || roundUp(size, smallUnit) != roundUp(h.size, smallUnit) {
		return 0, ErrPass
	}
	if h.block == nil {
		if alignment > (class{large: h.size >= largeUnit}).unit() { // more than a chunk has
			return 0, ErrPass
		}
		if err := s.place(h, true); err != nil {
			return 0, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := h.block.home + cuda.Ptr(h.off)
	if h.block.home == 0 || (alignment != 0 && uint64(p)%alignment != 0) {
		return 0, ErrPass
	}
	h.reserved++
	return p, nil
}

// Map notes that NCCL maps a handle where its memory is already, or maps a
// block of one handle elsewhere.
func (s *Space) Map(p cuda.Ptr, size, offset uint64, id cuda.Handle, flags uint64) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.bound(id)
	if err != nil {
		return err
	}
	b := h.block
	s.mu.Lock()
	if b.home != 0 && p == b.home+cuda.Ptr(h.off) {
		defer s.mu.Unlock()
		if offset != 0 || roundUp(size, smallUnit) != roundUp(h.size, smallUnit) {
			return fmt.Errorf("map %d bytes at offset %d of a handle of %d: %w", size, offset, h.size, cuda.ErrNotSupported)
		}
		h.mapped++
		return nil
	}
	s.mu.Unlock()
	if b.window != nil || (b.owner != nil && h.size != b.size) {
		return fmt.Errorf("NCCL maps a part of a slab at another address, which the driver can't do; set AMEM_ARENA=0: %w",
			cuda.ErrNotSupported)
	}
	m := &mapping{at: p, size: size, block: b}
	b.mem.rights.Lock()
	defer b.mem.rights.Unlock()
	s.mu.Lock()
	live := b.mem.live
	s.mu.Unlock()
	if live {
		if err := s.driver.Map(p, size, offset, b.mem.phys, flags); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b.mem.extra = append(b.mem.extra, m)
	s.addRange(addressRange{at: p, size: size, block: b, m: m})
	h.mapped++
	return nil
}

// Unmap undoes Map. A range may span several mappings.
func (s *Space) Unmap(p cuda.Ptr, size uint64) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	s.mu.Lock()
	if h, at, m := s.find(p); h != nil && m == nil {
		if at != p || h.mapped == 0 {
			s.mu.Unlock()
			return fmt.Errorf("unmap at %#x: %w", uint64(p), cuda.ErrInvalidValue)
		}
		h.mapped--
		s.mu.Unlock()
		return s.endUnused(h)
	}
	taken := s.mappingsIn(p, size)
	s.mu.Unlock()
	if len(taken) == 0 {
		return ErrPass
	}
	if err := eachLive(p, size, taken, s.driver.Unmap); err != nil {
		return err
	}
	var errs []error
	for _, r := range taken {
		s.mu.Lock()
		s.removeRange(r.at)
		r.block.mem.extra = slices.DeleteFunc(r.block.mem.extra, func(m *mapping) bool { return m == r.m })
		h := r.block.handles[0]
		h.mapped--
		s.mu.Unlock()
		errs = append(errs, s.endUnused(h))
	}
	return errors.Join(errs...)
}

// mappingsIn lists NCCL's own mappings in the range. mu is held.
func (s *Space) mappingsIn(p cuda.Ptr, size uint64) []addressRange {
	var list []addressRange
	for _, r := range s.ranges {
		if r.m != nil && r.at >= p && r.at+cuda.Ptr(r.size) <= p+cuda.Ptr(size) {
			list = append(list, r)
		}
	}
	return list
}

// eachLive calls the driver for the whole range, or, where a pause has released
// some of it, for each mapping that exists now. structure is held.
func eachLive(p cuda.Ptr, size uint64, mappings []addressRange, call func(cuda.Ptr, uint64) error) error {
	live := slices.DeleteFunc(slices.Clone(mappings), func(r addressRange) bool { return !r.block.mem.live })
	if len(live) == len(mappings) {
		return call(p, size)
	}
	for _, r := range live {
		if err := call(r.at, r.size); err != nil {
			return err
		}
	}
	return nil
}

// SetAccess gives locations access to what is mapped at p. For a part of a
// slab it is the whole slab: the driver knows no smaller unit.
func (s *Space) SetAccess(p cuda.Ptr, size uint64, access []cuda.Access) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	if err := s.noteDevice(access); err != nil {
		return err
	}
	s.mu.Lock()
	if h, _, m := s.find(p); h != nil && m == nil {
		s.mu.Unlock()
		return s.widen(h.block, access)
	}
	found := s.mappingsIn(p, size)
	s.mu.Unlock()
	if len(found) == 0 {
		return ErrPass
	}
	err := eachLive(p, size, found, func(p cuda.Ptr, size uint64) error { return s.driver.SetAccess(p, size, access) })
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range found {
		r.m.access = append(r.m.access, without(access, r.m.access)...)
	}
	return nil
}

// widen gives locations access to a block, which is to all of its memory at its
// home. structure is held.
func (s *Space) widen(b *block, access []cuda.Access) error {
	s.mu.Lock()
	m := b.mem
	s.mu.Unlock()
	m.rights.Lock()
	defer m.rights.Unlock()
	s.mu.Lock()
	if b.mem != m { // attached anew meanwhile
		s.mu.Unlock()
		return s.widen(b, access)
	}
	missing := without(access, m.access)
	live := m.live
	if !live {
		m.access = append(slices.Clone(m.access), missing...)
	}
	s.mu.Unlock()
	if !live || len(missing) == 0 {
		return nil
	}
	if err := s.driver.SetAccess(m.home, m.size, missing); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m.access = append(slices.Clone(m.access), missing...)
	return nil
}

// noteDevice notes the calling thread's device if it is given access: NCCL is
// about to use it. Others that are may not even be used by this process.
func (s *Space) noteDevice(access []cuda.Access) error {
	current, err := s.driver.CurrentDevice()
	if err != nil { // no context: nothing is about to be used
		return nil
	}
	for _, a := range access {
		if a.LocationType == cuda.LocationDevice && a.Location == current {
			_, err = s.device(current)
		}
	}
	return err
}

// without answers the rights that are not in have.
func without(want, have []cuda.Access) []cuda.Access {
	return slices.DeleteFunc(slices.Clone(want), func(a cuda.Access) bool { return slices.Contains(have, a) })
}

// AddressRange answers where the mapping that holds p starts, and its size.
func (s *Space) AddressRange(p cuda.Ptr) (cuda.Ptr, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, at, m := s.find(p)
	if h == nil {
		return 0, 0, ErrPass
	}
	if m != nil {
		return at, m.size, nil
	}
	return at, h.size, nil
}

// Retain answers the handle of the memory at p, with one more reference.
func (s *Space) Retain(p cuda.Ptr) (cuda.Handle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, _, _ := s.find(p)
	if h == nil {
		return 0, ErrPass
	}
	h.refs++
	return h.id, nil
}

// Release gives up one reference.
func (s *Space) Release(id cuda.Handle) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.lookup(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	h.refs--
	s.mu.Unlock()
	return s.endUnused(h)
}

// AddressFree undoes Reserve.
func (s *Space) AddressFree(p cuda.Ptr) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	s.mu.Lock()
	h, at, m := s.find(p)
	if h == nil || m != nil || at != p || h.reserved == 0 {
		s.mu.Unlock()
		return ErrPass
	}
	h.reserved--
	s.mu.Unlock()
	return s.endUnused(h)
}

// endUnused ends a handle that NCCL has let go of, and its block if nobody uses
// that any more. structure is held.
func (s *Space) endUnused(h *handle) error {
	s.mu.Lock()
	if h.refs > 0 || h.reserved > 0 || h.mapped > 0 || s.handles[h.id] != h {
		s.mu.Unlock()
		return nil
	}
	delete(s.handles, h.id)
	b := h.block
	if b == nil {
		s.mu.Unlock()
		return nil
	}
	b.removeHandle(h)
	if s.options.Region == "" {
		// Nobody tells when the dma-buf of NCCL's own buffer ends, but NCCL uses it no longer.
		s.unregister(func(r registration) bool {
			at := b.home + cuda.Ptr(h.off)
			return r.buffer && r.at >= at && r.at+cuda.Ptr(r.size) <= at+cuda.Ptr(roundUp(h.size, b.class.unit()))
		})
	}
	if b.slab {
		s.retire(b, span{h.off, roundUp(h.size, b.class.unit())}, h.exported)
	}
	if h.owed {
		s.peers.Ended(*b.owner, peer.Part{b.id, h.off})
	}
	s.mu.Unlock()
	return s.endEmpty(b)
}

// endEmpty ends a block that nobody uses. Own memory goes back to the device as
// a whole only, so the slabs on it end together. structure is held.
func (s *Space) endEmpty(b *block) error {
	if b.owner != nil { // no other thread maps it meanwhile, or imports it anew before it is unmapped
		attaching := b.attaching()
		attaching.Lock()
		defer attaching.Unlock()
	}
	s.mu.Lock()
	ending := s.endable(b)
	for _, b := range ending {
		if b.owner != nil {
			delete(s.imports, importKey{b.owner.ID, b.id})
			s.peers.Drop(*b.owner, b.id) // before another thread can fetch it again
		} else {
			delete(s.blocks, b.id)
			s.slabs[b.class] = slices.DeleteFunc(s.slabs[b.class], func(other *block) bool { return other == b })
		}
		if b.home != 0 {
			s.removeRange(b.home)
		}
		b.mem.blocks = slices.DeleteFunc(slices.Clone(b.mem.blocks), func(other *block) bool { return other == b })
	}
	if len(ending) > 0 {
		s.broadcast()
		if b.mem.filling {
			s.ended = append(s.ended, ending...)
			ending = nil
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, b := range ending {
		errs = append(errs, s.discard(b))
	}
	if b.owner != nil && len(ending) > 0 {
		s.options.Imported()
	}
	return errors.Join(errs...)
}

// endable lists the blocks that end if b does: none where something is still
// used, or where b has ended already. mu is held.
func (s *Space) endable(b *block) []*block {
	if !b.unused() || !slices.Contains(b.mem.blocks, b) {
		return nil
	}
	if b.owner != nil || !b.mem.live {
		return []*block{b}
	}
	if slices.ContainsFunc(b.mem.blocks, func(b *block) bool { return !b.unused() }) {
		return nil
	}
	return b.mem.blocks
}

// Properties answers what kind of memory the handle is.
func (s *Space) Properties(id cuda.Handle) (cuda.Prop, error) {
	h, err := s.lookup(id)
	if err != nil {
		return cuda.Prop{}, err
	}
	return h.prop, nil
}

// BindMulticast binds the handle's memory to a multicast object; from then on
// it stays where it is.
func (s *Space) BindMulticast(multicast cuda.Handle, multicastOffset uint64, id cuda.Handle, offset, size, flags uint64) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.bound(id)
	if err != nil {
		return err
	}
	if h.block.slab {
		return fmt.Errorf("NCCL binds a part of a slab to a multicast object; set AMEM_ARENA=0: %w", cuda.ErrNotSupported)
	}
	s.mu.Lock()
	before := h.block.mem.keep
	h.block.mem.keep = KeepMulticast
	phys := h.block.mem.phys
	s.mu.Unlock()
	if err := s.driver.BindMulticast(multicast, multicastOffset, phys, offset, size, flags); err != nil {
		s.mu.Lock()
		h.block.mem.keep = before
		s.mu.Unlock()
		return err
	}
	return nil
}

// Export writes a shareable handle to where NCCL wants it: a descriptor that
// names the memory, or the driver's own for memory that stays where it is.
func (s *Space) Export(shareable unsafe.Pointer, id cuda.Handle, handleType int, flags uint64) error {
	s.structure.RLock()
	defer s.structure.RUnlock()
	h, err := s.bound(id)
	if err != nil {
		return err
	}
	b := h.block
	if handleType != cuda.FileDescriptor || (b.owner == nil && b.home == 0) {
		if b.slab {
			return fmt.Errorf("export a part of a slab as handle type %d: %w", handleType, cuda.ErrNotSupported)
		}
		return s.driver.ExportTo(shareable, b.mem.phys, handleType, flags)
	}
	if err := s.share(b); err != nil {
		return err
	}
	fd, err := s.describe(h)
	if err != nil {
		return err
	}
	s.mu.Lock()
	h.exported = true
	s.mu.Unlock()
	*(*int32)(shareable) = int32(fd)
	return nil
}
