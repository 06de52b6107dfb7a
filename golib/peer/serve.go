package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"amem/golib/rescue"
)

const (
	// A process has a watch and a few idle connections to each peer.
	maxConnections = 4096
	// How long a process that connected may take to say who it is.
	helloTimeout = 10 * time.Second
)

func (n *Node) accept() {
	slots := make(chan struct{}, maxConnections)
	for {
		raw, err := n.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			slog.Warn("accept a peer", "error", err)
			time.Sleep(10 * time.Millisecond) // out of descriptors: let some be closed
			continue
		}
		select {
		case slots <- struct{}{}:
			rescue.Go(func() {
				defer func() { <-slots }()
				n.serve(conn{raw})
			})
		default:
			_ = raw.Close()
		}
	}
}

// serve answers one connection until it ends.
func (n *Node) serve(c conn) {
	defer c.Close()
	defer n.closes(c)()
	if err := c.checkUser(); err != nil {
		n.refused.Do(func() { slog.Warn("refused a connection, and will refuse others without a word", "error", err) })
		return
	}
	who, watch, err := n.greet(c)
	if err != nil {
		slog.Debug("refused a connection", "error", err)
		return
	}
	if watch {
		defer func() {
			_ = c.Close()
			n.unwatched(who)
		}()
	}
	for {
		m, fds, err := c.receive(context.Background())
		closeAll(fds)
		if err != nil {
			return
		}
		err = n.reply(c, who, m)
		if err != nil {
			return
		}
	}
}

// reply answers one message.
func (n *Node) reply(c conn, who Identity, m message) error {
	limit := 2 * n.timeout
	if m.Within > 0 { // what is done when the peer has given up, it does not reckon with
		limit = min(limit, m.Within)
	}
	waiting, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	reply, fds, err := n.answerGuarded(waiting, who, m)
	defer closeAll(fds)
	if err != nil {
		reply = message{Kind: kindError, Error: err.Error(), Late: waiting.Err() != nil}
	}
	sending, cancel := context.WithTimeout(context.Background(), n.timeout)
	defer cancel()
	return n.send(sending, c, reply, fds)
}

func (n *Node) greet(c conn) (who Identity, watch bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), helloTimeout)
	defer cancel()
	m, fds, err := c.receive(ctx)
	closeAll(fds)
	if err != nil {
		return Identity{}, false, err
	}
	if m.Kind != kindHello || m.Version != protocolVersion {
		err = fmt.Errorf("hello of protocol %d expected, got %q of %d", protocolVersion, m.Kind, m.Version)
		return Identity{}, false, errors.Join(err, n.send(ctx, c, message{Kind: kindError, Error: err.Error()}, nil))
	}
	n.update(func() { n.link(m.From).learn(m) })
	return m.From, m.Watch, n.send(ctx, c, n.hello(false), nil)
}

// answerGuarded is answer, whose panic is an error that the peer gets too.
func (n *Node) answerGuarded(ctx context.Context, who Identity, m message) (reply message, fds []int, err error) {
	defer func() {
		if fault := rescue.Panicked(recover()); fault != nil {
			err = fmt.Errorf("%s in process %d, whose log says more", fault, n.Self().PID)
		}
	}()
	return n.answer(ctx, who, m)
}

