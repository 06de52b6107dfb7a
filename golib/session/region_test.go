package session

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/simtest"
	"amem/golib/vmm"
)

// region makes a region in a process and answers its number.
func (p *process) region(t *testing.T, tag string, backup Backup) int {
	t.Helper()
	_, number, err := p.Region(tag, backup)
	require.NoError(t, err)
	return number
}

// torch allocates in a region, and fills what it gets.
func (p *process) torch(t *testing.T, region int, size, seed uint64) buffer {
	t.Helper()
	at, err := p.Allocate(region, size, 0)
	require.NoError(t, err)
	b := buffer{at: at, size: size, seed: seed}
	b.fill(seed)
	return b
}

func (p *process) give(t *testing.T, region int, buffers ...buffer) {
	t.Helper()
	for _, b := range buffers {
		require.NoError(t, p.Free(region, b.at))
	}
}

// alone answers a process that NCCL has no memory in; all of the device's memory
// is back at the test's end.
func alone(t *testing.T) *process { return bare(t, 1, 5*time.Second)[0] }

func TestRegion(t *testing.T) {
	p := alone(t)
	weights, cache := p.region(t, "weights", BackupCPU), p.region(t, "kv_cache", BackupNone)
	require.NotEqual(t, weights, cache)
	require.Equal(t, weights, p.region(t, "weights", BackupCPU), "the same one")
	var kept, lost []buffer
	for i := range uint64(12) {
		kept = append(kept, p.torch(t, weights, []uint64{2 * mib, 20 * mib, 70 * mib}[i%3]/4, i+1))
		lost = append(lost, p.torch(t, cache, 8*mib, i+100))
	}
	all := simtest.Used(t, 0)
	for range 3 {
		done, err := p.Session.Pause("kv_cache")
		require.NoError(t, err)
		require.True(t, done.Changed)
		require.Zero(t, done.Copied)
		require.Equal(t, all-done.Bytes, simtest.Used(t, 0))
		require.GreaterOrEqual(t, done.Bytes, 12*8*mib)
		for _, b := range kept {
			require.True(t, b.intact(), "the other tag's memory")
		}
		state, known := p.MemoryState(lost[3].at + 5)
		require.True(t, known)
		require.Equal(t, Paused, state)
		state, _ = p.TagState("weights")
		require.Equal(t, Active, state)
		state, _ = p.TagState("")
		require.Equal(t, Paused, state)

		done, err = p.Session.Pause("") // the rest
		require.NoError(t, err)
		require.GreaterOrEqual(t, done.Copied, uint64(len(kept))*mib/2)
		require.Zero(t, simtest.Used(t, 0))
		again, err := p.Session.Pause("weights,kv_cache")
		require.NoError(t, err)
		require.Equal(t, Transition{}, again, "paused already")

		_, err = p.Session.Resume("weights")
		require.NoError(t, err)
		require.LessOrEqual(t, simtest.Used(t, 0), done.Bytes, "no more than the tag's own")
		for _, b := range kept {
			require.True(t, b.intact())
		}
		require.NoError(t, p.Resume(""))
		require.Equal(t, all, simtest.Used(t, 0))
		for _, b := range lost {
			require.True(t, simtest.Writable(t, 0, b.at))
			b.fill(b.seed)
		}
	}
	p.give(t, weights, kept...)
	p.give(t, cache, lost...)
	require.Zero(t, simtest.Used(t, 0))
}

func TestTagsThatAreNone(t *testing.T) {
	p := alone(t)
	p.region(t, "weights", BackupCPU)
	for _, call := range []func(string) error{p.Pause, p.Resume} {
		err := call("weights,kv")
		require.ErrorIs(t, err, ErrArgument)
		require.ErrorContains(t, err, `no tag "kv"; the tags there are: nccl, weights`)
	}
	_, known := p.TagState("kv")
	require.False(t, known)
	for _, tag := range []string{"", "a,b", "nccl", strings.Repeat("x", 65), "a\x00b"} {
		_, _, err := p.Region(tag, BackupCPU)
		require.ErrorIs(t, err, ErrArgument, "%q", tag)
	}
	_, _, err := p.Region("w", 3)
	require.ErrorIs(t, err, ErrArgument)
	for i := range maxRegions - 1 {
		p.region(t, fmt.Sprint("tag", i), BackupNone)
	}
	_, _, err = p.Region("one more", BackupNone)
	require.ErrorIs(t, err, ErrState)
}

// A tag's regions of all kinds of backup are paused together, NCCL's memory with
// them.
func TestTagOfSeveralRegionsAndNCCL(t *testing.T) {
	p := start(t, 1, 5*time.Second)[0]
	base := simtest.Used(t, 0)
	folder := t.TempDir()
	require.NoError(t, p.SetDiskFolder(folder, false))
	var regions []int
	var buffers []buffer
	for i, backup := range []Backup{BackupCPU, BackupDisk, BackupNone} {
		regions = append(regions, p.region(t, "w", backup))
		buffers = append(buffers, p.torch(t, regions[i], 40*mib, uint64(i+1)))
	}
	for range 2 {
		require.NoError(t, p.Pause("w"))
		require.Equal(t, base, simtest.Used(t, 0))
		require.Equal(t, Active, p.State(), "NCCL")
		require.NoError(t, p.Pause(""))
		require.Zero(t, simtest.Used(t, 0))
		require.Equal(t, Paused, p.State())
		require.NoError(t, p.Resume("w"))
		require.True(t, buffers[0].intact())
		require.True(t, buffers[1].intact(), "from the disk")
		require.Equal(t, Paused, p.State())
		require.NoError(t, p.Resume("nccl"))
		intact(t, p)
	}
	names, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, names, "files have no names")
	for i, b := range buffers {
		p.give(t, regions[i], b)
	}
}

func TestSetDiskFolder(t *testing.T) {
	p := alone(t)
	require.ErrorIs(t, p.SetDiskFolder("/nowhere/at all", false), ErrArgument)
	require.ErrorContains(t, p.SetDiskFolder("/dev/null", false), "/dev/null is not a folder")
}

