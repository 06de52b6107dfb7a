package vmm

import (
	"context"
	"maps"
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

// cycle pauses and resumes both processes of a pair.
func (p *pair) cycle(t *testing.T) {
	t.Helper()
	for _, s := range []*Space{p.importer, p.owner} {
		_, err := pause(s, offload.NewArena(simtest.Driver()))
		require.NoError(t, err)
	}
	p.restore(t)
}

func (p *pair) restore(t *testing.T) {
	t.Helper()
	_, err := resume(p.owner)
	require.NoError(t, err)
	p.announce(p.owner)
	_, err = resume(p.importer)
	require.NoError(t, err)
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
}

func fill8(count int) []uint64 {
	sizes := make([]uint64, count)
	for i := range sizes {
		sizes[i] = 8 * mib
	}
	return sizes
}

// From the first resume on, slabs that stand side by side are one allocation,
// here and in peers.
func TestSlabsAreMerged(t *testing.T) {
	files := openFiles(t)
	p := newPair(t, 0, fill8(32)...)
	held := simtest.Used(t, 0)
	usage, _ := p.owner.Usage()
	require.Equal(t, 16, usage[0].Slabs)
	require.Len(t, p.importer.imports, 16)
	for cycle := range 3 {
		creates, imports := simtest.Calls(t, "cuMemCreate"), simtest.Calls(t, "cuMemImportFromShareableHandle")
		exports, opened := simtest.Calls(t, "cuMemExportToShareableHandle"), openFiles(t)
		p.cycle(t)
		require.Equal(t, creates+1, simtest.Calls(t, "cuMemCreate"))
		require.Equal(t, imports+1, simtest.Calls(t, "cuMemImportFromShareableHandle"))
		require.Equal(t, exports+1, simtest.Calls(t, "cuMemExportToShareableHandle"))
		require.Equal(t, held, simtest.Used(t, 0))
		require.LessOrEqual(t, openFiles(t), opened)
		filled(t, p.theirs)
		filled(t, p.imported)
		i := 5*cycle + 3
		simtest.Fill(p.imported[i].at, uint64(i+1), 8*mib)
		require.True(t, simtest.Holds(p.theirs[i].at, uint64(i+1), 8*mib), "still the same memory")
	}
	p.end(t)
	require.Empty(t, p.importer.views)
	require.Empty(t, p.owner.windows)
	require.Equal(t, files, openFiles(t))
}

// What is put together: adjacent slabs of one window with the same rights that the
// same peers map, up to a limit. Little is, whoever maps it.
func TestRegroup(t *testing.T) {
	peers := newNetwork()
	s := New(nil, Options{})
	s.SetPeers(port{peers, peer.Identity{}})
	one, other := &window{base: 1 << 40}, &window{base: 1<<40 + 400*1<<20}
	add := func(w *window, at, size uint64, change func(m *memory)) {
		b := &block{id: s.options.Numbers.Add(1), window: w, home: 1<<40 + cuda.Ptr(at), size: size}
		b.mem = &memory{size: size, home: b.home, blocks: []*block{b}, access: rights(0)}
		change(b.mem)
		s.blocks[b.id] = b
	}
	same := func(*memory) {}
	add(one, 0, 200*mib, same)
	add(one, 200*mib, 100*mib, same)
	add(one, 300*mib, 100*mib, same)
	add(other, 400*mib, 10*mib, same)
	add(other, 410*mib, 10*mib, func(m *memory) { m.live = true })
	add(other, 420*mib, 10*mib, same)
	add(other, 440*mib, 300*mib, same)
	add(other, 740*mib, 300*mib, same)
	add(other, 1040*mib, 10*mib, func(m *memory) { m.access = rights(1) })
	add(other, 1050*mib, 10*mib, func(m *memory) { m.access, m.keep = rights(1), KeepNIC })
	add(nil, 1060*mib, 10*mib, func(m *memory) { m.access = rights(1) })
	imported := func(by ...byte) func(m *memory) {
		return func(m *memory) {
			for _, id := range by {
				key := importKey{block: m.blocks[0].id}
				peers.maps[key] = append(peers.maps[key], peer.ID{id})
			}
		}
	}
	third := &window{base: 1 << 41}
	at := uint64(1 << 40)
	for _, part := range []struct {
		size uint64
		by   []byte
	}{
		{160, []byte{1}}, {160, []byte{1}}, {160, []byte{2}}, {32, []byte{2, 3}}, {32, []byte{1}}, {160, []byte{1}},
		{20, []byte{1}}, {160, []byte{1, 2, 3}}, {160, nil}, {160, nil},
	} {
		add(third, at, part.size*mib, imported(part.by...))
		at += part.size * mib
	}
	for range 2 { // the second time changes nothing
		s.regroup()
		var sizes []uint64
		for _, m := range s.own(func(*memory) bool { return true }) {
			sizes = append(sizes, m.size/mib)
			for _, b := range m.blocks {
				require.Same(t, m, b.mem)
			}
		}
		require.Equal(t, []uint64{400, 10, 10, 10, 300, 300, 10, 10, 10, 320, 160, 64, 180, 160, 320}, sizes)
	}
}

// What is merged goes back as a whole, at the latest at the next pause.
func TestFreeOfMergedSlabs(t *testing.T) {
	p := newPair(t, 0, fill8(8)...)
	n := nccl{Space: p.owner}
	before := simtest.Used(t, 0)
	p.cycle(t)
	nccl{Space: p.importer}.mustFree(t, p.imported...)
	p.imported = nil
	n.mustFree(t, p.theirs[2:]...) // three of four slabs
	require.Equal(t, before, simtest.Used(t, 0), "it backs a slab that is used, too")
	require.Eventually(t, func() bool {
		p.owner.mu.Lock()
		defer p.owner.mu.Unlock()
		for _, b := range p.owner.blocks {
			if len(b.awaited) > 0 {
				return false
			}
		}
		return true
	}, 5*time.Second, time.Millisecond)
	again := n.mustAllocate(t, 16*mib)
	require.Equal(t, before, simtest.Used(t, 0), "what was freed is used again")
	n.mustFree(t, again)
	p.theirs = p.theirs[:2]
	p.cycle(t)
	require.Equal(t, before-48*mib, simtest.Used(t, 0), "slabs that nobody uses are not made again")
	filled(t, p.theirs)

	// And all of it goes back when nothing of it is used.
	b := n.mustAllocate(t, 8*mib)
	simtest.Fill(b.at, 3, b.size)
	p.theirs = append(p.theirs, b)
	p.cycle(t)
	filled(t, p.theirs)
	p.end(t)
	require.Equal(t, before-64*mib, simtest.Used(t, 0))
}

// A peer that maps merged memory already needs no call for another slab on it,
// and no two threads map it twice.
func TestViewsOfMergedMemory(t *testing.T) {
	p := newPair(t, 0, 8*mib)
	n := nccl{Space: p.owner}
	var more []buffer
	var fds []int
	for range 6 { // little enough to be put together with what a peer maps
		b := n.mustAllocate(t, 8*mib)
		simtest.Fill(b.at, 9, b.size)
		more = append(more, b)
		fds = append(fds, exportFD(t, p.owner, b.handle))
	}
	p.theirs = append(p.theirs, more...)
	p.cycle(t)
	imports := simtest.Calls(t, "cuMemImportFromShareableHandle")
	var wg sync.WaitGroup
	got := make([]buffer, len(more))
	for i := range more {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer simtest.Use(t, 0)()
			h, err := p.importer.Import(fds[i])
			if err != nil {
				t.Error(err)
				return
			}
			b := buffer{size: 8 * mib, handle: h}
			if b.at, err = (nccl{Space: p.importer}).reserve(b.size, 0, 0, h); err == nil {
				err = nccl{Space: p.importer}.finish(b)
			}
			if err != nil {
				t.Error(err)
			}
			got[i] = b
		}()
	}
	wg.Wait()
	require.False(t, t.Failed())
	require.Equal(t, imports, simtest.Calls(t, "cuMemImportFromShareableHandle"))
	for i, b := range got {
		closeFD(t, fds[i])
		require.True(t, simtest.Holds(b.at, 9, b.size), "view %d", i)
		require.True(t, simtest.Writable(t, 0, b.at))
	}
	p.imported = append(p.imported, got...)
	p.cycle(t)
	for _, b := range got {
		require.True(t, simtest.Holds(b.at, 9, b.size))
	}
	p.end(t)
}

