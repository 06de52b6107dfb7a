package peer

import (
	"encoding/json"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// connPair answers two connected ends.
func connPair(t testing.TB) (ours, theirs conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	require.NoError(t, err)
	end := func(fd int) conn {
		file := os.NewFile(uintptr(fd), "")
		defer file.Close()
		c, err := net.FileConn(file)
		require.NoError(t, err)
		return conn{c.(*net.UnixConn)}
	}
	return end(fds[0]), end(fds[1])
}

func descriptorsOpen(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// quiet waits until the connections of earlier tests have ended.
func quiet(t testing.TB) {
	t.Helper()
	for last, now := -1, descriptorsOpen(t); now != last; last, now = now, descriptorsOpen(t) {
		time.Sleep(50 * time.Millisecond)
	}
}

// Whatever a process that connects says first and next, and whatever
// descriptors come with it, the connection ends with it and nothing is left.
func FuzzServe(f *testing.F) {
	hello := message{Kind: kindHello, Version: protocolVersion, From: Identity{ID: ID{7}, PID: 1}}
	watch := hello
	watch.Watch, watch.Pause = true, 4
	old := hello
	old.Version = 0
	for _, messages := range [][2]message{
		{hello, {Kind: kindFetch, Blocks: []uint64{1, 2}}},
		{hello, {Kind: kindFetch, Blocks: []uint64{9}}},
		{watch, {Kind: kindStopped, Pause: 5}},
		{hello, {Kind: kindRetract, Pause: 1}},
		{hello, {Kind: kindReady, Generation: 1}},
		{hello, {Kind: kindDescribe, Parts: []Part{{1, 0}}}},
		{hello, {Kind: kindDescribe}},
		{hello, {Kind: kindLeave, Blocks: []uint64{1, 9}}},
		{hello, {Kind: kindReturn, Blocks: []uint64{1}}},
		{hello, hello},
		{old, hello},
		{{Kind: kindFetch, Blocks: []uint64{1}}, {}},
	} {
		first, err := json.Marshal(messages[0])
		require.NoError(f, err)
		second, err := json.Marshal(messages[1])
		require.NoError(f, err)
		f.Add(first, second, uint8(0))
		f.Add(first, second, uint8(3))
	}
	p := newProcess(f, 0, 2)
	null, err := os.Open(os.DevNull)
	require.NoError(f, err)
	defer null.Close()
	quiet(f)
	f.Fuzz(func(t *testing.T, first, second []byte, count uint8) {
		before := descriptorsOpen(t)
		ours, theirs := connPair(t)
		ended := make(chan struct{})
		go func() {
			p.serve(theirs)
			close(ended)
		}()
		var rights []byte
		for range count % 8 {
			rights = append(rights, unix.UnixRights(int(null.Fd()))...)
		}
		for _, body := range [][]byte{first, second} {
			// It may have refused us already.
			_, _, _ = ours.WriteMsgUnix(body, rights, nil)
		}
		_ = ours.Close()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Fatal("the connection does not end")
		}
		if after := descriptorsOpen(t); after != before {
			t.Fatalf("%d descriptors are open, %d were before", after, before)
		}
	})
}

// What a peer answers is bounded and closed as well.
func FuzzIntroduce(f *testing.F) {
	p := newProcess(f, 0, 0)
	answer, err := json.Marshal(p.hello(false))
	require.NoError(f, err)
	f.Add(answer, uint8(0))
	f.Add(answer[:10], uint8(2))
	f.Add([]byte(`{"Kind":"error","Error":"no"}`), uint8(1))
	null, err := os.Open(os.DevNull)
	require.NoError(f, err)
	defer null.Close()
	quiet(f)
	f.Fuzz(func(t *testing.T, body []byte, count uint8) {
		before := descriptorsOpen(t)
		ours, theirs := connPair(t)
		var rights []byte
		for range count % 8 {
			rights = append(rights, unix.UnixRights(int(null.Fd()))...)
		}
		_, _, _ = ours.WriteMsgUnix(body, rights, nil)
		reply, err := p.introduce(within(t, 10*time.Second), theirs, false)
		if err == nil && (reply.Kind != kindHello || reply.Version != protocolVersion) {
			t.Fatalf("accepted %+v", reply)
		}
		_ = ours.Close()
		_ = theirs.Close()
		if after := descriptorsOpen(t); after != before {
			t.Fatalf("%d descriptors are open, %d were before", after, before)
		}
	})
}
