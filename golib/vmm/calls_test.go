package vmm

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/simtest"
)

func TestAllocatorsWay(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	require.Equal(t, 64*kib, s.Granularity())
	before := simtest.Used(t, 0)
	creates := simtest.Calls(t, "cuMemCreate")
	var buffers []buffer
	for range 16 {
		buffers = append(buffers, n.mustAllocate(t, 4*kib))
	}
	require.Equal(t, creates+1, simtest.Calls(t, "cuMemCreate"), "one slab holds all of them")
	require.Equal(t, 2*mib, simtest.Used(t, 0)-before)
	fill(buffers)
	filled(t, buffers)
	require.True(t, simtest.Writable(t, 0, buffers[3].at))

	// A freed chunk is used again when the slab is full, is clear then, and the
	// others keep their contents.
	n.mustFree(t, buffers[3])
	for range 16 {
		buffers = append(buffers, n.mustAllocate(t, 64*kib))
	}
	again := n.mustAllocate(t, 64*kib)
	require.Equal(t, buffers[3].at, again.at)
	require.Equal(t, make([]byte, again.size), simtest.Bytes(again.at, again.size), "NCCL relies on new memory being clear")
	require.Equal(t, creates+1, simtest.Calls(t, "cuMemCreate"), "no new slab")
	simtest.Fill(again.at, 4, again.size)
	buffers[3] = again
	filled(t, buffers[:16])

	n.mustFree(t, buffers...)
	empty(t, s)
	require.Equal(t, before, simtest.Used(t, 0), "the empty slab goes back to the device")
}

// The sequence of allocations that NCCL makes for a communicator with many
// peers: small metadata, and buffers of 2 and 10 MB.
func TestSlabsWasteLittle(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	before := simtest.Used(t, 0)
	creates := simtest.Calls(t, "cuMemCreate")
	random := rand.New(rand.NewPCG(3, 4))
	var buffers []buffer
	for i := range 676 {
		size := (4 + 4*random.Uint64N(16)) * kib
		switch i % 7 {
		case 1, 4:
			size = 2 * mib
		case 5:
			size = 10 * mib
		}
		buffers = append(buffers, n.mustAllocate(t, size))
		usage, _ := s.Usage()
		if held := usage[0].Slab; held > 320*mib {
			require.LessOrEqual(t, held-usage[0].SlabUsed, held/20, "unused part of %d slabs after %d allocations",
				usage[0].Slabs, i+1)
		}
	}
	usage, _ := s.Usage()
	require.Equal(t, len(buffers), usage[0].Chunks)
	require.Equal(t, usage[0].Slab, simtest.Used(t, 0)-before)
	require.LessOrEqual(t, usage[0].Slab-usage[0].SlabUsed, usage[0].Slab/20)
	require.Less(t, simtest.Calls(t, "cuMemCreate")-creates, 80, "driver allocations for 676 of NCCL's")

	random.Shuffle(len(buffers), func(i, j int) { buffers[i], buffers[j] = buffers[j], buffers[i] })
	n.mustFree(t, buffers...)
	empty(t, s)
}

