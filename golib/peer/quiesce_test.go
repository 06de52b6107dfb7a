package peer

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type outcome struct {
	relied []Identity
	err    error
}

// quiesce starts a process's pause.
func (p process) quiesce(ctx context.Context) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		relied, err := p.Quiesce(ctx)
		done <- outcome{relied, err}
	}()
	return done
}

// waitsFor checks that a pause ended because of these processes.
func waitsFor(t *testing.T, got outcome, who ...process) {
	t.Helper()
	var timeout *TimeoutError
	require.ErrorAs(t, got.err, &timeout)
	var want []Identity
	for _, p := range who {
		want = append(want, p.Self())
		require.ErrorContains(t, got.err, p.Self().String())
	}
	require.ElementsMatch(t, want, timeout.For)
}

func TestQuiesceAlone(t *testing.T) {
	a := newProcess(t, 0, 0)
	relied, err := a.Quiesce(within(t, second))
	require.NoError(t, err)
	require.Empty(t, relied)
}

func TestQuiesceWaitsForAll(t *testing.T) {
	a, b, c := newProcess(t, 0, 1), newProcess(t, 0, 1), newProcess(t, 0, 1)
	together(t, a, b, c)
	ctx := within(t, 20*second)
	first, second := a.quiesce(ctx), b.quiesce(ctx)
	time.Sleep(50 * time.Millisecond)
	require.Empty(t, first, "c has not stopped")
	require.Empty(t, second)
	third := c.quiesce(ctx)
	for _, done := range []<-chan outcome{first, second, third} {
		got := <-done
		require.NoError(t, got.err)
		require.Empty(t, got.relied)
	}
	for _, p := range a.Peers() {
		require.True(t, p.Stopped)
	}
	require.True(t, a.Stopped(b.Self()))
}

// A process that only exports, or only imports, is waited for as well.
func TestQuiesceOneWay(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	_, err := owner.Quiesce(within(t, 50*time.Millisecond))
	waitsFor(t, outcome{err: err}, importer)
	_, err = importer.Quiesce(within(t, 50*time.Millisecond))
	waitsFor(t, outcome{err: err}, owner)
	importer.Drop(owner.Self(), 1)
	_, err = importer.Quiesce(within(t, second))
	require.NoError(t, err, "they share nothing any more")
}

func TestMissingProcessIsNamed(t *testing.T) {
	a, b, c := newProcess(t, 7, 1), newProcess(t, 7, 1), newProcess(t, 7, 1)
	together(t, a, b, c)
	ctx := within(t, 200*time.Millisecond)
	first, second := a.quiesce(ctx), b.quiesce(ctx)
	got := <-first
	waitsFor(t, got, c)
	require.Empty(t, got.relied, "b could not stop either")
	require.ErrorContains(t, got.err, "(group 7)")
	require.ErrorContains(t, got.err, "pause and resume must be called in every process")
	waitsFor(t, <-second, c)
}

func TestGroups(t *testing.T) {
	a, b, other := newProcess(t, 100, 1), newProcess(t, 100, 1), newProcess(t, 200, 1)
	together(t, a, b, other)
	ctx := within(t, 10*second)
	first, second := a.quiesce(ctx), b.quiesce(ctx)
	require.NoError(t, (<-first).err, "a process of another group is not waited for")
	require.NoError(t, (<-second).err)
	require.False(t, other.Stopped(a.Self()), "and not told")
}

// A stop that was taken back, or that belongs to an earlier pause that failed,
// says nothing about the next pause.
func TestOldStopDoesNotCount(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 1)
	together(t, a, b)
	got := <-a.quiesce(within(t, 50*time.Millisecond))
	waitsFor(t, got, b)
	require.Empty(t, got.relied, "b had not stopped, so it can't have relied on a")
	require.False(t, b.Stopped(a.Self()))
	waitsFor(t, <-b.quiesce(within(t, 50*time.Millisecond)), a)
	waitsFor(t, <-a.quiesce(within(t, 50*time.Millisecond)), b)

	ctx := within(t, 10*second)
	first, second := a.quiesce(ctx), b.quiesce(ctx)
	require.NoError(t, (<-first).err)
	require.NoError(t, (<-second).err)
}

// A stop that arrives after it was taken back does not count.
func TestLateStop(t *testing.T) {
	a := newProcess(t, 0, 1)
	who := pretend(t, message{Kind: kindHello, Version: protocolVersion})
	ctx := context.Background()
	_, fds, err := a.answer(ctx, who, message{Kind: kindFetch, Blocks: []uint64{1}})
	require.NoError(t, err)
	closeAll(fds)
	reply, _, err := a.answer(ctx, who, message{Kind: kindRetract, Pause: 3})
	require.NoError(t, err)
	require.False(t, reply.Relied)
	_, _, err = a.answer(ctx, who, message{Kind: kindStopped, Pause: 3})
	require.NoError(t, err)
	require.False(t, a.Stopped(who))
	done := a.quiesce(within(t, 100*time.Millisecond))
	time.Sleep(20 * time.Millisecond)
	_, _, err = a.answer(ctx, who, message{Kind: kindStopped, Pause: 3})
	require.NoError(t, err)
	got := <-done
	var timeout *TimeoutError
	require.ErrorAs(t, got.err, &timeout)
	require.Equal(t, []Identity{who}, timeout.For)
}

