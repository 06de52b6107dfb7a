package vmm

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
)

// Why memory stays on the device during a pause.
const (
	KeepUser      = "user"      // made for users or windows: ncclMemAlloc, symmetric windows
	KeepFabric    = "fabric"    // shared with other nodes by FABRIC handles
	KeepMulticast = "multicast" // bound to a multicast object (NVLS)
	KeepNIC       = "nic"       // registered with a network interface
	KeepGroup     = "group"     // shared with a process of another group
)

// memory is one physical allocation: of a slab, of a single handle, or, since
// the last resume, of slabs that stand side by side. It is this process's own,
// or a peer's. Calls of the driver cost by the piece, so the fewer the better.
//
// The fields below mu's line are guarded by Space.mu; they change with a driver
// call only while Space.structure is held, for reading by NCCL's calls and for
// writing by a pause or a resume.
type memory struct {
	owner *peer.Identity // nil: own
	prop  cuda.Prop
	size  uint64
	home  cuda.Ptr // where it is mapped as a whole; 0: nowhere of our choosing

	// rights is held while threads of NCCL's, or an Attach, change where it is
	// mapped and who has access: the driver fails one of two threads that give
	// access to one mapping at once (CUDA_ERROR_ALREADY_MAPPED, seen on H200). It
	// is taken after Space.structure and before Space.mu.
	rights sync.Mutex

	// Guarded by mu.
	blocks     []*block // own: by address
	live       bool     // the physical memory is there
	phys       cuda.Handle
	fd         int    // of own memory that peers may fetch, while live; else -1
	generation uint64 // a peer's: of the owner's memory
	access     []cuda.Access
	extra      []*mapping // where NCCL mapped it beside home
	keep       string     // one of Keep*; "": released by a pause
	filling    bool       // contents are being copied in: not to be freed or carved
	missing    []*mapping // not live: phys is there all the same, and mapped but for these
	copied     cuda.Event // during a pause: when its contents are on the host; 0: none are kept
}

// mapping is an address range at which NCCL itself mapped a block's memory.
type mapping struct {
	at     cuda.Ptr
	size   uint64
	block  *block
	access []cuda.Access
}

// maxMemory is how far adjacent slabs of NCCL's are put together: a larger allocation
// saves few calls, and can be given back only when all of it is unused.
const maxMemory = 512 << 20

// littleMemory is how far they are put together whoever maps them, and the most for a
// region, whose tensors come and go, and where NICs are used, which keep all of it. On H200, giving
// access to 64 MB takes 22 to 92 us and to 512 MB 550 to 950; importing a piece takes
// 80, and 300 and more while four processes do.
const littleMemory = 64 << 20

// shared tells whether peers may fetch it. mu is held.
func (m *memory) shared() bool {
	return slices.ContainsFunc(m.blocks, func(b *block) bool { return b.shared })
}

// places lists where the memory is mapped.
func (m *memory) places() []*mapping {
	if m.home == 0 {
		return m.extra
	}
	return append([]*mapping{{at: m.home, size: m.size, access: m.access}}, m.extra...)
}

// contents lists what is kept on the host of its blocks.
func (m *memory) contents() []*offload.Contents {
	var list []*offload.Contents
	for _, b := range m.blocks {
		if b.contents != nil {
			list = append(list, b.contents)
		}
	}
	return list
}

// materialise makes own physical memory, mapped where it belongs. On failure
// all is as it was. structure is held.
func (s *Space) materialise(m *memory) (err error) {
	if m.missing != nil { // the driver has refused to give it back
		if err := s.mapAll(m.missing, m.phys); err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		m.missing, m.live = nil, true
		return nil
	}
	phys, err := s.driver.Create(m.size, m.prop, 0)
	if err != nil {
		return err
	}
	fd := -1
	defer func() {
		if err != nil {
			if fd >= 0 {
				s.driver.CloseFD(fd)
			}
			err = errors.Join(err, s.driver.Release(phys))
		}
	}()
	s.mu.Lock()
	shared := m.shared()
	s.mu.Unlock()
	if shared {
		if fd, err = s.driver.ExportFD(phys); err != nil {
			return err
		}
	}
	if err = s.mapAll(m.places(), phys); err != nil {
		return err
	}
	s.mu.Lock()
	m.phys, m.fd, m.live = phys, fd, true
	s.mu.Unlock()
	return nil
}

// mapOne maps physical memory at one place.
func (s *Space) mapOne(m *mapping, phys cuda.Handle) error {
	if err := s.driver.Map(m.at, m.size, 0, phys, 0); err != nil {
		return err
	}
	if len(m.access) == 0 { // NCCL has not set it yet
		return nil
	}
	if err := s.driver.SetAccess(m.at, m.size, m.access); err != nil {
		return errors.Join(err, s.driver.Unmap(m.at, m.size))
	}
	return nil
}

// mapAll maps physical memory at all the places, or at none.
func (s *Space) mapAll(places []*mapping, phys cuda.Handle) error {
	for i, m := range places {
		if err := s.mapOne(m, phys); err != nil {
			for _, done := range places[:i] {
				err = errors.Join(err, s.driver.Unmap(done.at, done.size))
			}
			return err
		}
	}
	return nil
}

