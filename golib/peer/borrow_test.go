package peer

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDescribe(t *testing.T) {
	owner, borrower := newProcess(t, 0, 1), newProcess(t, 7, 0)
	owner.memory.described = map[Part][]byte{{1, 4096}: []byte("what is there")}
	body, err := borrower.Describe(within(t, second), owner.Self(), Part{1, 4096})
	require.NoError(t, err)
	require.Equal(t, "what is there", string(body))
	_, err = borrower.Describe(within(t, second), owner.Self(), Part{1, 0})
	require.ErrorIs(t, err, ErrGone)
}

// Those who map some of the blocks are told of these, all at once, and nobody else.
func TestLeaveAndReturn(t *testing.T) {
	owner, one, two, none := newProcess(t, 0, 3), newProcess(t, 0, 0), newProcess(t, 5, 0), newProcess(t, 0, 1)
	one.maps(t, owner, 1, 2)
	two.maps(t, owner, 2, 3)
	owner.maps(t, none, 1)
	none.maps(t, owner, 3)
	pid := owner.Self().PID
	recall, err := owner.Leave(within(t, second), []uint64{1, 2})
	require.NoError(t, err)
	require.Equal(t, []string{fmt.Sprintf("leave %d [1 2]", pid)}, one.memory.listen())
	require.Equal(t, []string{fmt.Sprintf("leave %d [2]", pid)}, two.memory.listen())
	require.NoError(t, owner.Return(within(t, second), recall, []uint64{2}))
	require.Equal(t, []string{fmt.Sprintf("return %d [2]", pid)}, one.memory.listen())
	require.Equal(t, []string{fmt.Sprintf("return %d [2]", pid)}, two.memory.listen())
	require.Empty(t, none.memory.listen())

	one.Drop(owner.Self(), 2)
	require.Eventually(t, func() bool {
		_, err := owner.Leave(within(t, second), []uint64{2})
		require.NoError(t, err)
		return len(one.memory.listen()) == 0
	}, second, second/100)
}

func answers(p process, f func(ctx context.Context) error) {
	p.memory.mu.Lock()
	defer p.memory.mu.Unlock()
	p.memory.answer = f
}

// The error names who has not let go, and why.
func TestLeaveFails(t *testing.T) {
	owner, one, two := newProcess(t, 0, 1), newProcess(t, 0, 0), newProcess(t, 0, 0)
	one.maps(t, owner, 1)
	two.maps(t, owner, 1)
	answers(one, func(context.Context) error { return errors.New("a kernel does not end") })
	_, err := owner.Leave(within(t, second), []uint64{1})
	require.ErrorContains(t, err, fmt.Sprintf("pid %d", one.Self().PID))
	require.ErrorContains(t, err, "a kernel does not end")
	require.Len(t, two.memory.listen(), 1)

	answers(one, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	_, err = owner.Leave(within(t, second/10), []uint64{1})
	var timeout *TimeoutError
	require.ErrorAs(t, err, &timeout)
	require.ErrorContains(t, err, fmt.Sprintf("waiting for pid %d (group 0) to let go", one.Self().PID))

	one.Close() // it has ended: there is nobody to wait for
	_, err = owner.Leave(within(t, second), []uint64{1})
	require.NoError(t, err)
}

func TestSockets(t *testing.T) {
	one, two := newProcess(t, 0, 0), newProcess(t, 0, 0)
	list, err := Sockets()
	require.NoError(t, err)
	require.Subset(t, list, []ID{one.Self().ID, two.Self().ID})
	two.Close()
	list, err = Sockets()
	require.NoError(t, err)
	require.NotContains(t, list, two.Self().ID)
}
