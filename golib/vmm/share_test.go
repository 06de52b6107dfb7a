package vmm

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/simtest"
)

func closeFD(t testing.TB, fd int) {
	t.Helper()
	require.NoError(t, unix.Close(fd))
}

// importFD imports and maps as NCCL does.
func importFD(t *testing.T, s *Space, fd int, size uint64) buffer {
	t.Helper()
	h, err := s.Import(fd)
	require.NoError(t, err)
	n := nccl{Space: s}
	p, err := n.reserve(size, n.granularity(), 0, h)
	require.NoError(t, err)
	b := buffer{p, size, h}
	require.NoError(t, n.finish(b))
	require.NoError(t, s.Arrived(context.Background()))
	return b
}

// memfd makes a sealed file of the contents, as a descriptor is.
func memfd(t testing.TB, body []byte, sealed int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	if len(body) > 0 {
		_, err = unix.Write(fd, body)
		require.NoError(t, err)
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealed)
	require.NoError(t, err)
	return fd
}

func goodDescriptor() Descriptor {
	return Descriptor{Magic: descriptorMagic, Owner: peer.Identity{PID: 4321, Group: 7}, Block: 3, BlockSize: 2 * mib,
		Offset: 64 * kib, Size: 128 * kib, Prop: prop(1)}
}

func encode(t testing.TB, d Descriptor) []byte {
	t.Helper()
	body, err := json.Marshal(d)
	require.NoError(t, err)
	return body
}

func TestReadDescriptor(t *testing.T) {
	fd := memfd(t, encode(t, goodDescriptor()), seals)
	defer closeFD(t, fd)
	got, err := readDescriptor(fd)
	require.NoError(t, err)
	require.Equal(t, goodDescriptor(), got)
}

// Where vm.memfd_noexec is set, the kernel adds a seal to each file; amem asks for it
// itself, where the kernel knows it.
func TestDescriptorWithMoreSeals(t *testing.T) {
	probe, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if err != nil {
		t.Skipf("the kernel is older than 6.3: it has no F_SEAL_EXEC: %v", err)
	}
	closeFD(t, probe)
	body := encode(t, goodDescriptor())
	for name, more := range map[string]int{"exec": unix.F_SEAL_EXEC, "future write": unix.F_SEAL_FUTURE_WRITE} {
		fd := memfd(t, body, seals|more)
		got, err := readDescriptor(fd)
		require.NoError(t, err, name)
		require.Equal(t, goodDescriptor(), got)
		closeFD(t, fd)
	}
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	require.NoError(t, err)
	_, err = unix.Write(fd, body)
	require.NoError(t, err)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	require.NoError(t, err)
	got, err := readDescriptor(fd)
	require.NoError(t, err)
	require.Equal(t, goodDescriptor(), got)
	closeFD(t, fd)

	p := newPair(t, 0, 64*kib)
	fd = exportFD(t, p.owner, p.theirs[0].handle)
	have, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	require.NoError(t, err)
	require.Equal(t, seals|unix.F_SEAL_EXEC, have)
	closeFD(t, fd)
	p.end(t)
}

func TestForeignFiles(t *testing.T) {
	good := encode(t, goodDescriptor())
	regular, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer regular.Close()
	_, err = regular.Write(good)
	require.NoError(t, err)
	var pipe [2]int
	require.NoError(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer closeFD(t, pipe[1])
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	other := goodDescriptor()
	other.Magic = "amem memory 0"
	for name, fd := range map[string]int{
		"unsealed":        memfd(t, good, 0),
		"partly sealed":   memfd(t, good, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK),
		"empty":           memfd(t, nil, seals),
		"truncated":       memfd(t, good[:len(good)-5], seals),
		"trailing bytes":  memfd(t, append(append([]byte{}, good...), "{}"...), seals),
		"not JSON":        memfd(t, []byte("hello"), seals),
		"too long":        memfd(t, append(append([]byte{}, good...), make([]byte, 1<<20)...), seals),
		"other magic":     memfd(t, encode(t, other), seals),
		"regular file":    int(regular.Fd()),
		"pipe":            pipe[0],
		"device":          null,
		"closed":          1 << 20,
		"negative":        -1,
		"magic is absent": memfd(t, []byte("{}"), seals),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readDescriptor(fd)
			require.ErrorIs(t, err, ErrPass)
		})
		if fd >= 0 && fd != 1<<20 && fd != int(regular.Fd()) {
			closeFD(t, fd)
		}
	}
}