// What does not follow the allocator's way gets a physical allocation of its
// own, with the driver's semantics.
func TestNotTheAllocatorsWay(t *testing.T) {
	for name, reserve := range map[string]func(n nccl, h cuda.Handle) (cuda.Ptr, uint64, error){
		"another size": func(n nccl, h cuda.Handle) (cuda.Ptr, uint64, error) {
			p, err := n.reserve(4*mib, 0, 0, h)
			return p, 4 * mib, err
		},
		"alignment that a chunk can't have": func(n nccl, h cuda.Handle) (cuda.Ptr, uint64, error) {
			p, err := n.reserve(2*mib, 64*mib, 0, h)
			if uint64(p)%(64*mib) != 0 {
				err = errors.Join(err, errors.New("not aligned"))
			}
			return p, 2 * mib, err
		},
		"without a pending handle": func(n nccl, _ cuda.Handle) (cuda.Ptr, uint64, error) {
			p, err := n.reserve(2*mib, 0, 0, 0)
			return p, 2 * mib, err
		},
		"handle that is no more": func(n nccl, _ cuda.Handle) (cuda.Ptr, uint64, error) {
			p, err := n.reserve(2*mib, 0, 0, handleTag|999)
			return p, 2 * mib, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSpace(t, Options{Arena: true})
			n := nccl{Space: s}
			before := simtest.Used(t, 0)
			h, err := s.Create(2*mib, prop(0), 0, true)
			require.NoError(t, err)
			require.Equal(t, before, simtest.Used(t, 0), "no memory before NCCL shows what it wants")
			p, reserved, err := reserve(n, h)
			require.NoError(t, err)
			require.NoError(t, n.finish(buffer{p, 2 * mib, h}))
			require.Equal(t, 2*mib, simtest.Used(t, 0)-before)
			simtest.Fill(p, 7, 2*mib)

			arena := offload.NewArena(simtest.Driver())
			_, err = pause(s, arena)
			require.NoError(t, err)
			require.Equal(t, before, simtest.Used(t, 0))
			_, err = resume(s)
			require.NoError(t, err)
			require.True(t, simtest.Holds(p, 7, 2*mib), "contents at NCCL's own address")

			require.NoError(t, s.Unmap(p, 2*mib))
			require.NoError(t, s.Release(h))
			require.ErrorIs(t, s.AddressFree(p), ErrPass)
			require.NoError(t, simtest.Driver().AddressFree(p, reserved))
			empty(t, s)
		})
	}
}

func TestReserveWithHint(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	driver := simtest.Driver()
	whole, err := driver.Reserve(64*mib, 0, 0, 0)
	require.NoError(t, err)
	require.NoError(t, driver.AddressFree(whole, 64*mib))
	h, err := s.Create(2*mib, prop(0), 0, true)
	require.NoError(t, err)
	_, err = s.Reserve(2*mib, 0, whole, 0, h)
	require.ErrorIs(t, err, ErrPass)
	_, err = s.Reserve(2*mib, 0, 0, 1, h)
	require.ErrorIs(t, err, ErrPass, "unknown flags are the driver's to judge")
	require.NoError(t, s.Release(h))
	empty(t, s)
}

func TestMapPartOfSlabElsewhere(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 2*mib)
	simtest.Fill(b.at, 1, b.size)
	p, err := simtest.Driver().Reserve(2*mib, 0, 0, 0)
	require.NoError(t, err)
	err = s.Map(p, 2*mib, 0, b.handle, 0)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "AMEM_ARENA=0")
	require.ErrorIs(t, s.Map(b.at, 64*kib, 0, b.handle, 0), cuda.ErrNotSupported, "a part of a chunk")
	require.ErrorIs(t, s.Map(b.at, b.size, 64*kib, b.handle, 0), cuda.ErrNotSupported, "an offset into a chunk")
	require.True(t, simtest.Holds(b.at, 1, b.size))
	require.NoError(t, simtest.Driver().AddressFree(p, 2*mib))
	n.mustFree(t, b)
	empty(t, s)
}

// A block of one handle may be mapped at several addresses; a pause releases
// and restores all of them.
func TestMappedSeveralTimes(t *testing.T) {
	s := newSpace(t, Options{})
	n := nccl{Space: s}
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	b := n.mustAllocate(t, 2*mib)
	var at [3]cuda.Ptr
	for i := range at {
		p, err := driver.Reserve(2*mib, 0, 0, 0)
		require.NoError(t, err)
		require.NoError(t, s.Map(p, 2*mib, 0, b.handle, 0))
		require.NoError(t, s.SetAccess(p, 2*mib, rights(i%2)))
		at[i] = p
	}
	simtest.Fill(b.at, 1, b.size)
	require.True(t, simtest.Holds(at[2], 1, b.size))
	require.Equal(t, b.size, simtest.Used(t, 0)-before)

	_, err := pause(s, offload.NewArena(driver))
	require.NoError(t, err)
	require.Equal(t, before, simtest.Used(t, 0))
	// While paused NCCL unmaps one place and maps another.
	require.NoError(t, s.Unmap(at[0], 2*mib))
	require.NoError(t, driver.AddressFree(at[0], 2*mib))
	late, err := driver.Reserve(2*mib, 0, 0, 0)
	require.NoError(t, err)
	require.NoError(t, s.Map(late, 2*mib, 0, b.handle, 0))
	require.NoError(t, s.SetAccess(late, 2*mib, rights(1)))
	_, err = resume(s)
	require.NoError(t, err)
	for _, p := range []cuda.Ptr{b.at, at[1], at[2], late} {
		require.True(t, simtest.Holds(p, 1, b.size))
	}
	require.True(t, simtest.Writable(t, 1, at[1]), "rights come back with the mapping")
	require.False(t, simtest.Writable(t, 0, at[1]))
	require.True(t, simtest.Writable(t, 1, late))

	for _, p := range []cuda.Ptr{at[1], at[2], late} {
		require.NoError(t, s.Unmap(p, 2*mib))
		require.NoError(t, driver.AddressFree(p, 2*mib))
	}
	n.mustFree(t, b)
	empty(t, s)
}