func (n *Node) answer(ctx context.Context, who Identity, m message) (message, []int, error) {
	reply := message{Kind: m.Kind}
	switch m.Kind {
	case kindFetch:
		if len(m.Blocks) > maxFDs {
			return reply, nil, fmt.Errorf("%d blocks asked for at once, at most %d", len(m.Blocks), maxFDs)
		}
		// Counted first: a pause that starts now must wait for this peer too. What
		// it does not get, it drops: the request may be said twice, and answered otherwise.
		var added []uint64
		n.update(func() { added = n.link(who).take(m) })
		serving, cancel := context.WithCancel(ctx)
		defer cancel()
		if m.Now {
			cancel()
		}
		list, generation, err := n.handler.Serve(serving, who, m.Blocks)
		if err != nil {
			if errors.Is(err, ErrGone) { // as it will be each time
				n.update(func() { n.link(who).let(added, m.Number) })
				return reply, nil, nil // no memory says so
			}
			if errors.Is(err, ErrPaused) && m.Now {
				reply.Paused = true
				return reply, nil, nil
			}
			return reply, nil, err
		}
		n.update(func() { n.link(who).handedOut(m.Blocks, m.Number) })
		var fds []int
		for _, memory := range list {
			fds = append(fds, memory.FD)
		}
		reply.Memory, reply.Generation = list, generation
		return reply, fds, nil
	case kindDrop:
		n.update(func() {
			l := n.link(who)
			l.let(m.Blocks, m.Number)
			n.unusedBlocks(who.ID, func(block uint64) bool { return slices.Contains(m.Blocks, block) && !l.exports[block] })
		})
	case kindFreed:
		if len(m.Parts) > maxParts {
			return reply, nil, fmt.Errorf("%d parts freed at once, at most %d", len(m.Parts), maxParts)
		}
		reply.Parts = n.handler.Held(who, m.Parts)
	case kindClaim:
		if len(m.Chunks) > maxParts {
			return reply, nil, fmt.Errorf("%d chunks claimed at once, at most %d", len(m.Chunks), maxParts)
		}
		reply.Chunks = n.handler.Outlived(m.Chunks)
	case kindEnded:
		n.update(func() {
			l := n.link(who)
			if m.Number <= l.ended { // said again since, and the parts may be in use again
				return
			}
			l.ended = m.Number
			for _, part := range m.Parts {
				n.unused(part, who.ID)
			}
		})
	case kindUnmapped:
		if len(m.Parts) > maxParts || len(m.Blocks) > maxParts {
			return reply, nil, errTooMany
		}
		n.update(func() { n.link(who).heard(m) })
	case kindDescribe:
		if len(m.Parts) != 1 {
			return reply, nil, fmt.Errorf("%d parts to be described, not 1", len(m.Parts))
		}
		reply.Descriptor = n.handler.Describe(m.Parts[0])
	case kindLeave:
		return reply, nil, n.handler.Leave(ctx, who, m.Blocks, func() bool { return n.stands(ctx, who, m) })
	case kindReturn:
		n.update(func() { // first: from now on nobody lets go of them for a recall that is over
			l := n.link(who)
			for _, b := range m.Blocks {
				l.returned[b] = max(l.returned[b], m.Recall)
			}
		})
		return reply, nil, n.handler.Return(ctx, who, m.Blocks)
	case kindStopped:
		n.update(func() {
			l := n.link(who)
			l.stops, l.counts = max(l.stops, m.Pause), true
			reply.Relied, reply.Apart = l.met >= m.Pause, !l.neighbour()
			reply = n.progress(reply) // as of the same moment: a pause that ends later has relied
		})
		n.handler.PeerChanged()
	case kindRetract:
		n.update(func() {
			l := n.link(who)
			reply.Relied, reply.Apart = l.met >= m.Pause, !l.neighbour()
			l.met = max(l.met, m.Pause)
			l.readies = max(l.readies, m.Pause)
			reply = n.progress(reply)
		})
		n.handler.PeerChanged()
	case kindReady:
		n.update(func() {
			l := n.link(who)
			l.readies = max(l.readies, m.Pause)
			l.generation = max(l.generation, m.Generation)
			reply.Apart = !l.neighbour()
			reply = n.progress(reply)
		})
		n.handler.PeerChanged()
	default:
		return reply, nil, fmt.Errorf("unknown message %q", m.Kind)
	}
	return reply, nil, nil
}

// take counts the blocks of a fetch among those that the peer maps, unless it
// has dropped them since it asked. It answers which were not counted before.
func (l *link) take(m message) (added []uint64) {
	for _, b := range m.Blocks {
		if m.Number < l.told[b] {
			continue
		}
		l.told[b] = m.Number
		if !l.exports[b] {
			l.exports[b] = true
			added = append(added, b)
		}
	}
	if len(added) > 0 {
		l.since = l.stops
		if l.stopped() {
			l.since--
		}
	}
	return added
}

// let no longer counts the blocks, unless the peer has fetched them since.
func (l *link) let(blocks []uint64, number uint64) {
	for _, b := range blocks {
		if number >= l.told[b] {
			l.told[b] = number
			delete(l.exports, b)
			if !l.kept[b] {
				delete(l.mapped, b)
			}
		}
	}
}
