package offload

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

const small = 64 << 10 // a chunk in tests of many

// newDisk makes a Disk in a folder of its own, with small buffers, that is to
// have given everything back by the end of the test.
func newDisk(t *testing.T) *Disk { return newDiskOf(t, false) }

func newDiskOf(t *testing.T, named bool) *Disk {
	t.Helper()
	d := NewDisk(simtest.Driver(), t.TempDir(), named)
	d.chunkSize, d.ringSize = small, 4
	pinned := pinnedNow()
	t.Cleanup(func() {
		require.NoError(t, d.Free(always))
		require.Zero(t, d.Bytes())
		require.Zero(t, d.FileBytes())
		require.Empty(t, d.files(t))
		require.Equal(t, pinned, pinnedNow())
		d.namesNothing(t)
	})
	return d
}

// pinnedNow counts the driver's successful pinnings without an unpinning. Faults
// that tests set are in injected.
func pinnedNow() int64 {
	calls := simtest.Driver().Calls()
	return calls["cuMemHostRegister"] - injected["cuMemHostRegister"] - calls["cuMemHostUnregister"] + injected["cuMemHostUnregister"]
}

var injected = map[string]int64{}

func (d *Disk) namesNothing(t *testing.T) {
	t.Helper()
	list, err := os.ReadDir(d.Folder())
	require.NoError(t, err)
	require.Empty(t, list, "no file has a name")
}

// files lists this process's descriptors of files in the Disk's folder, as paths.
func (d *Disk) files(t *testing.T) (paths []string) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range list {
		path := filepath.Join("/proc/self/fd", e.Name())
		if target, err := os.Readlink(path); err == nil && strings.HasPrefix(target, d.Folder()+"/") {
			paths = append(paths, path)
		}
	}
	return paths
}

// held answers how much of the disk the file takes.
func (d *Disk) held(t *testing.T) uint64 {
	t.Helper()
	var s unix.Stat_t
	require.NoError(t, unix.Fstat(d.file.fd, &s))
	require.EqualValues(t, d.FileBytes(), s.Size)
	return uint64(s.Blocks) * 512
}

// cached answers how much of the file is in the page cache, as far as that is not
// what the file is made of.
func (d *Disk) cached(t *testing.T) (n uint64) {
	t.Helper()
	if s, err := d.file.status(); err == nil && inMemory(s) {
		return 0
	}
	memory, err := unix.Mmap(d.file.fd, 0, int(d.FileBytes()), unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	pages := make([]byte, len(memory)/os.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)),
		uintptr(unsafe.Pointer(&pages[0])))
	require.Zero(t, errno)
	require.NoError(t, unix.Munmap(memory))
	for _, page := range pages {
		n += uint64(page&1) * uint64(os.Getpagesize())
	}
	return n
}

// sample is device memory of which some is kept and some is cleared.
type sample struct {
	at     cuda.Ptr
	stream cuda.Stream
	list   []*Contents
	want   []byte // after a restore
}

const sampleSize = 4 << 20

// newSample has contents of all kinds: odd sizes, less than a block, larger than
// the ring, rows that end within chunks, none at all.
func newSample(t *testing.T, device int, seed uint64) *sample {
	t.Helper()
	s := &sample{at: deviceMemoryOf(t, device, sampleSize)}
	var err error
	s.stream, err = simtest.Driver().NewStream()
	require.NoError(t, err)
	s.list = []*Contents{
		{Kept: []Range{{s.at, 6*small + 12345, 1, 0}, {s.at + 7*small, 1, 1, 0}, {s.at + 8*small, 777, 1, 0}}},
		{},
		{Zeroed: []Range{{s.at + 10*small, 20 * small, 1, 0}}},
		{Kept: []Range{{s.at + 30*small, 3 * small, 1, 0}}},
		{Kept: []Range{{s.at + 40*small, small, 1, 0}}},
	}
	for row := range 40 {
		s.list[2].Keep(s.at+10*small+cuda.Ptr(row*30000), 20001)
	}
	require.Len(t, s.list[2].Kept, 1)
	simtest.Fill(s.at, seed, sampleSize)
	s.want = simtest.Random(seed+1000, sampleSize)
	for _, c := range s.list {
		for _, r := range c.Zeroed {
			clear(s.part(s.want, r.At, r.Size))
		}
		for _, r := range c.Kept {
			for row := range r.Rows {
				at := r.At + cuda.Ptr(row*r.Pitch)
				copy(s.part(s.want, at, r.Size), simtest.Bytes(at, r.Size))
			}
		}
	}
	return s
}

