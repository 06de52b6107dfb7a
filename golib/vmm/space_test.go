package vmm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/simtest"
)

const (
	kib = uint64(1) << 10
	mib = uint64(1) << 20
)

func TestMain(m *testing.M) { simtest.Main(m) }

// network stands for the sockets between the Spaces of one test.
type network struct {
	mu     sync.Mutex
	spaces map[peer.ID]*Space
	gone   map[peer.ID]bool
	ready  map[peer.ID]uint64 // the generation that an owner has announced
	drops  map[uint64]int     // by block
	freed  map[uint64]int
	users  map[importKey]int       // of parts that their owners have freed
	maps   map[importKey][]peer.ID // who maps whose block

	// Called at each fetch of these blocks, before it is answered and after; nil: not.
	fetching, fetched func(blocks []uint64)
	claiming          func() // at each claim, before it is answered; nil: not
	settling          func() // called when those who map a freed part have answered
	claimError        error
}

func newNetwork() *network {
	return &network{spaces: map[peer.ID]*Space{}, gone: map[peer.ID]bool{}, ready: map[peer.ID]uint64{},
		drops: map[uint64]int{}, freed: map[uint64]int{}, users: map[importKey]int{},
		maps: map[importKey][]peer.ID{}}
}

// port is one Space's Peers.
type port struct {
	*network
	self peer.Identity
}

func (p port) Self() peer.Identity { return p.self }

func (p port) Fetch(ctx context.Context, owner peer.Identity, blocks []uint64, _ bool) ([]peer.Memory, uint64, error) {
	if p.fetching != nil {
		p.fetching(blocks)
	}
	p.mu.Lock()
	space := p.spaces[owner.ID]
	for _, b := range blocks {
		key := importKey{owner.ID, b}
		p.maps[key] = slices.Compact(slices.SortedFunc(slices.Values(append(p.maps[key], p.self.ID)), peer.ID.Compare))
	}
	p.mu.Unlock()
	if space == nil || p.Gone(owner) {
		return nil, 0, peer.ErrGone
	}
	list, generation, err := space.Serve(ctx, p.self, blocks)
	if p.fetched != nil {
		p.fetched(blocks)
	}
	return list, generation, err
}

func (p port) Drop(owner peer.Identity, block uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drops[block]++
	key := importKey{owner.ID, block}
	p.maps[key] = slices.DeleteFunc(slices.Clone(p.maps[key]), func(id peer.ID) bool { return id == p.self.ID })
}

func (p port) Unmapped(peer.Identity, uint64, []uint64, []uint64) {}

func (p port) Importers(block uint64) []peer.ID {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.maps[importKey{p.self.ID, block}]
}

func (p port) Outside(block uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.maps[importKey{p.self.ID, block}], func(id peer.ID) bool {
		return !p.gone[id] && p.spaces[id] != nil && p.spaces[id].peers.Self().Group != p.self.Group
	})
}

func (p port) Freed(block uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.freed[block]++
}

// Settle asks the Spaces that have fetched the block, on a goroutine as a Node does.
func (p port) Settle(part peer.Part) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	var others []*Space
	for id, space := range p.spaces {
		if slices.Contains(p.maps[importKey{p.self.ID, part[0]}], id) && !p.gone[id] {
			others = append(others, space)
		}
	}
	if len(others) == 0 {
		return true
	}
	go func() {
		users := 0
		for _, space := range others {
			users += len(space.Held(p.self, []peer.Part{part}))
		}
		if p.settling != nil {
			p.settling()
		}
		p.used(p.self, part, users)
	}()
	return false
}

// Claim asks the owner's Space, as a Node does.
func (p port) Claim(_ context.Context, owner peer.Identity, chunks []peer.Chunk) ([]peer.Chunk, error) {
	p.mu.Lock()
	space := p.spaces[owner.ID]
	p.mu.Unlock()
	if p.claiming != nil {
		p.claiming()
	}
	if space == nil || p.Gone(owner) {
		return nil, peer.ErrGone
	}
	return space.Outlived(chunks), p.claimError
}

func (p port) Ended(owner peer.Identity, part peer.Part) {
	go p.used(owner, part, -1)
}

// used counts who uses a part that its owner has freed.
func (n *network) used(owner peer.Identity, part peer.Part, change int) {
	key := importKey{owner.ID, part[0]<<40 | part[1]}
	n.mu.Lock()
	n.users[key] += change
	settled, space := n.users[key] == 0, n.spaces[owner.ID]
	n.mu.Unlock()
	if settled {
		space.Settled(part)
	}
}

func (p port) Gone(who peer.Identity) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone[who.ID]
}

func (n *network) generation(who peer.Identity) uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ready[who.ID]
}

func (n *network) space(group int, options Options) *Space {
	s := New(simtest.Driver(), options)
	n.mu.Lock()
	defer n.mu.Unlock()
	var id peer.ID
	id[0] = byte(len(n.spaces) + 1)
	n.spaces[id] = s
	s.SetPeers(port{n, peer.Identity{ID: id, PID: 1000 + len(n.spaces), Group: group}})
	return s
}

// newSpace makes a Space without peers whose memory is all given back when the
// test has freed what it allocated: that is checked at its end.
func newSpace(t *testing.T, options Options) *Space {
	t.Helper()
	if options.Timeout == 0 {
		options.Timeout = 5 * time.Second
	}
	givesBack(t)
	simtest.On(t, 0)
	return newNetwork().space(0, options)
}

