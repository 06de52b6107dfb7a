// Package vmm stands between NCCL and the driver's virtual memory functions.
//
// It owns the device memory that NCCL allocates and imports: NCCL gets virtual
// handles, valid over any number of pauses, and its allocations are carved
// from slabs, each one physical allocation mapped once. What does not follow
// NCCL's allocator's way (create, reserve, map) gets a physical allocation of
// its own, with the driver's own semantics.
//
// The program's own memory is kept in the same way: each of its regions is a
// Space of its own, which is paused and resumed by itself.
//
// Locks. Space.structure is held for reading while a call of NCCL's makes or
// frees blocks, and for writing while a pause or a resume releases or restores
// them: never while waiting for a peer, and never by the goroutines that serve
// peers. Space.mu guards the tables, is taken after structure, and is never
// held across a driver call.
package vmm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
)

// ErrPass says that the memory is not amem's: the driver must be called.
var ErrPass = errors.New("not amem's memory")

// Peers is what Space needs of a peer.Node.
type Peers interface {
	Self() peer.Identity
	Fetch(ctx context.Context, owner peer.Identity, blocks []uint64, now bool) ([]peer.Memory, uint64, error)
	Drop(owner peer.Identity, block uint64)
	Unmapped(owner peer.Identity, number uint64, gone, kept []uint64)
	Freed(block uint64)
	Importers(block uint64) []peer.ID // in order
	Outside(block uint64) bool        // whether one of another group is among them
	Settle(part peer.Part) (unused bool)
	Claim(ctx context.Context, owner peer.Identity, chunks []peer.Chunk) (freed []peer.Chunk, err error)
	Ended(owner peer.Identity, part peer.Part)
	Gone(who peer.Identity) bool
}

// Options of a Space.
type Options struct {
	Arena       bool                      // carve slabs; false: a physical allocation for each handle
	ControlOnly bool                      // keep only the control regions of shared buffers
	Timeout     time.Duration             // for a peer's memory
	Region      string                    // its tag, if the memory is the program's own; "": NCCL's
	Discard     bool                      // keep no contents
	Margin      func() uint64             // bytes of a device that an allocation leaves free; nil: none
	Reached     func(device int32) uint64 // which devices have peer access to a device, by bits; nil: none
	Numbers     *atomic.Uint64            // of blocks, where several Spaces serve the same peers
	// Imported is told when a peer's memory is wanted, has come, or is wanted no more.
	Imported func()
}

// Space is the device memory that NCCL has in this process.
type Space struct {
	driver  *cuda.Driver
	peers   Peers
	options Options

	structure sync.RWMutex
	store     offload.Store // of the last pause; guarded by structure
	paused    bool          // from a pause to the resume; guarded by structure

	mu         sync.Mutex
	changed    chan struct{} // closed, and replaced, when blocks are made, become live or end
	nextHandle uint64
	generation uint64 // of this process's memory: how often it was restored
	leaving    bool   // a pause is under way
	handles    map[cuda.Handle]*handle
	blocks     map[uint64]*block  // own
	slabs      map[class][]*block // those of blocks that are carved, oldest first
	imports    map[importKey]*block
	bringing   map[peer.ID]bool        // whose memory a goroutine brings here
	growing    map[class]chan struct{} // room in the class is being made
	ranges     []addressRange          // by address; what is mapped where
	windows    map[class]*window       // that new slabs go to
	views      map[importKey]*window   // of peers' slabs; the key's number is the window's
	devices    map[int32]*Device
	mourned    map[peer.ID]bool // owners whose end, with memory that is gone with them, the log has told of
	outside    bool             // a process of another group has fetched memory
	letGos     uint64           // how often peers' memory was let go of: by a pause, or for an owner's
	ended      []*block         // freed while contents were copied in: Fill discards them
	stuck      []*block         // ended, but the driver has refused to give the memory back: the next pause tries again
	registered []registration   // what NICs use now
	network    bool             // a NIC has used some
}

