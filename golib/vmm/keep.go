package vmm

import (
	"log/slog"
	"slices"

	"amem/golib/cuda"
)

// registration is a range of addresses that a NIC, or a multicast object, was told
// of. Either keeps the physical memory, so a pause leaves that where it is.
type registration struct {
	number uint64
	at     cuda.Ptr
	size   uint64
	why    string    // one of Keep*
	mr     uintptr   // by which the NIC's library names it; 0: not known
	buffer bool      // a dma-buf: a registration may follow, and takes its place
	took   []*memory // that no multicast object was told of before
}

func (r registration) overlaps(at cuda.Ptr, size uint64) bool {
	return at < r.at+cuda.Ptr(r.size) && r.at < at+cuda.Ptr(size)
}

// memoryIn lists the memory that any byte of the range is of, used or not: what NCCL
// registers begins where the driver says that memory begins, which may be a part
// that is free. mu is held.
func (s *Space) memoryIn(p cuda.Ptr, size uint64) []*memory {
	var list []*memory
	add := func(m *memory) {
		if !slices.Contains(list, m) {
			list = append(list, m)
		}
	}
	i, exact := slices.BinarySearchFunc(s.ranges, p, compareAt)
	if !exact {
		i = max(i-1, 0)
	}
	for ; i < len(s.ranges) && s.ranges[i].at < p+cuda.Ptr(size); i++ {
		if p < s.ranges[i].at+cuda.Ptr(s.ranges[i].size) {
			add(s.ranges[i].block.mem)
		}
	}
	// A peer's memory is mapped as a whole: parts of it may be of blocks that were
	// not imported.
	for _, b := range s.imports {
		if m := b.mem; m.home != 0 && p < m.home+cuda.Ptr(m.size) && m.home < p+cuda.Ptr(size) {
			add(m)
		}
	}
	return list
}

// Keep notes that the memory in the range must stay where it is, and tells whether
// any is this Space's. It stays until the registration of the number has failed or
// ended. buffer: it is a dma-buf that a registration may follow.
func (s *Space) Keep(number uint64, p cuda.Ptr, size uint64, why string, buffer bool) (known bool) {
	s.mu.Lock()
	known = len(s.memoryIn(p, size)) > 0
	s.mu.Unlock()
	if !known { // most are of the host's: no pause holds them up
		return false
	}
	s.structure.RLock() // a pause that is about to release it does so first, and the registration fails
	defer s.structure.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.memoryIn(p, size)
	if len(list) == 0 {
		return false
	}
	r := registration{number: number, at: p, size: size, why: why, buffer: buffer}
	for _, m := range list {
		if m.keep != "" && (m.keep != KeepNIC || why == KeepNIC) { // only a NIC's reason may end: others stay
			continue
		}
		r.took = append(r.took, m)
		m.keep = why
		slog.Debug("memory stays resident", "why", why, "bytes", m.size)
	}
	s.registered = append(s.registered, r)
	s.network = s.network || why == KeepNIC
	return true
}

// Registered says how the NIC's library names the registration of a number from now
// on; 0: it has failed, or ended. A multicast object has no name, and its binding no end that
// is known: any but 0 stands for that.
func (s *Space) Registered(number uint64, mr uintptr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.registered, func(r registration) bool { return r.number == number })
	if i < 0 {
		return
	}
	if mr == 0 {
		s.unregister(func(r registration) bool { return r.number == number })
		return
	}
	made := &s.registered[i]
	made.mr = mr
	if made.why != KeepNIC {
		s.registered = slices.Delete(s.registered, i, i+1)
		return
	}
	at, size := made.at, made.size
	s.unregister(func(r registration) bool { return r.buffer && r.overlaps(at, size) })
}

// Deregister takes the name off what is about to be deregistered, since the next may
// get it at once, and answers its number, or 0. Registered with 0 ends it.
func (s *Space) Deregister(mr uintptr) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.registered, func(r registration) bool { return r.mr == mr })
	if mr == 0 || i < 0 {
		return 0
	}
	s.registered[i].mr = 0
	return s.registered[i].number
}

// unregister ends the registrations that choose answers true for. What no NIC uses
// any more, the next pause releases. mu is held.
func (s *Space) unregister(choose func(r registration) bool) {
	var ended []registration
	s.registered = slices.DeleteFunc(s.registered, func(r registration) bool {
		if choose(r) {
			ended = append(ended, r)
			return true
		}
		return false
	})
	for _, r := range ended {
		for _, m := range s.memoryIn(r.at, r.size) {
			bound := r.why == KeepMulticast && m.keep == KeepMulticast && slices.Contains(r.took, m)
			if m.keep != KeepNIC && !bound {
				continue
			}
			s.unkept(m)
		}
	}
}

// unkept takes its reason off memory that had to stay. A NIC may be another. mu is held.
func (s *Space) unkept(m *memory) {
	m.keep = ""
	if s.isRegistered(m) {
		m.keep = KeepNIC
	}
}

// isRegistered returns whether a NIC uses any of the memory. mu is held.
func (s *Space) isRegistered(m *memory) bool {
	return slices.ContainsFunc(s.registered, func(r registration) bool {
		return r.why == KeepNIC && slices.ContainsFunc(m.places(), func(p *mapping) bool { return r.overlaps(p.at, p.size) })
	})
}
