// Package rescue keeps a panic from ending the program that amem is a guest of.
//
// A panic may leave a lock held or a table half changed. So after the first one
// nothing of the core is used again: who asked for it by OnPanic is told why.
package rescue

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

var (
	tell atomic.Pointer[func(reason string)]
	once sync.Once
)

// OnPanic sets the function that is called with the reason, once.
func OnPanic(f func(reason string)) { tell.Store(&f) }

// Panicked returns an error for what recover() returned, and tells of it; nil for nil.
func Panicked(r any) error {
	if r == nil {
		return nil
	}
	slog.Error("internal error", "panic", r, "stack", string(debug.Stack()))
	if f := tell.Load(); f != nil {
		once.Do(func() { (*f)(fmt.Sprint(r)) })
	}
	return fmt.Errorf("internal error: %v", r)
}

// Go runs f in a goroutine of its own. Where somebody waits for f's result, f gets
// it by Err.
func Go(f func()) {
	go func() {
		defer func() { _ = Panicked(recover()) }()
		f()
	}()
}

// Err returns what f does, or an error where f panics.
func Err(f func() error) (err error) {
	defer func() {
		if p := Panicked(recover()); p != nil {
			err = p
		}
	}()
	return f()
}
