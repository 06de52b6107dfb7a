package peer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// breakConnections ends all connections to and from the processes, which live on.
func breakConnections(t *testing.T, of ...process) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	broken := 0
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		require.NoError(t, err)
		peer, err := unix.Getpeername(fd)
		if err != nil { // no connected socket
			continue
		}
		local, err := unix.Getsockname(fd)
		if err != nil { // closed meanwhile
			continue
		}
		for _, p := range of {
			for _, end := range []unix.Sockaddr{peer, local} {
				if address, is := end.(*unix.SockaddrUnix); is && address.Name == p.Self().socket().Name {
					if unix.Shutdown(fd, unix.SHUT_RDWR) == nil {
						broken++
					}
				}
			}
		}
	}
	require.NotZero(t, broken)
}

// watches answers how many connections tell of the other's end.
func (p process) watches(other process) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link(other.self).watched
}

// A connection's end is not its process's: both sides count each other as before,
// and hear of the end when it comes.
func TestConnectionsThatBreak(t *testing.T) {
	for _, ends := range []string{"owner", "importer"} {
		t.Run(ends, func(t *testing.T) {
			owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
			importer.maps(t, owner, 1)
			for range 5 {
				breakConnections(t, owner, importer)
				soon(t, func() bool { return importer.watches(owner) && owner.watches(importer) })
				require.False(t, owner.Gone(importer.Self()))
				require.False(t, importer.Gone(owner.Self()))
				require.Equal(t, []Peer{{importer.Self(), 0, 1, false}}, owner.Peers())
				require.Equal(t, []Peer{{owner.Self(), 1, 0, false}}, importer.Peers())
			}
			_, err := owner.Quiesce(within(t, 50*time.Millisecond))
			waitsFor(t, outcome{err: err}, importer)
			if ends == "owner" {
				owner.Close()
				soon(t, func() bool { return importer.Gone(owner.Self()) })
				return
			}
			importer.Close()
			soon(t, func() bool { return owner.Gone(importer.Self()) })
			require.Empty(t, owner.Peers())
		})
	}
}

// A fetch that the importer gives up is counted by the owner, for a while.
func TestFetchGivenUpIsNotCounted(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	owner.memory.wait = true
	_, _, err := importer.Fetch(within(t, 50*time.Millisecond), owner.Self(), []uint64{1}, false)
	var timeout *TimeoutError
	require.ErrorAs(t, err, &timeout)
	require.Empty(t, importer.Peers())
	soon(t, func() bool { return len(owner.Peers()) == 0 })

	// It may even arrive after the word that it is given up.
	_, _, err = owner.answer(context.Background(), importer.Self(), message{Kind: kindFetch, Blocks: []uint64{1}, Number: 1, Now: true,
		Within: 1})
	require.Error(t, err)
	require.Empty(t, owner.Peers())
}

// A request that is said twice, since its connection broke, is counted once: the
// failure of the first does not undo the second.
func TestFetchSaidTwice(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	number := importer.requests
	importer.Drop(owner.Self(), 1)
	soon(t, func() bool { return len(owner.Peers()) == 0 })
	number += 10
	fetch := message{Kind: kindFetch, Blocks: []uint64{1}, Number: number}
	waiting, giveUp := context.WithCancel(context.Background())
	first := make(chan error)
	owner.memory.mu.Lock()
	owner.memory.wait = true
	owner.memory.mu.Unlock()
	go func() {
		_, _, err := owner.answer(waiting, importer.Self(), fetch)
		first <- err
	}()
	soon(t, func() bool { return len(owner.Peers()) == 1 })
	giveUp()
	require.Error(t, <-first)
	require.Len(t, owner.Peers(), 1, "the importer says when it does not map it")
}

// The owner has freed what the importer maps still: it shares nothing with the importer,
// which waits for it no more than it must, and hears of its pauses all the same.
func TestFreedWhileMapped(t *testing.T) {
	owner, importer := newProcess(t, 0, 2), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	ctx := within(t, 10*second)
	first, second := owner.quiesce(ctx), importer.quiesce(ctx)
	require.NoError(t, (<-first).err)
	require.NoError(t, (<-second).err)
	owner.Freed(1)
	require.Empty(t, owner.Peers())
	importer.Ready(ctx, 1)
	waiting := make(chan error, 1)
	go func() { waiting <- importer.WaitReady(ctx) }()
	time.Sleep(20 * time.Millisecond)
	require.Empty(t, waiting)
	owner.Ready(ctx, 1)
	require.NoError(t, <-waiting)

	got := <-importer.quiesce(within(t, 10*time.Second))
	require.NoError(t, got.err, "the owner does not count it any more")
	importer.Ready(ctx, 2)
	require.NoError(t, importer.WaitReady(ctx))
	importer.maps(t, owner, 2)
	waitsFor(t, <-importer.quiesce(within(t, 50*time.Millisecond)), owner)
}