type importKey struct {
	owner peer.ID
	block uint64
}

// addressRange says which block stands at an address. m is nil at its home.
type addressRange struct {
	at    cuda.Ptr
	size  uint64
	block *block
	m     *mapping
}

// Device is a device that NCCL has memory on.
type Device struct {
	Ordinal  int32
	UUID     [16]byte
	Context  cuda.Context // NCCL's, as of its first allocation
	node     int          // the host's memory node next to it; -1: none
	rdma     bool         // a NIC can reach its memory
	stream   cuda.Stream  // for copies; made when first needed
	events   []cuda.Event // for copies; made when first needed
	clearing cuda.Stream  // for clearing what is to be used again; made when first needed
}

// New makes an empty Space. SetPeers must follow before its first use.
func New(driver *cuda.Driver, options Options) *Space {
	if options.Numbers == nil {
		options.Numbers = &atomic.Uint64{}
	}
	if options.Imported == nil {
		options.Imported = func() {}
	}
	return &Space{
		driver: driver, options: options, changed: make(chan struct{}),
		handles: map[cuda.Handle]*handle{}, blocks: map[uint64]*block{}, imports: map[importKey]*block{}, bringing: map[peer.ID]bool{},
		mourned: map[peer.ID]bool{},
		windows: map[class]*window{}, views: map[importKey]*window{},
		slabs: map[class][]*block{}, growing: map[class]chan struct{}{}, devices: map[int32]*Device{},
	}
}

// SetPeers connects the Space with other processes' memory.
func (s *Space) SetPeers(p Peers) { s.peers = p }

// Granularity is what NCCL's allocator rounds to; 0: what the driver says.
func (s *Space) Granularity() uint64 {
	if s.options.Arena {
		return smallUnit
	}
	return 0
}

// broadcast wakes those who wait for blocks. mu is held.
func (s *Space) broadcast() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// addRange notes what stands at an address. mu is held.
func (s *Space) addRange(r addressRange) {
	i, _ := slices.BinarySearchFunc(s.ranges, r.at, compareAt)
	s.ranges = slices.Insert(s.ranges, i, r)
}

// removeRange forgets it. mu is held.
func (s *Space) removeRange(at cuda.Ptr) {
	if i, found := slices.BinarySearchFunc(s.ranges, at, compareAt); found {
		s.ranges = slices.Delete(s.ranges, i, i+1)
	}
}

func compareAt(r addressRange, at cuda.Ptr) int { return compare(r.at, at) }

// rangeAt answers what stands at the address. mu is held.
func (s *Space) rangeAt(p cuda.Ptr) (addressRange, bool) {
	i, exact := slices.BinarySearchFunc(s.ranges, p, compareAt)
	if !exact {
		i--
	}
	if i < 0 || p >= s.ranges[i].at+cuda.Ptr(s.ranges[i].size) {
		return addressRange{}, false
	}
	return s.ranges[i], true
}

// find answers the handle whose memory is at p, and where that memory starts.
// mu is held.
func (s *Space) find(p cuda.Ptr) (h *handle, at cuda.Ptr, m *mapping) {
	r, ok := s.rangeAt(p)
	if !ok {
		return nil, 0, nil
	}
	if r.m != nil {
		if h = r.block.handleAt(0); h == nil {
			return nil, 0, nil
		}
		return h, r.at, r.m
	}
	if h = r.block.handleAt(uint64(p - r.at)); h == nil {
		return nil, 0, nil
	}
	return h, r.at + cuda.Ptr(h.off), nil
}

