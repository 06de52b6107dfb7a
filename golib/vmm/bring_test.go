package vmm

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/simtest"
)

// slabs are exported buffers of an owner, each in a slab of its own.
func (p *pair) slabs(t *testing.T, count int) (fds []int) {
	t.Helper()
	for i := range count {
		b := nccl{Space: p.owner}.mustAllocate(t, 16*mib)
		simtest.Fill(b.at, uint64(i+1), b.size)
		p.theirs = append(p.theirs, b)
		fd := exportFD(t, p.owner, b.handle)
		t.Cleanup(func() { closeFD(t, fd) })
		fds = append(fds, fd)
	}
	require.Len(t, p.owner.blocks, count)
	return fds
}

// promised imports and maps as NCCL does, and does not wait for the memory.
func (p *pair) promised(t *testing.T, fd int) {
	t.Helper()
	h, err := p.importer.Import(fd)
	require.NoError(t, err)
	n := nccl{Space: p.importer}
	at, err := n.reserve(16*mib, n.granularity(), 0, h)
	require.NoError(t, err)
	b := buffer{at, 16 * mib, h}
	require.NoError(t, n.finish(b))
	p.imported = append(p.imported, b)
}

// holdFirst keeps the first fetch from being answered until answer is called, which
// may be called again. begun is closed when the fetch is made.
func (p *pair) holdFirst(t *testing.T) (begun <-chan struct{}, answer func()) {
	t.Helper()
	started, goOn := make(chan struct{}), make(chan struct{})
	var later atomic.Bool
	p.fetching = func([]uint64) {
		if !later.Swap(true) {
			close(started)
			<-goOn
		}
	}
	answer = sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(answer)
	return started, answer
}

// underWay is a pair with two imports, of which the first is being fetched until answer
// is called.
func underWay(t *testing.T) (p *pair, answer func()) {
	t.Helper()
	p = newPair(t, 0)
	fds := p.slabs(t, 2)
	begun, answer := p.holdFirst(t)
	p.promised(t, fds[0])
	<-begun
	p.promised(t, fds[1])
	return p, answer
}

// What NCCL imports while a fetch is under way comes with the next, in one message.
func TestImportsComeTogether(t *testing.T) {
	p := newPair(t, 0)
	fds := p.slabs(t, 5)
	begun, answer := make(chan struct{}), make(chan struct{})
	var mu sync.Mutex
	var fetches [][]uint64
	p.fetching = func(blocks []uint64) {
		mu.Lock()
		fetches = append(fetches, blocks)
		first := len(fetches) == 1
		mu.Unlock()
		if first {
			close(begun)
			<-answer
		}
	}
	p.promised(t, fds[0])
	<-begun
	for _, fd := range fds[1:] {
		p.promised(t, fd)
	}
	require.Equal(t, Arriving, p.importer.Imports(p.generation))
	calls := simtest.Calls(t, "cuMemSetAccess")
	close(answer)
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, Here, p.importer.Imports(p.generation))
	filled(t, p.imported)
	require.Len(t, fetches, 2)
	require.Equal(t, []uint64{1}, fetches[0])
	require.Equal(t, []uint64{2, 3, 4, 5}, slices.Sorted(slices.Values(fetches[1])))
	require.Equal(t, calls+5, simtest.Calls(t, "cuMemSetAccess"), "access is given once, with the mapping")
	p.end(t)
}

// Memory that was fetched before all paused is the old one when it comes after the resume.
func TestImportComesAfterAPause(t *testing.T) {
	p := newPair(t, 0)
	fd := p.slabs(t, 1)[0]
	var later atomic.Bool
	fetched, goOn := make(chan struct{}), make(chan struct{})
	p.fetched = func([]uint64) {
		if !later.Swap(true) {
			close(fetched)
			<-goOn
		}
	}
	p.promised(t, fd)
	<-fetched
	arenas := [2]*offload.Arena{offload.NewArena(simtest.Driver()), offload.NewArena(simtest.Driver())}
	for i, s := range []*Space{p.importer, p.owner} {
		_, err := pause(s, arenas[i])
		require.NoError(t, err)
	}
	for _, s := range []*Space{p.importer, p.owner} {
		_, err := resume(s)
		require.NoError(t, err)
	}
	p.announce(p.owner)
	close(goOn)
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, Here, p.importer.Imports(p.generation))
	simtest.Fill(p.theirs[0].at, 70, 16*mib)
	require.True(t, simtest.Holds(p.imported[0].at, 70, 16*mib), "the memory of now")
	p.end(t)
}

// A paused process maps nothing of its peers': its resume does.
func TestImportWhilePaused(t *testing.T) {
	p := newPair(t, 0)
	fd := p.slabs(t, 1)[0]
	_, err := pause(p.importer, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	maps := simtest.Calls(t, "cuMemMap")
	p.promised(t, fd)
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, maps, simtest.Calls(t, "cuMemMap"))
	_, err = p.importer.Restore()
	require.NoError(t, err)
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.NoError(t, p.importer.Fill())
	filled(t, p.imported)
	p.end(t)
}

