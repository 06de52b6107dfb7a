package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"amem/golib/rescue"
)

// TimeoutError says whom a wait was for when its deadline passed.
type TimeoutError struct {
	For []Identity
	To  string // what they were to do; "": pause or resume as this process does
}

func (e *TimeoutError) Error() string {
	if e.To != "" {
		return fmt.Sprintf("waiting for %s to %s: the deadline passed", names(e.For), e.To)
	}
	return fmt.Sprintf("waiting for %s: the deadline passed; pause and resume must be called in every process that shares "+
		"a communicator with this one", names(e.For))
}

// neighbours lists the processes of our group that share memory with us.
// Memory shared with another group's process is never released, so there is
// nothing to agree on with it.
func (n *Node) neighbours() []*link {
	var list []*link
	for _, l := range n.links {
		if l.neighbour() && l.who.Group == n.self.Group {
			list = append(list, l)
		}
	}
	return list
}

// tell sends a message to all neighbours at once, and to those who count this process
// among theirs, and hands each answer to got.
// Each answer says how far the neighbour is: what it has told us itself may
// have been lost when its own deadline passed.
func (n *Node) tell(ctx context.Context, m message, got func(who Identity, reply message, err error)) {
	n.mu.Lock()
	var who []Identity
	for _, l := range n.links {
		// Who waits for this process must hear of it, though this one shares nothing with it.
		if !l.gone && l.who.Group == n.self.Group && (l.neighbour() || l.counts) {
			who = append(who, l.who)
			n.talk(l)
			n.tellUnmapped(l)
		}
	}
	n.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range who {
		wg.Add(1)
		rescue.Go(func() {
			defer wg.Done()
			reply, fds, err := n.request(ctx, w, m)
			closeAll(fds)
			if err == nil {
				n.update(func() {
					n.link(w).learn(reply)
					n.link(w).counts = !reply.Apart
				})
			}
			got(w, reply, err)
		})
	}
	wg.Wait()
}

// Quiesce tells all neighbours that no kernel of this process runs, and waits
// until each of them has said the same. When it returns nil, all of them rely
// on this process staying stopped, until Ready. When it fails, nobody does,
// but for the processes in relied.
func (n *Node) Quiesce(ctx context.Context) (relied []Identity, err error) {
	var pause uint64
	n.update(func() {
		n.stops++
		pause = n.stops
		for _, l := range n.links {
			l.relied, l.apart, l.unfetched = false, false, true
			l.met = l.stops // an earlier pause of theirs says nothing about this one
			if l.stopped() {
				l.met-- // but the one that they are in does
			}
		}
	})
	var untold []error
	n.tell(ctx, message{Kind: kindStopped, Pause: pause}, func(who Identity, reply message, err error) {
		n.update(func() {
			l := n.link(who)
			l.silent = err != nil
			l.apart = err == nil && reply.Apart && l.unfetched
			if timeout := (*TimeoutError)(nil); err != nil && !errors.Is(err, ErrGone) && !errors.As(err, &timeout) {
				untold = append(untold, err) // the wait below names it, but not why
			}
			if err == nil && reply.Ready >= reply.Pause && !reply.Relied {
				// Their pauses that we know of had ended before they heard of ours.
				l.met = max(l.met, reply.Pause)
			}
		})
	})
	err = n.wait(ctx, n.lagging, func() {
		for _, l := range n.links {
			l.met = l.stops
		}
	})
	if err == nil {
		return nil, nil
	}
	return n.retract(pause), errors.Join(append([]error{err}, untold...)...)
}

// StayStopped is a Quiesce of a process that has stopped already: it tells nobody
// anything new, and when it fails it takes nothing back. A pause of a neighbour's that was
// over when it fetched memory says nothing about that.
func (n *Node) StayStopped(ctx context.Context) error {
	return n.wait(ctx, func() []Identity {
		var list []Identity
		for _, l := range n.neighbours() {
			if !l.stopped() && l.stops <= max(l.met, l.since) {
				list = append(list, l.who)
			}
		}
		return list
	}, func() {
		for _, l := range n.links {
			l.met = l.stops
		}
	})
}

// lagging lists the neighbours that have not stopped for this pause. n.mu is held.
func (n *Node) lagging() []Identity {
	var list []Identity
	for _, l := range n.neighbours() {
		// A neighbour that stopped since we did was idle at one time with us,
		// even if it is ready again; so is one that stopped earlier and still is.
		// What is known of one that does not answer may be over. One that shares
		// nothing with this process does not tell it of its pauses: what is
		// counted here is freed, or not mapped any more, or not yet.
		if l.apart {
			continue
		}
		if l.silent || (l.stops <= l.met && !l.stopped()) {
			list = append(list, l.who)
		}
	}
	return list
}

// wait returns nil, after calling done under the lock, once missing answers
// an empty list, and a TimeoutError when ctx ends before.
func (n *Node) wait(ctx context.Context, missing func() []Identity, done func()) error {
	for {
		n.mu.Lock()
		list := missing()
		if len(list) == 0 {
			done()
			n.mu.Unlock()
			return nil
		}
		changed := n.changed
		n.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return &TimeoutError{For: list}
		}
	}
}

// retractTimeout bounds the wait for peers that did not answer before either.
const retractTimeout = 5 * time.Second

// retract takes a pause back and answers who has relied on it already. Who
// does not answer may have.
func (n *Node) retract(pause uint64) []Identity {
	n.update(func() { n.readies = pause })
	ctx, cancel := context.WithTimeout(context.Background(), min(n.timeout, retractTimeout))
	defer cancel()
	var mu sync.Mutex
	var relied []Identity
	n.tell(ctx, message{Kind: kindRetract, Pause: pause}, func(who Identity, reply message, err error) {
		if errors.Is(err, ErrGone) || (err == nil && !reply.Relied) {
			return
		}
		n.mu.Lock()
		l := n.link(who)
		stopped := l.stopped() && l.neighbour()
		if stopped {
			l.relied = true
			l.met = l.stops // it has to be over before we use their memory again
		}
		n.mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		if stopped {
			relied = append(relied, who)
		}
	})
	return relied
}

// Ready tells all neighbours that this process's memory has its contents
// again, as of the generation given. It ends what Quiesce began.
func (n *Node) Ready(ctx context.Context, generation uint64) {
	var pause uint64
	n.update(func() {
		ends := n.readies < n.stops
		n.readies, n.generation, pause = n.stops, generation, n.stops
		for _, l := range n.links {
			if ends && l.stopped() {
				l.met = l.stops // begun again, it may be, while ours went on
			}
		}
	})
	n.tell(ctx, message{Kind: kindReady, Pause: pause, Generation: generation},
		func(who Identity, _ message, err error) {
			if err != nil && !errors.Is(err, ErrGone) {
				slog.Debug("ready", "peer", who.String(), "error", err)
			}
		})
}

// WaitReady waits until every neighbour whose memory this process maps, or that
// has relied on its failed pause, has its contents in.
func (n *Node) WaitReady(ctx context.Context) error {
	return n.wait(ctx, func() []Identity {
		var list []Identity
		for _, l := range n.neighbours() {
			// Not whether it has stopped: it may have begun its next pause already, and wait for us.
			if !l.apart && (len(l.imports) > 0 || l.relied) && l.readies < l.met {
				list = append(list, l.who)
			}
		}
		return list
	}, func() {})
}

// Generation answers which generation of its memory a peer last called ready.
func (n *Node) Generation(who Identity) uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.link(who).generation
}

// Stopped tells whether a peer has paused, or is about to.
func (n *Node) Stopped(who Identity) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(who)
	return !l.gone && l.stopped()
}
