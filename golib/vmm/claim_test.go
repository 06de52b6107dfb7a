package vmm

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/simtest"
)

// begin imports and maps as NCCL does, and does not wait for the memory.
func begin(t *testing.T, s *Space, fd int, size uint64) buffer {
	t.Helper()
	h, err := s.Import(fd)
	require.NoError(t, err)
	n := nccl{Space: s}
	at, err := n.reserve(size, n.granularity(), 0, h)
	require.NoError(t, err)
	b := buffer{at, size, h}
	require.NoError(t, n.finish(b))
	return b
}

// full is a pair whose owner has one slab without room, of four chunks, and a descriptor
// of the first.
func full(t *testing.T) (p *pair, chunks []buffer, fd int) {
	t.Helper()
	p = newPair(t, 0)
	for i := range uint64(4) {
		b := nccl{Space: p.owner}.mustAllocate(t, 4*mib)
		simtest.Fill(b.at, i+1, b.size)
		chunks = append(chunks, b)
	}
	fd = exportFD(t, p.owner, chunks[0].handle)
	t.Cleanup(func() { closeFD(t, fd) })
	return p, chunks, fd
}

// replace frees the first chunk, and puts another in its place.
func (p *pair) replace(t *testing.T, chunks []buffer) {
	t.Helper()
	n := nccl{Space: p.owner}
	n.mustFree(t, chunks[0])
	require.Eventually(t, func() bool { // who maps the slab is asked
		p.owner.mu.Lock()
		defer p.owner.mu.Unlock()
		for _, b := range p.owner.blocks {
			return len(b.awaited) == 0
		}
		return false
	}, 5*time.Second, time.Millisecond)
	next := n.mustAllocate(t, 4*mib)
	require.Equal(t, chunks[0].at, next.at)
	simtest.Fill(next.at, 1, next.size)
	chunks[0] = next
}

// With the plain driver a descriptor, or a handle that was imported, keeps the memory.
// Here the owner may use it otherwise: then the importer does not.
func TestFreedBeforeItIsKnownToBeUsed(t *testing.T) {
	for name, imported := range map[string]func(t *testing.T, p *pair, chunks []buffer, fd int) buffer{
		"nobody maps the slab": func(t *testing.T, p *pair, chunks []buffer, fd int) buffer {
			p.replace(t, chunks)
			return begin(t, p.importer, fd, 4*mib)
		},
		"the slab is mapped": func(t *testing.T, p *pair, chunks []buffer, fd int) buffer {
			other := exportFD(t, p.owner, chunks[1].handle)
			p.imported = append(p.imported, importFD(t, p.importer, other, 4*mib))
			closeFD(t, other)
			p.replace(t, chunks)
			return begin(t, p.importer, fd, 4*mib)
		},
		"imported, and not fetched": func(t *testing.T, p *pair, chunks []buffer, fd int) buffer {
			begun, answer := p.holdFirst(t)
			b := begin(t, p.importer, fd, 4*mib)
			<-begun
			p.replace(t, chunks)
			answer()
			return b
		},
		"imported during a pause": func(t *testing.T, p *pair, chunks []buffer, fd int) buffer {
			_, err := pause(p.importer, offload.NewArena(simtest.Driver()))
			require.NoError(t, err)
			b := begin(t, p.importer, fd, 4*mib)
			p.replace(t, chunks)
			_, err = resume(p.importer)
			require.NoError(t, err)
			require.NoError(t, p.importer.Attach(context.Background(), p.generation))
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, chunks, fd := full(t)
			late := imported(t, p, chunks, fd)
			require.NoError(t, p.importer.Arrived(context.Background()))
			require.Equal(t, Stale, p.importer.Imports(p.generation), "launches, which would write to another's memory, are refused")
			require.NoError(t, p.importer.Attach(context.Background(), p.generation))
			require.Equal(t, Stale, p.importer.Imports(p.generation), "nothing brings it back")
			filled(t, chunks)

			fresh := exportFD(t, p.owner, chunks[0].handle)
			_, err := p.importer.Import(fresh)
			require.ErrorContains(t, err, "still in use here", "one address can't be both")
			nccl{Space: p.importer}.mustFree(t, late)
			require.Equal(t, Here, p.importer.Imports(p.generation))
			again := importFD(t, p.importer, fresh, 4*mib)
			closeFD(t, fresh)
			require.Equal(t, Here, p.importer.Imports(p.generation))
			require.True(t, simtest.Holds(again.at, 1, again.size))
			p.imported = append(p.imported, again)
			p.theirs = chunks
			p.end(t)
		})
	}
}

