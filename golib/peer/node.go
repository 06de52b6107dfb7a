// Package peer connects the processes that share GPU memory: it hands out file
// descriptors of memory blocks, and lets processes agree on when all of them
// have stopped and when all are ready again.
//
// Each process listens on an abstract Unix socket that is named after a random
// identity; a descriptor that travels through NCCL names the owner, so each
// process knows exactly whose memory it maps and who maps its own.
//
// No lock is held while waiting for a socket or for a peer, and answering a
// peer needs nothing but this package's own lock and the Handler. Every wait
// has the caller's deadline, and its error names the processes waited for.
package peer

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"amem/golib/rescue"
)

// ID is a process's random identity: pids are used again, this is not.
type ID [16]byte

func (id ID) String() string { return hex.EncodeToString(id[:]) }

// Compare orders IDs.
func (id ID) Compare(other ID) int { return bytes.Compare(id[:], other[:]) }

// MarshalText writes the identity as hexadecimal digits.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (id *ID) UnmarshalText(text []byte) error {
	if len(text) != 2*len(id) {
		return fmt.Errorf("process identity of %d digits, not %d", len(text), 2*len(id))
	}
	_, err := hex.Decode(id[:], text)
	return err
}

// Identity says who a process is.
type Identity struct {
	ID    ID
	PID   int
	Group int
}

func (i Identity) String() string { return fmt.Sprintf("pid %d (group %d)", i.PID, i.Group) }

func (i Identity) socket() *net.UnixAddr {
	return &net.UnixAddr{Name: socketPrefix + i.ID.String(), Net: "unixpacket"}
}

const socketPrefix = "@amem-"

// Handler is what a Node asks of its process. It is called on the Node's
// goroutines, by several at once.
type Handler interface {
	// Serve answers the memory of the blocks, with descriptors that are the
	// caller's to close, and the generation it belongs to. It waits until the
	// blocks have memory, or ctx ends, and answers ErrPaused then. The peer gets
	// ErrGone for a block that is no more.
	Serve(ctx context.Context, to Identity, blocks []uint64) (memory []Memory, generation uint64, err error)
	// Held answers which of the parts of the owner's memory, which the owner has
	// freed, are used here. Node.Ended is to be called when they are no more.
	Held(owner Identity, parts []Part) []Part
	// Outlived answers which of the chunks of this process's memory are no more: what
	// stands there now is another.
	Outlived(chunks []Chunk) []Chunk
	// Settled is called when no peer uses a part that Node.Settle named.
	Settled(part Part)
	// Describe answers the descriptor of a part of this process's memory, or nil if
	// there is none.
	Describe(part Part) []byte
	// Leave lets go of an owner's blocks, and Return maps them again. Neither waits
	// longer than ctx. Just before it lets go of them, Leave asks stands whether the
	// owner needs that still; if not, it fails with ErrOver.
	Leave(ctx context.Context, owner Identity, blocks []uint64, stands func() bool) error
	Return(ctx context.Context, owner Identity, blocks []uint64) error
	// PeerChanged is called when a peer has paused, is ready again, or is gone.
	PeerChanged()
}

// Memory is a physical allocation that an owner hands out, and which of the
// blocks that were asked for stand on it. Sizes and offsets are bytes.
type Memory struct {
	FD     int    `json:"-"`
	Number uint64 `json:"-"` // of the fetch, in this process
	Size   uint64
	Blocks []Place
}

// Place says where in its memory a block stands.
type Place struct{ Block, Offset uint64 }

// ErrGone says that the owner has freed the block, or is gone itself.
var ErrGone = errors.New("the memory's owner has freed it or has ended")

// ErrPaused says that the owner has paused the block.
var ErrPaused = errors.New("its memory is paused: resume it first")

// ErrBroken says that a process broke the connection off: it has ended, or is ending.
var ErrBroken = errors.New("the connection broke off")

// maxIdle is how many connections to a peer are kept for the next requests. Two at one time are rare.
const maxIdle = 1