func (s *sample) part(of []byte, at cuda.Ptr, size uint64) []byte { return of[at-s.at:][:size] }

func (s *sample) total() (n uint64) {
	for _, c := range s.list {
		n += c.Bytes()
	}
	return n
}

func (s *sample) save(d Store) error {
	for _, c := range s.list {
		if err := d.Save(c, s.stream); err != nil {
			return err
		}
	}
	return nil
}

func (s *sample) restore(d Store) error {
	for _, c := range s.list {
		if err := d.Restore(c, s.stream); err != nil {
			return err
		}
	}
	return nil
}

// lose puts other data where the contents were.
func (s *sample) lose(seed uint64) { simtest.Fill(s.at, seed, sampleSize) }

// intact compares all of the memory with what must be there after lose(seed+1000)
// and a restore.
func (s *sample) intact(t *testing.T, message ...any) {
	t.Helper()
	require.NoError(t, simtest.Driver().StreamSynchronize(s.stream))
	require.True(t, bytes.Equal(s.want, simtest.Bytes(s.at, sampleSize)), message...)
}

func TestDisk(t *testing.T) {
	for _, direct := range []bool{true, false} {
		t.Run(fmt.Sprintf("direct %v", direct), func(t *testing.T) {
			simtest.On(t, 0)
			d := newDisk(t)
			d.file.direct = direct
			require.Zero(t, d.FileBytes())
			for cycle := range uint64(4) {
				s := newSample(t, 0, cycle)
				require.NoError(t, d.Begin(s.total()))
				require.NoError(t, s.save(d))
				require.NoError(t, simtest.Driver().StreamSynchronize(s.stream))
				require.EqualValues(t, 4*small, d.Bytes())
				require.InDelta(t, s.total(), d.FileBytes(), 5*block)
				require.Len(t, d.files(t), 1)
				d.namesNothing(t)
				require.Less(t, d.cached(t), s.total()/10)
				s.lose(cycle + 1000)
				for range 2 { // it is kept until the next Begin
					require.NoError(t, s.restore(d))
					s.intact(t)
				}
				require.Less(t, d.cached(t), s.total()/10)
				if cycle == 1 {
					require.NoError(t, d.Free(always))
					require.Empty(t, d.files(t))
					require.ErrorIs(t, d.Restore(s.list[0], s.stream), errForgotten)
				}
			}
			require.Equal(t, direct, d.file.direct)
		})
	}
}

// With names, each Save has a file, of what it keeps and with that in it.
func TestDiskWithNames(t *testing.T) {
	simtest.On(t, 0)
	d := newDiskOf(t, true)
	var names []string
	for cycle := range uint64(3) {
		s := newSample(t, 0, cycle)
		require.NoError(t, d.Begin(s.total()))
		d.namesNothing(t)
		require.NoError(t, s.save(d))
		var held uint64
		for _, c := range s.list {
			if c.Bytes() == 0 {
				require.Empty(t, c.chunks)
				continue
			}
			f := c.chunks[0].file
			require.NotContains(t, names, f.path)
			names = append(names, f.path)
			data, err := os.ReadFile(f.path)
			require.NoError(t, err)
			require.GreaterOrEqual(t, uint64(len(data)), c.Bytes())
			held += uint64(len(data))
			first := c.Kept[0]
			require.Equal(t, data[:min(first.Size, small)], s.part(s.want, first.At, min(first.Size, small)))
		}
		list, err := os.ReadDir(d.Folder())
		require.NoError(t, err)
		require.Len(t, list, 4)
		require.Equal(t, held, d.FileBytes())
		s.lose(cycle + 1000)
		require.NoError(t, s.restore(d))
		s.intact(t)
		d.Remove()
		d.namesNothing(t)
		require.Empty(t, d.files(t))
		require.Zero(t, d.FileBytes())
		require.ErrorIs(t, d.Restore(s.list[0], s.stream), errForgotten)
	}
	s := newSample(t, 0, 9)
	require.NoError(t, d.Begin(s.total()))
	require.NoError(t, s.save(d))
	require.NoError(t, d.Begin(s.total()), "the last pause's go before the next")
	d.namesNothing(t)
}