// What is freed while its claim is under way, and is known to be used, stays as it is.
func TestFreedWhileItIsClaimed(t *testing.T) {
	p, chunks, fd := full(t)
	other := exportFD(t, p.owner, chunks[1].handle)
	p.imported = append(p.imported, importFD(t, p.importer, other, 4*mib))
	closeFD(t, other)
	claimed, goOn := make(chan struct{}), make(chan struct{})
	p.claiming = func() {
		close(claimed)
		<-goOn
	}
	b := begin(t, p.importer, fd, 4*mib)
	<-claimed
	require.Equal(t, Arriving, p.importer.Imports(p.generation), "launches wait")
	n := nccl{Space: p.owner}
	n.mustFree(t, chunks[0])
	next := n.mustAllocate(t, 4*mib)
	require.NotEqual(t, chunks[0].at, next.at)
	close(goOn)
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, Here, p.importer.Imports(p.generation))
	require.True(t, simtest.Holds(b.at, 1, b.size))
	p.imported = append(p.imported, b)
	p.theirs = append(chunks[1:], next)
	p.end(t)
}

// A peer has said that it does not use what is freed, and imports and claims it before its
// owner has heard that: the owner asks again.
func TestClaimedBeforeTheAnswerIsHeard(t *testing.T) {
	p, chunks, fd := full(t)
	other := exportFD(t, p.owner, chunks[1].handle)
	p.imported = append(p.imported, importFD(t, p.importer, other, 4*mib))
	closeFD(t, other)
	answered, goOn, heard := make(chan struct{}), make(chan struct{}), make(chan struct{}, 2)
	var once sync.Once
	p.settling = func() {
		once.Do(func() {
			close(answered)
			<-goOn
		})
		heard <- struct{}{}
	}
	n := nccl{Space: p.owner}
	n.mustFree(t, chunks[0])
	<-answered
	b := begin(t, p.importer, fd, 4*mib)
	require.NoError(t, p.importer.Arrived(context.Background()))
	ready := p.importer.Imports(p.generation)
	close(goOn)
	<-heard
	time.Sleep(20 * time.Millisecond)
	next := n.mustAllocate(t, 4*mib)
	require.True(t, ready == Stale || next.at != chunks[0].at, "the importer's kernels write there")
	require.Equal(t, Here, ready)
	require.True(t, simtest.Holds(b.at, 1, b.size))
	p.imported = append(p.imported, b)
	p.theirs = append(chunks[1:], next)
	p.end(t)
}

// A claim that fails leaves launches refused until a resume has made it.
func TestClaimFails(t *testing.T) {
	p, chunks, fd := full(t)
	p.claimError = peer.ErrBroken
	b := begin(t, p.importer, fd, 4*mib)
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, Stale, p.importer.Imports(p.generation))
	require.True(t, p.importer.Stale(p.generation))
	require.ErrorIs(t, p.importer.Attach(context.Background(), p.generation), peer.ErrBroken)
	p.claimError = nil
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.Equal(t, Here, p.importer.Imports(p.generation))
	require.True(t, simtest.Holds(b.at, 1, b.size))
	p.imported = append(p.imported, b)
	p.theirs = chunks
	p.end(t)
}

// A descriptor that comes back to the process that made it.
func TestOwnDescriptorOfFreedMemory(t *testing.T) {
	p, chunks, fd := full(t)
	h, err := p.owner.Import(fd)
	require.NoError(t, err)
	require.Equal(t, chunks[0].handle, h)
	require.NoError(t, p.owner.Release(h))
	p.replace(t, chunks)
	_, err = p.owner.Import(fd)
	require.ErrorContains(t, err, "freed memory")
	filled(t, chunks)
	p.theirs = chunks
	p.end(t)
}

// A region's: between the owner's description and the fetch.
func TestRegionFreedBeforeItIsOpened(t *testing.T) {
	givesBack(t)
	simtest.On(t, 0)
	p := &pair{network: newNetwork()}
	options := Options{Arena: true, Timeout: 5 * time.Second, Region: "weights"}
	p.owner, p.importer = p.space(0, options), p.space(0, options)
	at, err := p.owner.Allocate(4*mib, 0)
	require.NoError(t, err)
	kept, err := p.owner.Allocate(4*mib, 0)
	require.NoError(t, err)
	block, offset, number, err := p.owner.Share(at)
	require.NoError(t, err)
	d, known := p.owner.Describe(block, offset)
	require.True(t, known)
	require.Equal(t, number, d.Number)
	require.NoError(t, p.owner.Free(at))
	next, err := p.owner.Allocate(4*mib, 0)
	require.NoError(t, err)
	require.Equal(t, at, next)
	simtest.Fill(next, 9, 4*mib)
	_, err = p.importer.Open(d)
	require.ErrorIs(t, err, peer.ErrGone)
	empty(t, p.importer)
	require.True(t, simtest.Holds(next, 9, 4*mib))
	require.NoError(t, p.owner.Free(next))
	require.NoError(t, p.owner.Free(kept))
	empty(t, p.owner)
}