// What is allocated while its tag is paused is there at once, and what is freed
// then does not come back.
func TestRegionWhilePaused(t *testing.T) {
	p := alone(t)
	r := p.region(t, "weights", BackupCPU)
	old := []buffer{p.torch(t, r, 8*mib, 1), p.torch(t, r, 8*mib, 2), p.torch(t, r, 66*mib, 3)}
	require.NoError(t, p.Pause("weights"))
	young := p.torch(t, r, 4*mib, 4)
	require.True(t, young.intact())
	p.give(t, r, old[0], old[2])
	require.NoError(t, p.Resume("weights"))
	require.True(t, old[1].intact())
	require.True(t, young.intact())
	_, known := p.MemoryState(old[2].at)
	require.False(t, known)
	require.NoError(t, p.Pause("weights"))
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, p.Resume("weights"))
	require.True(t, old[1].intact())
	require.True(t, young.intact())
	p.give(t, r, old[1], young)
}

func TestBackupIsRead(t *testing.T) {
	p := alone(t)
	folder := t.TempDir()
	require.NoError(t, p.SetDiskFolder(folder, false))
	cpu, disk, none := p.region(t, "w", BackupCPU), p.region(t, "w", BackupDisk), p.region(t, "w", BackupNone)
	b := []buffer{p.torch(t, cpu, 6*mib, 1), p.torch(t, disk, 6*mib, 2), p.torch(t, none, 6*mib, 3)}
	to := make([]byte, 3*mib)
	require.ErrorIs(t, p.ReadBackup(b[0].at, to), ErrState, "not paused")
	require.ErrorIs(t, p.ReadBackup(0x1234, to), ErrArgument, "not a region's")
	require.NoError(t, p.Pause("w"))
	for i := range 2 {
		want := simtest.Random(b[i].seed, b[i].size)[mib : 4*mib]
		clear(to)
		require.NoError(t, p.ReadBackup(b[i].at+cuda.Ptr(mib), to))
		require.Equal(t, want, to)
	}
	found, err := p.FindBackup(b[0].at+cuda.Ptr(mib), 3*mib)
	require.NoError(t, err)
	require.Equal(t, simtest.Random(1, 6*mib)[mib:4*mib], found)
	_, err = p.FindBackup(b[1].at, mib)
	require.ErrorIs(t, err, ErrState, "on the disk")
	require.ErrorIs(t, p.ReadBackup(b[2].at, to), ErrState, "no backup")
	require.ErrorIs(t, p.ReadBackup(b[0].at+cuda.Ptr(4*mib), to), ErrArgument, "beyond the end")
	require.NoError(t, p.Resume("w"))
	p.give(t, cpu, b[0])
	p.give(t, disk, b[1])
	p.give(t, none, b[2])
}

// A pause that fails leaves all of its tags active.
func TestPauseOfSeveralTagsFails(t *testing.T) {
	for _, call := range []string{"cuMemHostRegister_v2", "cuMemcpyDtoHAsync_v2", "cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"} {
		t.Run(call, func(t *testing.T) {
			p := alone(t)
			one, two := p.region(t, "one", BackupCPU), p.region(t, "two", BackupCPU)
			a, b := p.torch(t, one, 8*mib, 1), p.torch(t, two, 8*mib, 2)
			used := simtest.Used(t, 0)
			simtest.Fault(t, call, 2, cuda.ErrUnknown) // the second tag's
			err := p.Pause("")
			require.ErrorIs(t, err, cuda.ErrUnknown)
			require.ErrorContains(t, err, `pause "two"`)
			for _, tag := range []string{"one", "two"} {
				state, _ := p.TagState(tag)
				require.Equal(t, Active, state, tag)
			}
			require.Equal(t, used, simtest.Used(t, 0))
			require.True(t, a.intact())
			require.True(t, b.intact())
			require.NoError(t, p.Pause(""))
			require.Zero(t, simtest.Used(t, 0))
			require.NoError(t, p.Resume(""))
			require.True(t, a.intact())
			require.True(t, b.intact())
			p.give(t, one, a)
			p.give(t, two, b)
		})
	}
}

func TestRegionOutOfMemory(t *testing.T) {
	p := alone(t)
	other := p.region(t, "other", BackupNone)
	r := p.region(t, "weights", BackupCPU)
	b := p.torch(t, r, 512*mib, 1)
	require.NoError(t, p.Pause("weights"))
	hog, err := p.Allocate(other, simtest.Memory-256*mib, 0)
	require.NoError(t, err)
	err = p.Resume("weights")
	var oom *vmm.OutOfMemoryError
	require.ErrorAs(t, err, &oom)
	require.Equal(t, 512*mib, oom.Needed)
	require.Equal(t, 256*mib, oom.Free)
	state, _ := p.TagState("weights")
	require.Equal(t, Paused, state)
	_, err = p.Allocate(r, 512*mib, 0)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.NoError(t, p.Free(other, hog))
	require.NoError(t, p.Resume("weights"))
	require.True(t, b.intact())
	p.give(t, r, b)
}

// A tag that can't be resumed keeps no other paused.
func TestOneTagOutOfMemory(t *testing.T) {
	p := start(t, 1, 5*time.Second)[0]
	other, large, small := p.region(t, "other", BackupNone), p.region(t, "large", BackupCPU), p.region(t, "small", BackupCPU)
	a, b := p.torch(t, large, 256*mib, 1), p.torch(t, small, 2*mib, 2)
	require.NoError(t, p.Pause("large,small,nccl"))
	hog, err := p.Allocate(other, simtest.Memory-128*mib, 0)
	require.NoError(t, err)
	var oom *vmm.OutOfMemoryError
	require.ErrorAs(t, p.Resume(""), &oom)
	intact(t, p)
	require.True(t, b.intact())
	state, _ := p.TagState("large")
	require.Equal(t, Paused, state)
	require.NoError(t, p.Free(other, hog))
	require.NoError(t, p.Resume(""))
	require.True(t, a.intact())
	p.give(t, large, a)
	p.give(t, small, b)
}

func TestFreeHostOfRegions(t *testing.T) {
	p := alone(t)
	r := p.region(t, "weights", BackupCPU)
	b := p.torch(t, r, 8*mib, 1)
	require.NoError(t, p.Pause("weights"))
	require.ErrorContains(t, p.FreeHost(""), `tag "weights" is paused`)
	require.NoError(t, p.Resume("weights"))
	require.True(t, b.intact())
	unregistered := simtest.Calls(t, "cuMemHostUnregister")
	require.NoError(t, p.FreeHost(""))
	require.Equal(t, unregistered+1, simtest.Calls(t, "cuMemHostUnregister"))
	require.NoError(t, p.Pause("weights"))
	require.NoError(t, p.Resume("weights"))
	require.True(t, b.intact())
	p.give(t, r, b)
}

