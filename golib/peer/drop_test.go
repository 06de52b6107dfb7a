package peer

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A drop that arrives after a later fetch of the block ends no use of its parts.
func TestLateDropEndsNoUse(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	importer.uses(Part{1, 0}, true)
	importer.maps(t, owner, 1)
	require.False(t, owner.Settle(Part{1, 0}))
	for number, settled := range []bool{1: false, 2: true} {
		_, _, err := owner.answer(context.Background(), importer.Self(), message{Kind: kindDrop, Blocks: []uint64{1}, Number: uint64(number)})
		require.NoError(t, err)
		time.Sleep(20 * time.Millisecond) // time for a wrong answer to arrive
		require.Equal(t, settled, owner.settled(Part{1, 0})(), "drop %d", number)
	}
}