// link is what is known of one other process.
type link struct {
	who     Identity
	imports map[uint64]uint64 // blocks of theirs that we map: the number of our last fetch
	exports map[uint64]bool   // blocks of ours that they map
	told    map[uint64]uint64 // for blocks of ours, the number of their last fetch or drop
	known   bool              // they have said how far they are
	gone    bool

	recalled map[uint64]uint64 // blocks of ours whose recall they were told of, but not of its end: its number
	returned map[uint64]uint64 // blocks of theirs: the last recall that is over
	ended    uint64            // the number of their last kindEnded

	stops      uint64 // the last pause that they started
	readies    uint64 // the last pause that they ended or retracted
	since      uint64 // their last pause that was over when they fetched memory of ours that they had not
	met        uint64 // their last pause that ours has taken into account
	generation uint64 // of their memory, as of their last kindReady

	silent    bool // they did not answer when we told them of our last pause
	relied    bool // they paused relying on our last pause, which failed
	unfetched bool // we have fetched nothing of theirs since our last pause began
	apart     bool // and as they said when we told them of it, they share no memory with us
	counts    bool // they have told us of a pause, so they count us among those they share memory with

	watched bool   // a connection is kept open to learn of their end
	idle    []conn // for requests

	unsettled unsettled

	gaveUp   map[uint64]uint64 // blocks of ours: the number of their last fetch of which they say that they map nothing
	mapped   map[uint64]uint64 // blocks of ours that they may have mapped now: the number of their last fetch that was answered
	kept     map[uint64]bool   // those that they say they keep
	unmapped unmapped          // what is to be said of theirs
}

func newLink(who Identity) *link {
	return &link{who: who, imports: map[uint64]uint64{}, exports: map[uint64]bool{}, told: map[uint64]uint64{},
		recalled: map[uint64]uint64{}, returned: map[uint64]uint64{}, unsettled: newUnsettled()}
}

func (l *link) neighbour() bool { return !l.gone && len(l.imports)+len(l.exports) > 0 }
func (l *link) stopped() bool   { return l.stops > l.readies }

// Node is this process's end of all connections.
type Node struct {
	handler  Handler
	timeout  time.Duration
	listener *net.UnixListener
	closed   context.Context // ends with Close
	end      context.CancelFunc
	refused  sync.Once    // tells of the first
	sent     atomic.Int64 // messages

	mu         sync.Mutex
	self       Identity
	links      map[ID]*link
	users      map[Part]map[ID]bool // who may use what this process has freed
	stops      uint64               // the last pause that we started
	readies    uint64               // the last pause that we ended or retracted
	generation uint64
	requests   uint64        // numbers fetches, drops and ends: a drop must not overtake, or undo, a later fetch
	recalls    uint64        // the number of our last recall of blocks
	changed    chan struct{} // closed, and replaced, when anything above changes
}

// Listen starts to serve peers. timeout bounds each answer to a peer.
func Listen(group int, handler Handler, timeout time.Duration) (*Node, error) {
	n := &Node{
		handler: handler, timeout: timeout,
		links: map[ID]*link{}, users: map[Part]map[ID]bool{}, changed: make(chan struct{}),
	}
	n.self = Identity{PID: os.Getpid(), Group: group}
	if _, err := rand.Read(n.self.ID[:]); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unixpacket", n.self.socket())
	if err != nil {
		return nil, fmt.Errorf("listen for peers: %w", err)
	}
	n.listener = listener
	n.closed, n.end = context.WithCancel(context.Background())
	rescue.Go(n.accept)
	return n, nil
}

// Close stops serving; connections to peers end.
func (n *Node) Close() {
	_ = n.listener.Close()
	n.end()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.links {
		for _, c := range l.idle {
			_ = c.Close()
		}
		l.idle = nil
	}
}

// closes makes Close end the connection, until the returned function is called.
func (n *Node) closes(c conn) (stop func() bool) {
	return context.AfterFunc(n.closed, func() { _ = c.Close() })
}

// Self answers this process's identity.
func (n *Node) Self() Identity {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.self
}

// SetGroup changes the group; only while no peer knows this process.
func (n *Node) SetGroup(group int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.links) > 0 {
		return errors.New("peers know this process already")
	}
	n.self.Group = group
	return nil
}

// update changes the state under the lock and wakes all who wait for a change.
func (n *Node) update(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
	close(n.changed)
	n.changed = make(chan struct{})
}

// link answers what is known of a process. n.mu is held.
func (n *Node) link(who Identity) *link {
	l := n.links[who.ID]
	if l == nil {
		l = newLink(who)
		n.links[who.ID] = l
	}
	return l
}

// learn notes how far a process is, as its hello says.
func (l *link) learn(m message) {
	if !l.known { // what they paused before we met has to be over before we use their memory
		l.known, l.met = true, m.Pause
	}
	l.stops = max(l.stops, m.Pause)
	l.readies = max(l.readies, m.Ready)
	l.generation = max(l.generation, m.Generation)
}

