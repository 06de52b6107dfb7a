package offload

import (
	"cmp"
	"slices"
	"sync"
	"unsafe"
)

// parts is the host memory of all Arenas that is pinned, each range by itself, by address.
var parts struct {
	mu   sync.RWMutex
	list []part
}

type part struct{ at, end uintptr }

func partOf(memory []byte) part {
	at := uintptr(unsafe.Pointer(&memory[0]))
	return part{at, at + uintptr(len(memory))}
}

func byAddress(p part, at uintptr) int { return cmp.Compare(p.at, at) }

func addPart(p part) {
	parts.mu.Lock()
	defer parts.mu.Unlock()
	i, _ := slices.BinarySearchFunc(parts.list, p.at, byAddress)
	parts.list = slices.Insert(parts.list, i, p)
}

func removePart(p part) {
	parts.mu.Lock()
	defer parts.mu.Unlock()
	parts.list = slices.DeleteFunc(parts.list, func(q part) bool { return q == p })
}

// Pinned answers how many bytes of an Arena from an address on are pinned together, so that
// the driver copies them at once; 0 if it is no Arena's. Any goroutine may call it.
func Pinned(at uintptr) uint64 {
	parts.mu.RLock()
	defer parts.mu.RUnlock()
	i, exact := slices.BinarySearchFunc(parts.list, at, byAddress)
	if !exact {
		i--
	}
	if i < 0 || at >= parts.list[i].end {
		return 0
	}
	return uint64(parts.list[i].end - at)
}
