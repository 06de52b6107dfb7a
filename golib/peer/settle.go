package peer

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"amem/golib/rescue"
)

// Part names a part of a block: the block's number and an offset. A peer that
// maps the block may have the part in use.
type Part [2]uint64

// Chunk names what stands at a part: the same part is another chunk's later, which has
// another number.
type Chunk [3]uint64

// maxParts keeps a message of parts, or of chunks, below maxMessage.
const maxParts = 1000

// unsettled is what is still to be said to one process.
type unsettled struct {
	freed   []Part          // ours, which we have freed: do you use them?
	ended   []Part          // theirs, which they have freed, and we now too
	dropped map[uint64]bool // blocks of theirs that we no longer map
	talking bool            // a goroutine says it
	hurry   chan struct{}   // wakes the goroutine, which waits after a failure
}

func newUnsettled() unsettled {
	return unsettled{dropped: map[uint64]bool{}, hurry: make(chan struct{}, 1)}
}

func (u *unsettled) empty() bool { return len(u.freed)+len(u.ended)+len(u.dropped) == 0 }

func (u *unsettled) forget() {
	u.freed, u.ended = nil, nil
	clear(u.dropped)
}

// Settle asks all processes that map the block whether they use the part,
// which this process has freed. It answers true if there are none. Otherwise
// the Handler's Settled is called when none uses it any more.
func (n *Node) Settle(part Part) (unused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	users := map[ID]bool{}
	for id, l := range n.links {
		if !l.gone && l.exports[part[0]] {
			users[id] = true
			l.unsettled.freed = append(l.unsettled.freed, part)
			n.talk(l)
		}
	}
	if len(users) > 0 {
		n.users[part] = users
	}
	return len(users) == 0
}

// Ended tells the owner that a part that it has freed is not used here any more.
func (n *Node) Ended(owner Identity, part Part) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(owner)
	l.unsettled.ended = append(l.unsettled.ended, part)
	n.talk(l)
}

// Claim asks an owner whose memory was fetched which of the chunks it has freed before
// it knew that they are used here. From then on it asks before it uses them otherwise.
func (n *Node) Claim(ctx context.Context, owner Identity, chunks []Chunk) (freed []Chunk, err error) {
	for batch := range slices.Chunk(chunks, maxParts) {
		reply, fds, err := n.request(ctx, owner, message{Kind: kindClaim, Chunks: batch})
		closeAll(fds)
		if err != nil {
			return nil, err
		}
		freed = append(freed, reply.Chunks...)
	}
	return freed, nil
}

// settle calls Settled if nobody uses the part. mu is held.
func (n *Node) settle(part Part) {
	if users, freed := n.users[part]; freed && len(users) == 0 {
		delete(n.users, part)
		rescue.Go(func() { n.handler.Settled(part) })
	}
}

// unused notes that a process does not use a part. mu is held.
func (n *Node) unused(part Part, who ID) {
	delete(n.users[part], who)
	n.settle(part)
}

// unusedBlocks notes that a process uses no part of the blocks that it chooses.
// mu is held.
func (n *Node) unusedBlocks(who ID, choose func(block uint64) bool) {
	for _, part := range slices.Collect(maps.Keys(n.users)) {
		if choose(part[0]) {
			n.unused(part, who)
		}
	}
}

// talk says what is unsettled with a process, on a goroutine that ends when
// nothing is, or the process has ended. A process that does not answer is asked again
// and again: after a while, and at the next pause or resume. mu is held.
func (n *Node) talk(l *link) {
	if l.gone || l.unsettled.empty() {
		return
	}
	if l.unsettled.talking {
		select {
		case l.unsettled.hurry <- struct{}{}:
		default:
		}
		return
	}
	l.unsettled.talking = true
	rescue.Go(func() {
		for wait := firstWait; ; {
			more, err := n.sayNext(l)
			if !more {
				return
			}
			if err == nil {
				wait = firstWait
				continue
			}
			select {
			case <-time.After(wait):
				wait = min(2*wait, lastWait)
			case <-l.unsettled.hurry:
			case <-n.closed.Done():
				return
			}
		}
	})
}

// How long a process that has not answered is left alone.
const (
	firstWait = 100 * time.Millisecond
	lastWait  = 10 * time.Second
)

// sayNext says as much as goes into a message. It answers whether more is to be
// said.
func (n *Node) sayNext(l *link) (more bool, err error) {
	n.mu.Lock()
	select { // what was new is said now
	case <-l.unsettled.hurry:
	default:
	}
	freed, ended := cut(&l.unsettled.freed), cut(&l.unsettled.ended)
	var dropped []uint64
	for b := range l.unsettled.dropped {
		if len(dropped) == maxBlocks {
			break
		}
		delete(l.unsettled.dropped, b)
		if l.imports[b] == 0 { // else fetched again since
			dropped = append(dropped, b)
		}
	}
	n.requests++ // now: what is fetched from now on is not meant
	number := n.requests
	n.mu.Unlock()
	err = n.say(l.who, number, freed, ended, dropped)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil && !l.gone {
		slog.Debug("settle", "peer", l.who.String(), "error", err)
		l.unsettled.freed = append(freed, l.unsettled.freed...)
		l.unsettled.ended = append(ended, l.unsettled.ended...)
		for _, b := range dropped {
			l.unsettled.dropped[b] = true
		}
	}
	l.unsettled.talking = !l.gone && !l.unsettled.empty()
	return l.unsettled.talking, err
}

// cut takes the first parts off a list, as many as go into a message.
func cut(list *[]Part) []Part {
	k := min(len(*list), maxParts)
	head := (*list)[:k:k]
	*list = (*list)[k:]
	return head
}

func (n *Node) say(who Identity, number uint64, freed, ended []Part, dropped []uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), n.timeout)
	defer cancel()
	if len(dropped) > 0 {
		if _, _, err := n.request(ctx, who, message{Kind: kindDrop, Blocks: dropped, Number: number}); err != nil {
			return err
		}
	}
	if len(ended) > 0 {
		if _, _, err := n.request(ctx, who, message{Kind: kindEnded, Parts: ended, Number: number}); err != nil {
			return err
		}
	}
	if len(freed) == 0 {
		return nil
	}
	reply, _, err := n.request(ctx, who, message{Kind: kindFreed, Parts: freed})
	if err != nil {
		return err
	}
	n.update(func() {
		for _, part := range freed {
			if !slices.Contains(reply.Parts, part) {
				n.unused(part, who.ID)
			}
		}
	})
	return nil
}
