package session

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
)

// Tag is the built-in tag of NCCL's memory.
const Tag = "nccl"

// Transition is what one pause or resume did. Sizes are bytes, times seconds.
type Transition struct {
	Changed bool    `json:"changed"` // false: all was so already
	Seconds float64 `json:"seconds"`
	Bytes   uint64  `json:"bytes"` // of device memory, given back or restored
	Copied  uint64  `json:"copied_bytes"`
	// The tags that were all active and are paused now, or the other way round.
	Tags []string `json:"tags"`
	// Of Bytes, what peers of NCCL's still mapped when a pause's deadline had passed: it is
	// not free yet.
	Held   uint64   `json:"held_bytes"`
	HeldBy []Holder `json:"held_by"`
}

func (t *Transition) add(other Transition) {
	t.Changed = t.Changed || other.Changed
	t.Bytes += other.Bytes
	t.Copied += other.Copied
	t.Held += other.Held
	t.HeldBy = append(t.HeldBy, other.HeldBy...)
}

// states answers the state of each tag.
func (s *Session) states() map[string]State {
	states := map[string]State{}
	for _, tag := range s.Tags() {
		states[tag], _ = s.TagState(tag)
	}
	return states
}

// changedTags lists the tags that have another state than before.
func (s *Session) changedTags(before map[string]State) []string {
	tags := []string{}
	for tag, state := range s.states() {
		if was, known := before[tag]; known && was != state {
			tags = append(tags, tag)
		}
	}
	slices.Sort(tags)
	return tags
}

// choose answers what a comma-separated list of tags names: "" is all.
func (s *Session) choose(tags string) (regions []*Region, nccl bool, err error) {
	all := s.allRegions()
	if tags == "" {
		// NCCL's memory is not missed where the program pauses its own.
		return all, len(all) == 0 || len(s.space.Devices()) > 0, nil
	}
	for _, tag := range strings.Split(tags, ",") {
		known := tag == Tag
		nccl = nccl || known
		for _, r := range all {
			if r.tag == tag {
				known = true
				if !slices.Contains(regions, r) {
					regions = append(regions, r)
				}
			}
		}
		if !known {
			return nil, false, fmt.Errorf("%w: no tag %q; the tags there are: %s", ErrArgument, tag, strings.Join(s.Tags(), ", "))
		}
	}
	return regions, nccl, nil
}

// Tags lists the tags there are, NCCL's first.
func (s *Session) Tags() []string {
	tags := []string{Tag}
	for _, r := range s.allRegions() {
		if !slices.Contains(tags, r.tag) {
			tags = append(tags, r.tag)
		}
	}
	return tags
}

// Pause gives the memory of the tags back to the device: all of it or, on
// failure, none.
func (s *Session) Pause(tags string) (done Transition, err error) {
	regions, nccl, err := s.choose(tags)
	if err != nil {
		return done, err
	}
	defer s.tidyRegions()
	clock, before := newClock(), s.states()
	var paused []*Region
	for _, r := range regions {
		already := r.isPaused()
		t, err := r.pause()
		if t.Changed && !already {
			paused = append(paused, r)
		}
		done.add(t)
		if err != nil {
			return Transition{}, errors.Join(fmt.Errorf("pause %q: %w", r.tag, err), undo(paused))
		}
	}
	if nccl { // last: it alone waits for other processes' callers
		t, err := s.pauseNCCL()
		if err != nil {
			return Transition{}, errors.Join(fmt.Errorf("pause: %w", err), undo(paused))
		}
		done.add(t)
	}
	if done.Changed {
		done.Seconds, done.Tags = clock.total(), s.changedTags(before)
		slog.Info("paused", "tags", tags, "released_bytes", done.Bytes, "copied_bytes", done.Copied, "seconds", done.Seconds)
	}
	return done, nil
}

// undo resumes what a pause that failed had paused.
func undo(regions []*Region) error {
	var errs []error
	for _, r := range regions {
		if _, err := r.resume(); err != nil {
			errs = append(errs, fmt.Errorf("%q stays paused: %w", r.tag, err))
		}
	}
	return errors.Join(errs...)
}

// Resume restores the memory of the tags. On failure each tag's is restored or
// paused still. Of what is active already, it restores what a failed pause has
// left stale, if anything.
func (s *Session) Resume(tags string) (done Transition, err error) {
	regions, nccl, err := s.choose(tags)
	if err != nil {
		return done, err
	}
	defer s.tidyRegions()
	clock, before := newClock(), s.states()
	var errs []error // one tag's failure keeps no other paused: other processes may wait for it
	for _, r := range regions {
		t, err := r.resume()
		done.add(t)
		if err != nil {
			errs = append(errs, fmt.Errorf("resume %q: %w", r.tag, err))
		}
	}
	if nccl {
		t, err := s.resumeNCCL()
		done.add(t)
		if err != nil {
			errs = append(errs, fmt.Errorf("resume: %w", err))
		}
	}
	if done.Changed {
		done.Seconds, done.Tags = clock.total(), s.changedTags(before)
		slog.Info("resumed", "tags", tags, "restored_bytes", done.Bytes, "seconds", done.Seconds)
	}
	return done, errors.Join(errs...)
}

// TagState answers the state of a tag's memory, of "" Paused if any is. known is
// false if there is no such tag.
func (s *Session) TagState(tag string) (state State, known bool) {
	state = Active
	if tag == Tag || tag == "" {
		state, known = s.State(), true
	}
	for _, r := range s.allRegions() {
		if r.tag == tag || tag == "" {
			known = true
			if r.isPaused() {
				state = Paused
			}
		}
	}
	return state, known
}
