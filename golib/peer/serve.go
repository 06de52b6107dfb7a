package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"
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
			go func() {
				defer func() { <-slots }()
				n.serve(conn{raw})
			}()
		default:
			_ = raw.Close()
		}
	}
}

// serve answers one connection until it ends.
func (n *Node) serve(c conn) {
	defer c.Close()
	defer func() {
		// A fault in answering one peer must not take the host process down.
		if r := recover(); r != nil {
			slog.Error("serving a peer", "panic", r)
		}
	}()
	if err := c.checkUser(); err != nil {
		slog.Warn("refused a connection", "error", err)
		return
	}
	who, watch, err := n.greet(c)
	if err != nil {
		slog.Debug("refused a connection", "error", err)
		return
	}
	if watch {
		defer n.lost(who)
	}
	for {
		m, fds, err := c.receive(context.Background())
		closeAll(fds)
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), n.timeout)
		reply, out, err := n.answer(ctx, who, m)
		if err != nil {
			reply = message{Kind: kindError, Error: err.Error()}
		}
		err = c.send(ctx, reply, out)
		closeAll(out)
		cancel()
		if err != nil {
			return
		}
	}
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
		return Identity{}, false, errors.Join(err, c.send(ctx, message{Kind: kindError, Error: err.Error()}, nil))
	}
	n.update(func() { n.link(m.From).learn(m) })
	return m.From, m.Watch, c.send(ctx, n.hello(false), nil)
}

func (n *Node) answer(ctx context.Context, who Identity, m message) (message, []int, error) {
	reply := message{Kind: m.Kind}
	switch m.Kind {
	case kindFetch:
		if len(m.Blocks) > maxFDs {
			return reply, nil, fmt.Errorf("%d blocks asked for at once, at most %d", len(m.Blocks), maxFDs)
		}
		// Counted first: a pause that starts now must wait for this peer too.
		n.update(func() {
			for _, b := range m.Blocks {
				n.link(who).exports[b] = true
			}
		})
		fds, generation, err := n.handler.Serve(ctx, who, m.Blocks)
		if err != nil {
			n.update(func() {
				for _, b := range m.Blocks {
					delete(n.link(who).exports, b)
				}
			})
			if errors.Is(err, ErrGone) {
				return reply, nil, nil // fewer descriptors than blocks says so
			}
			return reply, nil, err
		}
		reply.Generation = generation
		return reply, fds, nil
	case kindDrop:
		n.update(func() {
			for _, b := range m.Blocks {
				delete(n.link(who).exports, b)
			}
		})
	case kindStopped:
		n.update(func() { l := n.link(who); l.stops = max(l.stops, m.Pause) })
		n.handler.PeerChanged()
	case kindRetract:
		n.update(func() {
			l := n.link(who)
			reply.Relied = l.met >= m.Pause
			l.met = max(l.met, m.Pause)
			l.readies = max(l.readies, m.Pause)
		})
		n.handler.PeerChanged()
	case kindReady:
		n.update(func() {
			l := n.link(who)
			l.readies = max(l.readies, m.Pause)
			l.generation = max(l.generation, m.Generation)
		})
		n.handler.PeerChanged()
	default:
		return reply, nil, fmt.Errorf("unknown message %q", m.Kind)
	}
	return reply, nil, nil
}
