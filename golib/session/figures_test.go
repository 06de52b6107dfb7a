package session

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/vmm"
)

func TestFiguresOfAnError(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&vmm.OutOfMemoryError{Device: 0, Needed: 65536, Free: 0}, `{"device":0,"needed_bytes":65536,"free_bytes":0}`},
		{&offload.HostMemoryError{Bytes: 4096, Err: errors.New("why")}, `{"needed_bytes":4096}`},
		{&offload.DiskError{Needed: 10, Free: 3, Err: errors.New("why")}, `{"needed_bytes":10,"free_bytes":3}`},
		{&offload.DiskError{Err: errors.New("why")}, ""},
		{&peer.TimeoutError{For: []peer.Identity{{PID: 7, Group: 2}, {PID: 8}}}, `{"waiting_for":[{"pid":7,"group":2},{"pid":8,"group":0}]}`},
		{errors.New("why"), ""},
	} {
		require.Equal(t, c.want, FiguresOf(c.err))
		// As they come: said of a tag, and together with what else failed.
		require.Equal(t, c.want, FiguresOf(errors.Join(errors.New("other"), fmt.Errorf("resume %q: %w", "kv", c.err))))
	}
	// Many processes: the text stays short.
	many := &peer.TimeoutError{For: make([]peer.Identity, 1000)}
	require.Less(t, len(FiguresOf(many)), 300)
}