// While paused, a range to unmap may span mappings none of which exists now.
func TestUnmapRangeWhilePaused(t *testing.T) {
	s := newSpace(t, Options{})
	driver := simtest.Driver()
	window, err := driver.Reserve(8*mib, 0, 0, 0)
	require.NoError(t, err)
	var handles [4]cuda.Handle
	for i := range handles {
		h, err := s.Create(2*mib, prop(0), 0, true)
		require.NoError(t, err)
		require.NoError(t, s.Map(window+cuda.Ptr(uint64(i)*2*mib), 2*mib, 0, h, 0))
		handles[i] = h
	}
	require.NoError(t, s.SetAccess(window, 8*mib, rights(0)))
	simtest.Fill(window, 1, 8*mib)
	_, err = pause(s, offload.NewArena(driver))
	require.NoError(t, err)
	require.NoError(t, s.Unmap(window, 4*mib))
	_, err = resume(s)
	require.NoError(t, err)
	require.Equal(t, simtest.Random(1, 8*mib)[4*mib:], simtest.Bytes(window+cuda.Ptr(4*mib), 4*mib))
	require.NoError(t, s.Unmap(window+cuda.Ptr(4*mib), 4*mib))
	for _, h := range handles {
		require.NoError(t, s.Release(h))
	}
	require.NoError(t, driver.AddressFree(window, 8*mib))
	empty(t, s)
}

// Users' memory is the driver's: it stays, and may be mapped as the driver allows.
func TestUsersMemory(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	window, err := driver.Reserve(8*mib, 0, 0, 0)
	require.NoError(t, err)
	var handles [2]cuda.Handle
	for i := range handles {
		h, err := s.Create(2*mib, prop(0), 0, false)
		require.NoError(t, err)
		handles[i] = h
		_, err = s.Reserve(2*mib, 0, 0, 0, h)
		require.ErrorIs(t, err, ErrPass)
		require.NoError(t, s.Map(window+cuda.Ptr(uint64(i)*2*mib), 2*mib, 0, h, 0))
		require.NoError(t, s.Map(window+cuda.Ptr(uint64(i+2)*2*mib), 2*mib, 0, h, 0))
	}
	require.Equal(t, 4*mib, simtest.Used(t, 0)-before)
	require.NoError(t, s.SetAccess(window, 8*mib, append(rights(0), rights(1)...)))
	require.True(t, simtest.Writable(t, 1, window+cuda.Ptr(6*mib)))
	simtest.Fill(window, 1, 4*mib)
	require.True(t, simtest.Holds(window+cuda.Ptr(4*mib), 1, 4*mib), "both mappings show the same memory")

	p, err := pause(s, offload.NewArena(driver))
	require.NoError(t, err)
	require.Zero(t, p.Released)
	require.True(t, simtest.Holds(window, 1, 4*mib), "users' memory stays")
	_, err = resume(s)
	require.NoError(t, err)
	usage, resident := s.Usage()
	require.Equal(t, 4*mib, usage[0].Resident)
	require.Equal(t, map[string]uint64{KeepUser: 4 * mib}, resident)

	at, size, err := s.AddressRange(window + cuda.Ptr(3*mib))
	require.NoError(t, err)
	require.Equal(t, window+cuda.Ptr(2*mib), at)
	require.Equal(t, 2*mib, size)
	retained, err := s.Retain(window + cuda.Ptr(7*mib))
	require.NoError(t, err)
	require.Equal(t, handles[1], retained)
	require.NoError(t, s.Release(retained))

	for _, h := range handles {
		require.NoError(t, s.Release(h))
	}
	require.Equal(t, 4*mib, simtest.Used(t, 0)-before, "mapped memory outlives its handle")
	require.NoError(t, s.Unmap(window, 8*mib), "one call for four mappings")
	empty(t, s)
	require.Equal(t, before, simtest.Used(t, 0))
	require.NoError(t, driver.AddressFree(window, 8*mib))
}

