package vmm

import (
	"context"
	"fmt"
	"log/slog"

	"amem/golib/cuda"
	"amem/golib/peer"
)

// A descriptor that is on its way keeps nothing, nor does an import before the memory
// is fetched: the owner may free the chunk meanwhile, and have another stand there.
// With the plain driver either would keep the memory. So each chunk has a number,
// which its descriptor names. An importer claims what it has imported once the owner
// knows that it maps the block, and so asks it before it uses a freed part again. What
// the owner has freed by then must not be used: it may be another's.

// settle ends a claim; outlived: the owner has freed the chunk. mu is held.
func (h *handle) settle(outlived bool) {
	if h.unclaimed {
		h.unclaimed = false
		h.block.claims--
	}
	if h.outlived == outlived {
		return
	}
	h.outlived = outlived
	if outlived {
		h.block.outlived++
	} else {
		h.block.outlived--
	}
}

// chunk names the handle's memory to other processes.
func (h *handle) chunk() peer.Chunk { return peer.Chunk{h.block.id, h.off, h.number} }

// Outlived implements peer.Handler: which of the chunks have been freed, so that
// something else may stand there.
func (s *Space) Outlived(chunks []peer.Chunk) []peer.Chunk {
	s.mu.Lock()
	defer s.mu.Unlock()
	var freed []peer.Chunk
	for _, c := range chunks {
		if !s.stands(c) {
			freed = append(freed, c)
		}
	}
	return freed
}

// stands tells whether the chunk is there, or waits for its peers, who are asked again
// then. mu is held.
func (s *Space) stands(c peer.Chunk) bool {
	b := s.blocks[c[0]]
	if b == nil {
		return false
	}
	if part, freed := b.awaited[c[1]]; freed {
		part.claimed = part.claimed || part.number == c[2]
		b.awaited[c[1]] = part
		return part.number == c[2]
	}
	h := b.handleAt(c[1])
	return h != nil && h.off == c[1] && h.number == c[2]
}

// claim claims what was imported of an owner's memory, and is mapped, since the last
// time.
func (s *Space) claim(ctx context.Context, owner peer.Identity) error {
	claimed := map[peer.Chunk]*handle{}
	var chunks []peer.Chunk
	s.mu.Lock()
	for key, b := range s.imports {
		if key.owner != owner.ID || b.claims == 0 || !b.mem.live {
			continue
		}
		for _, h := range b.handles {
			if h.unclaimed {
				claimed[h.chunk()] = h
				chunks = append(chunks, h.chunk())
			}
		}
	}
	s.mu.Unlock()
	if len(chunks) == 0 {
		return nil
	}
	freed, err := s.peers.Claim(ctx, owner, chunks)
	if err != nil && s.peers.Gone(owner) {
		freed, err = nil, nil // nobody uses its memory otherwise any more
	}
	if err != nil {
		return fmt.Errorf("claim memory of %s: %w", owner, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range freed {
		if h := claimed[c]; h != nil {
			delete(claimed, c)
			if s.handles[h.id] == h {
				h.settle(true)
				slog.Warn("a peer has freed memory while it was imported: it must not be used", "peer", owner.String(), "bytes", h.size)
			}
		}
	}
	for _, h := range claimed {
		if s.handles[h.id] == h {
			h.settle(false)
		}
	}
	return nil
}

// claimNow claims a region's memory that was just imported.
func (s *Space) claimNow(id cuda.Handle, owner peer.Identity) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	if err := s.claim(ctx, owner); err != nil {
		return err
	}
	h, err := s.lookup(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.outlived {
		return fmt.Errorf("memory of %s: %w", owner, peer.ErrGone)
	}
	return nil
}
