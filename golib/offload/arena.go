// Package offload keeps the contents of paused memory, in one of two stores. An
// Arena is pinned host memory that grows to what is needed and is kept from one
// pause to the next, since pinning costs far more than copying. A Disk is a file
// without a name, or several with names, for what the host has no memory for.
//
// A store is used by one goroutine at a time, but for Bytes.
package offload

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/rescue"
)

const (
	hugePage = 2 << 20
	// The arena grows by pieces of this size: the first is copied to while the
	// next is pinned, and the one after that is populated.
	maxPiece = 512 << 20
	// A piece is pinned in parts of this size: the driver keeps all launches waiting
	// while it pins or unpins, 1.3 and 0.5 ms for 32 MB, and for all 512 no less
	// than for 16 parts. A copy must not span two of them: the driver refuses it
	// (all on an H200, CUDA 13.0).
	pinSize = 32 << 20
	// Pages are populated by this many threads at most: the kernel clears them at
	// memory speed then, and not at one core's.
	populators = 16
	// A thread's share is not made smaller than this.
	minShare = 32 << 20
)

// Arena is pinned host memory, in segments. Sizes are bytes.
type Arena struct {
	driver   *cuda.Driver
	segments []segment
	current  int           // the segment that Take takes from
	wanted   uint64        // what Begin was told
	ahead    chan prepared // a piece that is being populated
	bytes    atomic.Uint64
	node     int    // the memory node to prefer; -1: any
	begun    uint64 // how often all that was taken was forgotten
	claim    claim  // what is wanted and not populated
}

// segment is memory that is pinned, each pinSize bytes of it by itself.
type segment struct {
	memory []byte
	used   uint64
}

// prepared is host memory that is populated, and not pinned yet.
type prepared struct {
	memory []byte
	err    error
}

// NewArena makes an empty arena.
func NewArena(driver *cuda.Driver) *Arena {
	return &Arena{driver: driver, node: -1, claim: claim{on: &claims}}
}

// HostMemoryError says that the host lacks memory to keep the contents in.
type HostMemoryError struct {
	Bytes uint64
	Err   error
}

func (e *HostMemoryError) Error() string {
	return fmt.Sprintf("%d more bytes of host memory are needed to keep the contents in: %v; free some, raise the limit, "+
		"or keep less: of NCCL's memory with AMEM_NCCL_OFFLOAD_FREE_TAG=7, of a region's with another backup", e.Bytes, e.Err)
}

func (e *HostMemoryError) Unwrap() error { return e.Err }

// Bytes answers how much host memory the arena holds, to any goroutine.
func (a *Arena) Bytes() uint64 { return a.bytes.Load() }

// Prefer makes new memory come from a memory node of the host, if it has any left.
func (a *Arena) Prefer(node int) { a.node = node }

// Begin forgets all that was taken, and gets ready to hold total bytes, as Expect
// does. What is taken then lies where it lay before if the sizes are the same.
func (a *Arena) Begin(total uint64) error {
	a.forget()
	return a.Expect(total)
}

func (a *Arena) forget() {
	a.current = 0
	a.begun++
	for i := range a.segments {
		a.segments[i].used = 0
	}
}

// More gets ready to hold total bytes more than what was taken.
func (a *Arena) More(total uint64) error {
	for _, s := range a.segments {
		total += s.used
	}
	return a.Expect(total)
}

// Expect gets ready to hold total bytes, with what was taken. It fails where the
// host has not that much memory left, what other processes claim counted.
func (a *Arena) Expect(total uint64) error {
	a.wanted = total
	missing := a.missing()
	if a.ahead != nil { // then that much of it is there
		piece := <-a.ahead
		a.ahead <- piece
		missing -= min(missing, uint64(len(piece.memory)))
		if piece.err != nil {
			a.ahead = nil
		}
	}
	if err := a.claim.take(missing); err != nil {
		return &HostMemoryError{missing, err}
	}
	return nil
}

