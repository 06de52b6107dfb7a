// Package safe keeps a fault in amem from ending the program that it is a guest in: a
// panic on a goroutine that nobody recovers ends the whole process.
package safe

import (
	"fmt"
	"log/slog"
	"runtime/debug"
)

// Go calls f on a goroutine of its own. A panic of f is logged.
func Go(what string, f func()) {
	go func() {
		_ = Try(what, func() error {
			f()
			return nil
		})
	}()
}

// Try calls f and returns its error. A panic of f is logged, and is an error too, so that
// who waits for f hears of it.
func Try(what string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			slog.Error(what, "panic", r, "stack", string(debug.Stack()))
			err = fmt.Errorf("%s: internal error: %v", what, r)
		}
	}()
	return f()
}
