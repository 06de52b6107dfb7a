package vmm

import (
	"slices"
	"sync"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
)

// block is a slab that many chunks are carved from, or the memory of a single
// handle. It is this process's own, or imported. Peers know it by its number.
type block struct {
	id     uint64         // own: unique in this process; imported: the owner's number
	owner  *peer.Identity // nil: own
	size   uint64
	slab   bool // carved; a block that isn't belongs to one handle
	class  class
	home   cuda.Ptr   // where it stands; 0: nowhere of our choosing
	window *window    // that home is in, if any
	alone  sync.Mutex // attaching, of a block without a window

	// Guarded by mu.
	mem      *memory
	shared   bool               // peers may fetch it
	free     []span             // carved: what is unused, by offset
	awaited  map[uint64]awaited // carved: freed parts that peers may still write to, by offset
	dirty    []span             // carved: freed parts, to be cleared before they are used again
	clearing []span             // carved: those that are being cleared
	handles  []*handle          // by offset
	contents *offload.Contents  // while paused
	fetching chan struct{}      // imported: closed when the first fetch has ended
	wanted   bool               // imported: to be brought here (Space.bring)
	lost     bool               // imported: the owner has freed it or has ended, and it is not mapped
	claims   int                // imported: how many handles are unclaimed
	outlived int                // imported: how many handles are
	told     bool               // imported: the owner knows that it could not be unmapped
}

// awaited is a part of a slab that was freed, and the number of the chunk that it was.
type awaited struct {
	size, number uint64
	claimed      bool // by a peer, since who maps the slab was asked
}

// attaching is held while an imported block's memory is mapped, and from when the
// block ends until it is unmapped: see window.attaching.
func (b *block) attaching() *sync.Mutex {
	if b.window != nil {
		return &b.window.attaching
	}
	return &b.alone
}

// span is a part of a block.
type span struct{ off, size uint64 }

// class tells slabs apart beyond their properties.
type class struct {
	prop  cuda.Prop
	large bool // chunks of 2 MiB and more, at multiples of that
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
	maxSlabLarge = 160 << 20
	// A new slab is this part of what its class holds, so that the unused tail
	// of the newest one stays below 5 %.
	slabGrowth = 20
	// What is larger than this has nothing to gain from a slab.
	maxChunk = 64 << 20
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

// unused tells whether nobody needs it: no handle, and no peer that may still
// write to what was freed.
func (b *block) unused() bool {
	return len(b.handles) == 0 && len(b.awaited) == 0 && len(b.clearing) == 0
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
