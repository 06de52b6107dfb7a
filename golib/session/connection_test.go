package session

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/simtest"
)

// endConnections ends the connections at which steps were counted.
func endConnections() {
	sockets.Lock()
	defer sockets.Unlock()
	for c := range sockets.conns {
		if c != nil { // else of a step before it was made
			_ = c.CloseRead()
			_ = c.CloseWrite()
		}
	}
}

// The connections between an owner and a borrower end, and neither has: the borrower lets go
// for the owner's next pause as before, and does not keep the memory of before it, which, of a
// tag without backup, alone shows.
func TestConnectionsEndAndNoProcess(t *testing.T) {
	all := bare(t, 2, 20*time.Second)
	s := &shared{owner: all[0], borrower: all[1], backup: BackupNone}
	s.region = s.owner.region(t, "kv_cache", BackupNone)
	_, err := s.borrower.sharing()
	require.NoError(t, err)
	watchSockets(t, s.owner.regions.share.node, s.borrower.regions.share.node)
	own := s.owner.torch(t, s.region, 8*mib, 1)
	theirs := shares(t, s.owner, s.borrower, own)
	endConnections()
	time.Sleep(100 * time.Millisecond) // they notice
	require.NoError(t, s.owner.Pause("kv_cache"))
	require.Zero(t, simtest.Used(t, 0), "what the borrower maps still is not free")
	require.NoError(t, s.owner.Resume("kv_cache"))
	own.fill(7)
	require.True(t, simtest.Holds(theirs.at, 7, theirs.size), "the borrower sees what the owner has written")
	s.borrower.closes(t, theirs)
	s.owner.give(t, s.region, own)
}