// evaporate takes physical memory away; its addresses stay reserved. On
// failure all is as it was, or, where that fails too, the memory is not live, and
// materialise makes it whole again. structure is held.
func (s *Space) evaporate(m *memory) (err error) {
	s.mu.Lock()
	phys, fd := m.phys, m.fd
	m.live, m.fd = false, -1
	unmapped := m.missing
	m.missing = nil
	s.mu.Unlock()
	defer func() {
		if err == nil {
			if fd >= 0 {
				s.driver.CloseFD(fd)
			}
			return
		}
		var missing []*mapping
		for _, place := range unmapped {
			if mapErr := s.mapOne(place, phys); mapErr != nil {
				missing = append(missing, place)
				err = errors.Join(err, mapErr)
			}
		}
		s.mu.Lock()
		m.live, m.fd, m.missing = len(missing) == 0, fd, missing
		s.mu.Unlock()
	}()
	for _, place := range m.places() {
		if slices.ContainsFunc(unmapped, func(done *mapping) bool { return done.at == place.at }) {
			continue
		}
		if err := s.driver.Unmap(place.at, place.size); err != nil {
			return fmt.Errorf("unmap %d bytes: %w", place.size, err)
		}
		unmapped = append(unmapped, place)
	}
	if err := s.driver.Release(phys); err != nil {
		return fmt.Errorf("release %d bytes: %w", m.size, err)
	}
	return nil
}

// window is a range of addresses in which an owner's slabs of one class stand
// side by side, in the order in which they were made, so that one allocation
// can back several of them. Peers keep a window of the same size for it, with
// the slabs at the same offsets. No address in it is used twice, since peers
// may let go of a slab later than its owner.
type window struct {
	id   uint64 // the owner's number of it: its address may be that of a later one
	base cuda.Ptr
	size uint64

	// attaching is held while a peer's memory is mapped in it, and unmapped at its
	// end, so that two threads don't map the same, nor one what another unmaps. It
	// is taken after Space.structure.
	attaching sync.Mutex

	// Guarded by mu.
	next   uint64 // the owner's: where the next slab goes
	blocks int
}

// windowNumbers counts the windows that this process has made.
var windowNumbers atomic.Uint64

// windowSize is far more than a device's class of slabs takes at one time.
// Addresses cost nothing until they are mapped.
const windowSize = 64 << 30

// settle gives a new own block its home. structure is held, and for slabs the
// right to make room in the class.
func (s *Space) settle(b *block) error {
	if b.slab {
		if s.fit(b) {
			return nil
		}
		base, err := s.driver.Reserve(windowSize, 0, 0, 0)
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.windows[b.class] = &window{id: windowNumbers.Add(1), base: base, size: windowSize}
		s.mu.Unlock()
		s.fit(b)
		return nil
	}
	home, err := s.driver.Reserve(b.size, 0, 0, 0)
	b.home = home
	return err
}

// fit gives a slab its home in the window of its class, if that has room. One
// hold of mu finds the window and takes a part of it: unsettle gives a window
// without blocks back.
func (s *Space) fit(b *block) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.windows[b.class]
	if w == nil || w.size-w.next < b.size {
		return false
	}
	b.window, b.home = w, w.base+cuda.Ptr(w.next)
	w.next += b.size
	w.blocks++
	return true
}

// unsettle gives a block's home back, and its window with the last one.
func (s *Space) unsettle(b *block) error {
	at, size := b.home, b.size
	if w := b.window; w != nil {
		s.mu.Lock()
		w.blocks--
		last := w.blocks == 0
		if last && s.windows[b.class] == w {
			delete(s.windows, b.class)
		}
		if last && b.owner != nil {
			delete(s.views, importKey{b.owner.ID, w.id})
		}
		s.mu.Unlock()
		if !last {
			return nil
		}
		at, size = w.base, w.size
	}
	if at == 0 {
		return nil
	}
	if err := s.driver.AddressFree(at, size); err != nil {
		return fmt.Errorf("free %d bytes of addresses: %w", size, err)
	}
	return nil
}

// regroup puts own slabs that have no memory now, stand side by side and are
// mapped by the same peers on common memory: peers map all of it, and what giving
// access to much memory costs goes by its size. Little costs by the piece, so that
// much is put together whoever maps it. Where processes of other groups share memory
// with this one, no more is: what they fetch later keeps all that it stands on. mu is held.
func (s *Space) regroup() {
	limit := uint64(maxMemory)
	if s.options.Region != "" || s.network || s.outside {
		limit = littleMemory
	}
	var blocks []*block
	for _, b := range s.blocks {
		if !b.mem.live && b.mem.missing == nil && b.window != nil {
			blocks = append(blocks, b)
		}
	}
	slices.SortFunc(blocks, func(a, b *block) int { return compare(a.home, b.home) })
	var last *memory
	var users []peer.ID // of last
	for _, b := range blocks {
		m, others := b.mem, s.peers.Importers(b.id)
		if last != nil && last.home+cuda.Ptr(last.size) == b.home && last.blocks[0].window == b.window &&
			last.size+b.size <= limit && (slices.Equal(users, others) || last.size+b.size <= littleMemory) &&
			last.keep == m.keep && slices.Equal(last.access, m.access) {
			users = slices.Compact(slices.SortedFunc(slices.Values(slices.Concat(users, others)), peer.ID.Compare))
			last.blocks = append(last.blocks, b)
			last.size += b.size
			b.mem = last
			continue
		}
		last = &memory{prop: m.prop, size: b.size, home: b.home, blocks: []*block{b}, fd: -1, access: m.access, keep: m.keep}
		b.mem, users = last, others
	}
}