// missing answers by how much the arena is too small, in huge pages.
func (a *Arena) missing() uint64 {
	have := a.Bytes()
	if have >= a.wanted {
		return 0
	}
	return (a.wanted - have + hugePage - 1) &^ (hugePage - 1)
}

// Grow adds a piece if the arena is smaller than Begin was told, and tells
// whether it did. A context must be current. On failure nothing is wanted any
// more, and what was pinned before the failure is kept.
func (a *Arena) Grow() (grown bool, err error) {
	missing := a.missing()
	if missing == 0 {
		return false, nil
	}
	if a.ahead == nil {
		a.prepare(min(missing, maxPiece))
	}
	piece := <-a.ahead
	a.ahead = nil
	if piece.err != nil {
		a.Done()
		return false, &HostMemoryError{missing, piece.err}
	}
	if size := uint64(len(piece.memory)); missing > size {
		a.prepare(min(missing-size, maxPiece))
	}
	pinned, err := a.pin(piece.memory)
	if pinned > 0 {
		a.segments = append(a.segments, segment{memory: piece.memory[:pinned]})
		a.bytes.Add(pinned)
	}
	if err != nil {
		a.Done()
		return false, errors.Join(&HostMemoryError{missing, fmt.Errorf("pin it: %w", err)}, unmap(piece.memory[pinned:]))
	}
	return true, nil
}

// pin pins memory from its beginning on, and answers how much of it.
func (a *Arena) pin(memory []byte) (pinned uint64, err error) {
	for part := range slices.Chunk(memory, pinSize) {
		if err := a.driver.HostRegister(unsafe.Pointer(&part[0]), uint64(len(part))); err != nil {
			return pinned, err
		}
		addPart(partOf(part))
		pinned += uint64(len(part))
	}
	return pinned, nil
}

// prepare starts to populate the next piece, if the host has the room still.
func (a *Arena) prepare(size uint64) {
	a.ahead = make(chan prepared, 1)
	result, node := a.ahead, a.node
	rescue.Go(func() {
		var piece prepared
		piece.err = rescue.Err(func() (err error) {
			if err := a.claim.check(size); err != nil {
				return err
			}
			piece.memory, err = populated(size, node)
			a.claim.shrink(size)
			return err
		})
		result <- piece
	})
}

// Done implements Store: what was populated ahead and is not needed goes back.
func (a *Arena) Done() {
	a.wanted = 0
	if a.ahead != nil {
		piece := <-a.ahead
		a.ahead = nil
		if err := unmap(piece.memory); err != nil {
			slog.Warn("host memory that was got ahead is kept", "bytes", len(piece.memory), "error", err)
		}
	}
	a.claim.shrink(math.MaxUint64)
}

// Free implements Store.
func (a *Arena) Free(ready func() error) error {
	a.forget()
	a.Done()
	for len(a.segments) > 0 {
		last := &a.segments[len(a.segments)-1]
		size := uint64(len(last.memory))
		from := (size - 1) / pinSize * pinSize
		part := last.memory[from:]
		if err := ready(); err != nil {
			return err
		}
		if err := a.driver.HostUnregister(unsafe.Pointer(&part[0])); err != nil {
			return err
		}
		removePart(partOf(part))
		last.memory = last.memory[:from]
		if from == 0 {
			a.segments = a.segments[:len(a.segments)-1]
		}
		a.bytes.Add(from - size)
		if err := unmap(part); err != nil {
			return err
		}
	}
	return nil
}

// Save starts to copy the ranges kept to the arena, in stream order. A context
// must be current.
func (a *Arena) Save(c *Contents, stream cuda.Stream) error {
	c.forget()
	pieces, err := a.Take(c.Bytes())
	if err != nil {
		return err
	}
	from := uint64(0)
	for _, piece := range a.parts(pieces) {
		if err := c.copyOut(a.driver, from, piece, stream); err != nil {
			return err
		}
		from += uint64(len(piece))
	}
	c.keeper, c.age, c.host = a, a.begun, pieces
	return nil
}

