package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"amem/golib/offload"
	"amem/golib/vmm"
)

// settled is how long memory must have stayed as it is before host memory is got
// for it ahead: connecting, or loading weights, makes it grow for a while.
const settled = time.Second

// preallocate gets the host memory that a pause would need, whenever the Space's
// memory has settled, so that the first pause is as fast as the next. grow gets
// one more piece, and tells whether it did.
func (s *Session) preallocate(space *vmm.Space, grow func() (bool, error)) {
	for s.closed.Err() == nil {
		changed := space.Changed()
		select {
		case <-changed:
			continue
		case <-s.closed.Done():
			return
		case <-time.After(settled):
		}
		for more := true; more; {
			var err error
			if more, err = grow(); err != nil {
				slog.Warn("host memory for a pause is not got ahead", "error", err)
			}
		}
		select {
		case <-changed:
		case <-s.closed.Done():
		}
	}
}

// growHost gets one more piece for NCCL's memory if a pause would need it. A
// pause that is called meanwhile waits for the piece.
func (s *Session) growHost() (grown bool, err error) {
	if err := s.take(s.closed); err != nil {
		return false, nil // closed
	}
	defer s.give()
	if s.State() != Active { // the arena holds contents
		return false, nil
	}
	return grow(s.space, s.arena)
}

// growHost is likewise for a region with BackupCPU.
func (r *Region) growHost() (grown bool, err error) {
	if err := r.take(r.session.closed); err != nil {
		return false, nil
	}
	defer r.give()
	if r.isPaused() {
		return false, nil
	}
	return grow(r.space, r.keeper().(*offload.Arena))
}

func grow(space *vmm.Space, arena *offload.Arena) (grown bool, err error) {
	total := space.Footprint()
	if arena.Bytes() >= total {
		arena.Done() // less is needed than was
		return false, nil
	}
	if err := arena.Expect(total); err != nil { // a backup that was retained stays
		arena.Done()
		return false, err
	}
	err = space.AnyDevice(func() error {
		grown, err = arena.Grow()
		return err
	})
	return grown, err
}

// quiet is how long it takes at most to wait for devices that have nothing to do.
const quiet = time.Millisecond

// idle waits until the devices have nothing to do. It keeps nobody from launching
// meanwhile, as cuMemHostUnregister does.
func (s *Session) idle(ctx context.Context) error {
	spaces := []*vmm.Space{s.space}
	for _, r := range s.allRegions() {
		spaces = append(spaces, r.space)
	}
	seen := map[int32]bool{}
	spaces = slices.DeleteFunc(spaces, func(space *vmm.Space) bool {
		more := false
		for _, d := range space.Devices() {
			more = more || !seen[d.Ordinal]
			seen[d.Ordinal] = true
		}
		return !more
	})
	for {
		started := time.Now()
		for _, space := range spaces {
			if err := space.Synchronize(ctx); err != nil {
				return err
			}
		}
		if time.Since(started) < quiet { // else other work may have come meanwhile
			return nil
		}
	}
}

// brief is how long a thread may hold up others while it waits for idle devices.
const brief = 50 * time.Millisecond

// whenIdle calls f, which stops where ready fails, as it does soon while a device is
// busy. Then whenIdle waits for the devices and calls f again, until ctx ends.
func (s *Session) whenIdle(ctx context.Context, f func(ready func() error) error) error {
	for {
		soon, cancel := context.WithTimeout(ctx, brief)
		err := f(func() error { return s.idle(soon) })
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if ctx.Err() == nil {
			err = s.idle(ctx)
		}
		if err != nil {
			return fmt.Errorf("no host memory is given back while a GPU is busy, since no kernel could be launched meanwhile: %w", err)
		}
	}
}

// FreeHost gives the host memory back that is kept from one pause of the tags to
// the next, once no work is left on the devices.
func (s *Session) FreeHost(tags string) error {
	regions, nccl, err := s.choose(tags)
	if err != nil {
		return err
	}
	var errs []error
	if nccl {
		errs = append(errs, s.within(func(ctx context.Context) error {
			return s.whenIdle(ctx, func(ready func() error) error { return s.freeNCCLHost(ctx, ready) })
		}))
	}
	for _, r := range regions {
		errs = append(errs, s.within(func(ctx context.Context) error {
			return s.whenIdle(ctx, func(ready func() error) error { return r.freeHost(ctx, ready) })
		}))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("free host memory: %w", err)
	}
	return nil
}

func errHolds(tag string) error {
	return fmt.Errorf("%w: tag %q is paused, and its host memory holds the contents: resume it first", ErrState, tag)
}

func (s *Session) freeNCCLHost(ctx context.Context, ready func() error) error {
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	if s.State() != Active {
		return errHolds(Tag)
	}
	return s.space.AnyDevice(func() error { return s.arena.Free(ready) })
}

func (r *Region) freeHost(ctx context.Context, ready func() error) error {
	if err := r.take(ctx); err != nil {
		return err
	}
	defer r.give()
	if r.isPaused() {
		return errHolds(r.tag)
	}
	return r.dropStore(ready)
}

// tidyRegions gives back what is left of regions that ended while devices were busy.
func (s *Session) tidyRegions() {
	for _, r := range s.allRegions() {
		r.tidy()
	}
}