func TestFreeHostOfTags(t *testing.T) {
	p := alone(t)
	weights, optimizer := p.region(t, "weights", BackupCPU), p.region(t, "optimizer", BackupCPU)
	a, b := p.torch(t, weights, 8*mib, 1), p.torch(t, optimizer, 8*mib, 2)
	require.NoError(t, p.Pause(""))
	require.NoError(t, p.Resume("weights"))
	unregistered := simtest.Calls(t, "cuMemHostUnregister")
	require.ErrorContains(t, p.FreeHost("optimizer"), `tag "optimizer" is paused`)
	require.ErrorContains(t, p.FreeHost("weigths"), "the tags there are: nccl, weights, optimizer")
	require.NoError(t, p.FreeHost("weights"))
	require.Equal(t, unregistered+1, simtest.Calls(t, "cuMemHostUnregister"), "the other's holds its contents")
	require.NoError(t, p.Resume(""))
	require.True(t, a.intact() && b.intact())
	p.give(t, weights, a)
	p.give(t, optimizer, b)
}

func TestFreeWhatIsNone(t *testing.T) {
	p := alone(t)
	r := p.region(t, "weights", BackupCPU)
	b := p.torch(t, r, 8*mib, 1)
	require.ErrorIs(t, p.Free(r, b.at+4096), cuda.ErrInvalidValue)
	require.ErrorIs(t, p.Free(r, 0x1000), cuda.ErrInvalidValue)
	p.give(t, r, b)
	require.ErrorIs(t, p.Free(r, b.at), cuda.ErrInvalidValue, "freed already")
}

// What a NIC has registered stays where it is.
func TestRegionKeepsWhatANICUses(t *testing.T) {
	p := alone(t)
	r := p.region(t, "weights", BackupCPU)
	b := p.torch(t, r, 128*mib, 1)
	free := p.torch(t, r, 96*mib, 2)
	require.NotZero(t, p.Keep(b.at, b.size, vmm.KeepNIC, false))
	require.NoError(t, p.Pause("weights"))
	require.Equal(t, 128*mib, simtest.Used(t, 0))
	require.True(t, b.intact())
	require.NoError(t, p.Resume("weights"))
	require.True(t, free.intact())
	p.give(t, r, b, free)
}

// Memory that a NIC of a borrower uses can't be let go: after the owner's resume the NIC
// would write to what is not the owner's memory any more. The owner's pause says so.
func TestBorrowerKeepsWhatItsNICUses(t *testing.T) {
	s := newShared(t, BackupCPU)
	number := s.borrower.Keep(s.theirs[0].at, s.theirs[0].size, vmm.KeepNIC, false)
	require.NotZero(t, number)
	require.ErrorContains(t, s.owner.Pause("weights"), "registered with a network interface")
	s.mapped(t)
	s.borrower.Registered(number, 0)
	s.cycle(t)
	s.end(t)
}

// shares makes the second process open a buffer of the first.
func shares(t *testing.T, owner, borrower *process, b buffer) buffer {
	t.Helper()
	handle, known, err := owner.ShareHandle(b.at, false)
	require.NoError(t, err)
	require.True(t, known)
	at, known, err := borrower.OpenHandle(handle)
	require.NoError(t, err)
	require.True(t, known)
	opened := buffer{at: at, size: b.size, seed: b.seed}
	require.True(t, opened.intact())
	return opened
}

func (p *process) closes(t *testing.T, b buffer) {
	t.Helper()
	known, err := p.CloseHandle(b.at)
	require.NoError(t, err)
	require.True(t, known)
}

// The owner's pause releases both sides, and its resume restores both.
func TestSharedRegion(t *testing.T) {
	all := bare(t, 2, 5*time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	var own, theirs []buffer
	for i := range uint64(6) {
		own = append(own, a.torch(t, r, (2+13*i)*mib, i+1))
		theirs = append(theirs, shares(t, a, b, own[i]))
	}
	again := shares(t, a, b, own[0])
	require.Equal(t, theirs[0].at, again.at)
	used := simtest.Used(t, 0)
	for cycle := range uint64(3) {
		require.NoError(t, a.Pause("weights"))
		require.Zero(t, simtest.Used(t, 0), "memory that both sides mapped is given back")
		state, known := b.MemoryState(theirs[2].at)
		require.True(t, known)
		require.Equal(t, Paused, state)
		require.NoError(t, a.Resume("weights"))
		require.Equal(t, used, simtest.Used(t, 0))
		for i := range own {
			require.True(t, own[i].intact())
			require.True(t, theirs[i].intact(), "the borrower's side of buffer %d", i)
			theirs[i].fill(theirs[i].seed + 50*(cycle+1))
			own[i].seed += 50 * (cycle + 1)
			require.True(t, own[i].intact(), "the borrower's writes are the owner's contents")
			theirs[i].seed = own[i].seed
		}
	}
	b.closes(t, again)
	require.True(t, theirs[0].intact(), "opened twice, closed once")
	for _, o := range theirs {
		b.closes(t, o)
	}
	known, err := b.CloseHandle(theirs[0].at)
	require.True(t, err != nil || !known)
	a.give(t, r, own...)
}

// Either side may pause its tag first, and resume first.
func TestSharedRegionPausedOnBothSides(t *testing.T) {
	for _, order := range [][4]int{{0, 1, 0, 1}, {0, 1, 1, 0}, {1, 0, 0, 1}, {1, 0, 1, 0}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			all := bare(t, 2, 5*time.Second)
			a, b := all[0], all[1]
			r := a.region(t, "weights", BackupCPU)
			own := a.torch(t, r, 24*mib, 1)
			theirs := shares(t, a, b, own)
			for range 2 {
				require.NoError(t, all[order[0]].Pause("weights"))
				require.NoError(t, all[order[1]].Pause("weights"))
				require.Zero(t, simtest.Used(t, 0))
				require.NoError(t, all[order[2]].Resume("weights"), "it waits for nobody")
				require.NoError(t, all[order[3]].Resume("weights"))
				require.True(t, own.intact())
				require.True(t, theirs.intact())
			}
			b.closes(t, theirs)
			a.give(t, r, own)
		})
	}
}