// One process with two devices maps the same handle again for the second one.
func TestSecondDeviceAlias(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 2*mib)
	got, err := s.Properties(b.handle)
	require.NoError(t, err)
	require.Equal(t, prop(0), got)
	alias, err := s.Reserve(b.size, 64*kib, 0, 0, b.handle)
	require.NoError(t, err)
	require.NoError(t, s.Map(alias, b.size, 0, b.handle, 0))
	require.NoError(t, s.SetAccess(alias, b.size, rights(1)))
	simtest.Fill(alias, 1, b.size)
	require.True(t, simtest.Holds(b.at, 1, b.size))
	require.True(t, simtest.Writable(t, 0, b.at))
	require.True(t, simtest.Writable(t, 1, b.at))

	_, err = pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	_, err = resume(s)
	require.NoError(t, err)
	require.True(t, simtest.Writable(t, 1, alias), "the second device's rights come back")

	n.mustFree(t, buffer{at: alias, size: b.size})
	require.True(t, simtest.Holds(b.at, 1, b.size), "the alias was the second reservation, not the memory")
	// The second free ends it: the first took the references that the alias did not add.
	require.NoError(t, s.Unmap(b.at, b.size))
	require.NoError(t, s.AddressFree(b.at))
	empty(t, s)
}

// A second device that only gets access has a context of its own.
func TestDeviceContexts(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	first := nccl{Space: s}.mustAllocate(t, 2*mib)
	require.NoError(t, s.SetAccess(first.at, first.size, rights(1)))
	end := simtest.Use(t, 1)
	n := nccl{Space: s, device: 1}
	second := n.mustAllocate(t, 2*mib)
	end()
	simtest.On(t, 0)
	for _, d := range s.Devices() {
		require.Equal(t, simtest.Context(int(d.Ordinal)), d.Context, "context of device %d", d.Ordinal)
	}
	n.mustFree(t, first, second)
	empty(t, s)
}

func TestHandleEnds(t *testing.T) {
	type step struct {
		name string
		do   func(s *Space, b buffer) error
	}
	steps := []step{
		{"unmap", func(s *Space, b buffer) error { return s.Unmap(b.at, b.size) }},
		{"release", func(s *Space, b buffer) error { return s.Release(b.handle) }},
		{"address free", func(s *Space, b buffer) error { return s.AddressFree(b.at) }},
	}
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		name := steps[order[0]].name + ", " + steps[order[1]].name + ", " + steps[order[2]].name
		t.Run(name, func(t *testing.T) {
			s := newSpace(t, Options{Arena: true})
			before := simtest.Used(t, 0)
			b := nccl{Space: s}.mustAllocate(t, 64*kib)
			simtest.Fill(b.at, 1, b.size)
			for i, k := range order {
				require.True(t, simtest.Holds(b.at, 1, b.size), "before %s", steps[k].name)
				require.NoError(t, steps[k].do(s, b))
				if i < 2 {
					require.Len(t, s.handles, 1)
				}
			}
			empty(t, s)
			require.Equal(t, before, simtest.Used(t, 0))
		})
	}
}