// What an ended process has left behind goes when the next Disk starts. What a live
// one has, and other files, stay.
func TestDiskSweeps(t *testing.T) {
	simtest.On(t, 0)
	d := newDiskOf(t, true)
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	require.NoError(t, s.save(d))
	old, other := filepath.Join(d.Folder(), "amem-backup-1-77"), filepath.Join(d.Folder(), "amem-backup-1")
	link := filepath.Join(d.Folder(), "amem-backup-1-78")
	require.NoError(t, os.WriteFile(old, []byte("x"), 0o600))
	require.NoError(t, os.WriteFile(other, []byte("x"), 0o600))
	require.NoError(t, os.Symlink(other, link))
	NewDisk(simtest.Driver(), d.Folder(), false)
	require.FileExists(t, old)
	NewDisk(simtest.Driver(), d.Folder(), true)
	require.NoFileExists(t, old)
	require.FileExists(t, other)
	require.NoError(t, os.Remove(link))
	require.NoError(t, os.Remove(other))
	s.lose(1001)
	require.NoError(t, s.restore(d))
	s.intact(t)
	list, err := os.ReadDir(d.Folder())
	require.NoError(t, err)
	require.Len(t, list, 4, "this process lives")

	// As a death leaves it: nobody has it open, nor locked.
	path := s.list[0].chunks[0].file.path
	require.NoError(t, unix.Close(s.list[0].chunks[0].file.fd))
	s.list[0].chunks[0].file.fd = -1
	NewDisk(simtest.Driver(), d.Folder(), true)
	require.NoFileExists(t, path)
}

// A sweep may come between the file and its lock. On a file system without locks
// nothing is swept.
func TestDiskLocks(t *testing.T) {
	simtest.On(t, 0)
	d := newDiskOf(t, true)
	swept := 0
	replace(t, &flock, func(fd, how int) error {
		if swept++; swept == 1 {
			sweep(d.Folder())
		}
		return unix.Flock(fd, how)
	})
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	require.NoError(t, s.save(d))
	require.Greater(t, swept, 2)
	list, err := os.ReadDir(d.Folder())
	require.NoError(t, err)
	require.Len(t, list, 4)

	flock = func(int, int) error { return unix.ENOLCK }
	require.NoError(t, d.Begin(s.total()))
	require.NoError(t, s.save(d))
	sweep(d.Folder())
	list, err = os.ReadDir(d.Folder())
	require.NoError(t, err)
	require.Len(t, list, 4)
}

// Begin gives the disk back that it does not need.
func TestDiskShrinks(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	require.NoError(t, d.Begin(0))
	require.Empty(t, d.files(t), "nothing is taken before it is needed")
	require.NoError(t, d.Begin(5*mib+1))
	require.EqualValues(t, 5*mib+block, d.FileBytes())
	require.GreaterOrEqual(t, d.held(t), 5*mib, "there is room for it from the start")
	require.NoError(t, d.Begin(mib))
	require.EqualValues(t, mib, d.FileBytes())
	require.Less(t, d.held(t), 2*mib)
	require.NoError(t, d.Begin(0))
	require.Zero(t, d.FileBytes())
}

// Chunks of the size that users get, and more of them than buffers.
func TestDiskLargerThanTheRing(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	d.chunkSize, d.ringSize = chunkSize, ringSize
	size := uint64(chunkSize*ringSize + 3*chunkSize/2)
	at := deviceMemory(t, (size+2*mib-1)&^(2*mib-1))
	stream, err := simtest.Driver().NewStream()
	require.NoError(t, err)
	c := &Contents{Kept: []Range{{at, size, 1, 0}}}
	simtest.Fill(at, 1, size)
	require.NoError(t, d.Begin(size))
	require.NoError(t, d.Save(c, stream))
	require.EqualValues(t, chunkSize*ringSize, d.Bytes())
	simtest.Fill(at, 2, size)
	require.NoError(t, d.Restore(c, stream))
	require.NoError(t, simtest.Driver().StreamSynchronize(stream))
	require.True(t, simtest.Holds(at, 1, size))
	part := make([]byte, 3*chunkSize)
	require.NoError(t, c.Read(at+chunkSize/2, part))
	require.True(t, bytes.Equal(simtest.Random(1, size)[chunkSize/2:][:len(part)], part))
}

// The stream may have work before the copies, and the buffers may still be in
// use by an earlier Restore, of another device too.
func TestDiskStreams(t *testing.T) {
	d := newDisk(t)
	end := simtest.Use(t, 0)
	first := newSample(t, 0, 1)
	end()
	end = simtest.Use(t, 1)
	second := newSample(t, 1, 2)
	end()
	require.NoError(t, d.Begin(first.total()+second.total()))
	both := func(f func(*sample) error) {
		for i, s := range []*sample{first, second} {
			end := simtest.Use(t, i)
			require.NoError(t, f(s))
			end()
		}
	}
	both(func(s *sample) error { return s.save(d) })
	first.lose(1001)
	second.lose(1002)
	both(func(s *sample) error { return s.restore(d) })
	both(func(s *sample) error { s.intact(t); return nil })
	require.Len(t, d.events, 2)
	both(func(s *sample) error { return s.restore(d) })
	both(func(s *sample) error { s.intact(t); return nil })
	for _, list := range d.events {
		require.Len(t, list, d.ringSize, "events are used again")
	}
	defer simtest.Use(t, 0)()
	require.NoError(t, d.Free(always))
}