// Both share with each other, and call at the same time.
func TestSharedBothWaysAtOnce(t *testing.T) {
	all := bare(t, 2, 20*time.Second)
	var own, theirs [2]buffer
	var regions [2]int
	for i, p := range all {
		regions[i] = p.region(t, "weights", BackupCPU)
		own[i] = p.torch(t, regions[i], 16*mib, uint64(i+1))
	}
	for i, p := range all {
		theirs[1-i] = shares(t, p, all[1-i], own[i])
	}
	for range 20 {
		require.NoError(t, each(all, func(p *process) error { return p.Pause("weights") }))
		require.Zero(t, simtest.Used(t, 0))
		require.NoError(t, each(all, func(p *process) error { return p.Resume("weights") }))
		for i := range all {
			require.True(t, own[i].intact())
			require.True(t, theirs[i].intact())
		}
	}
	for i, p := range all {
		p.closes(t, theirs[i])
	}
	for i, p := range all {
		p.give(t, regions[i], own[i])
	}
}

// A borrower whose kernels use the memory is waited for, and named when it takes
// too long; the owner stays active.
func TestBorrowerDoesNotLetGo(t *testing.T) {
	all := bare(t, 2, 300*time.Millisecond)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own := a.torch(t, r, 8*mib, 1)
	end := simtest.Use(t, 1) // the borrower's device
	theirs := shares(t, a, b, own)
	finish := simtest.Busy(t)
	end()
	err := a.Pause("weights")
	require.ErrorContains(t, err, fmt.Sprintf("waiting for pid %d (group 0) to let go of this process's memory", os.Getpid()))
	state, _ := a.TagState("weights")
	require.Equal(t, Active, state)
	require.True(t, own.intact())
	finish()
	require.Eventually(t, func() bool { return a.Pause("weights") == nil }, 5*time.Second, 10*time.Millisecond)
	require.Zero(t, simtest.Used(t, 0))
	require.Eventually(t, func() bool { return a.Resume("weights") == nil }, 5*time.Second, 10*time.Millisecond)
	require.True(t, own.intact())
	require.True(t, theirs.intact())
	b.closes(t, theirs)
	a.give(t, r, own)
}

// A borrower that has ended is not waited for; an owner that has ended takes
// paused memory with it, and what was mapped stays.
func TestSharersThatEnd(t *testing.T) {
	all := bare(t, 3, 5*time.Second)
	a, b, c := all[0], all[1], all[2]
	r := a.region(t, "weights", BackupCPU)
	own := a.torch(t, r, 8*mib, 1)
	theirs, late := shares(t, a, b, own), shares(t, a, c, own)
	c.Close()
	require.NoError(t, a.Pause("weights"))
	require.NoError(t, a.Resume("weights"))
	require.True(t, own.intact())
	require.True(t, theirs.intact())
	owner := a.regions.share.node.Self()
	a.Close()
	require.Eventually(t, func() bool { return b.regions.share.node.Gone(owner) }, 5*time.Second, time.Millisecond)
	require.NoError(t, b.Pause("weights"))
	require.NoError(t, b.Resume("weights"))
	require.True(t, theirs.intact(), "this mapping is all that holds the memory")
	b.closes(t, theirs)
	c.closes(t, late)
	a.give(t, r, own)
}