func TestDescriptorOutsideTheBlock(t *testing.T) {
	for name, spoil := range map[string]func(*Descriptor){
		"no size":            func(d *Descriptor) { d.Size = 0 },
		"no block":           func(d *Descriptor) { d.BlockSize = 0 },
		"offset behind":      func(d *Descriptor) { d.Offset = d.BlockSize + 64*kib },
		"offset at the end":  func(d *Descriptor) { d.Offset = d.BlockSize },
		"one unit too large": func(d *Descriptor) { d.Size = d.BlockSize },
		"sum overflows":      func(d *Descriptor) { d.Offset, d.Size = 64*kib, ^uint64(0)-64*kib+1 },
		"offset overflows":   func(d *Descriptor) { d.Offset = ^uint64(0) - 64*kib + 1 },
		"not in units":       func(d *Descriptor) { d.Size = 100 },
		"absurd block":       func(d *Descriptor) { d.BlockSize = 1 << 60 },
	} {
		t.Run(name, func(t *testing.T) {
			d := goodDescriptor()
			spoil(&d)
			fd := memfd(t, encode(t, d), seals)
			defer closeFD(t, fd)
			_, err := readDescriptor(fd)
			require.ErrorIs(t, err, cuda.ErrInvalidValue)
			require.ErrorContains(t, err, "pid 4321")
		})
	}
}