// The device may be busy with what came before the copies: a Save waits for it,
// and a Restore for copies out of buffers that it needs again.
func TestDiskWaitsForTheDevice(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	at := deviceMemory(t, 2*mib)
	c := &Contents{Kept: []Range{{at, 2 * mib, 1, 0}}}
	require.NoError(t, d.Begin(2*mib))
	simtest.Fill(at, 1, 2*mib)
	for i, f := range []func(*Contents, cuda.Stream) error{d.Save, d.Restore} {
		release := simtest.Busy(t) // the default stream is
		waits := simtest.Calls(t, "cuEventSynchronize")
		done := make(chan error, 1)
		go func() {
			defer simtest.Use(t, 0)()
			done <- f(c, 0)
		}()
		for range 100 { // it never waits if it is wrong
			if simtest.Calls(t, "cuEventSynchronize") > waits {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		simtest.Fill(at, 2+uint64(i), 2*mib) // before the copies
		release()
		require.NoError(t, <-done)
	}
	require.NoError(t, simtest.Driver().StreamSynchronize(0))
	require.True(t, simtest.Holds(at, 2, 2*mib))
}

// What a store has is read without a device.
func TestRead(t *testing.T) {
	for name, make := range map[string]func(t *testing.T) Store{
		"disk":  func(t *testing.T) Store { return newDisk(t) },
		"named": func(t *testing.T) Store { return newDiskOf(t, true) },
		"arena": func(*testing.T) Store { return NewArena(simtest.Driver()) },
	} {
		t.Run(name, func(t *testing.T) {
			simtest.On(t, 0)
			store := make(t)
			s := newSample(t, 0, 1)
			require.NoError(t, store.Begin(s.total()))
			require.NoError(t, s.save(store))
			require.NoError(t, simtest.Driver().StreamSynchronize(s.stream))
			s.lose(2)
			calls := simtest.Driver().Calls()
			for _, c := range s.list {
				for _, r := range c.Kept {
					for row := range r.Rows {
						at := r.At + cuda.Ptr(row*r.Pitch)
						for _, part := range []span{{0, r.Size}, {r.Size / 3, r.Size / 2}, {r.Size - 1, 1}, {r.Size, 0}} {
							got := bytes.Repeat([]byte{0xee}, int(part.size))
							want := s.part(s.want, at+cuda.Ptr(part.from), part.size)
							require.NoError(t, c.Read(at+cuda.Ptr(part.from), got))
							require.True(t, bytes.Equal(want, got))
							piece := c.Piece(at+cuda.Ptr(part.from), part.size)
							if name == "arena" && part.size > 0 {
								require.True(t, bytes.Equal(want, piece))
								require.Equal(t, len(piece), cap(piece))
							} else {
								require.Nil(t, piece)
							}
						}
						if r.Pitch != r.Size {
							require.ErrorContains(t, c.Read(at, bytes.Repeat([]byte{0}, int(r.Size)+1)), "were not kept")
							require.Nil(t, c.Piece(at, r.Size+1))
						}
					}
				}
			}
			require.Equal(t, calls, simtest.Driver().Calls())
			require.ErrorContains(t, s.list[0].Read(s.at-1, []byte{0}), "were not kept")
			require.ErrorIs(t, (&Contents{}).Read(s.at, nil), errNotKept)
			require.Nil(t, (&Contents{Kept: s.list[0].Kept}).Piece(s.at, 1))
			require.ErrorIs(t, NewArena(simtest.Driver()).Restore(s.list[0], s.stream), errNotKept)
			require.ErrorIs(t, NewDisk(simtest.Driver(), "", false).Restore(s.list[0], s.stream), errNotKept)
			for _, forget := range []func() error{func() error { return store.Begin(s.total()) }, func() error { return store.Free(always) }} {
				require.NoError(t, store.Begin(s.total()))
				require.NoError(t, s.save(store))
				require.NoError(t, simtest.Driver().StreamSynchronize(s.stream))
				require.NoError(t, forget())
				require.ErrorIs(t, s.list[0].Read(s.at, []byte{0}), errForgotten)
				require.Nil(t, s.list[0].Piece(s.at, 1))
				require.ErrorIs(t, store.Restore(s.list[0], s.stream), errForgotten)
			}
		})
	}
}

// A range of device memory that was kept in parts that follow each other.
func TestReadAcrossRanges(t *testing.T) {
	simtest.On(t, 0)
	at := deviceMemory(t, 2*mib)
	simtest.Fill(at, 1, 2*mib)
	c := &Contents{}
	c.Keep(at, 1000)
	c.Keep(at+4000, 1000)
	c.Keep(at+5000, 1000) // follows the second row
	c.Keep(at+10000, 500)
	require.Len(t, c.Kept, 3)
	require.Equal(t, uint64(2), c.Kept[0].Rows)
	// In the arena's memory, a piece ends within the second row.
	a := NewArena(simtest.Driver())
	d := newDisk(t)
	for _, store := range []Store{a, d} {
		require.NoError(t, store.Begin(2*mib+c.Bytes()))
		before := &Contents{Kept: []Range{{at, 2*mib - 1500, 1, 0}}}
		if store == a {
			require.NoError(t, grow(a, 2*mib))
			require.NoError(t, grow(a, 2*mib+c.Bytes()))
		}
		require.NoError(t, store.Save(before, 0))
		require.NoError(t, store.Save(c, 0))
		require.NoError(t, simtest.Driver().StreamSynchronize(0))
		got := make([]byte, 1900)
		require.NoError(t, c.Read(at+4050, got))
		require.Equal(t, simtest.Bytes(at+4050, 1900), got)
		require.ErrorContains(t, c.Read(at+4050, make([]byte, 1951)), "were not kept")
		require.ErrorContains(t, c.Read(at+900, make([]byte, 200)), "were not kept")
		last := got[:300]
		require.NoError(t, c.Read(at+10100, last))
		require.Equal(t, simtest.Bytes(at+10100, 300), last)
		if store == a {
			require.Len(t, c.host, 2)
			require.Nil(t, c.Piece(at+4000, 1000))
			require.Equal(t, last, c.Piece(at+10100, 300))
		}
	}
	require.NoError(t, a.Begin(c.Bytes()))
	require.NoError(t, a.Save(c, 0))
	require.NoError(t, simtest.Driver().StreamSynchronize(0))
	require.Equal(t, simtest.Bytes(at+4000, 2000), c.Piece(at+4000, 2000), "over ranges that follow each other")
	require.NoError(t, a.Free(always))
}

func TestDiskHasNoFolder(t *testing.T) {
	simtest.On(t, 0)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for folder, want := range map[string]error{
		filepath.Join(t.TempDir(), "missing"): unix.ENOENT, file: unix.ENOTDIR, "/proc/self": nil,
	} {
		d := NewDisk(simtest.Driver(), folder, false)
		err := d.Begin(mib)
		var disk *DiskError
		require.ErrorAs(t, err, &disk, folder)
		require.Equal(t, folder, disk.Folder)
		require.ErrorContains(t, err, folder)
		require.ErrorContains(t, err, "set_disk_directory")
		if want != nil {
			require.ErrorIs(t, err, want)
		}
		require.NoError(t, d.Free(always))
	}
}

// A file system that knows only files with names, as NFS does.
func TestDiskWithANameForAMoment(t *testing.T) {
	simtest.On(t, 0)
	replace(t, &tmpfile, unix.O_WRONLY|unix.O_APPEND|unix.O_DIRECTORY) // of a folder: refused
	d := newDisk(t)
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	d.namesNothing(t)
	require.NoError(t, s.save(d))
	s.lose(1001)
	require.NoError(t, s.restore(d))
	s.intact(t)
}

func replace[T any](t *testing.T, what *T, by T) {
	old := *what
	*what = by
	t.Cleanup(func() { *what = old })
}

func TestDiskIsFull(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	require.NoError(t, d.Begin(mib))
	err := d.Begin(1 << 50)
	var disk *DiskError
	require.ErrorAs(t, err, &disk)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.EqualValues(t, 1<<50-mib, disk.Needed)
	require.Positive(t, disk.Free)
	require.ErrorContains(t, err, fmt.Sprintf("%d more bytes of disk are needed to keep the contents in, %d are free; free some, or "+
		"choose another folder with amem.set_disk_directory() or AMEM_DISK_DIRECTORY", disk.Needed, disk.Free))
	require.ErrorContains(t, err, d.Folder())
	require.Equal(t, mib, d.FileBytes(), "as it was")

	// It fills up after it was looked at.
	replace(t, &fallocate, func(fd int, mode uint32, at, size int64) error {
		return errors.Join(unix.Fallocate(fd, mode, at, size/2), unix.ENOSPC)
	})
	require.ErrorAs(t, d.Begin(2*mib), &disk)
	require.Equal(t, mib, disk.Needed)
	require.Equal(t, mib, d.FileBytes())
	require.LessOrEqual(t, d.held(t), mib+block, "what was taken of it is given back")
	require.NoError(t, d.Begin(mib), "there is room for this already")
}

// A file larger than the process may make would end it (SIGXFSZ).
func TestDiskLimitOfFiles(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: mib, Max: old.Max}))
	err := d.Begin(4 * mib)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &old))
	var disk *DiskError
	require.ErrorAs(t, err, &disk)
	require.ErrorIs(t, err, unix.EFBIG)
	require.Equal(t, 4*mib, disk.Needed)
	require.Equal(t, mib, disk.Free)
	require.ErrorContains(t, err, "ulimit")
	require.NoError(t, d.Begin(4*mib))
}