// givesBack checks at the test's end that the devices have what they had.
func givesBack(t *testing.T) {
	t.Helper()
	before := [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)}
	t.Cleanup(func() {
		if !t.Failed() {
			require.Eventually(t, func() bool { return before == [2]uint64{simtest.Used(t, 0), simtest.Used(t, 1)} },
				5*time.Second, time.Millisecond, "device memory not given back")
		}
	})
}

func prop(device int) cuda.Prop {
	return cuda.Prop{Type: 1, HandleTypes: cuda.FileDescriptor, LocationType: cuda.LocationDevice, Location: int32(device)}
}

func rights(device int) []cuda.Access {
	return []cuda.Access{{LocationType: cuda.LocationDevice, Location: int32(device), Flags: cuda.ReadWrite}}
}

// nccl calls a Space as the hook does for NCCL: what is not amem's goes to the
// driver.
type nccl struct {
	*Space
	device int
}

// buffer is what NCCL's allocator made.
type buffer struct {
	at     cuda.Ptr
	size   uint64
	handle cuda.Handle
}

func (n nccl) granularity() uint64 {
	if g := n.Granularity(); g != 0 {
		return g
	}
	return 2 * mib
}

// allocate follows NCCL's allocator.
func (n nccl) allocate(size uint64) (b buffer, err error) {
	b.size = roundUp(size, n.granularity())
	if b.handle, err = n.Create(b.size, prop(n.device), 0, true); err != nil {
		return b, fmt.Errorf("create: %w", err)
	}
	if b.at, err = n.reserve(b.size, n.granularity(), 0, b.handle); err != nil {
		return b, errors.Join(fmt.Errorf("reserve: %w", err), n.Release(b.handle))
	}
	return b, n.finish(b)
}

func (n nccl) finish(b buffer) error {
	if err := n.Map(b.at, b.size, 0, b.handle, 0); err != nil {
		return fmt.Errorf("map: %w", err)
	}
	if err := n.SetAccess(b.at, b.size, rights(n.device)); err != nil {
		return fmt.Errorf("set access: %w", err)
	}
	return nil
}

func (n nccl) reserve(size, alignment uint64, at cuda.Ptr, pending cuda.Handle) (cuda.Ptr, error) {
	p, err := n.Reserve(size, alignment, at, 0, pending)
	if errors.Is(err, ErrPass) {
		return simtest.Driver().Reserve(size, alignment, at, 0)
	}
	return p, err
}

// free follows NCCL's ncclCuMemFree.
func (n nccl) free(at cuda.Ptr) error {
	h, err := n.Retain(at)
	if err != nil {
		return fmt.Errorf("retain: %w", err)
	}
	if err := n.Release(h); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	_, size, err := n.AddressRange(at)
	if err != nil {
		return fmt.Errorf("address range: %w", err)
	}
	if err := n.Unmap(at, size); err != nil {
		return fmt.Errorf("unmap: %w", err)
	}
	if err := n.Release(h); err != nil {
		return fmt.Errorf("last release: %w", err)
	}
	err = n.AddressFree(at)
	if errors.Is(err, ErrPass) {
		err = simtest.Driver().AddressFree(at, size)
	}
	if err != nil {
		return fmt.Errorf("address free: %w", err)
	}
	return nil
}

func (n nccl) mustAllocate(t *testing.T, size uint64) buffer {
	t.Helper()
	b, err := n.allocate(size)
	require.NoError(t, err)
	return b
}

func (n nccl) mustFree(t *testing.T, buffers ...buffer) {
	t.Helper()
	for _, b := range buffers {
		require.NoError(t, n.free(b.at))
	}
}

// fill gives each buffer contents of its own; filled checks them.
func fill(buffers []buffer) {
	for i, b := range buffers {
		simtest.Fill(b.at, uint64(i+1), b.size)
	}
}

func filled(t *testing.T, buffers []buffer) {
	t.Helper()
	for i, b := range buffers {
		require.True(t, simtest.Holds(b.at, uint64(i+1), b.size), "contents of buffer %d of %d bytes", i, b.size)
	}
}

// pause and resume are the session's steps, without peers.
func pause(s *Space, arena offload.Store) (Paused, error) {
	p, err := s.Vacate(arena)
	p.Copying = 0 // it varies
	return p, err
}

func resume(s *Space) (Restored, error) {
	r, err := s.Restore()
	if err = errors.Join(err, s.Fill()); err != nil {
		return r, err
	}
	s.Resumed(false)
	return r, nil
}

// empty checks that nothing of NCCL's is left in the tables.
func empty(t *testing.T, s *Space) {
	t.Helper()
	require.Eventually(t, func() bool { // peers are asked whether they use what was freed
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.blocks) == 0
	}, 5*time.Second, time.Millisecond, "blocks")
	s.structure.Lock() // what ends is ended
	defer s.structure.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(t, s.handles, "handles")
	require.Empty(t, s.imports, "imports")
	require.Empty(t, s.ranges, "address ranges")
	for _, list := range s.slabs {
		require.Empty(t, list, "slabs")
	}
	require.Empty(t, s.ended)
}

// openFiles counts this process's descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	var count int
	for range 2 { // the first opens what Go's runtime itself needs for files
		list, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		count = len(list)
	}
	return count
}
