package peer

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// blocks are those that a pause has given back.
func blocks(ids ...uint64) map[uint64]bool {
	set := map[uint64]bool{}
	for _, id := range ids {
		set[id] = true
	}
	return set
}

// holdersOf waits for a moment until nobody maps the blocks.
func (p process) holdersOf(t *testing.T, ids ...uint64) map[ID][]uint64 {
	t.Helper()
	got := map[ID][]uint64{}
	for _, h := range p.WaitUnmapped(within(t, 100*time.Millisecond), blocks(ids...)) {
		got[h.ID] = h.Blocks
	}
	return got
}

// stopped makes all of the processes stop.
func stopped(t *testing.T, all ...process) {
	t.Helper()
	var ends []<-chan outcome
	for _, p := range all {
		ends = append(ends, p.quiesce(within(t, 20*second)))
	}
	for _, end := range ends {
		require.NoError(t, (<-end).err)
	}
}

func TestWaitUnmapped(t *testing.T) {
	owner, a, b := newProcess(t, 0, 3), newProcess(t, 0, 0), newProcess(t, 0, 0)
	a.maps(t, owner, 1, 2)
	b.maps(t, owner, 2)
	stopped(t, owner, a, b)
	require.Equal(t, map[ID][]uint64{a.Self().ID: {1, 2}, b.Self().ID: {2}}, owner.holdersOf(t, 1, 2, 3))
	require.Empty(t, owner.holdersOf(t, 3))
	a.Unmapped(owner.Self(), 0, []uint64{1, 2}, nil)
	require.Equal(t, map[ID][]uint64{b.Self().ID: {2}}, owner.holdersOf(t, 1, 2))
	waiting := make(chan []Holder)
	go func() { waiting <- owner.WaitUnmapped(within(t, 20*second), blocks(1, 2)) }()
	select {
	case <-waiting:
		require.Fail(t, "b maps it")
	case <-time.After(50 * time.Millisecond):
	}
	b.Unmapped(owner.Self(), 0, []uint64{2}, nil)
	require.Empty(t, <-waiting)

	b.maps(t, owner, 2)
	require.Equal(t, map[ID][]uint64{b.Self().ID: {2}}, owner.holdersOf(t, 1, 2), "fetched again")
	b.Drop(owner.Self(), 2)
	require.Empty(t, owner.WaitUnmapped(within(t, 20*second), blocks(1, 2)))
}

// Who has ended, has dropped it or is of another group is not waited for; nor is who says
// that it keeps a block, or whose pause has failed, but their blocks are told.
func TestWhoIsNotAboutToLetGo(t *testing.T) {
	owner, a, b, c, other := newProcess(t, 0, 3), newProcess(t, 0, 0), newProcess(t, 0, 0), newProcess(t, 0, 0), newProcess(t, 1, 0)
	for _, p := range []process{a, b, c, other} {
		p.maps(t, owner, 1, 2)
	}
	stopped(t, owner, a, b, c)
	a.Close()
	b.Unmapped(owner.Self(), 0, []uint64{1}, []uint64{2})
	c.retract(1)
	begun := time.Now()
	got := map[ID][]uint64{}
	for _, h := range owner.WaitUnmapped(within(t, 20*second), blocks(1, 2)) {
		got[h.ID] = h.Blocks
	}
	require.Less(t, time.Since(begun), 10*second)
	require.Equal(t, map[ID][]uint64{b.Self().ID: {2}, c.Self().ID: {1, 2}}, got)

	// The memory that was to end with the block, and could not be unmapped.
	b.Drop(owner.Self(), 2)
	require.Eventually(t, func() bool {
		owner.mu.Lock()
		defer owner.mu.Unlock()
		return !owner.links[b.Self().ID].exports[2]
	}, 10*second, time.Millisecond)
	require.Contains(t, owner.holdersOf(t, 2), b.Self().ID)
	b.Unmapped(owner.Self(), 0, []uint64{2}, nil)
	require.Eventually(t, func() bool {
		_, holds := owner.holdersOf(t, 2)[b.Self().ID]
		return !holds
	}, 10*second, time.Millisecond)
}

// What is said of an earlier fetch says nothing of a later one.
func TestUnmappedOfAnEarlierFetch(t *testing.T) {
	owner := newProcess(t, 0, 2)
	who := pretend(t, message{Kind: kindHello, Version: protocolVersion})
	ask := func(m message) {
		_, fds, err := owner.answer(context.Background(), who, m)
		require.NoError(t, err)
		closeAll(fds)
	}
	ask(message{Kind: kindFetch, Blocks: []uint64{1}, Number: 3})
	ask(message{Kind: kindFetch, Blocks: []uint64{1}, Number: 7})
	ask(message{Kind: kindUnmapped, Parts: []Part{{1, 3}, {2, 9}}, Blocks: []uint64{2}})
	require.Equal(t, map[ID][]uint64{who.ID: {1}}, owner.holdersOf(t, 1, 2))
	ask(message{Kind: kindUnmapped, Parts: []Part{{1, 7}}})
	require.Empty(t, owner.holdersOf(t, 1, 2))
}

// More than goes into a message is said in several.
func TestUnmappedInBatches(t *testing.T) {
	owner, a := newProcess(t, 0, 3), newProcess(t, 0, 0)
	a.maps(t, owner, 1, 2, 3)
	all := []uint64{1}
	for range 2 * maxParts {
		all = append(all, 1000) // the owner knows of none
	}
	a.Unmapped(owner.Self(), 0, append(all, 2), nil)
	require.Eventually(t, func() bool { return len(owner.holdersOf(t, 1, 2, 3)[a.Self().ID]) == 1 }, 20*second, time.Millisecond)
}

// A fetch is answered when its sender has given it up, and has said so: nobody maps what
// was answered.
func TestFetchIsAnsweredTooLate(t *testing.T) {
	for name, over := range map[string]message{
		"dropped":  {Kind: kindDrop, Blocks: []uint64{1}, Number: 4},
		"unmapped": {Kind: kindUnmapped, Parts: []Part{{1, 3}}},
	} {
		t.Run(name, func(t *testing.T) {
			owner := newProcess(t, 0, 2)
			who := pretend(t, message{Kind: kindHello, Version: protocolVersion})
			ask := func(m message) {
				_, fds, err := owner.answer(context.Background(), who, m)
				require.NoError(t, err)
				closeAll(fds)
			}
			ask(message{Kind: kindFetch, Blocks: []uint64{2}, Number: 1})
			if over.Kind == kindUnmapped { // else it says drop too
				ask(message{Kind: kindFetch, Blocks: []uint64{1}, Number: 2})
			}
			ask(over)
			ask(message{Kind: kindFetch, Blocks: []uint64{1}, Number: 3})
			require.Equal(t, map[ID][]uint64{who.ID: {2}}, owner.holdersOf(t, 1, 2))
			ask(message{Kind: kindFetch, Blocks: []uint64{1}, Number: 5})
			require.Equal(t, map[ID][]uint64{who.ID: {1, 2}}, owner.holdersOf(t, 1, 2), "fetched since")
		})
	}
}