// A file system that can't take room ahead says that it is full when it is
// written to.
func TestDiskFullWhenWritten(t *testing.T) {
	simtest.On(t, 0)
	for _, direct := range []bool{true, false} {
		d := newDisk(t)
		d.file.direct = direct
		s := newSample(t, 0, 1)
		fallocate = func(int, uint32, int64, int64) error { return unix.EOPNOTSUPP }
		pwrite = func(fd int, p []byte, at int64) (int, error) {
			if uint64(at)+uint64(len(p)) > mib {
				return 0, unix.ENOSPC
			}
			return unix.Pwrite(fd, p, at)
		}
		require.NoError(t, d.Begin(s.total()))
		err := s.save(d)
		fallocate, pwrite = unix.Fallocate, unix.Pwrite
		var disk *DiskError
		require.ErrorAs(t, err, &disk)
		require.ErrorIs(t, err, unix.ENOSPC)
		require.Positive(t, disk.Needed)

		c := s.list[0] // which there is room for
		require.NoError(t, d.Begin(c.Bytes()))
		require.NoError(t, d.Save(c, s.stream))
		s.lose(1001)
		require.NoError(t, d.Restore(c, s.stream))
		require.NoError(t, simtest.Driver().StreamSynchronize(s.stream))
		size := c.Kept[0].Size
		require.True(t, bytes.Equal(s.want[:size], simtest.Bytes(s.at, size)))
		require.NoError(t, d.Free(always))
	}
}

