package peer

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	"amem/golib/rescue"
)

// A pause gives memory back to the device only once all who map it have let go of
// it. So each process notes which of its blocks it has handed out, and who maps a
// block tells its owner when it does no more.

// unmapped is what is to be said to one owner of what this process maps of its memory.
type unmapped struct {
	parts   []Part   // blocks, and the number of the last fetch of each: none of them is mapped
	kept    []uint64 // blocks that stay mapped, though this process has paused
	talking bool     // a goroutine says it
}

// unmappedTries is how often it is said to a process that answers, but with an error.
const unmappedTries = 5

// Unmapped tells the owner that this process does not map the blocks of gone now,
// as of the fetch with the number, or 0 for the last one, and that it goes on to map
// those of kept. It may fetch the blocks again.
func (n *Node) Unmapped(owner Identity, number uint64, gone, kept []uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(owner)
	for _, b := range gone {
		l.unmapped.parts = append(l.unmapped.parts, Part{b, cmp.Or(number, l.imports[b], n.requests)})
	}
	l.unmapped.kept = append(l.unmapped.kept, kept...)
	n.tellUnmapped(l)
}

// tellUnmapped says it on a goroutine, which ends when all is said or can't be: then
// it is said with what comes next, or with the next pause or resume. mu is held.
func (n *Node) tellUnmapped(l *link) {
	if l.unmapped.talking || l.gone || len(l.unmapped.parts)+len(l.unmapped.kept) == 0 {
		return
	}
	l.unmapped.talking = true
	rescue.Go(func() {
		for try := 1; n.sayUnmapped(l, try); try++ {
		}
	})
}

// sayUnmapped says as much as goes into a message. It answers false when it is the
// last for now.
func (n *Node) sayUnmapped(l *link, try int) (more bool) {
	n.mu.Lock()
	parts := cut(&l.unmapped.parts)
	kept := l.unmapped.kept[:min(len(l.unmapped.kept), maxParts)]
	l.unmapped.kept = l.unmapped.kept[len(kept):]
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(n.closed, n.timeout)
	defer cancel()
	_, fds, err := n.request(ctx, l.who, message{Kind: kindUnmapped, Parts: parts, Blocks: kept})
	closeAll(fds)
	again := err != nil && ctx.Err() == nil && try < unmappedTries
	if again {
		time.Sleep(10 * time.Millisecond)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if l.gone {
		l.unmapped = unmapped{}
		return false
	}
	if err != nil {
		slog.Debug("unmapped", "peer", l.who.String(), "error", err)
		l.unmapped.parts = append(parts, l.unmapped.parts...)
		l.unmapped.kept = append(kept, l.unmapped.kept...)
	}
	l.unmapped.talking = (err == nil || again) && len(l.unmapped.parts)+len(l.unmapped.kept) > 0
	return l.unmapped.talking
}

// handedOut notes that a process has got the blocks, with its fetch of the number, unless
// it has said already that it maps nothing of that. mu is held.
func (l *link) handedOut(blocks []uint64, number uint64) {
	if l.mapped == nil {
		l.mapped, l.kept = map[uint64]uint64{}, map[uint64]bool{}
	}
	for _, b := range blocks {
		if !l.exports[b] || number <= l.gaveUp[b] {
			continue
		}
		l.mapped[b] = max(l.mapped[b], number)
		delete(l.kept, b)
	}
}

// heard takes in what an Unmapped of the process says. mu is held.
func (l *link) heard(m message) {
	for _, part := range m.Parts {
		if l.told[part[0]] != 0 { // else nothing of it is on its way
			if l.gaveUp == nil {
				l.gaveUp = map[uint64]uint64{}
			}
			l.gaveUp[part[0]] = max(l.gaveUp[part[0]], part[1])
		}
		if at, is := l.mapped[part[0]]; is && part[1] >= at {
			delete(l.mapped, part[0])
			delete(l.kept, part[0])
		}
	}
	for _, b := range m.Blocks {
		if l.mapped[b] != 0 {
			l.kept[b] = true
		}
	}
}

// Holder is a process that maps blocks of this process.
type Holder struct {
	Identity
	Blocks []uint64
}

// WaitUnmapped waits until no process of our group maps any of the blocks, which
// this process has released, or until ctx ends. It returns who does then. A process
// that is not about to let go is not waited for: one that says that it keeps a block,
// or whose own pause has failed.
func (n *Node) WaitUnmapped(ctx context.Context, blocks map[uint64]bool) []Holder {
	for {
		n.mu.Lock()
		holders, waiting := n.holders(blocks)
		changed := n.changed
		n.mu.Unlock()
		if !waiting {
			return holders
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return holders
		}
	}
}

// holders lists who maps any of the blocks, and tells whether one of them is about to
// let go. mu is held.
func (n *Node) holders(blocks map[uint64]bool) (list []Holder, waiting bool) {
	for _, l := range n.links {
		if l.gone || l.who.Group != n.self.Group {
			continue
		}
		h := Holder{Identity: l.who}
		for b := range maps.Keys(l.mapped) {
			if blocks[b] {
				h.Blocks = append(h.Blocks, b)
				waiting = waiting || (l.stopped() && !l.kept[b])
			}
		}
		if len(h.Blocks) > 0 {
			slices.Sort(h.Blocks)
			list = append(list, h)
		}
	}
	slices.SortFunc(list, func(a, b Holder) int { return cmp.Or(cmp.Compare(a.PID, b.PID), a.ID.Compare(b.ID)) })
	return list, waiting
}

// errTooMany refuses a message that no process of this release sends.
var errTooMany = errors.New("more blocks at once than go into a message")
