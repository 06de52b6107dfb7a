package session

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/simtest"
)

// A step that comes late is made all the same: when who has waited for it has given
// up, and both have gone on. Nothing that such a step does then may stand in the way
// of what the processes have agreed on since.

// delay is one step of the first attempt to pause, or to resume, that comes late.
type delay struct {
	resuming bool
	step     string
	n        int
	// until says what the processes have done by then.
	until moment
}

// moment is when a late step is made.
type moment int

const (
	afterTheAttempt moment = iota // who has waited for it has given up
	afterTheNext                  // all have tried again, or have given the pause up
	afterTheRound                 // all have resumed
	moments
)

func (m moment) String() string {
	return [...]string{"after the attempt", "after the next", "after the round"}[m]
}

// lateness holds a step up.
type lateness struct {
	over context.Context
	most time.Duration
}

func (l *lateness) wait() {
	select {
	case <-l.over.Done():
	case <-time.After(l.most):
	}
}

// holdUp makes a step late until the returned function is called. A step of a process
// that asks another holds up the attempt itself, so it is late by half of the deadline.
func holdUp(d delay, deadline time.Duration) (end func()) {
	over, cancel := context.WithCancel(context.Background())
	l := &lateness{over: over, most: patient / 4}
	if strings.Contains(d.step, "is asked") {
		l.most = deadline * 3 / 2
	}
	sockets.Lock()
	defer sockets.Unlock()
	sockets.late = func(step string, n int) *lateness {
		if step != d.step || n != d.n {
			return nil
		}
		return l
	}
	return func() {
		sockets.Lock()
		defer sockets.Unlock()
		sockets.late = nil
		cancel()
	}
}

// delayed pauses and resumes while a step is late. A pause that has failed is
// repeated, or with giveUp all resume instead. It tells whether the step was reached.
func (r *ranks) delayed(t *testing.T, d delay, deadline time.Duration, giveUp bool) (steps map[string]int, failed bool) {
	t.Helper()
	end := func() {}
	passed := func(now moment) {
		if now >= d.until {
			end()
		}
	}
	first := func(resuming bool, call func(p *process) error, list []*process) error {
		if resuming != d.resuming {
			return attempt(t, list, r.patience(resuming), call)
		}
		atSockets(t, nil)
		end = holdUp(d, deadline)
		err := attempt(t, list, deadline, call)
		sockets.Lock()
		steps = maps.Clone(sockets.count)
		sockets.Unlock()
		passed(afterTheAttempt)
		return err
	}
	err := first(false, pause, r.joining)
	failed = err != nil
	if failed && !giveUp {
		require.NoError(t, attempt(t, r.all, patient, pause), "the second attempt")
	}
	if !d.resuming {
		passed(afterTheNext)
	}
	if !failed || !giveUp {
		r.released(t)
	}
	if err := first(true, resume, r.all); err != nil {
		failed = true
		require.NoError(t, attempt(t, r.all, patient, resume), "the second attempt to resume")
	}
	passed(afterTheNext)
	r.restored(t)
	end()
	atSockets(t, nil) // all that was late has been made
	require.NoError(t, attempt(t, r.all, patient, resume), "a resume of what is active")
	r.restored(t)
	return steps, failed
}

// delays makes each step of a pause and a resume late in turn, as a first round
// without a delay has found them, if the choice falls on it.
func (r *ranks) delays(t *testing.T, choose func(step string) bool) {
	t.Helper()
	allPause := len(r.joining) == len(r.all)
	begin, cases, failures := time.Now(), 0, 0
	for _, resuming := range []bool{false, true} {
		steps, _ := r.delayed(t, delay{resuming: resuming}, r.patience(resuming), !allPause)
		r.cycle(t)
		for _, step := range slices.Sorted(maps.Keys(steps)) {
			for n := 1; n <= steps[step] && choose(step); n++ {
				for until := range moments {
					for _, giveUp := range []bool{!allPause, true} {
						failed := r.delay(t, delay{resuming, step, n, until}, giveUp)
						cases++
						if failed {
							failures++
						}
						if !failed || !allPause {
							break
						}
					}
				}
			}
		}
	}
	t.Logf("%d cases, in %d of them an attempt failed: %v", cases, failures, time.Since(begin))
	require.NotZero(t, failures)
}

// delay makes a round with a late step. It tells whether an attempt failed.
func (r *ranks) delay(t *testing.T, d delay, giveUp bool) (failed bool) {
	t.Helper()
	name := fmt.Sprintf("%s %d, made %s", d.step, d.n, d.until)
	ok := t.Run(name, func(t *testing.T) {
		simtest.On(t, 0)
		_, failed = r.delayed(t, d, hurried, giveUp)
	})
	require.True(t, ok)
	r.cycle(t)
	return failed
}

// Whichever step at a socket comes late, in whichever process: who waits for it gives
// up and says whom it waited for, both go on, and the next attempts succeed.
func TestDelaysAtSockets(t *testing.T) {
	for _, c := range []struct {
		name           string
		count, joining int
		asked          string // of processes that are all alike, one is enough
		share          func(all []*process)
	}{
		{"two", 2, 2, "process 0 ", func(all []*process) { together(t, all[0], all[1]) }},
		{"one maps the other", 2, 2, "", func(all []*process) { all[0].maps(t, all[1]) }},
		{"one does not pause", 3, 2, "", func(all []*process) {
			together(t, all[0], all[1])
			all[0].maps(t, all[2])
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRanks(t, c.count, c.joining, c.share)
			r.delays(t, func(step string) bool { return strings.HasPrefix(step, c.asked) })
		})
	}
}