// A folder in the host's memory has no more room than that.
func TestDiskInMemory(t *testing.T) {
	inRoot(t, map[string]string{"proc/meminfo": "MemAvailable: 1024 kB\n"})
	replace(t, &fstatfs, func(fd int, s *unix.Statfs_t) error {
		*s = unix.Statfs_t{Type: unix.TMPFS_MAGIC, Bavail: 1 << 30, Frsize: block}
		return nil
	})
	d := NewDisk(nil, t.TempDir(), false)
	err := d.Begin(2 * mib)
	var disk *DiskError
	require.ErrorAs(t, err, &disk)
	require.Equal(t, mib, disk.Free)
	require.ErrorContains(t, err, "MemAvailable")
	require.NoError(t, d.Begin(mib))
	require.NoError(t, d.Free(always))
}

func TestDiskHasNoHostMemory(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	inRoot(t, map[string]string{"proc/meminfo": "MemAvailable: 60 kB\n"})
	err := s.save(d)
	var host *HostMemoryError
	require.ErrorAs(t, err, &host)
	require.EqualValues(t, small, host.Bytes)
	require.Zero(t, d.Bytes())
}

// More than Begin was told is refused; what needs more blocks than was told is not.
func TestDiskTotal(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	at := deviceMemory(t, 2*mib)
	simtest.Fill(at, 1, 2*mib)
	require.NoError(t, d.Begin(30))
	var list []*Contents
	for i := range cuda.Ptr(30) {
		list = append(list, &Contents{Kept: []Range{{at + 1000*i, 1, 1, 0}}})
		require.NoError(t, d.Save(list[i], 0))
	}
	require.EqualValues(t, 30*block, d.FileBytes())
	require.ErrorContains(t, d.Save(&Contents{Kept: []Range{{at, 1, 1, 0}}}, 0), "1 bytes more than was said")
	require.NoError(t, d.Begin(30))
	require.EqualValues(t, block, d.FileBytes())
}

