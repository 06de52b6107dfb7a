package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// settled is how long NCCL's memory must have stayed as it is before host
// memory is got for it ahead: connecting makes it grow for a while.
const settled = time.Second

// preallocate gets the host memory that a pause would need, whenever NCCL's
// memory has settled, so that the first pause is as fast as the next.
func (s *Session) preallocate() {
	for s.closed.Err() == nil {
		changed := s.space.Changed()
		select {
		case <-changed:
			continue
		case <-s.closed.Done():
			return
		case <-time.After(settled):
		}
		for more := true; more; {
			var err error
			if more, err = s.growHost(); err != nil {
				slog.Warn("host memory for a pause is not got ahead", "error", err)
			}
		}
		select {
		case <-changed:
		case <-s.closed.Done():
		}
	}
}

// growHost gets one more piece of host memory if a pause would need it, and
// tells whether it did. A pause that is called meanwhile waits for the piece.
func (s *Session) growHost() (grown bool, err error) {
	if err := s.take(s.closed); err != nil {
		return false, nil // closed
	}
	defer s.give()
	if s.State() != Active { // the arena holds contents
		return false, nil
	}
	total := s.space.Footprint()
	if s.arena.Bytes() >= total {
		return false, nil
	}
	if err := s.arena.Begin(total); err != nil {
		return false, err
	}
	err = s.space.AnyDevice(func() error {
		grown, err = s.arena.Grow()
		return err
	})
	return grown, err
}

// FreeHost gives the host memory back that is kept from one pause to the next.
func (s *Session) FreeHost() error {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	if err := s.take(ctx); err != nil {
		return fmt.Errorf("free host memory: %w", err)
	}
	defer s.give()
	if s.State() != Active {
		return fmt.Errorf("%w: while paused, the host memory holds the contents: resume first", ErrState)
	}
	if err := s.space.AnyDevice(s.arena.Free); err != nil {
		return errors.Join(errors.New("free host memory"), err)
	}
	return nil
}
