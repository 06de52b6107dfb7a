package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	protocolVersion = 2
	maxMessage      = 64 << 10
	// The kernel takes up to 253 descriptors in a message (SCM_MAX_FD).
	maxFDs = 200
)

// The kinds of message. Each request is answered by one message: an answer of
// the same kind, or kindError.
const (
	kindHello    = "hello"    // who I am and how far I am; Watch: keep this connection until one of us ends
	kindFetch    = "fetch"    // give me descriptors of these blocks of yours
	kindDrop     = "drop"     // I no longer map these blocks of yours
	kindFreed    = "freed"    // I have freed these parts of my memory: which do you use?
	kindEnded    = "ended"    // I no longer use these parts, which you have freed
	kindClaim    = "claim"    // I use these chunks of yours: which have you freed?
	kindStopped  = "stopped"  // I started pause number Pause: none of my kernels runs
	kindRetract  = "retract"  // I gave up pause number Pause; did you rely on it?
	kindReady    = "ready"    // I ended pause number Pause: my memory has its contents
	kindUnmapped = "unmapped" // I don't map these blocks of yours now, as of these fetches, and keep those of Blocks
	kindDescribe = "describe" // what is at this part of your memory?
	kindLeave    = "leave"    // I am about to pause these blocks of mine: let go of them
	kindReturn   = "return"   // these blocks of mine are there again, or still: map them
	kindError    = "error"
)

type message struct {
	Kind       string
	Version    int      `json:",omitempty"`
	From       Identity `json:",omitzero"`
	Watch      bool     `json:",omitempty"`
	Blocks     []uint64 `json:",omitempty"`
	Parts      []Part   `json:",omitempty"`
	Chunks     []Chunk  `json:",omitempty"`
	Memory     []Memory `json:",omitempty"` // one for each descriptor
	Number     uint64   `json:",omitempty"` // of a fetch or drop, in the order in which the sender made them
	Pause      uint64   `json:",omitempty"`
	Ready      uint64   `json:",omitempty"`
	Generation uint64   `json:",omitempty"`
	Now        bool     `json:",omitempty"` // of a fetch: don't wait for what is paused
	Paused     bool     `json:",omitempty"` // it is
	Relied     bool     `json:",omitempty"`
	Apart      bool     `json:",omitempty"` // the answer's sender shares no memory with who asks
	Recall     uint64   `json:",omitempty"` // of a leave: its number; of a return: the last recall that is over
	Descriptor []byte   `json:",omitempty"`
	Error      string   `json:",omitempty"`

	Within time.Duration `json:",omitempty"` // how long the sender waits for the answer
	Late   bool          `json:",omitempty"` // of an error: that time has passed
}

// conn carries messages, each with descriptors, between two processes of one
// user. A message is one packet, so a truncated or an oversized one can't be
// mistaken for another.
type conn struct{ *net.UnixConn }

var errOtherUser = errors.New("the other end belongs to another user")

// Fault makes a step at a socket fail, with the error that it answers. Tests
// alone set it, before the first Node. It is called before each "user" (who is
// the other end?) and "send", and after each "sent" and "received", which name
// the kind of message too; and before each "dial" to an address, without c.
var Fault func(c *net.UnixConn, step string) error

func (c conn) fault(step string) error {
	if Fault == nil {
		return nil
	}
	return Fault(c.UnixConn, step)
}

// checkUser refuses a process of another user (SO_PEERCRED).
func (c conn) checkUser() error {
	if err := c.fault("user"); err != nil {
		return err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return fmt.Errorf("SO_PEERCRED: %w", credErr)
	}
	if int(cred.Uid) != os.Geteuid() {
		return errOtherUser
	}
	return nil
}

// send writes one message; fds stay the caller's.
func (c conn) send(ctx context.Context, m message, fds []int) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(body) > maxMessage || len(fds) > maxFDs {
		return fmt.Errorf("%s message of %d bytes and %d descriptors is over the limit", m.Kind, len(body), len(fds))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if err := c.fault("send " + m.Kind); err != nil {
		return err
	}
	if err := c.SetWriteDeadline(deadline(ctx)); err != nil {
		return err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Write(func(fd uintptr) bool {
		// Not net's own write: the host program may not ignore SIGPIPE.
		sendErr = unix.Sendmsg(int(fd), body, rights, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(sendErr, unix.EAGAIN)
	})
	return errors.Join(err, sendErr, c.fault("sent "+m.Kind))
}

// receive reads one message; the descriptors are the caller's to close.
func (c conn) receive(ctx context.Context) (message, []int, error) {
	if err := c.SetReadDeadline(deadline(ctx)); err != nil {
		return message{}, nil, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return message{}, nil, err
	}
	var m message
	var fds []int
	var readErr error
	err = raw.Read(func(fd uintptr) bool {
		// A buffer for this call only: most connections wait for a message for ever.
		b := buffers.Get().(*buffer)
		defer buffers.Put(b)
		m, fds, readErr = b.receive(int(fd))
		return !errors.Is(readErr, unix.EAGAIN)
	})
	if err == nil {
		err = readErr
	}
	if err == nil {
		err = c.fault("received " + m.Kind)
	}
	if err != nil {
		closeAll(fds)
		return message{}, nil, err
	}
	return m, fds, nil
}

// buffer holds one packet.
type buffer struct{ body, control []byte }

var buffers = sync.Pool{New: func() any {
	return &buffer{make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxFDs*4))}
}}

// receive reads the next packet of a socket that does not block.
func (b *buffer) receive(socket int) (message, []int, error) {
	n, controlLen, flags, _, err := unix.Recvmsg(socket, b.body, b.control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return message{}, nil, err
	}
	fds, err := descriptors(b.control[:controlLen])
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = errors.New("message over the limit")
	}
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("no room for its descriptors: this process has too many open files, see ulimit -n")
	}
	var m message
	if err == nil {
		err = json.Unmarshal(b.body[:n], &m)
	}
	if err != nil {
		closeAll(fds)
		return message{}, nil, err
	}
	return m, fds, nil
}

func descriptors(control []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	var fds []int
	for _, m := range messages {
		rights, err := unix.ParseUnixRights(&m)
		if err != nil {
			closeAll(fds)
			return nil, err
		}
		fds = append(fds, rights...)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// deadline answers the context's, or none.
func deadline(ctx context.Context) time.Time {
	d, _ := ctx.Deadline()
	return d
}