func TestRefusals(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, 64*kib)
	const unknown = cuda.Handle(handleTag | 12345)
	require.ErrorIs(t, s.Release(unknown), cuda.ErrInvalidValue)
	require.ErrorIs(t, s.Map(b.at, b.size, 0, unknown, 0), cuda.ErrInvalidValue)
	_, err := s.Properties(unknown)
	require.ErrorIs(t, err, cuda.ErrInvalidValue)
	require.ErrorIs(t, s.Unmap(b.at+4096, b.size), cuda.ErrInvalidValue, "not where the mapping starts")
	require.ErrorIs(t, s.AddressFree(b.at+4096), ErrPass)
	const nowhere = cuda.Ptr(1 << 20)
	_, _, err = s.AddressRange(nowhere)
	require.ErrorIs(t, err, ErrPass)
	_, err = s.Retain(nowhere)
	require.ErrorIs(t, err, ErrPass)
	require.ErrorIs(t, s.Unmap(nowhere, 4096), ErrPass)
	require.ErrorIs(t, s.SetAccess(nowhere, 4096, rights(0)), ErrPass)
	_, err = s.Create(2*mib, prop(7), 0, true)
	require.Error(t, err, "no such device")

	// After its last reference a handle is invalid, though the memory lives.
	require.NoError(t, s.Release(b.handle))
	require.ErrorIs(t, s.Release(b.handle), cuda.ErrInvalidValue)
	retained, err := s.Retain(b.at)
	require.NoError(t, err)
	require.Equal(t, b.handle, retained)
	require.NoError(t, s.Unmap(b.at, b.size))
	require.ErrorIs(t, s.Unmap(b.at, b.size), cuda.ErrInvalidValue, "unmapped already")
	require.NoError(t, s.AddressFree(b.at))
	require.ErrorIs(t, s.AddressFree(b.at), ErrPass, "freed already")
	require.NoError(t, s.Release(retained))
	empty(t, s)
}

func TestInnerAddresses(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	buffers := []buffer{n.mustAllocate(t, 64*kib), n.mustAllocate(t, 192*kib), n.mustAllocate(t, 4*mib)}
	for _, b := range buffers {
		for _, off := range []uint64{0, 1, b.size / 2, b.size - 1} {
			at, size, err := s.AddressRange(b.at + cuda.Ptr(off))
			require.NoError(t, err)
			require.Equal(t, b.at, at)
			require.Equal(t, b.size, size)
			h, err := s.Retain(b.at + cuda.Ptr(off))
			require.NoError(t, err)
			require.Equal(t, b.handle, h)
			require.NoError(t, s.Release(h))
		}
	}
	_, err := s.Retain(buffers[2].at + cuda.Ptr(buffers[2].size))
	require.ErrorIs(t, err, ErrPass, "the unused part of a slab is nobody's")
	n.mustFree(t, buffers...)
	empty(t, s)
}

func TestWithoutArena(t *testing.T) {
	s := newSpace(t, Options{})
	n := nccl{Space: s}
	require.Zero(t, s.Granularity(), "the driver says")
	before := simtest.Used(t, 0)
	creates := simtest.Calls(t, "cuMemCreate")
	buffers := []buffer{n.mustAllocate(t, 4*kib), n.mustAllocate(t, 4*kib), n.mustAllocate(t, 10*mib)}
	require.Equal(t, creates+3, simtest.Calls(t, "cuMemCreate"))
	require.Equal(t, 14*mib, simtest.Used(t, 0)-before)
	fill(buffers)
	_, err := pause(s, offload.NewArena(simtest.Driver()))
	require.NoError(t, err)
	require.Equal(t, before, simtest.Used(t, 0))
	_, err = resume(s)
	require.NoError(t, err)
	filled(t, buffers)
	usage, _ := s.Usage()
	require.Zero(t, usage[0].Slabs)
	require.Equal(t, 14*mib, usage[0].Direct)
	n.mustFree(t, buffers...)
	empty(t, s)
}

// A chunk larger than a quarter of the largest slab gets memory of its own.
func TestLargeBuffer(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	b := n.mustAllocate(t, maxChunk+2*mib)
	usage, _ := s.Usage()
	require.Zero(t, usage[0].Slabs)
	require.Equal(t, b.size, usage[0].Direct)
	n.mustFree(t, b)
	empty(t, s)
}

