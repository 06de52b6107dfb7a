package offload

import (
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
// kept is in the arena; the ranges to be zeroed are cleared before.
type Contents struct {
	Kept   []Range
	Zeroed []Range
	host   [][][]byte // the pieces of each range kept
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

// Bytes answers how much is kept on the host.
func (c *Contents) Bytes() uint64 {
	var n uint64
	for _, r := range c.Kept {
		n += r.Size * r.Rows
	}
	return n
}

// Save starts to copy the ranges kept to the arena, in stream order.
func (c *Contents) Save(driver *cuda.Driver, arena *Arena, stream cuda.Stream) error {
	c.host = make([][][]byte, len(c.Kept))
	for i, r := range c.Kept {
		var err error
		if c.host[i], err = arena.Take(r.Size * r.Rows); err != nil {
			return err
		}
	}
	return c.each(func(at cuda.Ptr, host unsafe.Pointer, size, rows, pitch uint64) error {
		if rows == 1 {
			return driver.CopyOut(host, at, size, stream)
		}
		return driver.CopyRowsOut(host, at, size, rows, pitch, stream)
	})
}

// Restore starts to copy everything back, in stream order.
func (c *Contents) Restore(driver *cuda.Driver, stream cuda.Stream) error {
	for _, r := range c.Zeroed {
		if err := driver.Zero(r.At, r.Size, stream); err != nil {
			return err
		}
	}
	return c.each(func(at cuda.Ptr, host unsafe.Pointer, size, rows, pitch uint64) error {
		if rows == 1 {
			return driver.CopyIn(at, host, size, stream)
		}
		return driver.CopyRowsIn(at, host, size, rows, pitch, stream)
	})
}

// each calls f for what is kept, in pieces that lie in one piece on the host:
// several whole rows, or a part of one.
func (c *Contents) each(f func(at cuda.Ptr, host unsafe.Pointer, size, rows, pitch uint64) error) error {
	for i, r := range c.Kept {
		row, into := uint64(0), uint64(0)
		for _, piece := range c.host[i] {
			for len(piece) > 0 {
				size, rows := min(uint64(len(piece)), r.Size-into), uint64(1)
				if into == 0 && size == r.Size {
					rows = min(uint64(len(piece))/size, r.Rows-row)
				}
				at := r.At + cuda.Ptr(row*r.Pitch+into)
				if err := f(at, unsafe.Pointer(&piece[0]), size, rows, r.Pitch); err != nil {
					return err
				}
				piece = piece[size*rows:]
				if into += size; into == r.Size {
					row, into = row+rows, 0
				}
			}
		}
	}
	return nil
}
