package peer

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process whose pause failed after all had stopped pauses again while the
// others still are: they must wait for this one too when they resume.
func TestWaitReadyForAPauseThatWasRepeated(t *testing.T) {
	a, b := newProcess(t, 0, 1), newProcess(t, 0, 1)
	together(t, a, b)
	ctx := within(t, 5*second)
	first, other := a.quiesce(ctx), b.quiesce(ctx)
	require.NoError(t, (<-first).err)
	require.NoError(t, (<-other).err)
	a.Ready(within(t, second), 0) // its copy has failed
	require.NoError(t, (<-a.quiesce(ctx)).err)

	b.Ready(within(t, second), 1)
	var timeout *TimeoutError
	require.ErrorAs(t, b.WaitReady(within(t, 200*time.Millisecond)), &timeout)
	require.Equal(t, a.Self().PID, timeout.For[0].PID)
	a.Ready(within(t, second), 1)
	require.NoError(t, b.WaitReady(within(t, second)))
	require.NoError(t, a.WaitReady(within(t, second)))
}
