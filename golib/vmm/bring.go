package vmm

import (
	"context"
	"fmt"
	"log/slog"

	"amem/golib/cuda"
	"amem/golib/peer"
	"amem/golib/safe"
)

// NCCL imports peers' slabs one by one and uses none of them before its next
// launch. So an import notes what is wanted and where it will stand, and a goroutine
// for each owner brings it there while NCCL goes on: what has come together
// meanwhile in one message. Until it is there, launches wait (Arriving).

// promise answers a handle of a part of a peer's slab, which will be brought here.
func (s *Space) promise(b *block, d Descriptor) (cuda.Handle, error) {
	if s.peers.Gone(*b.owner) {
		return 0, fmt.Errorf("import memory of %s: %w", b.owner, peer.ErrGone)
	}
	s.structure.RLock()
	defer s.structure.RUnlock()
	if current, err := s.driver.CurrentDevice(); err == nil { // bring needs a context
		if _, err := s.device(current); err != nil {
			return 0, err
		}
	}
	if err := s.settleView(b, d); err != nil {
		return 0, fmt.Errorf("import memory of %s: %w", b.owner, err)
	}
	s.mu.Lock()
	b.arrived()
	if b.owner.Group != s.peers.Self().Group {
		b.mem.keep = KeepGroup
	}
	s.addRange(addressRange{at: b.home, size: b.size, block: b})
	id := s.viewOf(b, d).id
	b.wanted = !s.paused // else the resume brings it
	if b.wanted && !s.bringing[b.owner.ID] {
		s.bringing[b.owner.ID] = true
		safe.Go("import memory", func() { s.bring(*b.owner) })
	}
	s.mu.Unlock()
	s.options.Imported()
	return id, nil
}

// bring maps what is wanted of an owner's memory. What fails stays stale, so that
// launches are refused and a resume tries again.
func (s *Space) bring(owner peer.Identity) {
	for {
		blocks := s.takeWanted(owner)
		if len(blocks) == 0 {
			break
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
		err := safe.Try("import memory", func() error { return s.attachFrom(ctx, owner, blocks) })
		cancel()
		if err != nil && !s.isPaused() {
			slog.Error("import memory: launches are refused until a resume has mapped it", "peer", owner.String(), "error", err)
		}
	}
	s.options.Imported()
}

// takeWanted answers what is wanted of an owner's memory; nothing ends its bring.
func (s *Space) takeWanted(owner peer.Identity) []*block {
	s.mu.Lock()
	defer s.mu.Unlock()
	var blocks []*block
	for key, b := range s.imports {
		if key.owner == owner.ID && b.wanted {
			b.wanted = false
			blocks = append(blocks, b)
		}
	}
	if len(blocks) == 0 {
		delete(s.bringing, owner.ID)
		s.broadcast()
	}
	return blocks
}

func (s *Space) isPaused() bool {
	s.structure.RLock()
	defer s.structure.RUnlock()
	return s.paused
}

// Readiness says whether kernels may be launched, which may use all that was imported.
type Readiness int

// How far peers' memory is.
const (
	Here     Readiness = iota
	Arriving           // some is being mapped
	Stale              // some is not mapped, or its owner has replaced it since
)

// Imports answers how far peers' memory is. current answers the generation that an
// owner has said is ready.
func (s *Space) Imports(current func(owner peer.Identity) uint64) Readiness {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := Here
	for _, b := range s.imports {
		switch {
		case b.lost && b.mem.home == 0: // it never came, and never will
			return Stale
		case b.stale(current) && len(s.bringing) > 0:
			answer = Arriving
		case b.stale(current):
			answer = Stale
		}
	}
	return answer
}

// Arrived waits until no peer's memory is being brought here.
func (s *Space) Arrived(ctx context.Context) error {
	for {
		s.mu.Lock()
		arriving, changed := len(s.bringing) > 0, s.changed
		s.mu.Unlock()
		if !arriving {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for peers' memory: %w", ctx.Err())
		}
	}
}
