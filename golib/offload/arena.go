// Package offload keeps the contents of paused memory in host memory: one
// pinned arena that grows to what is needed and is kept from one pause to the
// next, since pinning costs far more than copying.
//
// An Arena is used by one goroutine at a time, but for Bytes.
package offload

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
)

const (
	hugePage = 2 << 20
	// Pages are populated by this many threads: the kernel clears them at
	// memory speed then, and not at one core's.
	populators = 8
	// A thread's share is not made smaller than this.
	minShare = 64 << 20
)

// Arena is pinned host memory, in segments. Sizes are bytes.
type Arena struct {
	driver   *cuda.Driver
	segments []segment
	current  int // the segment that Take takes from
	bytes    atomic.Uint64
}

type segment struct {
	memory []byte
	used   uint64
}

// NewArena makes an empty arena.
func NewArena(driver *cuda.Driver) *Arena { return &Arena{driver: driver} }

// HostMemoryError says that the host lacks memory to keep the contents in.
type HostMemoryError struct {
	Bytes uint64
	Err   error
}

func (e *HostMemoryError) Error() string {
	return fmt.Sprintf("%d more bytes of host memory are needed to keep the contents in: %v", e.Bytes, e.Err)
}

func (e *HostMemoryError) Unwrap() error { return e.Err }

// Bytes answers how much host memory the arena holds, to any goroutine.
func (a *Arena) Bytes() uint64 { return a.bytes.Load() }

// Reset forgets all that was taken; the memory stays.
func (a *Arena) Reset() {
	a.current = 0
	for i := range a.segments {
		a.segments[i].used = 0
	}
}

// Grow makes the arena hold at least total bytes. A context must be current.
// On failure the arena is as it was.
func (a *Arena) Grow(total uint64) error {
	have := a.Bytes()
	if have >= total {
		return nil
	}
	size := (total - have + hugePage - 1) &^ (hugePage - 1)
	memory, err := populated(size)
	if err != nil {
		return &HostMemoryError{size, err}
	}
	if err := a.driver.HostRegister(unsafe.Pointer(&memory[0]), size); err != nil {
		return errors.Join(&HostMemoryError{size, fmt.Errorf("pin it: %w", err)}, unix.Munmap(memory))
	}
	a.segments = append(a.segments, segment{memory: memory})
	a.bytes.Add(size)
	return nil
}

// populated maps anonymous memory, in huge pages where there are any, all of
// it present.
func populated(size uint64) ([]byte, error) {
	memory, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE) // a wish only
	share := max(minShare, (size/populators+hugePage-1)&^(hugePage-1))
	var wg sync.WaitGroup
	failures := make([]error, (size+share-1)/share)
	for i := range failures {
		part := memory[uint64(i)*share : min(uint64(i+1)*share, size)]
		wg.Add(1)
		go func() {
			defer wg.Done()
			failures[i] = unix.Madvise(part, unix.MADV_POPULATE_WRITE)
		}()
	}
	wg.Wait()
	err = errors.Join(failures...)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.14: pinning populates, on one core
		err = nil
	}
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(memory))
	}
	return memory, nil
}

// Take answers size bytes, in as few pieces as the segments allow. The arena
// must have been grown to hold them.
func (a *Arena) Take(size uint64) [][]byte {
	var pieces [][]byte
	for size > 0 {
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
	return pieces
}