// Signals interrupt the system's calls, and some do a part.
func TestDiskInterrupted(t *testing.T) {
	simtest.On(t, 0)
	d := newDisk(t)
	var mu sync.Mutex
	calls := 0
	some := func(call func(int, []byte, int64) (int, error)) func(int, []byte, int64) (int, error) {
		return func(fd int, p []byte, at int64) (int, error) {
			mu.Lock()
			calls++
			n := calls
			mu.Unlock()
			switch {
			case n%3 == 0:
				return -1, unix.EINTR
			case n%3 == 1 && len(p) > 2*block:
				return call(fd, p[:len(p)/2&^(block-1)+100], at) // not even whole blocks
			}
			return call(fd, p, at)
		}
	}
	replace(t, &pwrite, some(unix.Pwrite))
	replace(t, &pread, some(unix.Pread))
	interrupted := false
	replace(t, &fallocate, func(fd int, mode uint32, at, size int64) error {
		if interrupted = !interrupted; interrupted {
			return unix.EINTR
		}
		return unix.Fallocate(fd, mode, at, size)
	})
	d.file.direct = false // which takes any length
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	require.NoError(t, s.save(d))
	s.lose(1001)
	require.NoError(t, s.restore(d))
	s.intact(t)
	require.Greater(t, calls, 50)

	pwrite = func(int, []byte, int64) (int, error) { return 0, nil }
	require.NoError(t, d.Begin(s.total()))
	require.ErrorContains(t, s.save(d), "short write")
}

// Where the file system wants larger blocks, the page cache is used after all.
func TestDiskRefusesToGoDirect(t *testing.T) {
	simtest.On(t, 0)
	replace(t, &pwrite, func(fd int, p []byte, at int64) (int, error) {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || flags&unix.O_DIRECT != 0 {
			return -1, errors.Join(err, unix.EINVAL)
		}
		return unix.Pwrite(fd, p, at)
	})
	d := newDisk(t)
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	require.False(t, d.file.direct)
	require.NoError(t, s.save(d))
	s.lose(1001)
	require.NoError(t, s.restore(d))
	s.intact(t)
}

// Each write, and each read, fails once. A second attempt succeeds.
func TestDiskFails(t *testing.T) {
	for _, named := range []bool{false, true} {
		t.Run(fmt.Sprintf("named %v", named), func(t *testing.T) { diskFails(t, named) })
	}
}

func diskFails(t *testing.T, named bool) {
	simtest.On(t, 0)
	for _, cause := range []error{unix.EIO, unix.ENOSPC} {
		for name, call := range map[string]*func(int, []byte, int64) (int, error){"write": &pwrite, "read": &pread} {
			real, failing, calls := *call, 0, 0
			var mu sync.Mutex
			replace(t, call, func(fd int, p []byte, at int64) (int, error) {
				mu.Lock()
				calls++
				fail := calls == failing
				mu.Unlock()
				if fail {
					return -1, cause
				}
				return real(fd, p, at)
			})
			d := newDiskOf(t, named)
			s := newSample(t, 0, 1)
			original := bytes.Clone(simtest.Bytes(s.at, sampleSize))
			cycle := func() (failed int) {
				attempt := func(f func() error) {
					err := f()
					for ; err != nil; err = f() {
						var disk *DiskError
						require.ErrorAs(t, err, &disk)
						require.ErrorIs(t, err, cause)
						require.Equal(t, cause == unix.ENOSPC && name == "write", disk.Needed > 0)
						failed++
					}
				}
				copy(simtest.Bytes(s.at, sampleSize), original)
				attempt(func() error {
					if err := d.Begin(s.total()); err != nil {
						return err
					}
					return s.save(d)
				})
				s.lose(1001)
				attempt(func() error { return s.restore(d) })
				s.intact(t)
				return failed
			}
			require.Zero(t, cycle())
			most := calls
			require.Greater(t, most, 20)
			for n := range most - 1 {
				calls, failing = 0, n+1
				require.Equal(t, 1, cycle(), "%s %d", name, failing)
			}
		}
	}
}

