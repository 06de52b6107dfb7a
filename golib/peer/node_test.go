package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

const second = time.Second

// memory is a process's blocks, each a file.
type memory struct {
	mu         sync.Mutex
	files      map[uint64]int
	generation uint64
	changes    int
	wait       bool // until the context ends
	panics     bool
	held       map[Part]bool // parts of others' memory that are in use here
	settled    []Part
	outlived   map[Chunk]bool // chunks of ours that are no more
	described  map[Part][]byte
	heard      []string                        // what owners have told of their blocks
	answer     func(ctx context.Context) error // to that
}

func (m *memory) told(ctx context.Context, what string, owner Identity, blocks []uint64) error {
	m.mu.Lock()
	m.heard = append(m.heard, fmt.Sprint(what, " ", owner.PID, " ", blocks))
	answer := m.answer
	m.mu.Unlock()
	if answer == nil {
		return nil
	}
	return answer(ctx)
}

func (m *memory) listen() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	heard := m.heard
	m.heard = nil
	return heard
}

func (m *memory) Serve(ctx context.Context, _ Identity, blocks []uint64) ([]Memory, uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.panics {
		panic("a fault in answering")
	}
	if m.wait {
		<-ctx.Done()
		return nil, 0, errors.New("its memory is paused")
	}
	var list []Memory
	for _, b := range blocks {
		file, ok := m.files[b]
		if !ok {
			closeMemory(list)
			return nil, 0, ErrGone
		}
		fd, err := unix.FcntlInt(uintptr(file), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeMemory(list)
			return nil, 0, err
		}
		list = append(list, Memory{FD: fd, Size: 1, Blocks: []Place{{Block: b}}})
	}
	return list, m.generation, nil
}

func (m *memory) Held(_ Identity, parts []Part) []Part {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(parts), func(part Part) bool { return !m.held[part] })
}

func (m *memory) Outlived(chunks []Chunk) []Chunk {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(chunks), func(c Chunk) bool { return !m.outlived[c] })
}

func (m *memory) Settled(part Part) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.settled = append(m.settled, part)
}

func (m *memory) Describe(part Part) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.described[part]
}

func (m *memory) Leave(ctx context.Context, owner Identity, blocks []uint64, stands func() bool) error {
	err := m.told(ctx, "leave", owner, blocks)
	if err == nil && !stands() {
		return ErrOver
	}
	return err
}

func (m *memory) Return(ctx context.Context, owner Identity, blocks []uint64) error {
	return m.told(ctx, "return", owner, blocks)
}

func (m *memory) PeerChanged() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changes++
}

func (m *memory) seen() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changes
}

// process is a Node with blocks numbered from 1.
type process struct {
	*Node
	memory *memory
}

var lastPID = 1000

func newProcess(t testing.TB, group, blocks int) process {
	t.Helper()
	m := &memory{files: map[uint64]int{}, generation: 1}
	for i := range blocks {
		fd, err := unix.MemfdCreate("block", unix.MFD_CLOEXEC)
		require.NoError(t, err)
		m.files[uint64(i+1)] = fd
	}
	n, err := Listen(group, m, second)
	require.NoError(t, err)
	lastPID++
	n.self.PID = lastPID // one of its own, to tell the processes of an error apart
	t.Cleanup(func() {
		n.Close()
		for _, fd := range m.files {
			_ = unix.Close(fd)
		}
	})
	return process{n, m}
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// maps makes p map the owner's blocks.
func (p process) maps(t testing.TB, owner process, blocks ...uint64) {
	t.Helper()
	list, _, err := p.Fetch(within(t, 5*second), owner.Self(), blocks, false)
	require.NoError(t, err)
	closeMemory(list)
}

// together makes each process map a block of each other.
func together(t testing.TB, all ...process) {
	t.Helper()
	for _, p := range all {
		for _, owner := range all {
			if p.Node != owner.Node {
				p.maps(t, owner, 1)
			}
		}
	}
}

func identity(t testing.TB, fd int) [2]uint64 {
	t.Helper()
	var status unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &status))
	return [2]uint64{status.Dev, status.Ino}
}

func TestIDText(t *testing.T) {
	var id, back ID
	copy(id[:], "0123456789abcdef")
	text, err := id.MarshalText()
	require.NoError(t, err)
	require.NoError(t, back.UnmarshalText(text))
	require.Equal(t, id, back)
	for _, bad := range []string{"", "12", string(text[:31]) + "x", string(text) + "00"} {
		require.Error(t, back.UnmarshalText([]byte(bad)), "%q", bad)
	}
}