// NCCL allocates all its buffers at one place, so nothing tells which a NIC will be
// told of: only the slab stays that such a one is in.
func TestMemoryOfNIC(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	arena := offload.NewArena(simtest.Driver())
	before := simtest.Used(t, 0)
	registered := n.mustAllocate(t, 4*mib)
	neighbour := n.mustAllocate(t, 4*mib)
	require.True(t, s.Keep(1, registered.at, registered.size, KeepNIC, false))
	s.Registered(1, 0x1000)
	others := []buffer{neighbour}
	for range 100 {
		others = append(others, n.mustAllocate(t, 4*mib))
	}
	fill(others)
	simtest.Fill(registered.at, 99, registered.size)
	_, resident := s.Usage()
	require.Equal(t, map[string]uint64{KeepNIC: 16 * mib}, resident, "the slab that the registered chunk is in")
	for range 2 { // also where slabs have been put together
		_, err := pause(s, arena)
		require.NoError(t, err)
		require.True(t, simtest.Holds(registered.at, 99, registered.size), "registered memory stays")
		require.Equal(t, 16*mib, simtest.Used(t, 0)-before)
		_, err = resume(s)
		require.NoError(t, err)
		filled(t, others)
	}

	// What is registered later keeps little more.
	require.True(t, s.Keep(2, others[60].at, others[60].size, KeepNIC, false))
	s.Registered(2, 0x2000)
	_, err := pause(s, arena)
	require.NoError(t, err)
	require.LessOrEqual(t, simtest.Used(t, 0)-before, 16*mib+littleMemory)
	_, err = resume(s)
	require.NoError(t, err)

	// The name is given to another registration as soon as the first has ended.
	require.Equal(t, uint64(1), s.Deregister(0x1000))
	require.True(t, s.Keep(3, registered.at, registered.size, KeepNIC, false))
	s.Registered(3, 0x1000)
	s.Registered(1, 0)
	require.Equal(t, uint64(2), s.Deregister(0x2000))
	s.Registered(2, 0)
	_, resident = s.Usage()
	require.Equal(t, map[string]uint64{KeepNIC: 16 * mib}, resident)
	require.Equal(t, uint64(3), s.Deregister(0x1000))
	s.Registered(3, 0)
	require.Zero(t, s.Deregister(0x1000))
	_, err = pause(s, arena)
	require.NoError(t, err)
	require.Equal(t, before, simtest.Used(t, 0), "what no NIC uses any more is given back")
	_, err = resume(s)
	require.NoError(t, err)
	require.True(t, simtest.Holds(registered.at, 99, registered.size))
	filled(t, others)
	n.mustFree(t, append(others, registered)...)
	empty(t, s)
	require.Empty(t, s.registered)
}

// A registration that fails keeps nothing, nor does a dma-buf once NCCL has freed the
// buffer, or once a registration that took its place has ended.
func TestWhatEndsAtANIC(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	arena := offload.NewArena(simtest.Driver())
	before := simtest.Used(t, 0)
	a, b := n.mustAllocate(t, 4*mib), n.mustAllocate(t, 4*mib)
	keeps := func(want uint64) {
		t.Helper()
		_, resident := s.Usage()
		require.Equal(t, want, resident[KeepNIC]+resident[KeepMulticast])
	}
	for _, why := range []string{KeepNIC, KeepMulticast} {
		require.True(t, s.Keep(1, a.at, a.size, why, false))
		keeps(16 * mib)
		s.Registered(1, 0)
		keeps(0)
	}
	require.False(t, s.Keep(2, 0x1000, 4096, KeepNIC, false), "host memory")

	require.True(t, s.Keep(3, a.at, a.size, KeepNIC, true))
	require.True(t, s.Keep(4, b.at, b.size, KeepNIC, true))
	require.True(t, s.Keep(5, b.at, b.size, KeepNIC, false))
	s.Registered(5, 0x5000)
	n.mustFree(t, a)
	keeps(16 * mib)
	s.Registered(s.Deregister(0x5000), 0)
	keeps(0)

	// Nor does a failure end another reason.
	user, err := s.Create(2*mib, prop(0), 0, false)
	require.NoError(t, err)
	at, err := simtest.Driver().Reserve(2*mib, 0, 0, 0)
	require.NoError(t, err)
	require.NoError(t, n.finish(buffer{at, 2 * mib, user}))
	for _, why := range []string{KeepNIC, KeepMulticast} {
		require.True(t, s.Keep(9, at, 2*mib, why, false))
		s.Registered(9, 0)
		_, resident := s.Usage()
		require.Equal(t, map[string]uint64{KeepUser: 2 * mib}, resident)
	}
	require.NoError(t, s.Unmap(at, 2*mib))
	require.NoError(t, s.Release(user))
	require.NoError(t, simtest.Driver().AddressFree(at, 2*mib))

	// A failed binding takes a NIC's registration along as little as that takes a binding.
	require.True(t, s.Keep(6, b.at, b.size, KeepNIC, false))
	s.Registered(6, 0x6000)
	require.True(t, s.Keep(7, b.at, b.size, KeepMulticast, false))
	s.Registered(7, 0)
	_, resident := s.Usage()
	require.Equal(t, map[string]uint64{KeepNIC: 16 * mib}, resident)
	require.True(t, s.Keep(8, b.at, b.size, KeepMulticast, false))
	s.Registered(8, 1)
	s.Registered(s.Deregister(0x6000), 0)
	_, resident = s.Usage()
	require.Equal(t, map[string]uint64{KeepMulticast: 16 * mib}, resident)
	simtest.Fill(b.at, 5, b.size)
	_, err = pause(s, arena)
	require.NoError(t, err)
	require.Equal(t, 16*mib, simtest.Used(t, 0)-before)
	require.True(t, simtest.Holds(b.at, 5, b.size))
	_, err = resume(s)
	require.NoError(t, err)
	n.mustFree(t, b)
	empty(t, s)
}

