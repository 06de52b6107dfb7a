package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/peer"
	"amem/golib/simtest"
)

// The simulated driver names errors.
func TestMain(m *testing.M) {
	if os.Getenv("AMEM_SIM_LIBRARY_DIR") == "" {
		if err := os.Setenv("AMEM_SIM_LIBRARY_DIR", filepath.Join("..", "..", "..", "build", "sim")); err != nil {
			panic(err)
		}
	}
	simtest.Main(m)
}

// What NCCL tries, and does without, is no error in the log; a process that has ended
// is one, however much of its memory fails to come.
func TestErrorsThatAreLogged(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	refused := fmt.Errorf("create: %w", cuda.ErrNotPermitted)
	require.EqualValues(t, cuda.ErrNotPermitted, tried("cuMemCreate", refused))
	require.Empty(t, log.String())
	require.EqualValues(t, cuda.ErrOutOfMemory, tried("cuMemCreate", cuda.ErrOutOfMemory))
	require.Equal(t, 1, strings.Count(log.String(), "\n"))
	result("cuMemCreate", refused)
	require.Equal(t, 2, strings.Count(log.String(), "\n"))
	for range 9 {
		for _, pid := range []int{1, 2} {
			err := fmt.Errorf("import memory of %s: %w", peer.Identity{PID: pid}, peer.ErrGone)
			require.NotZero(t, result("cuMemImportFromShareableHandle", err))
		}
	}
	require.Equal(t, 4, strings.Count(log.String(), "\n"))
}
