package vmm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/peer"
)

// Descriptor says which part of whose memory is shared. NCCL passes it on as the
// contents of a sealed memfd, as it would pass the driver's own descriptor. Of a
// region's memory, the owner gives it to who asks. Sizes and offsets are bytes.
type Descriptor struct {
	Magic     string
	Owner     peer.Identity
	Block     uint64
	BlockSize uint64
	Offset    uint64
	Size      uint64
	Number    uint64 // of the chunk: what stands there later has another
	Prop      cuda.Prop
	// Of a slab: the window that the block stands in, and where.
	Window     uint64 `json:",omitempty"`
	WindowSize uint64 `json:",omitempty"`
	At         uint64 `json:",omitempty"`
	Tag        string `json:",omitempty"` // of a region's memory
}

const (
	descriptorMagic = "amem memory 1"
	maxDescriptor   = 4 << 10
	seals           = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
)

func (s *Space) descriptor(h *handle) Descriptor {
	b := h.block
	owner := s.peers.Self()
	if b.owner != nil {
		owner = *b.owner
	}
	d := Descriptor{Magic: descriptorMagic, Owner: owner, Block: b.id, BlockSize: b.size, Offset: h.off, Size: h.size,
		Number: h.number, Prop: h.prop, Tag: s.options.Region}
	if b.window != nil {
		d.Window, d.WindowSize, d.At = b.window.id, b.window.size, uint64(b.home-b.window.base)
	}
	return d
}