// The driver says that memory begins where its slab does, where nothing may be in use.
func TestBaseOfARegionsMemory(t *testing.T) {
	s := newSpace(t, Options{Arena: true, Region: "weights"})
	arena := offload.NewArena(simtest.Driver())
	before := simtest.Used(t, 0)
	var parts []cuda.Ptr
	for range 4 {
		p, err := s.Allocate(4*mib, 0)
		require.NoError(t, err)
		parts = append(parts, p)
	}
	require.NoError(t, s.Free(parts[0]))
	base, size := simtest.AddressRange(t, parts[1])
	require.Equal(t, parts[0], base)
	require.Equal(t, 16*mib, size)
	live, known := s.Live(base)
	require.True(t, live && known)
	simtest.Fill(parts[1], 3, 4*mib)

	// As a binding does: from the base on, and less than all.
	require.True(t, s.Keep(1, base, 2*mib, KeepMulticast, false))
	_, err := pause(s, arena)
	require.NoError(t, err)
	require.Equal(t, 16*mib, simtest.Used(t, 0)-before)
	require.True(t, simtest.Holds(parts[1], 3, 4*mib))
	_, err = resume(s)
	require.NoError(t, err)
	s.Registered(1, 0)
	_, err = pause(s, arena)
	require.NoError(t, err)
	require.Equal(t, before, simtest.Used(t, 0))
	live, known = s.Live(base)
	require.True(t, known && !live)
	_, err = resume(s)
	require.NoError(t, err)
	for _, p := range parts[1:] {
		require.NoError(t, s.Free(p))
	}
	_, known = s.Live(base)
	require.False(t, known)
	empty(t, s)
}

func TestMulticastBind(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	driver := simtest.Driver()
	before := simtest.Used(t, 0)
	object := simtest.Multicast(t, 2*mib)
	h, err := s.Create(2*mib, prop(0), 0, true)
	require.NoError(t, err)
	require.NoError(t, s.BindMulticast(object, 0, h, 0, 2*mib, 0))
	require.Equal(t, 2*mib, simtest.Used(t, 0)-before)
	p, err := driver.Reserve(2*mib, 0, 0, 0)
	require.NoError(t, err)
	require.NoError(t, s.Map(p, 2*mib, 0, h, 0))
	require.NoError(t, s.SetAccess(p, 2*mib, rights(0)))
	simtest.Fill(p, 1, 2*mib)
	paused, err := pause(s, offload.NewArena(driver))
	require.NoError(t, err)
	require.Zero(t, paused.Released)
	require.True(t, simtest.Holds(p, 1, 2*mib), "bound memory stays")
	_, resident := s.Usage()
	require.Equal(t, map[string]uint64{KeepMulticast: 2 * mib}, resident)
	_, err = resume(s)
	require.NoError(t, err)

	b := nccl{Space: s}.mustAllocate(t, 2*mib)
	require.ErrorIs(t, s.BindMulticast(object, 0, b.handle, 0, 2*mib, 0), cuda.ErrNotSupported, "a part of a slab")
	nccl{Space: s}.mustFree(t, b)

	require.NoError(t, driver.Release(object))
	require.NoError(t, s.Unmap(p, 2*mib))
	require.NoError(t, driver.AddressFree(p, 2*mib))
	require.NoError(t, s.Release(h))
	empty(t, s)
}