func (n *Node) hello(watch bool) message {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.progress(message{Kind: kindHello, Version: protocolVersion, From: n.self, Watch: watch})
}

// progress adds how far this process is. n.mu is held.
func (n *Node) progress(m message) message {
	m.Pause, m.Ready, m.Generation = n.stops, n.readies, n.generation
	return m
}

// dial connects to a process and exchanges hellos with it.
func (n *Node) dial(ctx context.Context, who Identity, watch bool) (conn, error) {
	if err := (conn{}).fault("dial " + who.socket().Name); err != nil {
		return conn{}, fmt.Errorf("connect to %s: %w", who, err)
	}
	var dialer net.Dialer
	raw, err := dialer.DialContext(ctx, "unixpacket", who.socket().Name)
	for errors.Is(err, unix.EAGAIN) && ctx.Err() == nil { // it has not accepted those before us yet
		time.Sleep(10 * time.Millisecond)
		raw, err = dialer.DialContext(ctx, "unixpacket", who.socket().Name)
	}
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			n.lost(who) // nobody has its name, and nobody will again
			return conn{}, fmt.Errorf("%s: %w", who, ErrGone)
		}
		return conn{}, fmt.Errorf("connect to %s: %w", who, err)
	}
	c := conn{raw.(*net.UnixConn)}
	reply, err := n.introduce(ctx, c, watch)
	if err == nil && reply.From.ID != who.ID {
		err = fmt.Errorf("it says to be %s", reply.From)
	}
	if err != nil {
		_ = c.Close()
		return conn{}, fmt.Errorf("connect to %s: %w", who, broken(err))
	}
	n.update(func() { n.link(reply.From).learn(reply) })
	return c, nil
}

// broken marks an error that comes of the other end's being closed.
func broken(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return err
}

// ended tells whether a process that broke a connection off has ended: then
// nobody listens any more, which may be some time after the first connection
// is closed.
func (n *Node) ended(ctx context.Context, who Identity) bool {
	for {
		c, err := n.dial(ctx, who, false)
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, ErrBroken) {
			return errors.Is(err, ErrGone)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return false
		}
	}
}

func (n *Node) introduce(ctx context.Context, c conn, watch bool) (message, error) {
	if err := c.checkUser(); err != nil {
		return message{}, err
	}
	if err := n.send(ctx, c, n.hello(watch), nil); err != nil {
		return message{}, err
	}
	reply, fds, err := c.receive(ctx)
	closeAll(fds)
	if err != nil {
		return message{}, err
	}
	if reply.Kind != kindHello || reply.Version != protocolVersion {
		return message{}, fmt.Errorf("it answered %q of protocol %d, not %d: use the same release of amem in all ranks (%s)",
			reply.Kind, reply.Version, protocolVersion, reply.Error)
	}
	return reply, nil
}

// watch keeps a connection open to learn when the process ends.
func (n *Node) watch(ctx context.Context, who Identity) error {
	n.mu.Lock()
	l := n.link(who)
	started := l.watched
	l.watched = true
	n.mu.Unlock()
	if started {
		return nil
	}
	c, err := n.dial(ctx, who, true)
	if err != nil {
		n.update(func() { l.watched = false })
		return err
	}
	rescue.Go(func() {
		defer n.closes(c)()
		_, fds, _ := c.receive(context.Background()) // nothing is ever sent here: it returns at the end
		closeAll(fds)
		_ = c.Close()
		n.update(func() { l.watched = false })
		n.unwatched(who)
	})
	return nil
}

// unwatched is called when a connection that was kept to learn of a process's end
// has ended. The process may have ended, or the connection alone: then it is
// watched anew, since what it maps must not be forgotten.
func (n *Node) unwatched(who Identity) {
	for wait := 10 * time.Millisecond; n.closed.Err() == nil; wait = min(2*wait, time.Second) {
		ctx, cancel := context.WithTimeout(n.closed, n.timeout)
		err := n.watch(ctx, who)
		cancel()
		if err == nil || errors.Is(err, ErrGone) {
			return
		}
		slog.Debug("watch", "peer", who.String(), "error", err)
		select {
		case <-time.After(wait):
		case <-n.closed.Done():
		}
	}
}