// describe makes a file descriptor, the caller's to close, of the handle's memory.
func (s *Space) describe(h *handle) (int, error) {
	body, err := json.Marshal(s.descriptor(h))
	if err != nil {
		return -1, err
	}
	// Where vm.memfd_noexec is 2, a file must be made so; before Linux 6.3 it can't be.
	fd, err := unix.MemfdCreate("amem", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate("amem", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return -1, fmt.Errorf("make a memory descriptor: %w", err)
	}
	if _, err = unix.Write(fd, body); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("make a memory descriptor: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// readDescriptor answers ErrPass for a file that is no descriptor of amem's.
func readDescriptor(fd int) (Descriptor, error) {
	// Only a memfd has seals: a file of the driver's is not read. There may be more
	// of them than amem sets: vm.memfd_noexec adds one.
	if got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || got&seals != seals {
		return Descriptor{}, ErrPass
	}
	body := make([]byte, maxDescriptor)
	n, err := unix.Pread(fd, body, 0)
	if err != nil {
		return Descriptor{}, ErrPass
	}
	return ParseDescriptor(body[:n])
}

// ParseDescriptor reads and checks a descriptor, and answers ErrPass for what is
// none.
func ParseDescriptor(body []byte) (d Descriptor, err error) {
	if json.Unmarshal(body, &d) != nil || d.Magic != descriptorMagic {
		return Descriptor{}, ErrPass
	}
	if d.Size == 0 || d.BlockSize == 0 || d.Offset > d.BlockSize || d.Size > d.BlockSize-d.Offset ||
		(d.Offset+d.Size)%smallUnit != 0 || d.BlockSize > 1<<46 {
		return Descriptor{}, fmt.Errorf("a memory descriptor of %s claims %d bytes at %d of %d: %w",
			d.Owner, d.Size, d.Offset, d.BlockSize, cuda.ErrInvalidValue)
	}
	if d.WindowSize != 0 && (d.WindowSize > 1<<46 || d.At%largeUnit != 0 || d.At > d.WindowSize || d.BlockSize > d.WindowSize-d.At) {
		return Descriptor{}, fmt.Errorf("a memory descriptor of %s claims %d bytes at %d of a window of %d: %w",
			d.Owner, d.BlockSize, d.At, d.WindowSize, cuda.ErrInvalidValue)
	}
	return d, nil
}

// share makes the block's memory available to peers. structure is held.
func (s *Space) share(b *block) error {
	s.mu.Lock()
	if b.owner != nil || b.shared {
		s.mu.Unlock()
		return nil
	}
	m := b.mem
	exported := !m.live || m.fd >= 0 // what is not there is exported when it comes
	s.mu.Unlock()
	fd := -1
	if !exported {
		var err error
		if fd, err = s.driver.ExportFD(m.phys); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if fd >= 0 && m.fd >= 0 { // another thread was faster
		s.driver.CloseFD(fd)
	} else if fd >= 0 {
		m.fd = fd
	}
	b.shared = true
	s.broadcast()
	return nil
}

// Serve implements peer.Handler. It makes no driver call. While it waits it holds
// no descriptor, which would keep memory that is given back meanwhile.
func (s *Space) Serve(ctx context.Context, to peer.Identity, ids []uint64) (list []peer.Memory, generation uint64, err error) {
	for {
		s.mu.Lock()
		list, err = s.serve(to, ids)
		generation = s.generation
		changed := s.changed
		s.mu.Unlock()
		if list != nil || err != nil {
			return list, generation, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, 0, peer.ErrPaused
		}
	}
}

// serve answers the blocks, with a descriptor of each memory that they are in, or
// nil if one has no memory now. mu is held.
func (s *Space) serve(to peer.Identity, ids []uint64) ([]peer.Memory, error) {
	for _, id := range ids {
		b := s.blocks[id]
		if b == nil || !b.shared {
			return nil, peer.ErrGone
		}
		if m := b.mem; !m.live || m.fd < 0 || (m.keep == "" && s.leaving) {
			return nil, nil
		}
	}
	list := []peer.Memory{}
	at := map[*memory]int{}
	for _, id := range ids {
		b := s.blocks[id]
		m := b.mem
		if to.Group != s.peers.Self().Group && (m.keep == "" || m.keep == KeepNIC) && s.options.Region == "" {
			m.keep, s.outside = KeepGroup, true
		}
		i, known := at[m]
		if !known {
			fd, err := unix.FcntlInt(uintptr(m.fd), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				closeAll(list)
				return nil, err
			}
			i, at[m] = len(list), len(list)
			list = append(list, peer.Memory{FD: fd, Size: m.size})
		}
		list[i].Blocks = append(list[i].Blocks, peer.Place{Block: id, Offset: uint64(b.home - m.home)})
	}
	return list, nil
}

func closeAll(list []peer.Memory) {
	for _, m := range list {
		_ = unix.Close(m.FD)
	}
}

// Import answers a handle of the memory that fd stands for. NCCL closes fd.
func (s *Space) Import(fd int) (cuda.Handle, error) {
	d, err := readDescriptor(fd)
	if err != nil {
		return 0, err
	}
	return s.importOf(d)
}

// importOf answers a handle of the memory that is described.
func (s *Space) importOf(d Descriptor) (cuda.Handle, error) {
	if d.Owner.ID == s.peers.Self().ID {
		return s.importOwn(d)
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	for {
		id, wait, err := s.view(d)
		if err != nil || wait == nil {
			return id, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return 0, fmt.Errorf("import memory of %s: another thread's fetch did not end: %w", d.Owner, cuda.ErrOperatingSystem)
		}
	}
}

// importOwn answers the handle of memory that another thread of this process
// exported.
func (s *Space) importOwn(d Descriptor) (cuda.Handle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.blocks[d.Block]
	if b == nil {
		return 0, fmt.Errorf("import freed memory: %w", cuda.ErrInvalidValue)
	}
	h := b.handleAt(d.Offset)
	if h == nil || h.off != d.Offset || h.number != d.Number {
		return 0, fmt.Errorf("import freed memory: %w", cuda.ErrInvalidValue)
	}
	h.refs++
	return h.id, nil
}

// view answers a handle of a part of an imported block, fetching the block if
// no thread has. Where another thread is about to, it answers what to wait for.
func (s *Space) view(d Descriptor) (cuda.Handle, <-chan struct{}, error) {
	key := importKey{d.Owner.ID, d.Block}
	s.mu.Lock()
	b := s.imports[key]
	if b == nil {
		owner := d.Owner
		b = &block{id: d.Block, owner: &owner, size: d.BlockSize, fetching: make(chan struct{}),
			mem: &memory{owner: &owner, prop: d.Prop, fd: -1}}
		b.mem.blocks = []*block{b}
		s.imports[key] = b
		s.mu.Unlock()
		first := s.firstView
		if d.WindowSize != 0 && s.options.Region == "" {
			first = s.promise
		}
		id, err := first(b, d)
		if err != nil {
			s.mu.Lock()
			delete(s.imports, key)
			b.arrived()
			s.mu.Unlock()
		}
		return id, nil, err
	}
	if b.fetching != nil {
		defer s.mu.Unlock()
		return 0, b.fetching, nil
	}
	if d.BlockSize != b.size {
		defer s.mu.Unlock()
		return 0, nil, fmt.Errorf("import memory of %s: a block of %d bytes is said to have %d: %w", d.Owner, b.size, d.BlockSize,
			cuda.ErrInvalidValue)
	}
	if h := b.handleAt(d.Offset); h != nil && h.off == d.Offset && h.number != d.Number {
		defer s.mu.Unlock()
		return 0, nil, fmt.Errorf("import memory of %s: what it has freed there is still in use here: %w", b.owner, cuda.ErrInvalidValue)
	}
	h := s.viewOf(b, d)
	begun := h.unclaimed && s.options.Region == "" && (b.mem.live || s.bringing[b.owner.ID]) && s.want(b) // else the resume claims it
	s.mu.Unlock()
	if begun {
		s.options.Imported()
	}
	return h.id, nil, nil
}

// viewOf answers the handle of a part of an imported block. mu is held.
func (s *Space) viewOf(b *block, d Descriptor) *handle {
	h := b.handleAt(d.Offset)
	if h != nil && h.off == d.Offset && h.size == d.Size {
		h.refs++
		return h
	}
	h = s.newHandle(d.Size, d.Prop)
	h.block, h.off, h.number = b, d.Offset, d.Number
	if b.window != nil { // else no other has the block after it
		h.unclaimed = true
		b.claims++
	}
	b.addHandle(h)
	return h
}

// firstView fetches, imports and maps a peer's block.
func (s *Space) firstView(b *block, d Descriptor) (id cuda.Handle, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	err = s.fetched(ctx, *b.owner, []uint64{b.id}, false, func(list []peer.Memory, generation uint64) error {
		if err := s.settleView(b, d); err != nil {
			return err
		}
		if err := s.attach(*b.owner, []*block{b}, list[0], generation); err != nil {
			return errors.Join(err, s.unsettle(b))
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		b.arrived() // whatever the owner says of it from now on counts
		if b.owner.Group != s.peers.Self().Group && s.options.Region == "" {
			b.mem.keep = KeepGroup
		}
		s.addRange(addressRange{at: b.home, size: b.size, block: b})
		id = s.viewOf(b, d).id
		return nil
	})
	if err != nil {
		s.peers.Drop(*b.owner, b.id) // it may have been fetched, once or several times
		return 0, fmt.Errorf("import memory of %s: %w", b.owner, err)
	}
	return id, nil
}

// arrived ends a block's first fetch. mu is held.
func (b *block) arrived() {
	close(b.fetching)
	b.fetching = nil
}

// fetched calls f with an owner's memory of the blocks, as of now: what the owner,
// or a pause here, has taken back since it answered, it is asked for again. What is
// paused is waited for, or if now is set, is an ErrPaused. f holds structure.
func (s *Space) fetched(ctx context.Context, owner peer.Identity, blocks []uint64, now bool,
	f func(list []peer.Memory, generation uint64) error) error {
	for again := true; again; {
		s.mu.Lock()
		letGos := s.letGos
		s.mu.Unlock()
		list, generation, err := s.peers.Fetch(ctx, owner, blocks, now)
		if err != nil {
			s.tellUnused(owner, blocks, nil)
			return err
		}
		s.structure.RLock()
		s.mu.Lock()
		again = s.letGos != letGos
		s.mu.Unlock()
		if !again {
			err = f(list, generation)
		}
		closeAll(list)
		s.tellUnused(owner, blocks, list)
		s.structure.RUnlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// tellUnused tells an owner which blocks of a fetch, whose descriptors are closed, are not
// mapped here.
func (s *Space) tellUnused(owner peer.Identity, ids []uint64, list []peer.Memory) {
	if s.options.Region != "" {
		return // its owner makes each process let go, and hears from each
	}
	var number uint64
	if len(list) > 0 {
		number = list[0].Number
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var unused []uint64
	for _, id := range ids { // one that has ended is dropped
		if b := s.imports[importKey{owner.ID, id}]; b != nil && !b.mem.live {
			unused = append(unused, id)
		}
	}
	if len(unused) > 0 {
		s.peers.Unmapped(owner, number, unused, nil)
	}
}

// tellOwners tells owners which of the peers' memory, all of which was mapped, is not any
// more.
func (s *Space) tellOwners(list []*memory) {
	if s.options.Region != "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	gone, kept := map[peer.Identity][]uint64{}, map[peer.Identity][]uint64{}
	for _, m := range list {
		to := gone
		if m.live {
			to = kept
		}
		for _, b := range m.blocks {
			to[*m.owner] = append(to[*m.owner], b.id)
		}
	}
	for owner, blocks := range gone {
		s.peers.Unmapped(owner, 0, blocks, kept[owner])
		delete(kept, owner)
	}
	for owner, blocks := range kept {
		s.peers.Unmapped(owner, 0, nil, blocks)
	}
}

// settleView gives a peer's block its home: for a slab, where it stands in the
// owner's window. structure is held.
func (s *Space) settleView(b *block, d Descriptor) (err error) {
	if d.WindowSize == 0 {
		b.home, err = s.driver.Reserve(b.size, 0, 0, 0)
		return err
	}
	key := importKey{d.Owner.ID, d.Window}
	s.mu.Lock()
	w := s.views[key]
	if w == nil {
		w = &window{id: d.Window, size: d.WindowSize}
		s.views[key] = w
	}
	w.blocks++
	s.mu.Unlock()
	b.window = w
	w.attaching.Lock()
	defer w.attaching.Unlock()
	if w.base == 0 {
		if w.base, err = s.driver.Reserve(w.size, 0, 0, 0); err != nil {
			return errors.Join(err, s.unsettle(b))
		}
	}
	if w.size != d.WindowSize {
		return errors.Join(fmt.Errorf("a window of %d bytes is said to have %d: %w", w.size, d.WindowSize, cuda.ErrInvalidValue),
			s.unsettle(b))
	}
	b.home = w.base + cuda.Ptr(d.At)
	return nil
}

// attach maps a peer's memory at the home of those of the blocks that stand on it, unless
// it is here already, or all of them have been freed meanwhile: what was imported anew
// under their numbers has no home yet. structure is held.
func (s *Space) attach(owner peer.Identity, blocks []*block, got peer.Memory, generation uint64) error {
	m := &memory{owner: &owner, size: got.Size, fd: -1, generation: generation}
	s.mu.Lock()
	for _, place := range got.Blocks {
		b := s.imports[importKey{owner.ID, place.Block}]
		if !slices.Contains(blocks, b) || b.here(generation) { // freed, or brought by another thread
			continue
		}
		home := b.home - cuda.Ptr(place.Offset)
		if !b.fits(place.Offset, got.Size) || (m.home != 0 && m.home != home) {
			s.mu.Unlock()
			return fmt.Errorf("%s says that a block of %d bytes stands at %d of %d bytes: %w", owner, b.size, place.Offset,
				got.Size, cuda.ErrInvalidValue)
		}
		m.home = home
		m.prop, m.extra, m.keep = b.mem.prop, b.mem.extra, b.mem.keep
		m.access = append(m.access, without(b.mem.access, m.access)...)
		m.blocks = append(m.blocks, b)
	}
	s.mu.Unlock()
	if len(m.blocks) == 0 {
		return nil
	}
	attaching := m.blocks[0].attaching()
	attaching.Lock()
	defer attaching.Unlock()
	if !s.stillImported(m) {
		return nil
	}
	if m.blocks[0].window != nil {
		if s.joined(m) {
			return s.widen(m.blocks[0], m.access)
		}
		if err := s.clearTheWay(m); err != nil {
			return err
		}
	}
	phys, err := s.driver.ImportFD(got.FD)
	if err != nil {
		return err
	}
	if err := s.mapAll(m.places(), phys); err != nil {
		return errors.Join(err, s.driver.Release(phys))
	}
	s.mu.Lock()
	m.phys, m.live = phys, true
	var since []cuda.Access // what NCCL has given access to meanwhile
	for _, b := range m.blocks {
		since = append(since, without(b.mem.access, m.access)...)
		b.mem = m
	}
	s.mu.Unlock()
	return s.widen(m.blocks[0], since)
}

// stillImported takes the blocks off m that have ended, and tells whether any is
// left. attaching is held: from now on none ends.
func (s *Space) stillImported(m *memory) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.blocks = slices.DeleteFunc(m.blocks, func(b *block) bool { return s.imports[importKey{b.owner.ID, b.id}] != b })
	return len(m.blocks) > 0
}

// fits tells whether the block can stand at the offset of memory of the size:
// inside it, and with all of it inside the block's window, if it has one.
func (b *block) fits(offset, size uint64) bool {
	if offset > size || b.size > size-offset {
		return false
	}
	if b.window == nil {
		return offset == 0 && size == b.size
	}
	at := uint64(b.home - b.window.base)
	return offset <= at && offset%largeUnit == 0 && size <= b.window.size-(at-offset)
}

// joined gives m's blocks the memory that another block of the same owner,
// place and generation has brought here, if one has. The window's attaching is held.
func (s *Space) joined(m *memory) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, there := range s.imported() {
		// What another group's process maps, its owner does not replace, as often as it pauses.
		same := there.generation == m.generation || there.keep == KeepGroup
		if there.live && *there.owner == *m.owner && there.home == m.home && there.size == m.size && same {
			for _, b := range m.blocks {
				if b.mem != there {
					b.mem = there
					there.blocks = append(there.blocks, b)
				}
			}
			return true
		}
	}
	return false
}

// clearTheWay lets go of what is mapped where m is to be, and puts its blocks on
// m: a pause could not let go of it, and its owner has put it together with other
// memory since. The window's attaching is held.
func (s *Space) clearTheWay(m *memory) error {
	s.mu.Lock()
	old := slices.DeleteFunc(s.imported(), func(there *memory) bool {
		return !there.live || *there.owner != *m.owner || there.home >= m.home+cuda.Ptr(m.size) ||
			m.home >= there.home+cuda.Ptr(there.size)
	})
	s.mu.Unlock()
	for _, there := range old {
		if err := s.letGo(there); err != nil {
			return err
		}
		s.mu.Lock()
		for _, b := range there.blocks {
			if !slices.Contains(m.blocks, b) && b.fits(uint64(b.home-m.home), m.size) {
				m.blocks = append(m.blocks, b)
				m.access = append(m.access, without(there.access, m.access)...)
			}
		}
		s.mu.Unlock()
	}
	return nil
}
