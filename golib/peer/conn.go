package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	protocolVersion = 1
	maxMessage      = 64 << 10
	// The kernel takes up to 253 descriptors in a message (SCM_MAX_FD).
	maxFDs = 200
)

// The kinds of message. Each request is answered by one message: an answer of
// the same kind, or kindError.
const (
	kindHello   = "hello"   // who I am and how far I am; Watch: keep this connection until one of us ends
	kindFetch   = "fetch"   // give me descriptors of these blocks of yours
	kindDrop    = "drop"    // I no longer map these blocks of yours
	kindStopped = "stopped" // I started pause number Pause: none of my kernels runs
	kindRetract = "retract" // I gave up pause number Pause; did you rely on it?
	kindReady   = "ready"   // I ended pause number Pause: my memory has its contents
	kindError   = "error"
)

type message struct {
	Kind       string
	Version    int      `json:",omitempty"`
	From       Identity `json:",omitzero"`
	Watch      bool     `json:",omitempty"`
	Blocks     []uint64 `json:",omitempty"`
	Pause      uint64   `json:",omitempty"`
	Ready      uint64   `json:",omitempty"`
	Generation uint64   `json:",omitempty"`
	Relied     bool     `json:",omitempty"`
	Error      string   `json:",omitempty"`
}

// conn carries messages, each with descriptors, between two processes of one
// user. A message is one packet, so a truncated or an oversized one can't be
// mistaken for another.
type conn struct{ *net.UnixConn }

var errOtherUser = errors.New("the other end belongs to another user")

// checkUser refuses a process of another user (SO_PEERCRED).
func (c conn) checkUser() error {
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
	return errors.Join(err, sendErr)
}

// receive reads one message; the descriptors are the caller's to close.
func (c conn) receive(ctx context.Context) (message, []int, error) {
	if err := c.SetReadDeadline(deadline(ctx)); err != nil {
		return message{}, nil, err
	}
	body := make([]byte, maxMessage)
	control := make([]byte, unix.CmsgSpace(maxFDs*4))
	n, controlLen, flags, _, err := c.ReadMsgUnix(body, control)
	fds, parseErr := descriptors(control[:controlLen])
	if err == nil {
		err = parseErr
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("message over the limit")
	}
	var m message
	if err == nil {
		err = json.Unmarshal(body[:n], &m)
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