func TestFetch(t *testing.T) {
	owner, importer := newProcess(t, 0, 3), newProcess(t, 0, 0)
	owner.memory.generation = 17
	list, generation, err := importer.Fetch(within(t, 5*second), owner.Self(), []uint64{3, 1}, false)
	require.NoError(t, err)
	require.Equal(t, uint64(17), generation)
	require.Len(t, list, 2)
	require.Equal(t, identity(t, owner.memory.files[3]), identity(t, list[0].FD))
	require.Equal(t, []Place{{Block: 3}}, list[0].Blocks)
	require.Equal(t, identity(t, owner.memory.files[1]), identity(t, list[1].FD))
	closeMemory(list)
	require.Equal(t, []Peer{{owner.Self(), 2, 0, false}}, importer.Peers())
	require.Equal(t, []Peer{{importer.Self(), 0, 2, false}}, owner.Peers())

	importer.Drop(owner.Self(), 3)
	require.Eventually(t, func() bool { return slices.Equal(owner.Peers(), []Peer{{importer.Self(), 0, 1, false}}) },
		5*second, time.Millisecond)
	owner.Freed(1)
	require.Empty(t, owner.Peers())
	importer.Drop(owner.Self(), 1)
	require.Empty(t, importer.Peers())
}

func TestFetchInBatches(t *testing.T) {
	const count = 2*maxFDs + 50
	owner, importer := newProcess(t, 0, count), newProcess(t, 0, 0)
	var blocks []uint64
	for i := range count {
		blocks = append(blocks, uint64(count-i))
	}
	importer.maps(t, owner, 1)
	quiet(t)
	before := descriptorsOpen(t)
	list, _, err := importer.Fetch(within(t, 10*second), owner.Self(), blocks, false)
	require.NoError(t, err)
	for i, m := range list {
		require.Equal(t, identity(t, owner.memory.files[blocks[i]]), identity(t, m.FD), "block %d", blocks[i])
	}
	closeMemory(list)
	require.Equal(t, count, owner.Peers()[0].Exports)

	// One that is gone fails all of them, and leaves no descriptor open.
	_, _, err = importer.Fetch(within(t, 10*second), owner.Self(), append(blocks, 9999), false)
	require.ErrorIs(t, err, ErrGone)
	// What it drops then may take a second connection, which is kept: two ends.
	require.Eventually(t, func() bool { return descriptorsOpen(t) <= before+2 }, 5*second, 10*time.Millisecond)
}

func TestFetchOfTheGone(t *testing.T) {
	importer := newProcess(t, 0, 0)
	_, _, err := importer.Fetch(within(t, 5*second), Identity{ID: ID{1, 2, 3}, PID: 4242, Group: 3}, []uint64{1}, false)
	require.ErrorIs(t, err, ErrGone)
	require.ErrorContains(t, err, "pid 4242 (group 3)")
}

// An owner whose memory is paused does not answer: the error names it.
func TestFetchDeadline(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	owner.memory.wait = true
	_, _, err := importer.Fetch(within(t, 50*time.Millisecond), owner.Self(), []uint64{1}, false)
	require.ErrorContains(t, err, owner.Self().String())
	var timeout *TimeoutError
	require.ErrorAs(t, err, &timeout)
	require.Equal(t, []Identity{owner.Self()}, timeout.For)
}

func TestSetGroup(t *testing.T) {
	a, b := newProcess(t, 1, 1), newProcess(t, 0, 0)
	require.NoError(t, b.SetGroup(1))
	require.Equal(t, 1, b.Self().Group)
	b.maps(t, a, 1)
	require.Error(t, a.SetGroup(2), "b knows it as of group 1")
	require.Error(t, b.SetGroup(2))
	require.Equal(t, 1, a.Self().Group)
}

// A process that lets go of a block and maps it again is an importer still.
func TestDropThenFetch(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	for range 300 {
		importer.maps(t, owner, 1)
		importer.Drop(owner.Self(), 1)
		importer.maps(t, owner, 1)
	}
	time.Sleep(100 * time.Millisecond) // what is on its way arrives
	require.Equal(t, []Peer{{importer.Self(), 0, 1, false}}, owner.Peers())
	require.Equal(t, []Peer{{owner.Self(), 1, 0, false}}, importer.Peers())
}

func TestClosedNodeIsGone(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 1)
	together(t, a, b)
	changes := a.memory.seen()
	b.Close()
	require.Eventually(t, func() bool { return a.Gone(b.Self()) }, 5*second, time.Millisecond)
	require.Eventually(t, func() bool { return a.memory.seen() > changes }, 5*second, time.Millisecond)
	require.Empty(t, a.Peers())
	_, _, err := a.Fetch(within(t, 5*second), b.Self(), []uint64{1}, false)
	require.ErrorIs(t, err, ErrGone)
	_, err = a.Quiesce(within(t, 5*second))
	require.NoError(t, err, "who is gone is not waited for")
}

