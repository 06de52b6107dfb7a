package vmm

import (
	"errors"
	"fmt"
	"slices"
	"sync"

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

// block is one physical allocation: a slab that many chunks are carved from,
// or the memory of a single handle. It is this process's own, or imported.
//
// The fields below mu's line are guarded by Space.mu; they change with a
// driver call only while Space.structure is held, for reading by NCCL's calls
// and for writing by a pause or a resume.
type block struct {
	id    uint64         // own: unique in this process; imported: the owner's number
	owner *peer.Identity // nil: own
	prop  cuda.Prop
	size  uint64
	slab  bool // carved; a block that isn't belongs to one handle
	class class
	home  cuda.Ptr // where it is mapped as a whole; 0: nowhere of our choosing

	// rights is held while threads of NCCL's, or an Attach, change where the
	// block is mapped and who has access: the driver fails one of two threads
	// that give access to one mapping at once (CUDA_ERROR_ALREADY_MAPPED, seen
	// on H200). It is taken after Space.structure and before Space.mu.
	rights sync.Mutex

	// Guarded by mu.
	live       bool // it has physical memory
	phys       cuda.Handle
	generation uint64 // imported: of the owner's memory
	access     []cuda.Access
	extra      []*mapping // where NCCL mapped it beside home
	keep       string     // one of Keep*; "": released by a pause
	shared     bool       // peers may fetch it: fd is valid while live
	fd         int
	free       []span            // carved: what is unused, by offset
	awaited    map[uint64]uint64 // carved: freed parts that peers may still write to, offset to size
	dirty      []span            // carved: freed parts, to be cleared before they are used again
	clearing   []span            // carved: those that are being cleared
	handles    []*handle         // by offset
	contents   *offload.Contents // while paused
	filling    bool              // contents are being copied in: not to be freed or carved
	fetching   chan struct{}     // imported: closed when the first fetch has ended
	lost       bool              // imported: the owner has freed it or has ended, and it is mapped no more
}

// mapping is an address range at which NCCL itself mapped a block.
type mapping struct {
	at     cuda.Ptr
	size   uint64
	block  *block
	access []cuda.Access
}

// span is a part of a block.
type span struct{ off, size uint64 }

// class tells slabs apart beyond their properties.
type class struct {
	prop  cuda.Prop
	large bool // chunks of 2 MiB and more, at multiples of that
	nic   bool // allocated where memory was registered with a NIC before
}

func (c class) unit() uint64 {
	if c.large {
		return largeUnit
	}
	return smallUnit
}

const (
	smallUnit = 64 << 10
	largeUnit = 2 << 20

	minSlabSmall = 2 << 20
	minSlabLarge = 16 << 20
	maxSlabSmall = 32 << 20
	maxSlabLarge = 256 << 20
	// A new slab is this part of what its class holds, so that the unused tail
	// of the newest one stays below 5 %.
	slabGrowth = 20
	// What is larger than this has nothing to gain from a slab.
	maxChunk = maxSlabLarge / 4
)

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

// slabSize answers the size of a class's next slab. It is a multiple of the
// chunk's, which more of its size follow: what is left behind the last one
// would stay unused.
func slabSize(c class, held, chunk uint64) uint64 {
	low, high := uint64(minSlabSmall), uint64(maxSlabSmall)
	if c.large {
		low, high = minSlabLarge, maxSlabLarge
	}
	size := max(min(max(held/slabGrowth, low), high), chunk)
	return roundUp(size/chunk*chunk, largeUnit)
}

// carve takes size bytes off the first free span that holds them.
func (b *block) carve(size uint64) (uint64, bool) {
	for i, f := range b.free {
		if f.size < size {
			continue
		}
		if f.size == size {
			b.free = slices.Delete(b.free, i, i+1)
		} else {
			b.free[i] = span{f.off + size, f.size - size}
		}
		return f.off, true
	}
	return 0, false
}

// uncarve gives a span back and joins it with its free neighbours.
func (b *block) uncarve(s span) {
	i, _ := slices.BinarySearchFunc(b.free, s, func(a, b span) int { return compare(a.off, b.off) })
	if i < len(b.free) && s.off+s.size == b.free[i].off {
		s.size += b.free[i].size
		b.free = slices.Delete(b.free, i, i+1)
	}
	if i > 0 && b.free[i-1].off+b.free[i-1].size == s.off {
		b.free[i-1].size += s.size
		return
	}
	b.free = slices.Insert(b.free, i, s)
}

func compare[T ~uint64](a, b T) int {
	if a < b {
		return -1
	}
	if a > b {
		return 1
	}
	return 0
}

// handleAt answers the handle whose part of the block holds the offset.
func (b *block) handleAt(off uint64) *handle {
	i, exact := slices.BinarySearchFunc(b.handles, off, func(h *handle, off uint64) int { return compare(h.off, off) })
	if !exact {
		i--
	}
	if i < 0 || off >= b.handles[i].off+b.handles[i].size {
		return nil
	}
	return b.handles[i]
}

func (b *block) addHandle(h *handle) {
	i, _ := slices.BinarySearchFunc(b.handles, h.off, func(h *handle, off uint64) int { return compare(h.off, off) })
	b.handles = slices.Insert(b.handles, i, h)
}

func (b *block) removeHandle(h *handle) {
	b.handles = slices.DeleteFunc(b.handles, func(other *handle) bool { return other == h })
}

// used answers how many bytes NCCL's handles take.
func (b *block) used() uint64 {
	if !b.slab {
		return b.size
	}
	var n uint64
	for _, h := range b.handles {
		n += roundUp(h.size, b.class.unit())
	}
	return n
}

// materialise gives an own block physical memory, mapped where it was or, the
// first time, somewhere. On failure the block is as it was. structure is held.
func (s *Space) materialise(b *block) (err error) {
	phys, err := s.driver.Create(b.size, b.prop, 0)
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
	if b.shared {
		if fd, err = s.driver.ExportFD(phys); err != nil {
			return err
		}
	}
	if b.home == 0 {
		if err = s.settle(b); err != nil {
			return err
		}
	}
	if err = s.mapAll(b.places(), phys); err != nil {
		return err
	}
	s.mu.Lock()
	b.phys, b.fd, b.live = phys, fd, true
	s.mu.Unlock()
	return nil
}

// settle reserves a new block's home.
func (s *Space) settle(b *block) error {
	home, err := s.driver.Reserve(b.size, 0, 0, 0)
	if err != nil {
		return err
	}
	b.home = home
	b.access = []cuda.Access{{LocationType: cuda.LocationDevice, Location: b.prop.Location, Flags: cuda.ReadWrite}}
	return nil
}

// places lists where the block is mapped.
func (b *block) places() []*mapping {
	if b.home == 0 {
		return b.extra
	}
	return append([]*mapping{{at: b.home, size: b.size, access: b.access}}, b.extra...)
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

// evaporate takes a block's physical memory away; its addresses stay
// reserved. On failure the block is as it was. structure is held.
func (s *Space) evaporate(b *block) (err error) {
	s.mu.Lock()
	phys, fd := b.phys, b.fd
	b.live, b.fd = false, -1
	s.mu.Unlock()
	var unmapped []*mapping
	defer func() {
		if err == nil {
			if fd >= 0 {
				s.driver.CloseFD(fd)
			}
			return
		}
		for _, m := range unmapped {
			err = errors.Join(err, s.mapOne(m, phys))
		}
		s.mu.Lock()
		b.live, b.fd = true, fd
		s.mu.Unlock()
	}()
	for _, m := range b.places() {
		if err := s.driver.Unmap(m.at, m.size); err != nil {
			return fmt.Errorf("unmap %d bytes: %w", m.size, err)
		}
		unmapped = append(unmapped, m)
	}
	if err := s.driver.Release(phys); err != nil {
		return fmt.Errorf("release %d bytes: %w", b.size, err)
	}
	return nil
}