func TestFabricMemory(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	fabric := prop(0)
	fabric.HandleTypes |= cuda.Fabric
	before := simtest.Used(t, 0)
	h, err := s.Create(2*mib, fabric, 0, true)
	require.NoError(t, err)
	require.Equal(t, 2*mib, simtest.Used(t, 0)-before, "memory at once")
	_, resident := s.Usage()
	require.Equal(t, map[string]uint64{KeepFabric: 2 * mib}, resident)
	require.NoError(t, s.Release(h))
	empty(t, s)
}

// A failed call leaves nothing behind, and the next one succeeds. Out of memory, a slab is tried without room for more.
func TestAllocationFails(t *testing.T) {
	for _, arena := range []bool{true, false} {
		for _, call := range []string{"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"} {
			t.Run(call, func(t *testing.T) {
				s := newSpace(t, Options{Arena: arena})
				n := nccl{Space: s}
				before := simtest.Used(t, 0)
				simtest.Fault(t, call, 1, cuda.ErrNotSupported)
				_, err := n.allocate(2 * mib)
				require.ErrorIs(t, err, cuda.ErrNotSupported)
				empty(t, s)
				require.Equal(t, before, simtest.Used(t, 0))
				b := n.mustAllocate(t, 2*mib)
				fill([]buffer{b})
				n.mustFree(t, b)
				empty(t, s)
			})
		}
	}
}

// A device without memory left refuses NCCL, and serves it again later.
func TestDeviceFull(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	n := nccl{Space: s}
	var buffers []buffer
	for {
		b, err := n.allocate(60 * mib)
		if err != nil {
			require.ErrorIs(t, err, cuda.ErrOutOfMemory)
			break
		}
		buffers = append(buffers, b)
	}
	require.Greater(t, len(buffers), 20)
	n.mustFree(t, buffers[0])
	buffers[0] = n.mustAllocate(t, 60*mib)
	n.mustFree(t, buffers...)
	empty(t, s)
}

func TestConcurrentCalls(t *testing.T) {
	s := newSpace(t, Options{Arena: true})
	before := simtest.Used(t, 0)
	var grown [2]uint64
	for round := range grown {
		var wg sync.WaitGroup
		errs := make(chan error, 8)
		for worker := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				defer simtest.Use(t, 0)()
				errs <- churn(nccl{Space: s}, uint64(worker+1))
			}()
		}
		wg.Wait()
		for range 8 {
			require.NoError(t, <-errs)
		}
		empty(t, s)
		grown[round] = simtest.Used(t, 0) - before
	}
	require.Equal(t, [2]uint64{}, grown)
	require.Empty(t, s.growing)
}

// churn allocates and frees at random, and checks that nobody else writes to
// its buffers.
func churn(n nccl, seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 0))
	var buffers []buffer
	free := func(i int) error {
		b := buffers[i]
		buffers[i] = buffers[len(buffers)-1]
		buffers = buffers[:len(buffers)-1]
		if !simtest.Holds(b.at, seed+uint64(b.at), 4096) {
			return errors.New("another thread has written to the buffer")
		}
		return n.free(b.at)
	}
	for range 150 {
		if len(buffers) > 0 && random.IntN(2) == 0 {
			if err := free(random.IntN(len(buffers))); err != nil {
				return err
			}
			continue
		}
		size := (1 + random.Uint64N(64)) * 4 * kib
		if random.IntN(8) == 0 {
			size = (2 + random.Uint64N(8)) * mib
		}
		b, err := n.allocate(size)
		if err != nil {
			return err
		}
		simtest.Fill(b.at, seed+uint64(b.at), 4096)
		buffers = append(buffers, b)
	}
	for len(buffers) > 0 {
		if err := free(len(buffers) - 1); err != nil {
			return err
		}
	}
	return nil
}