// The end of a process ends a wait for it at once.
func TestEndDuringQuiesce(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 1)
	together(t, a, b)
	done := make(chan error, 1)
	ctx := within(t, 30*second)
	go func() {
		_, err := a.Quiesce(ctx)
		done <- err
	}()
	time.Sleep(20 * time.Millisecond)
	require.Empty(t, done)
	b.Close()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(5 * second):
		require.Fail(t, "still waiting for a process that has ended")
	}
}

// rawDial connects to a node without introducing itself.
func rawDial(t testing.TB, to process) conn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, to.Self().socket())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return conn{c}
}

func introduced(t testing.TB, to process, who Identity) conn {
	t.Helper()
	c := rawDial(t, to)
	require.NoError(t, c.send(within(t, second), message{Kind: kindHello, Version: protocolVersion, From: who}, nil))
	m, _, err := c.receive(within(t, second))
	require.NoError(t, err)
	require.Equal(t, kindHello, m.Kind)
	require.Equal(t, to.Self(), m.From)
	return c
}

func TestWrongProtocol(t *testing.T) {
	a := newProcess(t, 0, 0)
	for name, m := range map[string]message{
		"version":     {Kind: kindHello, Version: 99},
		"no hello":    {Kind: kindFetch, Version: protocolVersion, Blocks: []uint64{1}},
		"stop unseen": {Kind: kindStopped, Pause: 5},
	} {
		c := rawDial(t, a)
		require.NoError(t, c.send(within(t, second), m, nil))
		reply, _, err := c.receive(within(t, second))
		require.NoError(t, err, name)
		require.Equal(t, kindError, reply.Kind, name)
		require.Contains(t, reply.Error, fmt.Sprintf("protocol %d", protocolVersion), name)
		_, _, err = c.receive(within(t, second))
		require.Error(t, err, "%s: the connection has ended", name)
	}
	require.Empty(t, a.links, "who did not introduce itself is not known")
}

// pretend listens as another process would and answers each hello with m.
func pretend(t testing.TB, m message) Identity {
	t.Helper()
	who := Identity{ID: ID{9, byte(lastPID)}, PID: 31337}
	lastPID++
	listener, err := net.ListenUnix("unixpacket", who.socket())
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			raw, err := listener.AcceptUnix()
			if err != nil {
				return
			}
			c := conn{raw}
			_, _, _ = c.receive(context.Background())
			_ = c.send(context.Background(), m, nil)
		}
	}()
	return who
}

func TestPeerOfAnotherRelease(t *testing.T) {
	a := newProcess(t, 0, 0)
	who := pretend(t, message{Kind: kindError, Error: "I speak another protocol"})
	_, _, err := a.Fetch(within(t, 5*second), who, []uint64{1}, false)
	require.ErrorContains(t, err, "use the same release of amem in all ranks")
	require.ErrorContains(t, err, "I speak another protocol")
	require.ErrorContains(t, err, "pid 31337")

	who = pretend(t, message{Kind: kindHello, Version: protocolVersion, From: Identity{ID: ID{7}, PID: 5}})
	_, _, err = a.Fetch(within(t, 5*second), who, []uint64{1}, false)
	require.ErrorContains(t, err, "it says to be pid 5")
}

// Whatever is sent, the node ends that connection, leaks no descriptor, and
// serves others.
func TestBadPackets(t *testing.T) {
	a, other := newProcess(t, 0, 1), newProcess(t, 0, 0)
	other.maps(t, a, 1)
	quiet(t)
	files := descriptorsOpen(t)
	valid, err := json.Marshal(message{Kind: kindFetch, Blocks: []uint64{1}})
	require.NoError(t, err)
	for name, packet := range map[string][]byte{
		"garbage":   []byte("\x00\xff\x13garbage"),
		"truncated": valid[:len(valid)-3],
		"oversized": append(bytes.Clone(valid), bytes.Repeat([]byte(" "), maxMessage)...),
		"too deep":  bytes.Repeat([]byte("["), 50000),
		"no object": []byte(`"hello"`),
		"bad type":  []byte(`{"Kind":"fetch","Blocks":[-1]}`),
		"bad ID":    []byte(`{"Kind":"hello","Version":1,"From":{"ID":"zz"}}`),
		"empty":     {},
	} {
		for _, greeted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, greeted %v", name, greeted), func(t *testing.T) {
				c := rawDial(t, a)
				if greeted {
					_ = c.Close()
					c = introduced(t, a, Identity{ID: ID{1}, PID: 1})
				}
				raw, err := c.File()
				require.NoError(t, err)
				require.NoError(t, unix.Sendmsg(int(raw.Fd()), packet, unix.UnixRights(0, 1, 2), nil, unix.MSG_NOSIGNAL))
				require.NoError(t, raw.Close())
				_, fds, err := c.receive(within(t, 2*second))
				require.Error(t, err)
				require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection ends")
				require.Empty(t, fds)
				_ = c.Close()
			})
		}
	}
	other.maps(t, a, 1)
	require.Eventually(t, func() bool { return descriptorsOpen(t) <= files }, 5*second, 10*time.Millisecond)
}