// What is fetched after a pause that did not wait for its owner is waited for.
func TestFetchedWhilePaused(t *testing.T) {
	owner, importer := newProcess(t, 0, 2), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	owner.Freed(1)
	ctx := within(t, 10*second)
	require.NoError(t, (<-importer.quiesce(ctx)).err)
	importer.maps(t, owner, 2)
	require.NoError(t, (<-owner.quiesce(ctx)).err)
	importer.Ready(ctx, 1)
	var timeout *TimeoutError
	require.ErrorAs(t, importer.WaitReady(within(t, second/10)), &timeout)
	require.Equal(t, []Identity{owner.Self()}, timeout.For)
	owner.Ready(ctx, 1)
	require.NoError(t, importer.WaitReady(ctx))
}

// The parts that a process says it has ended are those of now: what is said again
// arrives late.
func TestEndSaidTwice(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	part := Part{1, 64}
	importer.uses(part, true)
	require.False(t, owner.Settle(part))
	end := message{Kind: kindEnded, Parts: []Part{part}, Number: 100}
	_, _, err := owner.answer(context.Background(), importer.Self(), end)
	require.NoError(t, err)
	soon(t, owner.settled(part))
	owner.memory.mu.Lock()
	owner.memory.settled = nil
	owner.memory.mu.Unlock()
	require.False(t, owner.Settle(part), "in use again, and freed again")
	_, _, err = owner.answer(context.Background(), importer.Self(), end)
	require.NoError(t, err)
	time.Sleep(20 * time.Millisecond) // time for a wrong answer to arrive
	require.False(t, owner.settled(part)())
}

// A fault in answering is the error of who has asked, at once, and the connection serves on.
func TestPanicIsAnswered(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	owner.memory.mu.Lock()
	owner.memory.panics = true
	owner.memory.mu.Unlock()
	_, _, err := importer.Fetch(within(t, 30*second), owner.Self(), []uint64{1}, false)
	require.ErrorContains(t, err, "a fault in answering")
	require.ErrorContains(t, err, fmt.Sprintf("process %d", owner.Self().PID))
	require.NotErrorIs(t, err, ErrBroken)

	answers(importer, func(context.Context) error { panic("a fault in letting go") })
	_, err = owner.Leave(within(t, 30*second), []uint64{1})
	require.ErrorContains(t, err, "a fault in letting go")
	owner.update(func() {}) // no lock is held
	importer.update(func() {})
	require.Panics(t, func() { owner.update(func() { panic("under the lock") }) })
	owner.update(func() {})
}

// A recall that is over stands for nobody, whichever message comes first.
func TestRecallThatIsOver(t *testing.T) {
	owner, borrower := newProcess(t, 0, 2), newProcess(t, 0, 0)
	borrower.maps(t, owner, 1, 2)
	goOn := make(chan struct{})
	answers(borrower, func(context.Context) error { <-goOn; return nil })
	recall, err := owner.Leave(within(t, second/10), []uint64{1, 2})
	var timeout *TimeoutError
	require.ErrorAs(t, err, &timeout)
	answers(borrower, nil)
	require.NoError(t, owner.Return(within(t, second), recall, []uint64{1, 2}))
	close(goOn)
	_, _, err = borrower.answer(context.Background(), owner.Self(), message{Kind: kindLeave, Blocks: []uint64{2}, Recall: recall})
	require.ErrorIs(t, err, ErrOver)
	next, err := owner.Leave(within(t, second), []uint64{1, 2})
	require.NoError(t, err)
	require.Greater(t, next, recall)

	// Its end is said until it is heard, and then no more; what has been recalled anew
	// since is not returned by an older end.
	borrower.memory.listen()
	require.NoError(t, owner.Return(within(t, second), recall, []uint64{1, 2}))
	require.Empty(t, borrower.memory.listen())
	answers(borrower, func(context.Context) error { return errors.New("not now") })
	require.ErrorContains(t, owner.Return(within(t, second), next, []uint64{1, 2}), "not now")
	answers(borrower, nil)
	require.NoError(t, owner.Return(within(t, second), next, []uint64{1, 2}))
	require.Equal(t, 2, len(slices.Compact(borrower.memory.listen()))+1)
	require.NoError(t, owner.Return(within(t, second), next, []uint64{1, 2}))
	require.Empty(t, borrower.memory.listen())
}
