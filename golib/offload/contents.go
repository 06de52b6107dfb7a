package offload

import (
	"errors"
	"fmt"
	"unsafe"

	"amem/golib/cuda"
)

// Range is a piece of device memory: Rows pieces of Size bytes each, Pitch apart.
type Range struct {
	At    cuda.Ptr
	Size  uint64
	Rows  uint64
	Pitch uint64 // where there are several rows
}

// Contents is what a pause kept of some device memory: what was in the ranges
// kept is in a store; the ranges to be zeroed are cleared before.
type Contents struct {
	Kept   []Range
	Zeroed []Range

	// The store that has what was in the ranges kept, all ranges and rows one
	// after the other; nil: it is not kept.
	keeper keeper
	age    uint64   // the store's when it was kept
	host   [][]byte // where it lies, in pieces, if the store is an Arena
	chunks []chunk  // where it lies if the store is a Disk
}

// Keep adds size bytes, at a higher address than what is kept already. What
// follows on, or stands as far apart as what came before, makes one range: each
// costs a call of the driver.
func (c *Contents) Keep(at cuda.Ptr, size uint64) {
	if k := len(c.Kept) - 1; k >= 0 {
		last := &c.Kept[k]
		apart := uint64(at - last.At)
		switch {
		case last.Rows == 1 && apart == last.Size:
			last.Size += size
			return
		case last.Size == size && last.Rows == 1 && apart < maxPitch:
			last.Rows, last.Pitch = 2, apart
			return
		case last.Size == size && last.Rows > 1 && apart == last.Rows*last.Pitch:
			last.Rows++
			return
		}
	}
	c.Kept = append(c.Kept, Range{At: at, Size: size, Rows: 1})
}

// maxPitch is the driver's limit (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
const maxPitch = 1<<31 - 1

// Bytes answers how much is kept.
func (c *Contents) Bytes() uint64 {
	var n uint64
	for _, r := range c.Kept {
		n += r.Size * r.Rows
	}
	return n
}

var (
	errNotKept   = errors.New("contents were not kept there")
	errForgotten = errors.New("contents were kept and then forgotten")
)

// forget makes that nothing is kept, though the store still takes the room.
func (c *Contents) forget() { c.keeper, c.host, c.chunks = nil, nil, nil }

// keptIn fails unless the store has the contents.
func (c *Contents) keptIn(k keeper) error {
	if c.keeper == nil || c.keeper != k {
		return errNotKept
	}
	if c.age != k.age() {
		return errForgotten
	}
	return nil
}

// Held tells whether the store still has the contents. As for Read, no other use
// of it may be under way.
func (c *Contents) Held() bool { return c.keptIn(c.keeper) == nil }

// Piece answers where on the host the contents of size bytes of device memory
// are, until the store's next Begin or Free, and nil unless an Arena has them all
// in one piece. They are right once the copies that Save started have ended, and
// must not be written to. No device is needed, but no other use of the store may
// be under way.
func (c *Contents) Piece(at cuda.Ptr, size uint64) []byte {
	spans, err := c.find(at, size)
	if err != nil || len(spans) != 1 || c.keptIn(c.keeper) != nil {
		return nil
	}
	from := spans[0].from
	for _, piece := range c.host {
		if n := uint64(len(piece)); from >= n {
			from -= n
			continue
		}
		if to := from + size; to <= uint64(len(piece)) {
			return piece[from:to:to]
		}
		return nil
	}
	return nil
}

// Read copies the kept contents of device memory to the host, whichever store
// has them. It fails where not all of the range was kept, and as Restore does.
// They are right once the copies that Save started have ended. No device is
// needed, but no other use of the store may be under way.
func (c *Contents) Read(at cuda.Ptr, to []byte) error {
	if err := c.keptIn(c.keeper); err != nil {
		return err
	}
	spans, err := c.find(at, uint64(len(to)))
	if err != nil {
		return err
	}
	for _, s := range spans {
		if err := c.keeper.read(c, s.from, to[:s.size]); err != nil {
			return err
		}
		to = to[s.size:]
	}
	return nil
}

// span is a part of what is kept: where it begins, over all ranges and rows.
type span struct{ from, size uint64 }

// find answers where a range of device memory is in what is kept: as several
// spans if parts of it are apart there.
func (c *Contents) find(at cuda.Ptr, size uint64) (spans []span, err error) {
	for size > 0 {
		s := c.locate(at)
		if s.size == 0 {
			return nil, fmt.Errorf("%d bytes of device memory at %#x were not kept", size, uint64(at))
		}
		s.size = min(s.size, size)
		at += cuda.Ptr(s.size)
		size -= s.size
		if last := len(spans) - 1; last >= 0 && spans[last].from+spans[last].size == s.from {
			spans[last].size += s.size
		} else {
			spans = append(spans, s)
		}
	}
	return spans, nil
}

// locate answers where the byte at an address is in what is kept, and how many
// follow in its row; none if it was not kept.
func (c *Contents) locate(at cuda.Ptr) span {
	start := uint64(0)
	for _, r := range c.Kept {
		if at >= r.At && r.Size > 0 {
			row, into := uint64(0), uint64(at-r.At)
			if r.Rows > 1 {
				row, into = into/r.Pitch, into%r.Pitch
			}
			if row < r.Rows && into < r.Size {
				return span{start + row*r.Size + into, r.Size - into}
			}
		}
		start += r.Size * r.Rows
	}
	return span{}
}

// copyOut starts to copy what is kept, from an offset on, to pinned host memory.
func (c *Contents) copyOut(driver *cuda.Driver, from uint64, host []byte, stream cuda.Stream) error {
	return c.walk(from, host, func(at cuda.Ptr, host unsafe.Pointer, size, rows, pitch uint64) error {
		if rows == 1 {
			return driver.CopyOut(host, at, size, stream)
		}
		return driver.CopyRowsOut(host, at, size, rows, pitch, stream)
	})
}

// copyIn undoes copyOut.
func (c *Contents) copyIn(driver *cuda.Driver, from uint64, host []byte, stream cuda.Stream) error {
	return c.walk(from, host, func(at cuda.Ptr, host unsafe.Pointer, size, rows, pitch uint64) error {
		if rows == 1 {
			return driver.CopyIn(at, host, size, stream)
		}
		return driver.CopyRowsIn(at, host, size, rows, pitch, stream)
	})
}

// clear starts to clear the ranges to be zeroed.
func (c *Contents) clear(driver *cuda.Driver, stream cuda.Stream) error {
	for _, r := range c.Zeroed {
		if err := driver.Zero(r.At, r.Size, stream); err != nil {
			return err
		}
	}
	return nil
}

// walk calls f for what is kept from an offset on, as much as the host memory
// holds: for several whole rows, or a part of one.
func (c *Contents) walk(from uint64, host []byte, f func(at cuda.Ptr, host unsafe.Pointer, size, rows, pitch uint64) error) error {
	start := uint64(0) // of the range, in what is kept
	for _, r := range c.Kept {
		end := start + r.Size*r.Rows
		for from < end && len(host) > 0 {
			row, into := (from-start)/r.Size, (from-start)%r.Size
			size, rows := min(r.Size-into, uint64(len(host))), uint64(1)
			if size == r.Size {
				rows = min(uint64(len(host))/size, r.Rows-row)
			}
			if err := f(r.At+cuda.Ptr(row*r.Pitch+into), unsafe.Pointer(&host[0]), size, rows, r.Pitch); err != nil {
				return err
			}
			from += size * rows
			host = host[size*rows:]
		}
		start = end
	}
	return nil
}