// lost notes that a process has ended.
func (n *Node) lost(who Identity) {
	n.update(func() {
		l := n.link(who)
		l.gone = true
		l.exports, l.told, l.recalled = map[uint64]bool{}, map[uint64]uint64{}, map[uint64]uint64{}
		l.mapped, l.kept, l.gaveUp = nil, nil, nil
		l.unsettled.forget()
		n.unusedBlocks(who.ID, func(uint64) bool { return true })
		for _, c := range l.idle {
			_ = c.Close()
		}
		l.idle = nil
	})
	n.handler.PeerChanged()
}

// request sends one message to a process and returns its answer.
func (n *Node) request(ctx context.Context, who Identity, m message) (message, []int, error) {
	reply, fds, err := n.ask(ctx, who, m)
	if errors.Is(err, ErrBroken) && !n.ended(ctx, who) {
		// The connection alone has ended. The message may have arrived: each may be said twice.
		reply, fds, err = n.ask(ctx, who, m)
	}
	if errors.Is(err, ErrBroken) && n.ended(ctx, who) {
		err = fmt.Errorf("%s: %w", who, ErrGone)
	}
	if errors.Is(err, ErrGone) && !n.Gone(who) {
		n.lost(who)
	}
	return reply, fds, err
}

func (n *Node) ask(ctx context.Context, who Identity, m message) (message, []int, error) {
	n.mu.Lock()
	l := n.link(who)
	var c conn
	if k := len(l.idle); k > 0 {
		c, l.idle = l.idle[k-1], l.idle[:k-1]
	}
	gone := l.gone
	n.mu.Unlock()
	if gone {
		return message{}, nil, fmt.Errorf("%s: %w", who, ErrGone)
	}
	if c.UnixConn == nil {
		var err error
		if c, err = n.dial(ctx, who, false); err != nil {
			return message{}, nil, err
		}
	}
	if end, limited := ctx.Deadline(); limited {
		m.Within = time.Until(end)
	}
	reply, fds, err := n.exchange(ctx, c, m)
	if err != nil {
		_ = c.Close()
		if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
			err = &TimeoutError{For: []Identity{who}}
		}
		return message{}, nil, fmt.Errorf("%s: %s: %w", who, m.Kind, broken(err))
	}
	n.mu.Lock()
	keep := !l.gone && len(l.idle) < maxIdle
	if keep {
		l.idle = append(l.idle, c)
	}
	n.mu.Unlock()
	if !keep {
		_ = c.Close()
	}
	if reply.Kind != m.Kind {
		closeAll(fds)
		if reply.Late {
			return message{}, nil, fmt.Errorf("%s: %s: %s: %w", who, m.Kind, reply.Error, &TimeoutError{For: []Identity{who}})
		}
		return message{}, nil, fmt.Errorf("%s: %s: %s", who, m.Kind, reply.Error)
	}
	return reply, fds, nil
}

func (n *Node) exchange(ctx context.Context, c conn, m message) (message, []int, error) {
	if err := n.send(ctx, c, m, nil); err != nil {
		return message{}, nil, err
	}
	return c.receive(ctx)
}

func (n *Node) send(ctx context.Context, c conn, m message, fds []int) error {
	n.sent.Add(1)
	return c.send(ctx, m, fds)
}

// Sent answers how many messages this process has sent to others.
func (n *Node) Sent() int64 { return n.sent.Load() }

// Fetch answers the memory of the owner's blocks, with descriptors that are the
// caller's to close, and the generation that it belongs to. From then on the
// owner counts this process among those that map the blocks. Paused blocks are
// waited for, or if now is set, are an ErrPaused.
func (n *Node) Fetch(ctx context.Context, owner Identity, blocks []uint64, now bool) ([]Memory, uint64, error) {
	if err := n.watch(ctx, owner); err != nil {
		return nil, 0, err
	}
	var number uint64
	var fresh []uint64
	n.update(func() { // counted first: a pause that starts now must wait for the owner too
		n.requests++
		number = n.requests
		l := n.link(owner)
		l.apart, l.unfetched = false, false
		for _, b := range blocks {
			if l.imports[b] == 0 {
				fresh = append(fresh, b)
			}
			l.imports[b] = number
		}
	})
	list, generation, err := n.fetch(ctx, owner, blocks, message{Kind: kindFetch, Number: number, Now: now})
	if err != nil { // the owner may have counted it all the same, or may still
		n.update(func() {
			l := n.link(owner)
			for _, b := range fresh {
				if l.imports[b] == number {
					n.drop(l, b)
				}
			}
		})
	}
	return list, generation, err
}

