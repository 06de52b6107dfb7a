package vmm

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCarve(t *testing.T) {
	b := &block{size: 1 * mib, slab: true, free: []span{{0, 1 * mib}}}
	for want := uint64(0); want < 1*mib; want += 256 * kib {
		off, ok := b.carve(256 * kib)
		require.True(t, ok)
		require.Equal(t, want, off)
	}
	_, ok := b.carve(64 * kib)
	require.False(t, ok, "the slab is full")

	b.uncarve(span{256 * kib, 256 * kib})
	_, ok = b.carve(512 * kib)
	require.False(t, ok)
	off, ok := b.carve(64 * kib)
	require.True(t, ok)
	require.Equal(t, 256*kib, off, "the first span that fits")
}

func TestUncarveJoinsNeighbours(t *testing.T) {
	for name, order := range map[string][]uint64{
		"upwards": {0, 1, 2, 3}, "downwards": {3, 2, 1, 0}, "gap closed last": {0, 2, 3, 1}, "inside out": {1, 2, 0, 3},
	} {
		t.Run(name, func(t *testing.T) {
			b := &block{size: 256 * kib, slab: true}
			for _, i := range order {
				b.uncarve(span{i * 64 * kib, 64 * kib})
			}
			require.Equal(t, []span{{0, 256 * kib}}, b.free)
		})
	}
}

// Whatever is carved and given back, chunks never overlap, and free and used
// parts make up the whole slab.
func TestCarveAtRandom(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const size = 4 << 20
	b := &block{size: size, slab: true, free: []span{{0, size}}}
	var chunks []span
	for range 5000 {
		if len(chunks) > 0 && random.IntN(2) == 0 {
			i := random.IntN(len(chunks))
			b.uncarve(chunks[i])
			chunks[i] = chunks[len(chunks)-1]
			chunks = chunks[:len(chunks)-1]
		} else {
			n := (1 + random.Uint64N(8)) * 64 * kib
			if off, ok := b.carve(n); ok {
				chunks = append(chunks, span{off, n})
			}
		}
		var owner [size / (64 << 10)]bool
		mark := func(s span) {
			for at := s.off; at < s.off+s.size; at += 64 * kib {
				require.False(t, owner[at/(64*kib)], "overlap")
				owner[at/(64*kib)] = true
			}
		}
		for i, f := range b.free {
			mark(f)
			if i > 0 {
				require.Greater(t, f.off, b.free[i-1].off+b.free[i-1].size, "free neighbours are joined, in order")
			}
		}
		for _, c := range chunks {
			mark(c)
		}
		require.NotContains(t, owner[:], false)
	}
}

func TestHandleAt(t *testing.T) {
	b := &block{size: 1 * mib, slab: true}
	first, second := &handle{off: 64 * kib, size: 64 * kib}, &handle{off: 256 * kib, size: 128 * kib}
	b.addHandle(second)
	b.addHandle(first)
	for off, want := range map[uint64]*handle{
		0: nil, 64*kib - 1: nil, 64 * kib: first, 128*kib - 1: first, 128 * kib: nil,
		256 * kib: second, 384*kib - 1: second, 384 * kib: nil,
	} {
		require.Same(t, want, b.handleAt(off), "offset %d", off)
	}
	b.removeHandle(first)
	require.Nil(t, b.handleAt(64*kib))
}

func TestSlabSize(t *testing.T) {
	small, large := class{}, class{large: true}
	for _, c := range []struct {
		name              string
		class             class
		held, chunk, want uint64
	}{
		{"first small", small, 0, 64 * kib, 2 * mib},
		{"first large", large, 0, 2 * mib, 16 * mib},
		{"5 % of what is held", small, 100 * mib, 64 * kib, 6 * mib},
		{"5 % of what is held, large", large, 1000 * mib, 2 * mib, 50 * mib},
		{"no larger than the largest", large, 100 << 30, 2 * mib, 160 * mib},
		{"no larger than the largest small", small, 100 << 30, 64 * kib, 32 * mib},
		{"at least the chunk", large, 0, 40 * mib, 40 * mib},
		{"in whole large units", small, 0, 2*mib - 64*kib, 2 * mib},
	} {
		got := slabSize(c.class, c.held, c.chunk)
		require.Equal(t, c.want, got, c.name)
	}
}
