package vmm

import (
	"errors"
	"fmt"
	"log/slog"

	"amem/golib/cuda"
	"amem/golib/peer"
	"amem/golib/rescue"
)

// What NCCL frees of a slab is used again only when nobody can write to it any
// more and it is clear: with the plain driver, a peer's last kernel may write
// to a buffer after its owner has freed it, since the peer's mapping keeps the
// memory alive, and NCCL relies on new memory being clear.
//
// So a part of a slab that is freed goes this way: if peers may have it mapped,
// it waits for them (block.awaited); then it is dirty (block.dirty) until
// memory of its class is needed and it is cleared; then it is free. A region's
// memory is free at once, or when no peer has it mapped any more: it was in use
// by nobody else, and new memory of a program's may have any contents.

// retire takes in what a handle of a slab has had. mu is held.
func (s *Space) retire(b *block, part span, exported bool, number uint64) {
	if exported && !s.peers.Settle(peer.Part{b.id, part.off}) {
		if b.awaited == nil {
			b.awaited = map[uint64]awaited{}
		}
		b.awaited[part.off] = awaited{size: part.size, number: number}
		return
	}
	s.reclaim(b, part)
}

// reclaim makes a part that nobody uses any more free, or dirty. mu is held.
func (s *Space) reclaim(b *block, part span) {
	if s.options.Region != "" {
		b.uncarve(part)
		return
	}
	b.dirty = append(b.dirty, part)
}

// Settled implements peer.Handler: no peer has the part mapped any more.
func (s *Space) Settled(part peer.Part) {
	s.mu.Lock()
	b := s.blocks[part[0]]
	if b == nil || b.awaited[part[1]].size == 0 {
		s.mu.Unlock()
		return
	}
	size := b.awaited[part[1]].size
	if now := b.awaited[part[1]]; now.claimed { // who claims it may have said before that it does not use it
		now.claimed = false
		b.awaited[part[1]] = now
		if !s.peers.Settle(part) {
			s.mu.Unlock()
			return
		}
	}
	delete(b.awaited, part[1])
	s.reclaim(b, span{part[1], size})
	s.mu.Unlock()
	// Not on the goroutine that serves the peer, which must not wait for structure.
	rescue.Go(func() {
		s.structure.RLock()
		defer s.structure.RUnlock()
		if err := s.endEmpty(b); err != nil {
			slog.Error("free a slab", "error", err)
		}
	})
}

// Held implements peer.Handler: which of the parts of an owner's memory, freed
// by the owner, are mapped here. Their end is told to the owner.
func (s *Space) Held(owner peer.Identity, parts []peer.Part) []peer.Part {
	s.mu.Lock()
	defer s.mu.Unlock()
	var held []peer.Part
	for _, part := range parts {
		b := s.imports[importKey{owner.ID, part[0]}]
		if b == nil {
			continue
		}
		if h := b.handleAt(part[1]); h != nil && h.off == part[1] {
			h.owed = true
			held = append(held, part)
		}
	}
	return held
}

// takeDirty takes the dirty parts of the class's slabs over to be cleared, and
// answers the slabs. mu is held.
func (s *Space) takeDirty(c class) []*block {
	var blocks []*block
	for _, b := range s.slabs[c] {
		if len(b.dirty) > 0 && b.mem.live && !b.mem.filling {
			b.clearing, b.dirty = b.dirty, nil
			blocks = append(blocks, b)
		}
	}
	return blocks
}

// clear zeroes what takeDirty has taken, and makes it free. What could not be
// zeroed stays dirty. structure is held.
func (s *Space) clear(blocks []*block) error {
	err := s.onDevice(blocks[0].mem.prop.Location, func(d *Device) (err error) {
		if d.clearing == 0 {
			if d.clearing, err = s.driver.NewStream(); err != nil {
				return err
			}
		}
		for _, b := range blocks {
			for _, part := range b.clearing {
				if err := s.driver.Zero(b.home+cuda.Ptr(part.off), part.size, d.clearing); err != nil {
					return errors.Join(err, s.driver.StreamSynchronize(d.clearing))
				}
			}
		}
		return s.driver.StreamSynchronize(d.clearing)
	})
	for _, b := range blocks {
		s.mu.Lock()
		if err != nil {
			b.dirty = append(b.dirty, b.clearing...)
		} else {
			for _, part := range b.clearing {
				b.uncarve(part)
			}
		}
		b.clearing = nil
		s.mu.Unlock()
		if endErr := s.endEmpty(b); endErr != nil {
			slog.Error("free a slab", "error", endErr)
		}
	}
	if err != nil {
		return fmt.Errorf("clear freed memory: %w", err)
	}
	return nil
}