func (n *Node) fetch(ctx context.Context, owner Identity, blocks []uint64, m message) ([]Memory, uint64, error) {
	var list []Memory
	var generation uint64
	for batch := range slices.Chunk(blocks, maxFDs) {
		m.Blocks = batch
		reply, fds, err := n.request(ctx, owner, m)
		if err == nil && reply.Paused {
			err = fmt.Errorf("%s: %w", owner, ErrPaused)
		}
		if err == nil {
			if err = reply.carries(fds, batch); err != nil {
				err = fmt.Errorf("%s: %w", owner, err)
			}
		}
		if err != nil {
			closeAll(fds)
			closeMemory(list)
			return nil, 0, err
		}
		if len(list) == 0 { // the oldest: one that is too new would hide that the memory was replaced
			generation = reply.Generation
		}
		for i := range reply.Memory {
			reply.Memory[i].Number = m.Number
		}
		list = append(list, reply.Memory...)
	}
	return list, generation, nil
}

// carries puts the descriptors to the memory of an answer to a fetch. It
// fails with ErrGone if one of the blocks is missing.
func (m *message) carries(fds []int, blocks []uint64) error {
	if len(fds) != len(m.Memory) {
		return fmt.Errorf("%d descriptors for %d allocations", len(fds), len(m.Memory))
	}
	missing := map[uint64]bool{}
	for _, b := range blocks {
		missing[b] = true
	}
	for i := range m.Memory {
		m.Memory[i].FD = fds[i]
		for _, place := range m.Memory[i].Blocks {
			if !missing[place.Block] {
				return fmt.Errorf("block %d was not asked for", place.Block)
			}
			delete(missing, place.Block)
		}
	}
	if len(missing) > 0 {
		return ErrGone
	}
	return nil
}

func closeMemory(list []Memory) {
	for _, m := range list {
		_ = unix.Close(m.FD)
	}
}

// Drop tells the owner that this process no longer maps its block. The owner is told
// as often as it takes: it would wait for this process at each of its pauses.
func (n *Node) Drop(owner Identity, block uint64) {
	n.update(func() { n.drop(n.link(owner), block) })
}

// drop is Drop. n.mu is held.
func (n *Node) drop(l *link, block uint64) {
	delete(l.imports, block)
	l.unsettled.dropped[block] = true
	n.talk(l)
}

// Freed notes that a block of this process is no more: nobody maps it for us.
func (n *Node) Freed(block uint64) {
	n.update(func() {
		for _, l := range n.links {
			delete(l.exports, block)
			delete(l.told, block)
			delete(l.mapped, block)
			delete(l.gaveUp, block)
			delete(l.kept, block)
			delete(l.recalled, block)
		}
	})
}

// Importers lists the processes that map a block of this process, in order.
func (n *Node) Importers(block uint64) []ID {
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []ID
	for id, l := range n.links {
		if !l.gone && l.exports[block] {
			list = append(list, id)
		}
	}
	slices.SortFunc(list, ID.Compare)
	return list
}

// Outside tells whether a process of another group maps a block of this process.
func (n *Node) Outside(block uint64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.links {
		if !l.gone && l.who.Group != n.self.Group && l.exports[block] {
			return true
		}
	}
	return false
}

// Gone tells whether the process is known to have ended.
func (n *Node) Gone(who Identity) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.link(who).gone
}

// names lists processes for an error.
func names(list []Identity) string {
	text := make([]string, len(list))
	for i, who := range list {
		text[i] = who.String()
	}
	slices.Sort(text)
	return strings.Join(text, ", ")
}

// Peer is what statistics tell of one process.
type Peer struct {
	Identity
	Imports int  // blocks of theirs that this process maps
	Exports int  // blocks of this process that they map
	Stopped bool // they have paused, or are about to
}

// Peers lists the processes that share memory with this one.
func (n *Node) Peers() []Peer {
	n.mu.Lock()
	defer n.mu.Unlock()
	var peers []Peer
	for _, l := range n.links {
		if l.neighbour() {
			peers = append(peers, Peer{l.who, len(l.imports), len(l.exports), l.stopped()})
		}
	}
	slices.SortFunc(peers, func(a, b Peer) int { return a.PID - b.PID })
	return peers
}
