package session

import (
	"context"
	"fmt"
	"maps"
	"os"
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

// lateStep is one step of the first attempt to pause, or to resume, that comes late.
type lateStep struct {
	place
	resuming bool
	step     string
	n        int
	until    moment // what the processes have done by then
}

// place is where steps come late: at sockets, or in the driver.
type place struct {
	// holdUp counts steps anew, and makes one late until end is called, or for most of
	// the time.
	holdUp func(t *testing.T, d lateStep, deadline time.Duration) (end func())
	// made returns how often each step was made since.
	made func() map[string]int
	// settle waits until what was late has been made.
	settle func(t *testing.T)
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

// lateSockets holds up steps at sockets. A step of a process that asks another holds up
// the attempt itself, so it is late by half of the deadline.
func lateSockets() place {
	return place{
		holdUp: func(t *testing.T, d lateStep, deadline time.Duration) (end func()) {
			over, cancel := context.WithCancel(context.Background())
			most := patient / 4
			if strings.Contains(d.step, "is asked") {
				most = deadline * 3 / 2
			}
			atSockets(t, func(step string, n int) error {
				if step != d.step || n != d.n {
					return nil
				}
				until, stop := context.WithTimeout(over, most)
				context.AfterFunc(until, stop)
				return held{until.Done()}
			})
			return func() {
				sockets.Lock()
				defer sockets.Unlock()
				sockets.fail = nil
				cancel()
			}
		},
		made: func() map[string]int {
			sockets.Lock()
			defer sockets.Unlock()
			return maps.Clone(sockets.count)
		},
		settle: func(t *testing.T) { atSockets(t, nil) },
	}
}

// lateDriver holds up calls of the driver, by so many deadlines: the driver has no
// way to give up.
func lateDriver(deadlines float64) place {
	var before map[string]int64
	var latest time.Time
	return place{
		holdUp: func(t *testing.T, d lateStep, deadline time.Duration) (end func()) {
			before = simtest.Driver().Calls()
			if d.n == 0 {
				return func() {}
			}
			wait := time.Duration(deadlines * float64(deadline))
			simtest.Delay(t, d.step, d.n, wait)
			latest = time.Now().Add(deadline + wait) // the attempt takes up to a deadline until then
			return func() { simtest.Delay(t, d.step, 0, 0) }
		},
		made: func() map[string]int {
			calls := map[string]int{}
			for call, count := range simtest.Driver().Calls() {
				if made := int(count - before[call]); made > 0 {
					calls[call] = made
				}
			}
			return calls
		},
		settle: func(*testing.T) { time.Sleep(time.Until(latest)) },
	}
}

// delayed pauses and resumes while a step is late. A pause that has failed is
// repeated, or with giveUp all resume instead. It tells whether the step was reached.
func (r *ranks) delayed(t *testing.T, d lateStep, deadline time.Duration, giveUp bool) (steps map[string]int, failed bool) {
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
		end = d.holdUp(t, d, deadline)
		err := attempt(t, list, deadline, call)
		steps = d.made()
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
	d.settle(t)
	require.NoError(t, attempt(t, r.all, patient, resume), "a resume of what is active")
	r.restored(t)
	return steps, failed
}

// untils returns the moments at which a step is made that comes late. All of them take
// minutes: without DELAYS=all each step has one, in turn.
func untils(number int) []moment {
	if os.Getenv("DELAYS") == "all" {
		return []moment{afterTheAttempt, afterTheNext, afterTheRound}
	}
	return []moment{moment(number % int(moments))}
}

// numbers returns which of so many steps of a kind come late: the first and the last, or
// with DELAYS=all each.
func numbers(count int) (list []int) {
	for n := 1; n <= count; n++ {
		if n == 1 || n == count || os.Getenv("DELAYS") == "all" {
			list = append(list, n)
		}
	}
	return list
}

// delays makes each step of a pause and a resume late in turn, as a first round
// without a delay has found them, if the choice falls on it.
func (r *ranks) delays(t *testing.T, at place, choose func(step string) bool) {
	t.Helper()
	allPause := len(r.joining) == len(r.all)
	begin, cases, failures := time.Now(), 0, 0
	for _, resuming := range []bool{false, true} {
		steps, _ := r.delayed(t, lateStep{place: at, resuming: resuming}, r.patience(resuming), !allPause)
		r.cycle(t)
		for _, step := range slices.Sorted(maps.Keys(steps)) {
			for _, n := range numbers(steps[step]) {
				if !choose(step) {
					break
				}
				for _, until := range untils(cases) {
					for _, giveUp := range []bool{!allPause, true} {
						failed := r.delay(t, lateStep{at, resuming, step, n, until}, giveUp)
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
func (r *ranks) delay(t *testing.T, d lateStep, giveUp bool) (failed bool) {
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
		{"one does not pause", 3, 2, "process 0 ", func(all []*process) {
			together(t, all[0], all[1])
			all[0].maps(t, all[2])
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRanks(t, c.count, c.joining, c.share)
			r.delays(t, lateSockets(), func(step string) bool { return strings.HasPrefix(step, c.asked) })
		})
	}
}

// Whichever call of the driver comes late, in whichever of two processes: by less than
// two deadlines, when a peer gives up and this process does not, and by more.
func TestDelaysAtTheDriver(t *testing.T) {
	for _, deadlines := range []float64{1.5, 3} {
		t.Run(fmt.Sprint(deadlines), func(t *testing.T) {
			r := newRanks(t, 2, 2, func(all []*process) { together(t, all[0], all[1]) })
			r.delays(t, lateDriver(deadlines), func(string) bool { return true })
		})
	}
}

// Whichever step comes late while an owner pauses and resumes memory that another
// process has opened.
func TestDelaysOfRegions(t *testing.T) {
	for _, backup := range []Backup{BackupCPU, BackupNone} {
		t.Run(backup.String(), func(t *testing.T) {
			s := newShared(t, backup)
			for _, at := range []place{lateSockets(), lateDriver(1.5), lateDriver(3)} {
				cases, failures := s.delays(t, at)
				t.Logf("%d cases, in %d of them an attempt failed", cases, failures)
				require.NotZero(t, failures)
			}
			s.end(t)
		})
	}
}

func (s *shared) delays(t *testing.T, at place) (cases, failures int) {
	t.Helper()
	s.delayed(t, lateStep{place: at}) // buffers, streams and events are made
	for _, resuming := range []bool{false, true} {
		steps, _ := s.delayed(t, lateStep{place: at, resuming: resuming})
		require.NotEmpty(t, steps)
		for _, step := range slices.Sorted(maps.Keys(steps)) {
			for _, n := range numbers(steps[step]) {
				for _, until := range untils(cases) {
					cases++
					t.Run(fmt.Sprintf("%s %d, made %s", step, n, until), func(t *testing.T) {
						simtest.On(t, 0)
						if _, failed := s.delayed(t, lateStep{at, resuming, step, n, until}); failed {
							failures++
						}
					})
				}
			}
		}
	}
	return cases, failures
}

// delayed pauses and resumes while a step is late. The attempt that it makes fail is
// repeated, in every other case only after a resume.
func (s *shared) delayed(t *testing.T, d lateStep) (steps map[string]int, failed bool) {
	t.Helper()
	end := func() {}
	defer func() { end() }()
	passed := func(now moment) {
		if now >= d.until {
			end()
		}
	}
	both := []*process{s.owner, s.borrower}
	deadline := func(to time.Duration) {
		for _, p := range both {
			p.options.Timeout = to
		}
	}
	defer deadline(patient)
	for _, resuming := range []bool{false, true} {
		change, wanted := s.owner.Pause, Paused
		if resuming {
			change, wanted = s.owner.Resume, Active
		}
		var err error
		if d.resuming == resuming {
			if d.n > 0 {
				deadline(hurried)
			}
			end = d.holdUp(t, d, hurried)
			err = change("weights")
			steps = d.made()
			deadline(patient)
			passed(afterTheAttempt)
		} else {
			err = change("weights")
		}
		if err != nil {
			failed = true
			if d.n%2 == 0 && !resuming {
				require.NoError(t, s.owner.Resume("weights"), "a resume after the attempt")
				s.same(t)
			}
			require.NoError(t, change("weights"), "the second attempt")
		}
		state, _ := s.owner.TagState("weights")
		require.Equal(t, wanted, state)
		if state == Paused {
			require.Zero(t, simtest.Used(t, 0))
		}
		if d.resuming == resuming {
			passed(afterTheNext)
		}
	}
	s.same(t)
	end()
	d.settle(t)
	require.NoError(t, s.borrower.Resume(""), "a resume of what is active")
	s.same(t)
	require.NoError(t, s.owner.Pause("weights"), "the next pause")
	require.Zero(t, simtest.Used(t, 0))
	require.NoError(t, s.owner.Resume("weights"), "the next resume")
	s.same(t)
	return steps, failed
}

// same checks that the contents are right, and that both processes have the same memory.
func (s *shared) same(t *testing.T) {
	t.Helper()
	for i, own := range s.own {
		theirs := s.theirs[i]
		require.True(t, simtest.Writable(t, 0, theirs.at), "buffer %d is mapped nowhere in the borrower", i)
		require.True(t, s.backup == BackupNone || (own.intact() && theirs.intact()), "contents of buffer %d", i)
		own.fill(own.seed)
		require.True(t, theirs.intact(), "both sides have the same memory")
	}
}