func TestRefusedRequests(t *testing.T) {
	a := newProcess(t, 0, 1)
	c := introduced(t, a, Identity{ID: ID{1}, PID: 1})
	for name, m := range map[string]message{
		"too many blocks": {Kind: kindFetch, Blocks: make([]uint64, maxFDs+1)},
		"too many parts":  {Kind: kindUnmapped, Parts: make([]Part, maxParts+1)},
		"unknown kind":    {Kind: "format"},
		"no kind":         {},
		"hello again":     {Kind: kindHello, Version: protocolVersion},
	} {
		require.NoError(t, c.send(within(t, second), m, nil))
		reply, fds, err := c.receive(within(t, second))
		require.NoError(t, err, name)
		require.Equal(t, kindError, reply.Kind, name)
		require.NotEmpty(t, reply.Error, name)
		require.Empty(t, fds, name)
	}
	require.Empty(t, a.Peers(), "nothing was handed out")
	require.NoError(t, c.send(within(t, second), message{Kind: kindFetch, Blocks: []uint64{1}}, nil))
	_, fds, err := c.receive(within(t, second))
	require.NoError(t, err)
	require.Len(t, fds, 1)
	require.Equal(t, identity(t, a.memory.files[1]), identity(t, fds[0]), "the connection still serves")
	closeAll(fds)
}

func TestSendRefusesTooMuch(t *testing.T) {
	a := newProcess(t, 0, 0)
	c := introduced(t, a, Identity{ID: ID{1}, PID: 1})
	require.ErrorContains(t, c.send(within(t, second), message{Kind: kindDrop, Blocks: make([]uint64, maxMessage)}, nil), "over the limit")
	require.ErrorContains(t, c.send(within(t, second), message{Kind: kindDrop}, make([]int, maxFDs+1)), "over the limit")
}

// Processes that connect and say nothing keep nobody else from being served.
func TestSilentConnections(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 0)
	for range 300 {
		rawDial(t, a)
	}
	start := time.Now()
	b.maps(t, a, 1)
	require.Less(t, time.Since(start), 5*second)
}

func TestPanicInAnswer(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 0)
	a.memory.panics = true
	_, _, err := b.Fetch(within(t, 5*second), a.Self(), []uint64{1}, false)
	require.Error(t, err)
	a.memory.mu.Lock()
	a.memory.panics = false
	a.memory.mu.Unlock()
	b.maps(t, a, 1)
}

func FuzzAnswer(f *testing.F) {
	for _, m := range []message{
		{Kind: kindHello, Version: protocolVersion, Watch: true},
		{Kind: kindFetch, Blocks: []uint64{1, 2}},
		{Kind: kindFetch, Blocks: []uint64{7}},
		{Kind: kindDrop, Blocks: []uint64{1}},
		{Kind: kindStopped, Pause: 1},
		{Kind: kindRetract, Pause: ^uint64(0)},
		{Kind: kindReady, Pause: 3, Generation: ^uint64(0)},
	} {
		body, err := json.Marshal(m)
		require.NoError(f, err)
		f.Add(body)
	}
	f.Add([]byte(`{"Kind":"fetch","Blocks":null,"From":{"ID":"00000000000000000000000000000000"}}`))
	p := newProcess(f, 0, 2)
	who := Identity{ID: ID{1}, PID: 1}
	f.Fuzz(func(t *testing.T, body []byte) {
		var m message
		if json.Unmarshal(body, &m) != nil {
			return
		}
		reply, fds, err := p.answer(context.Background(), who, m)
		defer closeAll(fds)
		if err == nil && (reply.Kind != m.Kind || m.Kind == kindHello) {
			t.Fatalf("%q was answered by %q", m.Kind, reply.Kind)
		}
		if len(fds) != 0 && (m.Kind != kindFetch || len(fds) != len(m.Blocks) || len(fds) > maxFDs) {
			t.Fatalf("%d descriptors for %+v", len(fds), m)
		}
	})
}