// A second device that one view was given access to keeps it when the view's
// memory becomes another.
func TestAccessToMergedMemory(t *testing.T) {
	p := newPair(t, 0, fill8(4)...)
	require.NoError(t, p.importer.SetAccess(p.imported[3].at, 8*mib, rights(1)))
	require.False(t, simtest.Writable(t, 1, p.imported[0].at))
	p.cycle(t)
	require.True(t, simtest.Writable(t, 1, p.imported[3].at))
	require.True(t, simtest.Writable(t, 0, p.imported[0].at))
	p.cycle(t)
	require.True(t, simtest.Writable(t, 1, p.imported[3].at))
	p.end(t)
}

// What an owner says of where its blocks stand is checked before it is mapped.
func TestAttachChecksClaims(t *testing.T) {
	p := newPair(t, 0, 8*mib, 16*mib)
	owner := p.owner.peers.Self()
	small := uint64(0)
	for key, b := range p.importer.imports {
		require.Equal(t, owner.ID, key.owner)
		require.Equal(t, 16*mib, b.size)
		small = max(small, key.block)
	}
	blocks := slices.Collect(maps.Values(p.importer.imports))
	before := simtest.Calls(t, "cuMemImportFromShareableHandle")
	for name, got := range map[string]peer.Memory{
		"outside its memory":      {Size: 16 * mib, Blocks: []peer.Place{{Block: small, Offset: 2 * mib}}},
		"smaller than the block":  {Size: 8 * mib, Blocks: []peer.Place{{Block: small}}},
		"before the window":       {Size: 1 << 30, Blocks: []peer.Place{{Block: small, Offset: 512 * mib}}},
		"beyond the window":       {Size: windowSize, Blocks: []peer.Place{{Block: small}}},
		"more than can be":        {Size: 1 << 63, Blocks: []peer.Place{{Block: small, Offset: 1<<63 - 16*mib}}},
		"two that don't fit":      {Size: 32 * mib, Blocks: []peer.Place{{Block: 1}, {Block: 2}}},
		"in the middle of a page": {Size: 32 * mib, Blocks: []peer.Place{{Block: small, Offset: 4096}}},
	} {
		err := p.importer.attach(owner, blocks, got, 7)
		require.ErrorIs(t, err, cuda.ErrInvalidValue, name)
		require.ErrorContains(t, err, owner.String(), name)
	}
	require.Equal(t, before, simtest.Calls(t, "cuMemImportFromShareableHandle"))
	require.NoError(t, p.importer.attach(owner, blocks, peer.Memory{Size: 2 * mib, Blocks: []peer.Place{{Block: 99}}}, 7),
		"what NCCL has freed meanwhile is none of our business")
	filled(t, p.imported)
	p.end(t)
}

