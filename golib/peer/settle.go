package peer

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"amem/golib/safe"
)

// Part names a part of a block: the block's number and an offset. A peer that
// maps the block may have the part in use.
type Part [2]uint64

// maxParts keeps a message of parts below maxMessage.
const maxParts = 1000

// unsettled is what is still to be said to one process.
type unsettled struct {
	freed   []Part // ours, which we have freed: do you use them?
	ended   []Part // theirs, which they have freed, and we now too
	talking bool   // a goroutine says it
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

// settle calls Settled if nobody uses the part. mu is held.
func (n *Node) settle(part Part) {
	if users, freed := n.users[part]; freed && len(users) == 0 {
		delete(n.users, part)
		safe.Go("settle", func() { n.handler.Settled(part) })
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
// nothing is, or when the process does not answer: then it is said with what
// comes next, or at the next pause or resume. mu is held.
func (n *Node) talk(l *link) {
	if l.unsettled.talking || l.gone || len(l.unsettled.freed)+len(l.unsettled.ended) == 0 {
		return
	}
	l.unsettled.talking = true
	safe.Go("settle", func() {
		more := true
		defer func() {
			if more { // a panic has ended it
				n.update(func() { l.unsettled.talking = false })
			}
		}()
		for more {
			more = n.sayNext(l)
		}
	})
}

// sayNext says as much as goes into a message. It answers false when it is the
// last for now.
func (n *Node) sayNext(l *link) bool {
	n.mu.Lock()
	freed, ended := cut(&l.unsettled.freed), cut(&l.unsettled.ended)
	n.mu.Unlock()
	err := n.say(l.who, freed, ended)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil && !l.gone {
		slog.Debug("settle", "peer", l.who.String(), "error", err)
		l.unsettled.freed = append(freed, l.unsettled.freed...)
		l.unsettled.ended = append(ended, l.unsettled.ended...)
	}
	l.unsettled.talking = err == nil && len(l.unsettled.freed)+len(l.unsettled.ended) > 0
	return l.unsettled.talking
}

// cut takes the first parts off a list, as many as go into a message.
func cut(list *[]Part) []Part {
	k := min(len(*list), maxParts)
	head := (*list)[:k:k]
	*list = (*list)[k:]
	return head
}

func (n *Node) say(who Identity, freed, ended []Part) error {
	ctx, cancel := context.WithTimeout(context.Background(), n.timeout)
	defer cancel()
	if len(ended) > 0 {
		if _, _, err := n.request(ctx, who, message{Kind: kindEnded, Parts: ended}); err != nil {
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