func TestHandles(t *testing.T) {
	all := bare(t, 2, time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own := a.torch(t, r, 8*mib, 1)
	_, known, err := a.ShareHandle(0x1000, true)
	require.NoError(t, err)
	require.False(t, known, "not a region's: CUDA's own handle is for it")
	_, known, err = b.OpenHandle([HandleSize]byte{1, 2, 3})
	require.NoError(t, err)
	require.False(t, known)

	handle, _, err := a.ShareHandle(own.at, true)
	require.NoError(t, err)
	for name, change := range map[string]func(h *[HandleSize]byte){
		"another owner":  func(h *[HandleSize]byte) { h[8] ^= 1 },
		"another block":  func(h *[HandleSize]byte) { h[32] ^= 0x40 },
		"another offset": func(h *[HandleSize]byte) { h[42] ^= 1 },
	} {
		bad := handle
		change(&bad)
		_, known, err = b.OpenHandle(bad)
		require.True(t, known, name)
		require.ErrorContains(t, err, "open memory of pid", name)
	}
	require.NoError(t, a.Pause("weights"))
	_, _, err = a.ShareHandle(own.at, true)
	require.ErrorIs(t, err, ErrState)
	require.ErrorContains(t, err, `tag "weights" is paused`)
	require.NoError(t, a.Resume("weights"))
	at, _, err := a.OpenHandle(handle) // by itself
	require.NoError(t, err)
	require.Equal(t, own.at, at)
	a.closes(t, own)
	require.True(t, own.intact())
	theirs := shares(t, a, b, own)
	_, _, err = b.ShareHandle(theirs.at, true)
	require.ErrorContains(t, err, "share it from there")
	b.closes(t, theirs)
	a.give(t, r, own)
}

// Freed memory that a borrower still has is not used for something else.
func TestFreedWhileBorrowed(t *testing.T) {
	all := bare(t, 2, 5*time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own, other := a.torch(t, r, 4*mib, 1), a.torch(t, r, 4*mib, 2)
	theirs := shares(t, a, b, own)
	a.give(t, r, own)
	next := a.torch(t, r, 4*mib, 3)
	require.NotEqual(t, own.at, next.at)
	require.True(t, theirs.intact())
	b.closes(t, theirs)
	require.Eventually(t, func() bool {
		young := a.torch(t, r, 4*mib, 4)
		defer a.give(t, r, young)
		return young.at == own.at
	}, 5*time.Second, 10*time.Millisecond, "then it is")
	require.True(t, other.intact())
	a.give(t, r, other, next)
}

// Threads allocate and free in two regions while others pause and resume them.
func TestRegionsFromManyThreads(t *testing.T) {
	all := bare(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	regions := []int{a.region(t, "one", BackupCPU), a.region(t, "two", BackupCPU)}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for worker := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer simtest.Use(t, 0)()
			random := rand.New(rand.NewPCG(uint64(worker), 9))
			r := regions[worker%2]
			var held []cuda.Ptr
			for {
				select {
				case <-stop:
					for _, p := range held {
						check(t, a.Free(r, p))
					}
					return
				default:
				}
				if len(held) > 8 || (len(held) > 0 && random.IntN(2) == 0) {
					i := random.IntN(len(held))
					check(t, a.Free(r, held[i]))
					held[i] = held[len(held)-1]
					held = held[:len(held)-1]
					continue
				}
				p, err := a.Allocate(r, (1+random.Uint64N(20))*mib, 0)
				check(t, err)
				held = append(held, p)
			}
		}()
	}
	fixed := a.torch(t, regions[0], 8*mib, 1)
	theirs := shares(t, a, b, fixed)
	for range 30 {
		require.NoError(t, a.Pause("one"))
		require.NoError(t, a.Pause(""))
		require.NoError(t, a.Resume("two"))
		require.NoError(t, a.Resume(""))
		require.True(t, fixed.intact())
		require.True(t, theirs.intact())
	}
	close(stop)
	wg.Wait()
	b.closes(t, theirs)
	a.give(t, regions[0], fixed)
}

func check(t *testing.T, err error) {
	if err != nil {
		t.Error(err)
	}
}

// Whichever driver call, or step at a socket, of a pause or a resume of shared
// memory fails, with the owner or with who has opened it: the tag is active or
// paused, and the next attempt succeeds.
func TestFaultsOfRegions(t *testing.T) {
	for _, backup := range []Backup{BackupCPU, BackupDisk, BackupNone} {
		t.Run(backup.String(), func(t *testing.T) {
			s := newShared(t, backup)
			for name, at := range map[string]seam{"driver": atTheDriver(), "sockets": atAllSockets()} {
				cases, reached := s.faults(t, at)
				t.Logf("%s: %d cases, %d of them reached", name, cases, reached)
				require.Greater(t, 2*reached, cases)
			}
			s.end(t)
		})
	}
}

// shared is memory of one process's region that another has opened.
type shared struct {
	owner, borrower *process
	region          int
	backup          Backup
	own, theirs     []buffer
	used            uint64
}

func newShared(t *testing.T, backup Backup) *shared {
	t.Helper()
	all := bare(t, 2, 20*time.Second)
	s := &shared{owner: all[0], borrower: all[1], backup: backup}
	require.NoError(t, s.owner.SetDiskFolder(t.TempDir(), false))
	s.region = s.owner.region(t, "weights", backup)
	for i, size := range []uint64{2 * mib, 6 * mib} {
		b := s.owner.torch(t, s.region, size, uint64(i+1))
		s.own, s.theirs = append(s.own, b), append(s.theirs, shares(t, s.owner, s.borrower, b))
	}
	s.used = simtest.Used(t, 0)
	watchSockets(t, s.owner.regions.share.node, s.borrower.regions.share.node)
	return s
}

func (s *shared) end(t *testing.T) {
	t.Helper()
	for i := range s.own {
		s.borrower.closes(t, s.theirs[i])
		s.owner.give(t, s.region, s.own[i])
	}
}

// faults makes each step of a pause and a resume fail in turn, as a round without
// a fault has found them. It answers how many, and how many were reached: at a
// socket, what is said depends on which connections are left.
func (s *shared) faults(t *testing.T, at seam) (cases, reached int) {
	t.Helper()
	s.round(t, fault{seam: at}) // buffers, streams and events are made
	for _, resuming := range []bool{false, true} {
		steps := s.round(t, fault{seam: at, resuming: resuming})
		require.NotEmpty(t, steps)
		for step, count := range steps {
			for n := 1; n <= count; n++ {
				for _, fails := range at.errors(step) {
					cases++
					t.Run(fmt.Sprintf("%s %d: %v", step, n, fails), func(t *testing.T) {
						simtest.On(t, 0)
						if s.round(t, fault{at, resuming, step, n, fails})[step] >= n {
							reached++
						}
					})
				}
			}
		}
	}
	return cases, reached
}

// round pauses and resumes, and answers which steps the fault's phase took.
func (s *shared) round(t *testing.T, f fault) (steps map[string]int) {
	t.Helper()
	for _, resuming := range []bool{false, true} {
		change, wanted := s.owner.Pause, Paused
		if resuming {
			change, wanted = s.owner.Resume, Active
		}
		var err error
		if f.resuming == resuming {
			f.fail(t, f.step, f.n, f.err)
			err = change("weights")
			steps = f.heal(t)
		} else {
			err = change("weights")
		}
		state, _ := s.owner.TagState("weights")
		if state == Active {
			require.Equal(t, s.used, simtest.Used(t, 0))
			require.True(t, resuming || s.backup == BackupNone || s.own[1].intact())
		} else {
			require.Zero(t, simtest.Used(t, 0))
		}
		if err != nil {
			require.NoError(t, change("weights"), "the second attempt")
		} else {
			require.Equal(t, wanted, state)
		}
	}
	for i, own := range s.own {
		require.True(t, s.backup == BackupNone || (own.intact() && s.theirs[i].intact()))
		own.fill(own.seed)
		require.True(t, s.theirs[i].intact(), "both sides have the same memory")
	}
	return steps
}

// What a resume that fails has made and gives back again, nobody gets meanwhile.
func TestAbandonedMemoryIsNotLent(t *testing.T) {
	s := newShared(t, BackupCPU)
	for range 30 {
		require.NoError(t, s.owner.Pause("weights"))
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() { // maps what it can get
			defer close(ended)
			for {
				select {
				case <-stop:
					return
				default:
					check(t, s.borrower.Resume("weights"))
				}
			}
		}()
		simtest.Fault(t, "cuStreamSynchronize", 1, cuda.ErrUnknown) // the contents are not in
		require.ErrorIs(t, s.owner.Resume("weights"), cuda.ErrUnknown)
		close(stop)
		<-ended
		require.Zero(t, simtest.Used(t, 0))
		require.NoError(t, s.owner.Resume("weights"))
		require.Equal(t, s.used, simtest.Used(t, 0))
		for i, own := range s.own {
			require.True(t, own.intact())
			require.True(t, s.theirs[i].intact())
		}
	}
	s.end(t)
}

// Memory that is opened while its owner pauses is not kept by who opens it.
func TestOpeningWhileItsOwnerPauses(t *testing.T) {
	all := bare(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own := a.torch(t, r, 8*mib, 1)
	handle, _, err := a.ShareHandle(own.at, true)
	require.NoError(t, err)
	stop, ended := make(chan struct{}), make(chan int, 2)
	for range 2 {
		go func() {
			defer simtest.Use(t, 0)()
			for opened := 0; ; opened++ {
				select {
				case <-stop:
					ended <- opened
					return
				default:
				}
				at, _, err := b.OpenHandle(handle)
				check(t, err)
				_, err = b.CloseHandle(at)
				check(t, err)
			}
		}()
	}
	for range 40 {
		require.NoError(t, a.Pause("weights"))
		require.Eventually(t, func() bool { return simtest.Used(t, 0) == 0 }, 5*time.Second, time.Millisecond)
		require.NoError(t, a.Resume("weights"))
		require.True(t, own.intact())
	}
	close(stop)
	require.NotZero(t, <-ended)
	require.NotZero(t, <-ended)
	a.give(t, r, own)
}

// What was opened while its owner paused and resumed is there when both have ended.
func TestOpenedWhileItsOwnerPauses(t *testing.T) {
	all := bare(t, 2, 20*time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own := a.torch(t, r, 8*mib, 1)
	handle, _, err := a.ShareHandle(own.at, true)
	require.NoError(t, err)
	for range 300 {
		opened := make(chan cuda.Ptr, 1)
		go func() {
			defer simtest.Use(t, 0)()
			at, _, err := b.OpenHandle(handle)
			check(t, err)
			opened <- at
		}()
		require.NoError(t, a.Pause("weights"))
		require.NoError(t, a.Resume("weights"))
		at := <-opened
		state, _ := b.MemoryState(at)
		require.Equal(t, Active, state)
		require.True(t, simtest.Holds(at, 1, 8*mib))
		_, err := b.CloseHandle(at)
		require.NoError(t, err)
	}
	a.give(t, r, own)
}

// A backup that a resume has retained is read until the next pause, which writes
// the new contents to the same place; a resume that does not retain it drops it.
func TestBackupIsRetained(t *testing.T) {
	p := alone(t)
	weights, cache := p.region(t, "w", BackupCPU), p.region(t, "w", BackupNone)
	disk := p.region(t, "w", BackupDisk)
	require.NoError(t, p.SetDiskFolder(t.TempDir(), false))
	var list []buffer
	for i, size := range []uint64{2 * mib, 6 * mib, 70 * mib} {
		list = append(list, p.torch(t, weights, size, uint64(i+1)))
	}
	lost, swapped := p.torch(t, cache, 2*mib, 10), p.torch(t, disk, 2*mib, 11)
	places := make([]*byte, len(list))
	kept := func(seeds uint64) {
		t.Helper()
		for i, b := range list {
			found, err := p.FindBackup(b.at, b.size)
			require.NoError(t, err)
			require.True(t, bytes.Equal(simtest.Random(b.seed+seeds, b.size), found), "buffer %d", i)
			if places[i] == nil {
				places[i] = &found[0]
			}
			require.Same(t, places[i], &found[0])
			to := make([]byte, mib)
			require.NoError(t, p.ReadBackup(b.at+cuda.Ptr(mib), to))
			require.True(t, bytes.Equal(simtest.Random(b.seed+seeds, b.size)[mib:2*mib], to))
		}
		for _, b := range []buffer{lost, swapped} {
			if state, _ := p.MemoryState(b.at); state == Active {
				require.ErrorIs(t, p.ReadBackup(b.at, make([]byte, 1)), ErrState)
			}
		}
	}
	none := func() {
		t.Helper()
		for _, b := range list {
			require.ErrorIs(t, p.ReadBackup(b.at, make([]byte, 1)), ErrState)
			_, err := p.FindBackup(b.at, 1)
			require.ErrorIs(t, err, ErrState)
		}
	}
	write := func(seeds uint64) {
		for _, b := range list {
			b.fill(b.seed + seeds)
		}
	}
	holds := func(seeds uint64) {
		t.Helper()
		for _, b := range list {
			require.True(t, simtest.Holds(b.at, b.seed+seeds, b.size))
		}
	}
	p.RetainBackups(true)
	for cycle := range uint64(3) {
		write(10 * cycle)
		require.NoError(t, p.Pause("w"))
		kept(10 * cycle)
		require.NoError(t, p.Resume("w"))
		holds(10 * cycle)
		write(10*cycle + 5)
		kept(10 * cycle)
		require.NoError(t, p.Resume("w"), "active already")
		kept(10 * cycle)
	}

	// A pause that fails brings back what the memory held, and not what was retained.
	simtest.Fault(t, "cuMemUnmap", 2, cuda.ErrUnknown)
	require.ErrorIs(t, p.Pause("w"), cuda.ErrUnknown)
	holds(25)
	none()

	// Memory that takes the place of memory with a backup has none.
	require.NoError(t, p.Pause("w"))
	require.NoError(t, p.Resume("w"))
	kept(25)
	p.give(t, weights, list[0])
	b := p.torch(t, weights, list[0].size, 1)
	require.Equal(t, list[0].at, b.at, "or this shows nothing")
	require.ErrorIs(t, p.ReadBackup(b.at, make([]byte, 1)), ErrState)
	list[0] = b
	b.fill(b.seed + 25)

	require.NoError(t, p.Pause("w"))
	p.RetainBackups(false)
	require.NoError(t, p.Resume("w"))
	holds(25)
	none()

	p.RetainBackups(true)
	require.NoError(t, p.Pause("w"))
	require.NoError(t, p.Resume("w"))
	require.NoError(t, p.FreeHost("w"))
	none()
	holds(25)
	p.give(t, weights, list...)
	p.give(t, cache, lost)
	p.give(t, disk, swapped)
}

// Host memory that is got ahead leaves what was retained where it is.
func TestBackupIsRetainedWhileTheArenaGrows(t *testing.T) {
	p := alone(t)
	r, number, err := p.Session.Region("w", BackupCPU)
	require.NoError(t, err)
	p.RetainBackups(true)
	a := p.torch(t, number, 4*mib, 1)
	require.NoError(t, p.Pause("w"))
	require.NoError(t, p.Resume("w"))
	b := p.torch(t, number, 8*mib, 2)
	grown, err := r.growHost()
	require.NoError(t, err)
	require.True(t, grown)
	found, err := p.FindBackup(a.at, a.size)
	require.NoError(t, err)
	require.True(t, bytes.Equal(simtest.Random(1, a.size), found))
	require.ErrorIs(t, p.ReadBackup(b.at, make([]byte, 1)), ErrState, "it has not been paused")
	require.NoError(t, p.Pause("w"))
	require.NoError(t, p.Resume("w"))
	require.True(t, a.intact() && b.intact())
	p.give(t, number, a, b)
}

// Host memory, and files, go with the last memory of the region.
func TestHostMemoryGoesWithTheLastMemory(t *testing.T) {
	for _, backup := range []Backup{BackupCPU, BackupDisk} {
		for _, paused := range []bool{false, true} {
			t.Run(fmt.Sprint(backup, paused), func(t *testing.T) {
				p := alone(t)
				require.NoError(t, p.SetDiskFolder(t.TempDir(), false))
				p.RetainBackups(true)
				r := p.region(t, "w", backup)
				a, b := p.torch(t, r, 4*mib, 1), p.torch(t, r, 20*mib, 2)
				held := func() uint64 { s := p.Stats("").Regions[0]; return s.Host + s.Disk }
				require.NoError(t, p.Pause("w"))
				require.Positive(t, held())
				if !paused {
					require.NoError(t, p.Resume("w"))
				}
				unregistered := simtest.Calls(t, "cuMemHostUnregister")
				p.give(t, r, b)
				require.Positive(t, held())
				require.Equal(t, unregistered, simtest.Calls(t, "cuMemHostUnregister"))
				p.give(t, r, a)
				require.Zero(t, held())
				require.Greater(t, simtest.Calls(t, "cuMemHostUnregister"), unregistered)

				c := p.torch(t, r, 4*mib, 3)
				require.NoError(t, p.Resume("w"))
				require.NoError(t, p.Pause("w"))
				require.NoError(t, p.Resume("w"))
				require.True(t, c.intact())
				p.give(t, r, c)
				require.Zero(t, held())
			})
		}
	}
}

// A free does not wait for a pause that has the turn; whose end does it then.
func TestFreedDuringATurn(t *testing.T) {
	p := alone(t)
	r, number, err := p.Session.Region("w", BackupCPU)
	require.NoError(t, err)
	b := p.torch(t, number, 4*mib, 1)
	require.NoError(t, p.Pause("w"))
	require.NoError(t, p.Resume("w"))
	require.NoError(t, r.take(t.Context()))
	p.give(t, number, b)
	require.Positive(t, p.Stats("").Regions[0].Host)
	r.give()
	require.Zero(t, p.Stats("").Regions[0].Host)
}

// Files with names are there while paused, and only then.
func TestDiskFolderWithNames(t *testing.T) {
	p := alone(t)
	folder := t.TempDir()
	require.NoError(t, p.SetDiskFolder(folder, true))
	p.RetainBackups(true)
	r := p.region(t, "w", BackupDisk)
	list := []buffer{p.torch(t, r, 14*mib, 1), p.torch(t, r, 2*mib, 2)}
	files := func() (sizes []int64) {
		entries, err := os.ReadDir(folder)
		require.NoError(t, err)
		for _, e := range entries {
			info, err := e.Info()
			require.NoError(t, err)
			sizes = append(sizes, info.Size())
		}
		return sizes
	}
	for range 3 {
		require.NoError(t, p.Pause("w"))
		require.ElementsMatch(t, []int64{int64(14 * mib), int64(2 * mib)}, files())
		require.Equal(t, 16*mib, p.Stats("").Regions[0].Disk)
		to := make([]byte, mib)
		require.NoError(t, p.ReadBackup(list[0].at, to))
		require.True(t, bytes.Equal(simtest.Random(1, mib), to))
		require.NoError(t, p.Resume("w"))
		require.Empty(t, files())
		require.True(t, list[0].intact() && list[1].intact())
		require.ErrorIs(t, p.ReadBackup(list[0].at, to), ErrState)
	}
	simtest.Fault(t, "cuMemUnmap", 1, cuda.ErrUnknown)
	require.ErrorIs(t, p.Pause("w"), cuda.ErrUnknown)
	require.Empty(t, files(), "the pause has failed")
	require.True(t, list[0].intact() && list[1].intact())
	require.NoError(t, p.Pause("w"))
	require.Len(t, files(), 2)
	p.give(t, r, list...)
	require.Empty(t, files())
}

// NCCL registers not a buffer but what the driver says that its memory is, from its
// beginning on, where nothing may be in use: that is a region's too, its owner's and who
// has opened it.
func TestBaseOfRegionMemory(t *testing.T) {
	all := bare(t, 2, 5*time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	var own []buffer
	for i := range uint64(8) {
		own = append(own, a.torch(t, r, 8*mib, i+1))
	}
	require.NoError(t, a.Pause("weights"))
	require.NoError(t, a.Resume("weights")) // slabs are put together
	last := len(own) - 1
	theirs := shares(t, a, b, own[last])
	a.give(t, r, own[0])
	for _, side := range []struct {
		*process
		at cuda.Ptr
	}{{a, own[last].at}, {b, theirs.at}} {
		base, size := simtest.AddressRange(t, side.at)
		require.Less(t, base, side.at-8*cuda.Ptr(mib), "not in the slab that was opened, either")
		state, known := side.MemoryState(base)
		require.True(t, known)
		require.Equal(t, Active, state)
		number := side.Keep(base, size, vmm.KeepNIC, false)
		require.NotZero(t, number)
		side.Registered(number, 0)
	}
	base, size := simtest.AddressRange(t, own[last].at)
	number := a.Keep(base, size, vmm.KeepNIC, false)
	a.Registered(number, 7)
	require.NoError(t, a.Pause("weights"))
	require.Equal(t, size, simtest.Used(t, 0))
	require.True(t, own[last].intact(), "what a NIC uses stays")
	require.NoError(t, a.Resume("weights"))
	require.Equal(t, number, a.Deregister(7))
	a.Registered(number, 0)
	require.NoError(t, a.Pause("weights"))
	require.Zero(t, simtest.Used(t, 0))
	for _, side := range []struct {
		*process
		at cuda.Ptr
	}{{a, base}, {b, theirs.at}} {
		state, known := side.MemoryState(side.at)
		require.True(t, known)
		require.Equal(t, Paused, state)
	}
	require.NoError(t, a.Resume("weights"))
	require.True(t, theirs.intact())
	b.closes(t, theirs)
	a.give(t, r, own[1:]...)
	require.Eventually(t, func() bool { // the borrower is asked whether it uses what was freed
		_, known := a.MemoryState(base)
		return !known
	}, 5*time.Second, time.Millisecond)
}

// A handle is of what stood there when it was made.
func TestHandleOfFreedMemory(t *testing.T) {
	all := bare(t, 2, 5*time.Second)
	a, b := all[0], all[1]
	r := a.region(t, "weights", BackupCPU)
	own, other := a.torch(t, r, 4*mib, 1), a.torch(t, r, 4*mib, 2)
	handle, _, err := a.ShareHandle(own.at, true)
	require.NoError(t, err)
	a.give(t, r, own)
	next := a.torch(t, r, 4*mib, 3)
	require.Equal(t, own.at, next.at)
	for range 2 { // the second time of memory that is shared too
		_, known, err := b.OpenHandle(handle)
		require.True(t, known)
		require.ErrorIs(t, err, peer.ErrGone)
		theirs := shares(t, a, b, next)
		require.True(t, theirs.intact())
		b.closes(t, theirs)
	}
	require.True(t, next.intact())
	a.give(t, r, other, next)
}

// Copies that take longer than the time that a wait is given fail nothing: not NCCL's
// part of the pause or the resume, nor another region's.
func TestSlowCopies(t *testing.T) {
	all := start(t, 2, 20*time.Second)
	p, q := all[0], all[1]
	together(t, p, q)
	var regions []int
	var tensors []buffer
	for i := range uint64(4) {
		regions = append(regions, p.region(t, fmt.Sprint("tag", i), BackupCPU))
		tensors = append(tensors, p.torch(t, regions[i], 8*mib, i+1))
	}
	held := func() {
		for _, b := range tensors {
			require.True(t, b.intact())
		}
	}
	const wait, slow = 400 * time.Millisecond, 900 * time.Millisecond
	p.options.Timeout = wait
	paused := make(chan error, 1)
	go func() { paused <- q.Pause("") }()
	soon(t, func() bool { return p.Stats("").Peers[0].Stopped })
	simtest.Delay(t, "cuMemcpyDtoHAsync", 1, slow)
	require.NoError(t, p.Pause(""))
	require.NoError(t, <-paused)
	require.Zero(t, simtest.Used(t, 0))
	resumed := make(chan error, 1)
	simtest.Delay(t, "cuMemcpyHtoDAsync", 1, slow)
	p.options.Timeout = 20 * time.Second
	require.NoError(t, p.Resume("tag3")) // so that the delay is p's
	held2 := tensors[3].intact()
	require.True(t, held2)
	simtest.Delay(t, "cuMemcpyHtoDAsync", 1, slow)
	p.options.Timeout = wait
	go func() {
		time.Sleep(slow / 2)
		resumed <- q.Resume("")
	}()
	require.NoError(t, p.Resume(""))
	require.NoError(t, <-resumed)
	held()
	intact(t, p, q)

	// A pause that fails with NCCL's part undoes the regions', however long that takes.
	simtest.Delay(t, "cuMemcpyHtoDAsync", 1, slow)
	err := p.Pause("")
	require.ErrorContains(t, err, "pause: quiesce: waiting for pid")
	require.NotContains(t, err.Error(), "stays paused")
	for i := range tensors {
		state, _ := p.TagState(fmt.Sprint("tag", i))
		require.Equal(t, Active, state)
	}
	held()
	intact(t, p, q)
	for i, b := range tensors {
		p.give(t, regions[i], b)
	}
}

// The next pause of a paused tag gives back what was allocated since.
func TestPauseOfARegionsNewMemory(t *testing.T) {
	p := bare(t, 1, 20*time.Second)[0]
	folder := t.TempDir()
	for _, named := range []bool{false, true} {
		require.NoError(t, p.SetDiskFolder(folder, named))
		cpu, disk := p.region(t, "w", BackupCPU), p.region(t, "w", BackupDisk)
		var kept []buffer
		for i := range uint64(4) {
			kept = append(kept, p.torch(t, cpu, 6*mib, 2*i+1), p.torch(t, disk, 5*mib+512, 2*i+2))
			done, err := p.Session.Pause("w")
			require.NoError(t, err)
			require.True(t, done.Changed)
			require.GreaterOrEqual(t, done.Copied, 11*mib)
			require.Zero(t, simtest.Used(t, 0), "all memory is given back")
			if i == 0 {
				require.Equal(t, []string{"w"}, done.Tags)
			} else {
				require.Empty(t, done.Tags, "it was paused before")
			}
		}
		// One that fails leaves what was kept as it is.
		kept = append(kept, p.torch(t, cpu, 6*mib, 98), p.torch(t, disk, 6*mib, 99))
		for _, call := range []string{"cuMemcpyDtoHAsync", "cuMemUnmap"} {
			simtest.Fault(t, call, 1, cuda.ErrUnknown)
			require.ErrorIs(t, p.Pause("w"), cuda.ErrUnknown)
			state, _ := p.TagState("w")
			require.Equal(t, Paused, state)
			require.True(t, kept[8].intact())
		}
		require.NoError(t, p.Pause("w"))
		require.Zero(t, simtest.Used(t, 0))
		done, err := p.Session.Resume("w")
		require.NoError(t, err)
		require.Equal(t, []string{"w"}, done.Tags)
		for i, b := range kept {
			require.True(t, b.intact(), "tensor %d", i)
			p.give(t, []int{cpu, disk}[i%2], b)
		}
	}
}

// faulty is a store whose n-th Save panics.
type faulty struct {
	offload.Store
	n int
}

func (f *faulty) Save(c *offload.Contents, stream cuda.Stream) error {
	if f.n--; f.n == 0 {
		panic("injected")
	}
	return f.Store.Save(c, stream)
}

// A panic in the middle of a pause is an error of it: all is as it was, and the next succeeds.
func TestPanicOfAPause(t *testing.T) {
	p := bare(t, 1, 5*time.Second)[0]
	r, number, err := p.Region("w", BackupCPU)
	require.NoError(t, err)
	a, b := p.torch(t, number, 70*mib, 1), p.torch(t, number, 80*mib, 2)
	used := simtest.Used(t, 0)
	r.store = &faulty{offload.NewArena(simtest.Driver()), 2}
	require.ErrorContains(t, p.Pause("w"), "internal error: injected")
	state, _ := p.TagState("w")
	require.Equal(t, Active, state)
	require.Equal(t, used, simtest.Used(t, 0))
	require.NoError(t, p.Resume("w"))
	for range 2 {
		require.True(t, a.intact())
		require.True(t, b.intact())
		require.NoError(t, p.Pause("w"))
		require.Zero(t, simtest.Used(t, 0))
		require.NoError(t, p.Resume("w"))
	}
	p.give(t, number, a, b)
}
