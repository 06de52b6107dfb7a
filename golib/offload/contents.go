package offload

import (
	"unsafe"

	"amem/golib/cuda"
)

// Range is a piece of device memory.
type Range struct {
	At   cuda.Ptr
	Size uint64
}

// Contents is what a pause kept of some device memory: what was in the ranges
// Kept is in the arena; the ranges Zeroed are to be cleared.
type Contents struct {
	Kept   []Range
	Zeroed []Range
	host   [][][]byte // the pieces of each range kept
}

// Bytes answers how much is kept on the host.
func (c *Contents) Bytes() uint64 {
	var n uint64
	for _, r := range c.Kept {
		n += r.Size
	}
	return n
}

// Save starts to copy the ranges kept to the arena, in stream order.
func (c *Contents) Save(driver *cuda.Driver, arena *Arena, stream cuda.Stream) error {
	c.host = make([][][]byte, len(c.Kept))
	for i, r := range c.Kept {
		c.host[i] = arena.Take(r.Size)
	}
	return c.each(func(at cuda.Ptr, host []byte) error {
		return driver.CopyOut(unsafe.Pointer(&host[0]), at, uint64(len(host)), stream)
	})
}

// Restore starts to copy everything back, in stream order.
func (c *Contents) Restore(driver *cuda.Driver, stream cuda.Stream) error {
	for _, r := range c.Zeroed {
		if err := driver.Zero(r.At, r.Size, stream); err != nil {
			return err
		}
	}
	return c.each(func(at cuda.Ptr, host []byte) error {
		return driver.CopyIn(at, unsafe.Pointer(&host[0]), uint64(len(host)), stream)
	})
}

func (c *Contents) each(f func(at cuda.Ptr, host []byte) error) error {
	for i, r := range c.Kept {
		at := r.At
		for _, piece := range c.host[i] {
			if err := f(at, piece); err != nil {
				return err
			}
			at += cuda.Ptr(len(piece))
		}
	}
	return nil
}
