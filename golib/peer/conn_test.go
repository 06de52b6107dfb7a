package peer

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A process that has no room for the descriptors that are sent to it is told so.
func TestReceiveWithoutRoomForDescriptors(t *testing.T) {
	quiet(t)
	ours, theirs := connPair(t)
	defer ours.Close()
	defer theirs.Close()
	before := descriptorsOpen(t)
	require.NoError(t, ours.send(within(t, second), message{Kind: kindFetch}, []int{0, 1}))
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}))
	_, fds, err := theirs.receive(within(t, second))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.ErrorContains(t, err, "ulimit -n")
	require.Empty(t, fds)
	require.Equal(t, before, descriptorsOpen(t))
}