// Restore starts to copy everything back, in stream order. A context must be
// current.
func (a *Arena) Restore(c *Contents, stream cuda.Stream) error {
	if err := c.keptIn(a); err != nil {
		return err
	}
	if err := c.clear(a.driver, stream); err != nil {
		return err
	}
	from := uint64(0)
	for _, piece := range a.parts(c.host) {
		if err := c.copyIn(a.driver, from, piece, stream); err != nil {
			return err
		}
		from += uint64(len(piece))
	}
	return nil
}

// parts cuts pieces that Take answered where what is pinned by itself ends.
func (a *Arena) parts(pieces [][]byte) (parts [][]byte) {
	for _, piece := range pieces {
		i := slices.IndexFunc(a.segments, func(s segment) bool { return offset(s, piece) < uint64(len(s.memory)) })
		first := pinSize - offset(a.segments[i], piece)%pinSize // bytes, to where a part ends
		if first < uint64(len(piece)) {
			parts = append(parts, piece[:first])
			piece = piece[first:]
		}
		parts = slices.AppendSeq(parts, slices.Chunk(piece, pinSize))
	}
	return parts
}

// offset answers where a piece begins in a segment; beyond it if in another.
func offset(s segment, piece []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(&piece[0])) - uintptr(unsafe.Pointer(&s.memory[0])))
}

func (a *Arena) age() uint64 { return a.begun }

// read answers what is kept of c from an offset on.
func (a *Arena) read(c *Contents, from uint64, to []byte) error {
	for _, piece := range c.host {
		if size := uint64(len(piece)); from >= size {
			from -= size
			continue
		}
		to = to[copy(to, piece[from:]):]
		from = 0
	}
	return nil
}

// populated maps anonymous memory, in huge pages where there are any, all of
// it present. Pages are touched for that: 8 threads took 75 ms for 2 GiB in huge
// pages, with MADV_POPULATE_WRITE 384, and pinning what is not there 304 (Linux 6.18).
func populated(size uint64, node int) ([]byte, error) {
	at, err := unix.MmapPtr(-1, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	memory := unsafe.Slice((*byte)(at), size)
	// A child of fork() has no use for it, and would get a copy of what is pinned, or
	// keep what is given back here.
	if err := unix.Madvise(memory, unix.MADV_DONTFORK); err != nil {
		return nil, errors.Join(err, unmap(memory))
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE) // a wish only
	preferNode(memory, node)
	threads := uint64(min(populators, runtime.NumCPU()))
	share := max(minShare, (size/threads+hugePage-1)&^(hugePage-1))
	var wg sync.WaitGroup
	for part := range slices.Chunk(memory, int(share)) {
		wg.Add(1)
		rescue.Go(func() {
			defer wg.Done()
			cuda.Touch(part)
		})
	}
	wg.Wait()
	return memory, nil
}

// unmap gives back memory that populated answered, or a part of it.
func unmap(memory []byte) error {
	if len(memory) == 0 {
		return nil
	}
	return unix.MunmapPtr(unsafe.Pointer(&memory[0]), uintptr(len(memory)))
}

// Take answers size bytes, in as few pieces as the segments allow, and grows
// the arena as far as Begin was told. A context must be current.
func (a *Arena) Take(size uint64) ([][]byte, error) {
	var pieces [][]byte
	for size > 0 {
		if a.current == len(a.segments) {
			grown, err := a.Grow()
			if err != nil {
				return nil, err
			}
			if !grown {
				return nil, fmt.Errorf("%d bytes more than was said are to be kept", size)
			}
		}
		s := &a.segments[a.current]
		n := min(size, uint64(len(s.memory))-s.used)
		if n == 0 {
			a.current++
			continue
		}
		pieces = append(pieces, s.memory[s.used:s.used+n])
		s.used += n
		size -= n
	}
	return pieces, nil
}
