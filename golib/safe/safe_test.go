package safe

import (
	"bytes"
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// log answers what is logged from now on. It is complete when what logs has ended.
func log(t *testing.T) *bytes.Buffer {
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	text := &bytes.Buffer{}
	slog.SetDefault(slog.New(slog.NewTextHandler(text, nil)))
	return text
}

func TestTry(t *testing.T) {
	text := log(t)
	want := errors.New("its own")
	require.Equal(t, want, Try("work", func() error { return want }))
	require.NoError(t, Try("work", func() error { return nil }))
	require.Empty(t, text.String())
	err := Try("work", func() error { panic("a fault") })
	require.EqualError(t, err, "work: internal error: a fault")
	require.Contains(t, text.String(), "a fault")
	require.Contains(t, text.String(), "TestTry", "the stack")
}

// The process goes on, and what the goroutine was to end has ended.
func TestGo(t *testing.T) {
	log(t)
	var mu sync.Mutex
	var wg sync.WaitGroup
	wg.Add(1)
	Go("work", func() {
		defer wg.Done()
		mu.Lock()
		defer mu.Unlock()
		panic("a fault")
	})
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
}