// A resume may be faster than what brings an import: what kernels use then stays mapped.
func TestResumeIsFasterThanAnImport(t *testing.T) {
	p, answer := underWay(t)
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.Equal(t, Here, p.importer.Imports(p.generation))
	filled(t, p.imported)
	unmaps, maps := simtest.Calls(t, "cuMemUnmap"), simtest.Calls(t, "cuMemMap")
	answer()
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, unmaps, simtest.Calls(t, "cuMemUnmap"))
	require.Equal(t, maps, simtest.Calls(t, "cuMemMap"))
	filled(t, p.imported)
	p.end(t)
}

// The owner must not count a process that has freed the memory before it came.
func TestFreedBeforeItComes(t *testing.T) {
	p, answer := underWay(t)
	imports := simtest.Calls(t, "cuMemImportFromShareableHandle")
	nccl{Space: p.importer}.mustFree(t, p.imported...)
	p.imported = nil
	answer()
	require.NoError(t, p.importer.Arrived(context.Background()))
	empty(t, p.importer)
	require.Equal(t, imports, simtest.Calls(t, "cuMemImportFromShareableHandle"))
	for _, block := range []uint64{1, 2} {
		require.Empty(t, port{p.network, p.owner.peers.Self()}.Importers(block))
	}
	p.end(t)
}

// What its owner has taken along when it ended never comes: until NCCL frees it, nothing
// may be launched that could use it.
func TestImportNeverComes(t *testing.T) {
	p, answer := underWay(t)
	owner := p.owner.peers.Self().ID
	p.mu.Lock()
	p.gone[owner] = true
	p.mu.Unlock()
	answer()
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, Stale, p.importer.Imports(p.generation))
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.Equal(t, Stale, p.importer.Imports(p.generation))
	nccl{Space: p.importer}.mustFree(t, p.imported...)
	p.imported = nil
	require.Equal(t, Here, p.importer.Imports(p.generation))
	delete(p.gone, owner)
	p.end(t)
}

// An owner that is known to have ended is refused at once.
func TestImportOfTheDead(t *testing.T) {
	p := newPair(t, 0)
	fd := p.slabs(t, 1)[0]
	p.gone[p.owner.peers.Self().ID] = true
	_, err := p.importer.Import(fd)
	require.ErrorIs(t, err, peer.ErrGone)
	require.ErrorContains(t, err, "pid 1001")
	empty(t, p.importer)
	delete(p.gone, p.owner.peers.Self().ID)
	p.end(t)
}

// What is opened anew while an owner's memory is mapped again has no home yet: it is left
// to who opens it.
func TestOpenedAnewWhileItIsMappedAgain(t *testing.T) {
	givesBack(t)
	simtest.On(t, 0)
	p := &pair{network: newNetwork()}
	options := Options{Arena: true, Timeout: 5 * time.Second, Region: "weights"}
	p.owner, p.importer = p.space(0, options), p.space(0, options)
	at, err := p.owner.Allocate(16*mib, 0)
	require.NoError(t, err)
	simtest.Fill(at, 1, 16*mib)
	block, offset, _, err := p.owner.Share(at)
	require.NoError(t, err)
	d, known := p.owner.Describe(block, offset)
	require.True(t, known)
	opened, err := p.importer.Open(d)
	require.NoError(t, err)
	owner := p.owner.peers.Self()
	require.NoError(t, p.importer.LetGo(owner, []uint64{block}, func() bool { return true }))

	var fetches atomic.Int32
	begun, goOn := [2]chan struct{}{make(chan struct{}), make(chan struct{})}, [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	p.fetched = func([]uint64) {
		if n := fetches.Add(1) - 1; n < 2 {
			close(begun[n])
			<-goOn[n]
		}
	}
	again := make(chan error, 1)
	go func() { again <- p.importer.AttachAgain(context.Background(), owner, []uint64{block}) }()
	<-begun[0]
	require.NoError(t, p.importer.Close(opened))
	anew := make(chan cuda.Ptr, 1)
	go func() {
		defer simtest.Use(t, 0)()
		at, _ := p.importer.Open(d)
		anew <- at
	}()
	<-begun[1]
	imports := simtest.Calls(t, "cuMemImportFromShareableHandle")
	close(goOn[0])
	require.NoError(t, <-again)
	require.Equal(t, imports, simtest.Calls(t, "cuMemImportFromShareableHandle"))
	close(goOn[1])
	opened = <-anew
	require.True(t, simtest.Holds(opened, 1, 16*mib))
	require.NoError(t, p.importer.Close(opened))
	require.NoError(t, p.owner.Free(at))
	empty(t, p.importer)
	empty(t, p.owner)
}