// device answers the device, and notes its context when it is new.
func (s *Space) device(ordinal int32) (*Device, error) {
	s.mu.Lock()
	d := s.devices[ordinal]
	s.mu.Unlock()
	if d != nil {
		return d, nil
	}
	ctx, err := s.driver.ContextOf(ordinal)
	if err != nil {
		return nil, err
	}
	uuid, err := s.driver.UUID(int(ordinal))
	if err != nil {
		return nil, err
	}
	d = &Device{Ordinal: ordinal, UUID: uuid, Context: ctx, node: s.driver.NUMANode(ordinal), rdma: s.driver.RDMA(ordinal)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.devices[ordinal] == nil {
		s.devices[ordinal] = d
	}
	return s.devices[ordinal], nil
}

// Devices lists the devices that NCCL has used.
func (s *Space) Devices() []*Device {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*Device
	for _, d := range s.devices {
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b *Device) int { return int(a.Ordinal - b.Ordinal) })
	return list
}

// newBlock makes an own block with physical memory at a home address, with h
// as its first handle. structure is held.
func (s *Space) newBlock(c class, size uint64, slab bool, h *handle) error {
	if err := s.keepMargin(size); err != nil {
		return err
	}
	b := &block{size: size, slab: slab, class: c}
	if slab {
		b.free = []span{{0, size}}
	}
	if err := s.settle(b); err != nil {
		return err
	}
	b.mem = &memory{prop: c.prop, size: size, home: b.home, blocks: []*block{b}, fd: -1,
		access: s.accessFor(c.prop.Location)}
	if err := s.materialise(b.mem); err != nil {
		return errors.Join(err, s.unsettle(b))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b.id = s.options.Numbers.Add(1)
	s.blocks[b.id] = b
	s.broadcast()
	if slab {
		s.slabs[c] = append(s.slabs[c], b)
		h.off, _ = b.carve(roundUp(h.size, c.unit()))
	}
	h.block = b
	b.addHandle(h)
	s.addRange(addressRange{at: b.home, size: b.size, block: b})
	return nil
}

// keepMargin fails where size bytes more would leave less than the margin free
// on the current context's device. A resume does not ask: it brings back what
// was there.
func (s *Space) keepMargin(size uint64) error {
	if s.options.Margin == nil || s.options.Margin() == 0 {
		return nil
	}
	free, _, err := s.driver.MemInfo()
	if margin := s.options.Margin(); err == nil && (size > free || free-size < margin) {
		err = fmt.Errorf("%d bytes are free, of which a margin of %d stays: %w", free, margin, cuda.ErrOutOfMemory)
	}
	return err
}

// discard ends a block that no handle uses; with the last block of its memory,
// that goes back to the device. It has been taken from the tables. structure
// is held, mu is not.
func (s *Space) discard(b *block) error {
	s.mu.Lock()
	last := (b.mem.live || b.mem.missing != nil) && len(b.mem.blocks) == 0
	s.mu.Unlock()
	if last {
		if err := s.evaporate(b.mem); err != nil {
			s.mu.Lock()
			s.stuck = append(s.stuck, b)
			s.tellOwner(b, true)
			s.mu.Unlock()
			return err
		}
		s.mu.Lock()
		s.tellOwner(b, false)
		s.mu.Unlock()
	}
	err := s.unsettle(b)
	if b.owner == nil {
		s.peers.Freed(b.id)
	}
	return err
}

// discardStuck tries again to give back what the driver has refused to. structure is
// held for writing.
func (s *Space) discardStuck() {
	s.mu.Lock()
	stuck := s.stuck
	s.stuck = nil
	s.mu.Unlock()
	for _, b := range stuck {
		if err := s.discard(b); err != nil {
			slog.Warn("memory that was freed stays on the device until the next pause", "bytes", b.size, "error", err)
		}
	}
}

// tellOwner tells the owner of a peer's block that has ended, whose Drop was said
// before it was unmapped, if it stays mapped after all, and once it does not. mu is held.
func (s *Space) tellOwner(b *block, kept bool) {
	switch {
	case b.owner == nil || s.options.Region != "" || (!kept && !b.told):
	case kept:
		b.told = true
		s.peers.Unmapped(*b.owner, 0, nil, []uint64{b.id})
	default:
		s.peers.Unmapped(*b.owner, 0, []uint64{b.id}, nil)
	}
}