// b shares memory with a alone, and a with c too, which never stops: b ends its
// pause, relying on a's stop, and a must learn so when it gives up.
func TestRelied(t *testing.T) {
	a, b, c := newProcess(t, 0, 1), newProcess(t, 0, 1), newProcess(t, 0, 1)
	together(t, a, b)
	together(t, a, c)
	first := a.quiesce(within(t, 300*time.Millisecond))
	got := <-b.quiesce(within(t, 10*second))
	require.NoError(t, got.err)
	got = <-first
	waitsFor(t, got, c)
	require.Equal(t, []Identity{b.Self()}, got.relied)

	// b resumes: its memory is ready, and a's needs no wait.
	b.Ready(within(t, second), 2)
	require.NoError(t, b.WaitReady(within(t, second)))
	require.Equal(t, uint64(2), a.Generation(b.Self()))
	require.False(t, a.Stopped(b.Self()))

	// The next pause takes all three.
	ctx := within(t, 10*second)
	all := []<-chan outcome{a.quiesce(ctx), b.quiesce(ctx)}
	time.Sleep(50 * time.Millisecond)
	require.Empty(t, all[0])
	all = append(all, c.quiesce(ctx))
	for _, done := range all {
		require.NoError(t, (<-done).err)
	}
}

// A process that does not answer may have relied on the pause.
func TestReliedIsTheSafeGuess(t *testing.T) {
	a := newProcess(t, 0, 1)
	who := pretend(t, message{Kind: kindHello, Version: protocolVersion})
	ctx := context.Background()
	_, fds, err := a.answer(ctx, who, message{Kind: kindFetch, Blocks: []uint64{1}})
	require.NoError(t, err)
	closeAll(fds)
	a.Node.timeout = 50 * time.Millisecond
	_, _, err = a.answer(ctx, who, message{Kind: kindStopped, Pause: 1})
	require.NoError(t, err)
	other := newProcess(t, 0, 1)
	together(t, a, other)
	got := <-a.quiesce(within(t, 100*time.Millisecond))
	var timeout *TimeoutError
	require.ErrorAs(t, got.err, &timeout)
	require.ElementsMatch(t, []Identity{who, other.Self()}, timeout.For, "what is known of one that does not answer may be over")
	require.Equal(t, []Identity{who}, got.relied)
}

func TestWaitReady(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	ctx := within(t, 10*second)
	first, second := owner.quiesce(ctx), importer.quiesce(ctx)
	require.NoError(t, (<-first).err)
	require.NoError(t, (<-second).err)

	var timeout *TimeoutError
	require.ErrorAs(t, importer.WaitReady(within(t, 30*time.Millisecond)), &timeout)
	require.Equal(t, []Identity{owner.Self()}, timeout.For)
	require.NoError(t, owner.WaitReady(ctx), "it maps nothing of the importer's")

	waiting := make(chan error, 1)
	go func() { waiting <- importer.WaitReady(ctx) }()
	changes := importer.memory.seen()
	owner.Ready(ctx, 5)
	require.NoError(t, <-waiting)
	require.Equal(t, uint64(5), importer.Generation(owner.Self()))
	require.False(t, importer.Stopped(owner.Self()))
	require.Greater(t, importer.memory.seen(), changes)
	require.True(t, owner.Stopped(importer.Self()), "each says so for itself")
	importer.Ready(ctx, 9)
	require.False(t, owner.Stopped(importer.Self()))
	require.Zero(t, owner.Generation(importer.Self())-9)
}

// Who joins later learns how far a process is.
func TestHelloSaysHowFar(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 0)
	_, err := a.Quiesce(within(t, second))
	require.NoError(t, err)
	b.maps(t, a, 1)
	require.True(t, b.Stopped(a.Self()))
	a.Ready(within(t, second), 3)
	require.False(t, b.Stopped(a.Self()))
	require.Equal(t, uint64(3), b.Generation(a.Self()))
	waitsFor(t, <-b.quiesce(within(t, 50*time.Millisecond)), a)
}

// In each round nobody goes on before all have stopped.
func TestManyRounds(t *testing.T) {
	const rounds = 30
	all := []process{newProcess(t, 0, 1), newProcess(t, 0, 1), newProcess(t, 0, 1)}
	together(t, all...)
	var at [3]atomic.Int64
	errs := make(chan error, len(all))
	ctx := within(t, 30*second)
	for i, p := range all {
		go func() {
			errs <- func() error {
				for round := range int64(rounds) {
					at[i].Store(round)
					if _, err := p.Quiesce(ctx); err != nil {
						return err
					}
					for k := range at {
						if at[k].Load() != round {
							return errors.New("a process runs while another relies on its stop")
						}
					}
					p.Ready(ctx, uint64(round+1))
					if err := p.WaitReady(ctx); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range all {
		require.NoError(t, <-errs)
	}
	for _, owner := range all[1:] {
		require.Equal(t, uint64(rounds), all[0].Generation(owner.Self()))
	}
}