func FuzzReadDescriptor(f *testing.F) {
	good := encode(f, goodDescriptor())
	f.Add(good)
	f.Add(good[:20])
	f.Add([]byte(`{"Magic":"amem memory 1","BlockSize":18446744073709551615,"Size":18446744073709551615}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		fd := memfd(t, body, seals)
		defer closeFD(t, fd)
		d, err := readDescriptor(fd)
		if err != nil {
			return
		}
		if d.Size == 0 || d.Offset >= d.BlockSize || d.Offset+d.Size > d.BlockSize || d.Offset+d.Size < d.Offset {
			t.Fatalf("accepted %+v", d)
		}
	})
}

// pair is an owner and an importer with one shared buffer of each size.
type pair struct {
	*network
	owner, importer  *Space
	theirs, imported []buffer
}

func newPair(t *testing.T, group int, sizes ...uint64) *pair {
	t.Helper()
	givesBack(t)
	simtest.On(t, 0)
	p := &pair{network: newNetwork()}
	options := Options{Arena: true, Timeout: time.Second}
	p.owner, p.importer = p.space(0, options), p.space(group, options)
	for i, size := range sizes {
		b := nccl{Space: p.owner}.mustAllocate(t, size)
		simtest.Fill(b.at, uint64(i+1), b.size)
		fd := exportFD(t, p.owner, b.handle)
		p.theirs = append(p.theirs, b)
		p.imported = append(p.imported, importFD(t, p.importer, fd, b.size))
		closeFD(t, fd)
	}
	return p
}

func (p *pair) announce(s *Space) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready[s.peers.Self().ID] = s.Generation()
}

func (p *pair) end(t *testing.T) {
	t.Helper()
	nccl{Space: p.importer}.mustFree(t, p.imported...)
	nccl{Space: p.owner}.mustFree(t, p.theirs...)
	empty(t, p.importer)
	empty(t, p.owner)
}

func TestImport(t *testing.T) {
	files := openFiles(t)
	p := newPair(t, 0, 64*kib, 64*kib, 192*kib, 4*mib)
	before := simtest.Used(t, 0)
	imports := simtest.Calls(t, "cuMemImportFromShareableHandle")
	filled(t, p.imported)
	simtest.Fill(p.imported[1].at, 50, p.imported[1].size)
	require.True(t, simtest.Holds(p.theirs[1].at, 50, p.theirs[1].size), "the same memory")
	require.Len(t, p.importer.imports, 2, "two slabs")

	// Another import out of a known slab costs no driver call.
	fd := exportFD(t, p.owner, p.theirs[0].handle)
	again := importFD(t, p.importer, fd, p.theirs[0].size)
	closeFD(t, fd)
	require.Equal(t, p.imported[0], again, "the same part is the same handle")
	require.Equal(t, imports, simtest.Calls(t, "cuMemImportFromShareableHandle"))
	require.Equal(t, before, simtest.Used(t, 0))

	// NCCL may export what it has imported.
	fd = exportFD(t, p.importer, p.imported[2].handle)
	back, err := p.owner.Import(fd)
	closeFD(t, fd)
	require.NoError(t, err)
	require.Equal(t, p.theirs[2].handle, back, "the owner gets its own handle back")
	require.NoError(t, p.owner.Release(back))

	require.NoError(t, p.importer.Unmap(again.at, again.size))
	require.NoError(t, p.importer.Release(again.handle))
	require.NoError(t, p.importer.AddressFree(again.at))
	require.True(t, simtest.Holds(p.imported[0].at, 1, 64*kib))
	p.end(t)
	require.Equal(t, map[uint64]int{1: 1, 2: 1}, p.drops, "the owner is told once a slab")
	require.Equal(t, map[uint64]int{1: 1, 2: 1}, p.freed)
	require.Equal(t, files, openFiles(t))
}

func TestImportOwnMemory(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 64*kib)
	simtest.Fill(b.at, 1, b.size)
	fd := exportFD(t, s, b.handle)
	h, err := s.Import(fd)
	require.NoError(t, err)
	require.Equal(t, b.handle, h)
	p, err := s.Reserve(b.size, 0, 0, 0, h)
	require.NoError(t, err)
	require.Equal(t, b.at, p)
	require.NoError(t, s.AddressFree(p))
	require.NoError(t, s.Release(h))
	n.mustFree(t, b)
	_, err = s.Import(fd)
	require.ErrorIs(t, err, cuda.ErrInvalidValue, "freed since")
	closeFD(t, fd)
	empty(t, s)
}

// Both pause; what a peer wrote before is in the contents after.
func TestPauseSharedMemory(t *testing.T) {
	p := newPair(t, 0, 64*kib, 2*mib, 10*mib)
	driver := simtest.Driver()
	held := simtest.Used(t, 0)
	before := held - 18*mib // a small slab and a large one
	simtest.Fill(p.imported[2].at, 3, p.imported[2].size)
	arenas := [2]*offload.Arena{offload.NewArena(driver), offload.NewArena(driver)}
	for range 2 {
		got, err := pause(p.importer, arenas[1])
		require.NoError(t, err)
		require.Equal(t, Paused{Detached: 18 * mib}, got)
		require.Equal(t, held, simtest.Used(t, 0), "the owner's memory is the owner's to give back")
		_, err = pause(p.owner, arenas[0])
		require.NoError(t, err)
		require.Equal(t, before, simtest.Used(t, 0))

		_, err = resume(p.owner)
		require.NoError(t, err)
		p.announce(p.owner)
		_, err = p.importer.Restore()
		require.NoError(t, err)
		require.NoError(t, p.importer.Attach(context.Background(), p.generation))
		require.NoError(t, p.importer.Fill())
		p.importer.Resumed(false)
		require.False(t, p.importer.Stale(p.generation))
		filled(t, p.theirs)
		filled(t, p.imported)
		simtest.Fill(p.imported[0].at, 1, p.imported[0].size)
		require.True(t, simtest.Holds(p.theirs[0].at, 1, 64*kib))
	}
	p.end(t)
}

// An owner that was restored while its importer stayed active has other memory now.
func TestStale(t *testing.T) {
	p := newPair(t, 0, 64*kib, 2*mib)
	require.False(t, p.importer.Stale(p.generation))
	_, err := pause(p.owner, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.False(t, p.importer.Stale(p.generation))
	_, err = resume(p.owner)
	require.NoError(t, err)
	p.announce(p.owner)
	require.True(t, p.importer.Stale(p.generation))

	// A failure to map it again leaves it stale.
	simtest.Fault(t, "cuMemMap", 1, cuda.ErrUnknown)
	require.ErrorIs(t, p.importer.Attach(context.Background(), p.generation), cuda.ErrUnknown)
	require.True(t, p.importer.Stale(p.generation), "memory that is not mapped is not fit to use")
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.False(t, p.importer.Stale(p.generation))
	simtest.Fill(p.theirs[1].at, 60, 2*mib)
	require.True(t, simtest.Holds(p.imported[1].at, 60, 2*mib), "the new memory")
	p.end(t)
}

// A pause that failed half-way has replaced memory: importers must learn of it.
func TestFailedPauseIsANewGeneration(t *testing.T) {
	p := newPair(t, 0, 64*kib, 2*mib)
	simtest.Fault(t, "cuMemUnmap", 2, cuda.ErrUnknown)
	_, err := pause(p.owner, offload.NewArena(simtest.Driver()))
	require.ErrorIs(t, err, cuda.ErrUnknown)
	filled(t, p.theirs)
	p.announce(p.owner)
	require.True(t, p.importer.Stale(p.generation), "the importer still maps the first slab's old memory")
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.False(t, p.importer.Stale(p.generation))
	simtest.Fill(p.theirs[0].at, 60, 64*kib)
	require.True(t, simtest.Holds(p.imported[0].at, 60, 64*kib))
	p.end(t)
}

// Of two slabs the owner freed one while the importer was paused.
func TestOwnerFreesWhilePaused(t *testing.T) {
	p := newPair(t, 0, 64*kib, 2*mib)
	arena := offload.NewArena(simtest.Driver())
	_, err := pause(p.importer, arena)
	require.NoError(t, err)
	nccl{Space: p.owner}.mustFree(t, p.theirs[0])
	p.theirs = p.theirs[1:]
	_, err = p.importer.Restore()
	require.NoError(t, err)
	require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	require.NoError(t, p.importer.Fill())
	p.importer.Resumed(false)
	require.False(t, p.importer.Stale(p.generation), "what is no more can't be had again")
	require.True(t, simtest.Holds(p.imported[1].at, 2, 2*mib))
	p.end(t)
}

// What an ended owner leaves behind is held by the importer's mapping alone.
func TestOwnerEnds(t *testing.T) {
	p := newPair(t, 0, 64*kib)
	p.mu.Lock()
	p.gone[p.owner.peers.Self().ID] = true
	p.mu.Unlock()
	got, err := pause(p.importer, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.Zero(t, got.Detached)
	filled(t, p.imported)
	_, err = resume(p.importer)
	require.NoError(t, err)
	filled(t, p.imported)
	p.end(t)
}

// Memory shared with a process of another group is not released, by either.
func TestOtherGroup(t *testing.T) {
	p := newPair(t, 5, 64*kib)
	for _, s := range []*Space{p.owner, p.importer} {
		got, err := pause(s, offload.NewArena(simtest.Driver()))
		require.NoError(t, err)
		require.Equal(t, Paused{}, got)
	}
	filled(t, p.imported)
	_, resident := p.owner.Usage()
	require.Equal(t, map[string]uint64{KeepGroup: 2 * mib}, resident)
	_, resident = p.importer.Usage()
	require.Equal(t, map[string]uint64{"imported:" + KeepGroup: 2 * mib}, resident)
	for _, s := range []*Space{p.owner, p.importer} {
		_, err := resume(s)
		require.NoError(t, err)
	}
	p.end(t)
}

func TestImportFails(t *testing.T) {
	for _, call := range []string{"cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap"} {
		t.Run(call, func(t *testing.T) {
			atOnce := call == "cuMemAddressReserve"
			p := newPair(t, 0)
			n := nccl{Space: p.owner}
			b := n.mustAllocate(t, 64*kib)
			simtest.Fill(b.at, 1, b.size)
			fd := exportFD(t, p.owner, b.handle)
			defer closeFD(t, fd)
			files := openFiles(t)
			simtest.Fault(t, call, 1, cuda.ErrUnknown)
			h, err := p.importer.Import(fd)
			if atOnce {
				require.ErrorIs(t, err, cuda.ErrUnknown)
				require.ErrorContains(t, err, "pid 1001")
				require.Equal(t, Here, p.importer.Imports(p.generation))
			} else { // it fails while it is brought: what was not freed, a resume tries again
				require.NoError(t, err)
				require.NoError(t, p.importer.Arrived(context.Background()))
				require.Equal(t, Stale, p.importer.Imports(p.generation))
				require.NoError(t, p.importer.Attach(context.Background(), p.generation))
				require.Equal(t, Here, p.importer.Imports(p.generation))
				require.NoError(t, p.importer.Release(h))
			}
			empty(t, p.importer)
			require.Equal(t, files, openFiles(t))
			got := importFD(t, p.importer, fd, b.size)
			require.True(t, simtest.Holds(got.at, 1, b.size))
			nccl{Space: p.importer}.mustFree(t, got)
			n.mustFree(t, b)
			empty(t, p.owner)
		})
	}
}

func TestImportRefused(t *testing.T) {
	p := newPair(t, 0, 64*kib)
	self := p.owner.peers.Self()
	for name, d := range map[string]Descriptor{
		"unknown block":    {Magic: descriptorMagic, Owner: self, Block: 99, BlockSize: 2 * mib, Offset: 0, Size: 64 * kib, Prop: prop(0)},
		"unknown process":  {Magic: descriptorMagic, Owner: peer.Identity{ID: peer.ID{99}, PID: 77}, Block: 1, BlockSize: 2 * mib, Offset: 0, Size: 64 * kib, Prop: prop(0)},
		"other block size": {Magic: descriptorMagic, Owner: self, Block: 1, BlockSize: 4 * mib, Offset: 2 * mib, Size: 64 * kib, Prop: prop(0)},
	} {
		t.Run(name, func(t *testing.T) {
			fd := memfd(t, encode(t, d), seals)
			defer closeFD(t, fd)
			_, err := p.importer.Import(fd)
			require.Error(t, err)
			require.ErrorContains(t, err, d.Owner.String())
			require.Len(t, p.importer.imports, 1)
		})
	}
	filled(t, p.imported)
	p.end(t)
}

// A block that was said to be larger than it is can't be mapped.
func TestImportLiesAboutSize(t *testing.T) {
	p := newPair(t, 0)
	n := nccl{Space: p.owner}
	b := n.mustAllocate(t, 64*kib)
	closeFD(t, exportFD(t, p.owner, b.handle))
	fd := memfd(t, encode(t, Descriptor{Magic: descriptorMagic, Owner: p.owner.peers.Self(), Block: 1, BlockSize: 8 * mib, Offset: 4 * mib, Size: 64 * kib, Prop: prop(0)}), seals)
	_, err := p.importer.Import(fd)
	require.ErrorIs(t, err, cuda.ErrInvalidValue)
	closeFD(t, fd)
	empty(t, p.importer)
	n.mustFree(t, b)
}

// Paused memory is served when it is back, or refused when the wait ends.
func TestServeWaits(t *testing.T) {
	p := newPair(t, 0, 64*kib)
	_, err := pause(p.importer, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	_, err = pause(p.owner, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	self := p.importer.peers.Self()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	fds, _, err := p.owner.Serve(ctx, self, []uint64{1})
	require.ErrorContains(t, err, "paused")
	require.Empty(t, fds)

	_, err = p.importer.Restore()
	require.NoError(t, err)
	require.NoError(t, p.importer.Fill())
	served := make(chan error, 1)
	go func() { served <- p.importer.Attach(context.Background(), p.generation) }()
	time.Sleep(20 * time.Millisecond)
	_, err = resume(p.owner)
	require.NoError(t, err)
	require.NoError(t, <-served)
	filled(t, p.imported)
	p.end(t)
}

func TestServeRefuses(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 64*kib)
	files := openFiles(t)
	for name, ids := range map[string][]uint64{"unknown": {99}, "never exported": {1}} {
		fds, _, err := s.Serve(context.Background(), s.peers.Self(), ids)
		require.ErrorIs(t, err, peer.ErrGone, name)
		require.Empty(t, fds)
	}
	closeFD(t, exportFD(t, s, b.handle))
	_, _, err := s.Serve(context.Background(), s.peers.Self(), []uint64{1, 1, 99})
	require.ErrorIs(t, err, peer.ErrGone)
	require.Equal(t, files+1, openFiles(t), "descriptors of a refused answer are closed")
	n.mustFree(t, b)
	require.Equal(t, files-1, openFiles(t), "the slab and its descriptor are gone")
}

func TestConcurrentImports(t *testing.T) {
	p := newPair(t, 0)
	n := nccl{Space: p.owner}
	var buffers []buffer
	var fds []int
	for range 16 {
		b := n.mustAllocate(t, 64*kib)
		buffers = append(buffers, b)
		fds = append(fds, exportFD(t, p.owner, b.handle))
	}
	fill(buffers)
	imports := simtest.Calls(t, "cuMemImportFromShareableHandle")
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	var loaded sync.WaitGroup
	loaded.Add(8)
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer simtest.Use(t, 0)()
			errs <- importAll(p.importer, fds, buffers, &loaded)
		}()
	}
	wg.Wait()
	for range 8 {
		require.NoError(t, <-errs)
	}
	require.Equal(t, imports+1, simtest.Calls(t, "cuMemImportFromShareableHandle"), "one fetch for all threads")
	for _, fd := range fds {
		closeFD(t, fd)
	}
	empty(t, p.importer)
	n.mustFree(t, buffers...)
	empty(t, p.owner)
}

// importAll imports every buffer and lets go of them once all threads have.
func importAll(s *Space, fds []int, buffers []buffer, loaded *sync.WaitGroup) error {
	n := nccl{Space: s}
	var got []buffer
	load := func() error {
		defer loaded.Done()
		for i, fd := range fds {
			h, err := s.Import(fd)
			if err != nil {
				return err
			}
			b := buffer{size: buffers[i].size, handle: h}
			if b.at, err = n.reserve(b.size, 0, 0, h); err != nil {
				return err
			}
			if err := n.finish(b); err != nil {
				return err
			}
			if err := s.Arrived(context.Background()); err != nil {
				return err
			}
			if !simtest.Holds(b.at, uint64(i+1), b.size) {
				return cuda.ErrUnknown
			}
			got = append(got, b)
		}
		return nil
	}
	if err := load(); err != nil {
		return err
	}
	loaded.Wait()
	for _, b := range got {
		if err := n.free(b.at); err != nil {
			return err
		}
	}
	return nil
}

// A peer's fetch that waits for one block keeps none of the others: a resume that
// fails gives its memory back.
func TestServeHoldsNothingWhileItWaits(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	before := simtest.Used(t, 0)
	buffers := []buffer{n.mustAllocate(t, 64*kib), n.mustAllocate(t, 2*mib)}
	fill(buffers)
	for _, b := range buffers {
		closeFD(t, exportFD(t, s, b.handle))
	}
	_, err := pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	ids := slices.Sorted(maps.Keys(s.blocks))
	first := s.blocks[ids[0]].mem
	require.NoError(t, s.materialise(first))
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		_, _, err := s.Serve(ctx, peer.Identity{}, ids)
		served <- err
	}()
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, s.evaporate(first))
	require.Equal(t, before, simtest.Used(t, 0))
	cancel()
	require.Error(t, <-served)
	_, err = resume(s)
	require.NoError(t, err)
	filled(t, buffers)
	n.mustFree(t, buffers...)
	empty(t, s)
}

// A program that this process starts must not keep its memory.
func TestDescriptorsEndWithExec(t *testing.T) {
	p := newPair(t, 0, 64*kib, 4*mib)
	fd := exportFD(t, p.owner, p.theirs[0].handle)
	defer closeFD(t, fd)
	got, _, err := p.owner.Serve(context.Background(), p.importer.peers.Self(), p.owner.Shared())
	require.NoError(t, err)
	fds := []int{fd}
	for _, m := range got {
		fds = append(fds, m.FD)
	}
	for _, b := range p.owner.blocks {
		fds = append(fds, b.mem.fd)
	}
	require.Len(t, fds, 5)
	for _, fd := range fds {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, flags&unix.FD_CLOEXEC)
	}
	closeAll(got)
	p.end(t)
}

// What another group's process does not map any more, a pause releases again.
func TestOtherGroupLetsGo(t *testing.T) {
	p := newPair(t, 5, 64*kib, 8*mib)
	held := simtest.Used(t, 0)
	nccl{Space: p.importer}.mustFree(t, p.imported[1])
	for _, kept := range []uint64{2 * mib, 0} {
		got, err := pause(p.owner, offload.NewArena(simtest.Driver()))
		require.NoError(t, err)
		require.Equal(t, held-kept, got.Released)
		_, resident := p.owner.Usage()
		require.Equal(t, kept, resident[KeepGroup])
		_, err = resume(p.owner)
		require.NoError(t, err)
		filled(t, p.theirs)
		if kept > 0 {
			nccl{Space: p.importer}.mustFree(t, p.imported[0])
		}
	}
	nccl{Space: p.owner}.mustFree(t, p.theirs...)
	empty(t, p.importer)
	empty(t, p.owner)
}

// What another group's process maps is in use there while its owner pauses and resumes: it
// stays mapped when another part of the same memory is imported.
func TestOtherGroupImportsMoreOfWhatItMaps(t *testing.T) {
	p := newPair(t, 5)
	fds := p.slabs(t, 2)
	cycle := func() {
		_, err := pause(p.owner, offload.NewArena(simtest.Driver()))
		require.NoError(t, err)
		_, err = resume(p.owner)
		require.NoError(t, err)
		p.announce(p.owner)
	}
	cycle() // the slabs are one memory now
	p.promised(t, fds[0])
	require.NoError(t, p.importer.Arrived(context.Background()))
	more := nccl{Space: p.owner}.mustAllocate(t, 64*kib)
	cycle() // it has been replaced, and not what the importer maps
	unmapped := simtest.Calls(t, "cuMemUnmap")
	p.promised(t, fds[1])
	require.NoError(t, p.importer.Arrived(context.Background()))
	require.Equal(t, Here, p.importer.Imports(p.generation))
	require.Equal(t, unmapped, simtest.Calls(t, "cuMemUnmap"), "kernels may be using it")
	filled(t, p.imported)
	nccl{Space: p.importer}.mustFree(t, p.imported[0])
	require.True(t, simtest.Holds(p.imported[1].at, 2, p.imported[1].size))
	p.imported = p.imported[1:]
	nccl{Space: p.owner}.mustFree(t, more)
	p.end(t)
}

// A buffer that another group's process fetches after a resume keeps the memory that
// it stands on, which is little where groups share memory, and not all slabs.
func TestOtherGroupKeepsLittle(t *testing.T) {
	p := newPair(t, 5, fill8(20)...)
	b := p.theirs[5]
	nccl{Space: p.importer}.mustFree(t, p.imported...)
	_, err := pause(p.owner, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.Zero(t, simtest.Used(t, 0))
	_, err = resume(p.owner)
	require.NoError(t, err)
	fd := exportFD(t, p.owner, b.handle)
	p.imported = []buffer{importFD(t, p.importer, fd, b.size)}
	closeFD(t, fd)
	_, err = pause(p.owner, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.LessOrEqual(t, simtest.Used(t, 0), uint64(littleMemory))
	require.True(t, simtest.Holds(p.imported[0].at, 6, b.size))
	_, err = resume(p.owner)
	require.NoError(t, err)
	filled(t, p.theirs)
	p.end(t)
}

// lines counts what is logged from a level on.
type lines struct {
	slog.Handler
	level slog.Level
	count *atomic.Int32
}

func (l lines) Enabled(_ context.Context, level slog.Level) bool { return level >= l.level }
func (l lines) Handle(context.Context, slog.Record) error        { l.count.Add(1); return nil }

// However much memory goes with a peer that has ended, the log tells of it once.
func TestOwnersEndIsOneLine(t *testing.T) {
	p := newPair(t, 0, fill8(32)...)
	require.Len(t, p.importer.imports, 16)
	_, err := pause(p.importer, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	p.mu.Lock()
	p.gone[p.owner.peers.Self().ID] = true
	p.mu.Unlock()
	counted := lines{slog.Default().Handler(), slog.LevelInfo, &atomic.Int32{}}
	before := slog.Default()
	slog.SetDefault(slog.New(counted))
	defer slog.SetDefault(before)
	for range 3 {
		require.NoError(t, p.importer.Attach(context.Background(), p.generation))
		_, err = resume(p.importer)
		require.NoError(t, err)
		require.NoError(t, p.importer.Attach(context.Background(), p.generation))
	}
	require.EqualValues(t, 1, counted.count.Load())
	require.False(t, p.importer.Stale(p.generation))
	p.end(t)
}