// What a pause could not let go of is in the way of what its owner puts together.
func TestPeersMemoryThatStayedMapped(t *testing.T) {
	for _, asked := range []string{"with the rest", "alone"} {
		p := newPair(t, 0, fill8(6)...)
		held := simtest.Used(t, 0)
		simtest.Fault(t, "cuMemUnmap", 2, cuda.ErrUnknown)
		_, err := pause(p.importer, offload.NewArena(simtest.Driver()))
		require.NoError(t, err)
		simtest.Fault(t, "cuMemUnmap", 0, 0)
		usage, _ := p.importer.Usage()
		require.Equal(t, 16*mib, usage[0].Imported)
		_, err = pause(p.owner, offload.NewArena(simtest.Driver()))
		require.NoError(t, err)
		if asked == "alone" { // the owner's new memory is asked for before it has said that it is there
			_, err = resume(p.owner)
			require.NoError(t, err)
			require.NoError(t, p.importer.Attach(context.Background(), p.generation))
		}
		p.restore(t)
		require.False(t, p.importer.Stale(p.generation))
		require.Equal(t, held, simtest.Used(t, 0))
		filled(t, p.imported)
		for i, b := range p.imported {
			simtest.Fill(b.at, uint64(i+1), b.size)
			require.True(t, simtest.Holds(p.theirs[i].at, uint64(i+1), b.size), "the same memory")
		}
		p.cycle(t)
		filled(t, p.imported)
		p.end(t)
	}
}

// A window given back with its last slab is not the one that another thread's
// new slab goes to.
func TestWindowsComeAndGo(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	var wg sync.WaitGroup
	errs := make(chan error, 4)
	for range cap(errs) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer simtest.Use(t, 0)()
			n := nccl{Space: s}
			for range 300 {
				b, err := n.allocate(2 * mib)
				if err == nil {
					err = n.free(b.at)
				}
				if err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	empty(t, s)
}

// What is freed of a region's memory is given back by the slab or two, after a resume as
// before.
func TestFreedAfterAResume(t *testing.T) {
	s := newSpace(t, Options{Arena: true, Region: "weights", Discard: true})
	before := simtest.Used(t, 0)
	const count, size = 96, 16 * mib // 1,536 MB, of which 224 MB stay in use
	var parts []cuda.Ptr
	for range count {
		p, err := s.Allocate(size, 0)
		require.NoError(t, err)
		parts = append(parts, p)
	}
	maps := simtest.Calls(t, "cuMemMap")
	_, err := pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.Equal(t, before, simtest.Used(t, 0))
	_, err = resume(s)
	require.NoError(t, err)
	require.LessOrEqual(t, simtest.Calls(t, "cuMemMap")-maps, 32, "slabs are put together")
	simtest.Fill(parts[count-1], 5, size)
	for _, p := range parts[:count-14] {
		require.NoError(t, s.Free(p))
	}
	require.LessOrEqual(t, simtest.Used(t, 0)-before, (224+64)*mib)
	require.True(t, simtest.Holds(parts[count-1], 5, size))
	for _, p := range parts[count-14:] {
		require.NoError(t, s.Free(p))
	}
	empty(t, s)
}