// Of what was changed in the file, nothing is passed off as right.
func TestDiskIsCorrupt(t *testing.T) {
	simtest.On(t, 0)
	opened := func(k chunk) *os.File {
		file, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", k.file.fd), os.O_RDWR, 0)
		require.NoError(t, err)
		return file
	}
	for i := range 4 {
		d := newDiskOf(t, i > 1)
		d.file.direct = i%2 > 0
		s := newSample(t, 0, 1)
		require.NoError(t, d.Begin(s.total()))
		require.NoError(t, s.save(d))
		for _, c := range s.list {
			for _, k := range c.chunks {
				file := opened(k)
				at := int64(k.at + k.size/2)
				var was [1]byte
				_, err := file.ReadAt(was[:], at)
				require.NoError(t, err)
				_, err = file.WriteAt([]byte{was[0] ^ 1}, at)
				require.NoError(t, err)

				var corrupt *CorruptError
				require.ErrorAs(t, s.restore(d), &corrupt)
				require.Equal(t, CorruptError{d.Folder(), k.at, k.size}, *corrupt)
				require.ErrorContains(t, corrupt, fmt.Sprintf("offset %d of the file in the folder %s", k.at, d.Folder()))
				r := c.Kept[0]
				if r.Rows == 1 && k.from < r.Size {
					require.ErrorAs(t, c.Read(r.At+cuda.Ptr(k.from), []byte{0}), &corrupt)
				}
				_, err = file.WriteAt(was[:], at)
				require.NoError(t, err)
				require.NoError(t, file.Close())
			}
		}
		s.lose(1001)
		require.NoError(t, s.restore(d), "it was for a while only")
		s.intact(t)
		last := s.list[len(s.list)-1].chunks[0]
		file := opened(last)
		require.NoError(t, file.Truncate(int64(last.at)+100))
		var corrupt *CorruptError
		require.ErrorAs(t, s.restore(d), &corrupt)
		require.Equal(t, last.at, corrupt.Offset)
		require.NoError(t, file.Close())
	}
}

// Every call of the driver that a pause and a resume make fails once, and some
// together with the wait that follows. A second attempt succeeds.
func TestDiskFaults(t *testing.T) {
	for _, named := range []bool{false, true} {
		t.Run(fmt.Sprintf("named %v", named), func(t *testing.T) { diskFaults(t, named) })
	}
}

func diskFaults(t *testing.T, named bool) {
	simtest.On(t, 0)
	driver := simtest.Driver()
	s := newSample(t, 0, 1)
	original := bytes.Clone(simtest.Bytes(s.at, sampleSize))
	d := newDiskOf(t, named)
	attempt := func(f func() error) (failed int) {
		err := f()
		for ; err != nil && failed < 3; err = f() {
			require.ErrorIs(t, err, cuda.ErrUnknown)
			failed++
		}
		require.NoError(t, err)
		return failed
	}
	cycle := func() (failed int) {
		d.events = map[cuda.Context][]cuda.Event{} // they are made again
		copy(simtest.Bytes(s.at, sampleSize), original)
		failed += attempt(func() error {
			if err := d.Begin(s.total()); err != nil {
				return err
			}
			return s.save(d)
		})
		s.lose(1001)
		failed += attempt(func() error { return s.restore(d) })
		s.intact(t)
		failed += attempt(func() error { return d.Free(always) })
		require.Zero(t, d.Bytes())
		return failed
	}
	before := driver.Calls()
	require.Zero(t, cycle())
	counts := driver.Calls()
	maps.DeleteFunc(counts, func(name string, n int64) bool { counts[name] = n - before[name]; return counts[name] == 0 })
	counts["cuStreamSynchronize"]-- // the test's own
	cases := 0
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		for n := range int(counts[name]) {
			simtest.Fault(t, name, n+1, cuda.ErrUnknown)
			injected[name]++
			require.Equal(t, 1, cycle(), "%s %d", name, n+1)
			cases++
		}
	}
	require.Greater(t, cases, 100, counts)

	// Where the event can't be recorded, nor the stream waited for, buffers
	// stay in use until it can.
	simtest.Fault(t, "cuEventRecord", 2, cuda.ErrUnknown)
	simtest.Fault(t, "cuStreamSynchronize", 1, cuda.ErrUnknown)
	require.Equal(t, 1, cycle())
	simtest.Fault(t, "cuEventSynchronize", 1, cuda.ErrUnknown)
	simtest.Fault(t, "cuMemHostUnregister", 2, cuda.ErrUnknown)
	injected["cuMemHostUnregister"]++
	require.Equal(t, 2, cycle())
}

// Memory that could not be pinned is given back.
func TestDiskPinsNot(t *testing.T) {
	simtest.On(t, 0)
	resident := func() uint64 {
		n, ok := field("proc/self/status", "VmRSS:")
		require.True(t, ok)
		return n << 10
	}
	d := newDisk(t)
	d.chunkSize = 32 << 20
	s := newSample(t, 0, 1)
	require.NoError(t, d.Begin(s.total()))
	before := resident()
	for range 20 {
		simtest.Fault(t, "cuMemHostRegister", 1, cuda.ErrOutOfMemory)
		injected["cuMemHostRegister"]++
		var host *HostMemoryError
		require.ErrorAs(t, s.save(d), &host)
		require.ErrorContains(t, host, "pin it")
		require.Zero(t, d.Bytes())
	}
	require.Less(t, resident(), before+200<<20)
}
