package session

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/peer"
	"amem/golib/simtest"
)

var errInjected = errors.New("injected")

// sockets counts the steps at the sockets of a test's processes, and makes some fail.
var sockets socketSteps

type socketSteps struct {
	sync.Mutex
	names   map[string]string              // of the processes, by the address at which each listens
	count   map[string]int                 // of steps, by what they are
	fail    func(step string, n int) error // of the n-th such step; nil: none
	sending int                            // how many messages
	conns   map[*net.UnixConn]bool         // kept, since the collector closes what is lost
}

// asked names a step of who asks the process that listens at the address.
func (s *socketSteps) asked(address, step string) string {
	if name := s.names[address]; name != "" {
		return name + " is asked: " + step
	}
	return ""
}

func init() {
	peer.Fault = func(c *net.UnixConn, step string) error {
		err := sockets.step(c, step)
		if wait := delay(0); errors.As(err, &wait) {
			time.Sleep(time.Duration(wait))
			return nil
		}
		if until := (held{}); errors.As(err, &until) {
			<-until.until
			return nil
		}
		return err
	}
}

// delay is the error of a step that is only late.
type delay time.Duration

func (d delay) Error() string { return fmt.Sprint("late by ", time.Duration(d)) }

// held is the error of a step that is made when the channel is closed.
type held struct{ until <-chan struct{} }

func (held) Error() string { return "held" }

func late(err error) bool {
	d, h := delay(0), held{}
	return errors.As(err, &d) || errors.As(err, &h)
}

// step counts a step at a socket and answers its error.
func (s *socketSteps) step(c *net.UnixConn, step string) (err error) {
	sockets.Lock()
	defer sockets.Unlock()
	var what string
	if c == nil {
		what = sockets.asked(strings.TrimPrefix(step, "dial "), "dial")
	} else if name := sockets.names[fmt.Sprint(c.LocalAddr())]; name != "" {
		what = name + " serves: " + step
	} else {
		what = sockets.asked(fmt.Sprint(c.RemoteAddr()), step)
	}
	if what == "" { // of an earlier test's process, which may be talking still
		return nil
	}
	sockets.conns[c] = true
	sockets.count[what]++
	if sockets.fail != nil {
		err = sockets.fail(what, sockets.count[what])
	}
	if strings.HasPrefix(step, "send ") && (err == nil || late(err)) {
		sockets.sending++
	}
	if strings.HasPrefix(step, "sent ") {
		sockets.sending = max(0, sockets.sending-1) // it may have begun before it was watched
	}
	return err
}

// atSockets asks fail for the error of each step, and counts anew. It answers
// how often each step was made until now.
func atSockets(t *testing.T, fail func(step string, n int) error) map[string]int {
	t.Helper()
	soon(t, func() bool {
		sockets.Lock()
		defer sockets.Unlock()
		return sockets.sending == 0
	}, "a message is still being sent")
	sockets.Lock()
	defer sockets.Unlock()
	count := sockets.count
	sockets.count, sockets.fail = map[string]int{}, fail
	return count
}

// watchSockets makes the nodes' sockets those at which steps are counted and fail.
func watchSockets(t *testing.T, nodes ...*peer.Node) {
	t.Helper()
	sockets.Lock()
	defer sockets.Unlock()
	sockets.names, sockets.conns, sockets.count = map[string]string{}, map[*net.UnixConn]bool{}, map[string]int{}
	sockets.sending = 0
	for i, n := range nodes {
		sockets.names["@amem-"+n.Self().ID.String()] = fmt.Sprintf("process %d", i)
	}
	t.Cleanup(func() {
		sockets.Lock()
		defer sockets.Unlock()
		sockets.names, sockets.fail, sockets.conns = nil, nil, nil
	})
}

// soon waits until what is true. Unlike require.Eventually it starts no goroutine.
func soon(t *testing.T, what func() bool, message ...any) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !what(); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), message...)
	}
}

// holdings is what a test process holds of what it could leak.
type holdings struct {
	memory            uint64
	files, goroutines int
}

func holdingsNow(t *testing.T) holdings {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return holdings{simtest.Used(t, 0), len(files), runtime.NumGoroutine()}
}

// ranks are processes that share memory.
type ranks struct {
	all     []*process
	joining []*process // those that pause
	paused  uint64     // device memory in use when all have paused
	active  holdings   // after a cycle

	unreached int // faults whose step came when the attempt had ended
}

func newRanks(t *testing.T, count, joining int, share func(all []*process)) *ranks {
	t.Helper()
	r := &ranks{paused: simtest.Used(t, 0)}
	r.all = start(t, count, patient)
	r.joining = r.all[:joining]
	share(r.all)
	var nodes []*peer.Node
	for _, p := range r.all {
		nodes = append(nodes, p.node)
	}
	watchSockets(t, nodes...)
	for r.active != holdingsNow(t) {
		r.active = holdingsNow(t)
		atSockets(t, loseReady)
		require.NoError(t, pauseAll(r.all...))
		require.NoError(t, resumeAll(r.all...))
		time.Sleep(50 * time.Millisecond) // connections end
	}
	return r
}

// cycle pauses and resumes all without a fault in what matters. The answers to
// its last messages are taken for lost, which ends the connections: what is held
// after it is always the same, and the next one begins with dialing. A second connection
// to a process, which two messages at one time have made, ends with another cycle.
func (r *ranks) cycle(t *testing.T) {
	t.Helper()
	var now holdings
	for range 4 {
		atSockets(t, loseReady)
		require.NoError(t, attempt(t, r.all, patient, pause))
		r.released(t)
		for i, p := range r.all {
			require.Empty(t, p.Stats("").LastPause.HeldBy, "process %d", i)
		}
		require.NoError(t, attempt(t, r.all, patient, resume))
		intact(t, r.all...)
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
			now = holdingsNow(t)
			if now.memory == r.active.memory && now.files <= r.active.files && now.goroutines <= r.active.goroutines {
				r.active = now // less if what an earlier test has left has ended
				return
			}
		}
	}
	require.Fail(t, "something is held", "%+v, before %+v", now, r.active)
}

func loseReady(step string, _ int) error {
	if strings.HasSuffix(step, "is asked: received ready") {
		return errInjected
	}
	return nil
}

// mapped answers how much of peers' memory is mapped.
func (r *ranks) mapped() (bytes uint64) {
	for _, p := range r.all {
		for _, d := range p.Stats("").Devices {
			bytes += d.Imported
		}
	}
	return bytes
}

// released checks that all are paused, with no memory in use but peers' that the
// driver has refused to let go.
func (r *ranks) released(t *testing.T) {
	t.Helper()
	require.NoError(t, resumeNone(r.all...))
	want := r.paused + r.mapped()
	soon(t, func() bool { return simtest.Used(t, 0) == want }, "memory in use, beside %d", want)
}

// restored checks that all are active again, as they were before.
func (r *ranks) restored(t *testing.T) {
	t.Helper()
	intact(t, r.all...)
	for _, p := range r.all {
		r.reaches(t, p)
	}
	soon(t, func() bool { return simtest.Used(t, 0) == r.active.memory }, "memory in use, beside %d", r.active.memory)
}

// whole checks that each process is either active or paused, and that kernels
// may be launched only where all is there that they could use.
func (r *ranks) whole(t *testing.T) {
	t.Helper()
	for i, p := range r.all {
		if p.State() == Paused {
			require.Equal(t, Closed, p.position(), "guard of process %d", i)
			require.Equal(t, p.is(Paused, true), p.space.Whole(), "process %d", i)
			continue
		}
		require.NotEqual(t, Closed, p.position(), "guard of process %d", i)
		require.True(t, p.space.Whole(), "process %d", i)
		for k, b := range p.own {
			require.True(t, b.intact(), "process %d: contents of buffer %d", i, k)
		}
		if p.position() == Open {
			r.reaches(t, p)
		}
	}
}

// reaches checks that p's mappings of peers' memory are of the memory that these have.
func (r *ranks) reaches(t *testing.T, p *process) {
	t.Helper()
	for _, owner := range r.all {
		for _, own := range owner.own {
			for _, mapped := range p.theirs {
				if mapped.seed != own.seed {
					continue
				}
				require.True(t, owner.space.Whole(), "the guard is open, and a peer's memory is gone")
				require.True(t, mapped.intact(), "a peer's contents")
				ours, theirs := simtest.Bytes(mapped.at, own.size), simtest.Bytes(own.at, own.size)
				for _, i := range []uint64{0, own.size - 1} {
					ours[i]++
					require.Equal(t, ours[i], theirs[i], "a peer's write is seen")
					ours[i]--
				}
			}
		}
	}
}

// attempt calls f for the processes, and checks that an error says whom or what it
// is about.
func attempt(t *testing.T, list []*process, timeout time.Duration, f func(p *process) error) error {
	t.Helper()
	return each(list, func(p *process) error {
		p.options.Timeout = timeout
		err := f(p)
		if err != nil {
			assert.Regexp(t, fmt.Sprintf(`(?s)^(pause|resume): .*(pid %d \(group 0\)|GPU|cu[A-Z]\w+: )`, os.Getpid()), err.Error())
		}
		return err
	})
}

func pause(p *process) error  { return p.Pause("") }
func resume(p *process) error { return p.Resume("") }

const (
	hurried = 100 * time.Millisecond // for attempts that may have to wait for what does not come
	patient = 20 * time.Second
)

// seam is where faults are made: at sockets, or in the driver.
type seam struct {
	// fail makes the n-th step of a kind fail; n 0 is none.
	fail func(t *testing.T, step string, n int, err error)
	// heal undoes fail, and answers how often each step was made since.
	heal func(t *testing.T) map[string]int
	// errors are what a step may fail with.
	errors func(step string) []error
}

// fault is a step that fails, in the first attempt to pause or to resume.
type fault struct {
	seam
	resuming bool
	step     string
	n        int
	err      error
}

// round pauses and resumes, each in a second attempt where the first has failed.
// A pause that has failed may also be given up: then all resume. It answers which
// steps the fault's phase took, and the error of the first attempt to pause.
func (r *ranks) round(t *testing.T, f fault, deadline time.Duration, giveUp bool) (steps map[string]int, err error) {
	t.Helper()
	first := func(resuming bool, list []*process, call func(p *process) error) error {
		if f.resuming != resuming {
			return attempt(t, list, r.patience(resuming), call)
		}
		f.fail(t, f.step, f.n, f.err)
		defer func() { steps = f.heal(t) }()
		return attempt(t, list, deadline, call)
	}
	err = first(false, r.joining, pause)
	r.whole(t)
	if err != nil && !giveUp {
		require.NoError(t, attempt(t, r.all, patient, pause), "the second attempt")
	}
	if err == nil || !giveUp {
		r.released(t)
	}
	if first(true, r.all, resume) != nil {
		r.whole(t)
		if !slices.ContainsFunc(r.all, func(p *process) bool { return !p.is(Paused, false) }) {
			r.released(t)
		}
		require.NoError(t, attempt(t, r.all, patient, resume), "the second attempt")
	}
	r.restored(t)
	return steps, err
}

// faults makes each step of a pause and a resume fail in turn, as a first round
// without a fault has found them, if the choice falls on it.
func (r *ranks) faults(t *testing.T, s seam, choose func(resuming bool, step string) bool) {
	t.Helper()
	allPause := len(r.joining) == len(r.all)
	begin, kinds, cases, failures := time.Now(), 0, 0, 0
	for _, resuming := range []bool{false, true} {
		steps, err := r.round(t, fault{seam: s, resuming: resuming}, r.patience(resuming), !allPause)
		require.Equal(t, allPause, err == nil)
		r.cycle(t)
		kinds += len(steps)
		for _, step := range slices.Sorted(maps.Keys(steps)) {
			for n := 1; n <= steps[step] && choose(resuming, step); n++ {
				for _, fails := range s.errors(step) {
					for _, giveUp := range []bool{!allPause, true} {
						err := r.fault(t, fault{s, resuming, step, n, fails}, giveUp)
						cases++
						if err != nil {
							failures++
						}
						if err == nil || !allPause {
							break // there is no pause to give up, or none to repeat
						}
					}
				}
			}
		}
	}
	t.Logf("%d kinds of steps, %d cases, %d of them not reached, in %d of them a pause failed: %v", kinds, cases,
		r.unreached, failures, time.Since(begin))
	require.NotZero(t, failures)
	require.Less(t, 10*r.unreached, cases)
}

// fault makes a round with a fault. It answers the error of the pause.
func (r *ranks) fault(t *testing.T, f fault, giveUp bool) (err error) {
	t.Helper()
	for deadline := hurried; deadline < patient; deadline *= 2 {
		var steps map[string]int
		ok := t.Run(fmt.Sprintf("%s %d: %v", f.step, f.n, f.err), func(t *testing.T) {
			simtest.On(t, 0)
			steps, err = r.round(t, f, deadline, giveUp)
		})
		require.True(t, ok)
		r.cycle(t)
		if steps[f.step] >= f.n {
			return err
		}
		// The machine is busy, and the step came too late.
	}
	if strings.HasSuffix(f.step, " received unmapped") {
		// Nobody waits for this answer: it may come when the attempt has ended.
		r.unreached++
		return err
	}
	require.Fail(t, "there was no such step", "%s %d", f.step, f.n)
	return nil
}

// patience is how long the first attempt of a round without a fault is given.
func (r *ranks) patience(resuming bool) time.Duration {
	if !resuming && len(r.joining) < len(r.all) {
		return hurried
	}
	return patient
}

func atAllSockets() seam {
	return seam{
		fail: func(t *testing.T, step string, n int, err error) {
			atSockets(t, func(s string, k int) error {
				if s == step && k == n {
					return err
				}
				return nil
			})
		},
		heal: func(t *testing.T) map[string]int { return atSockets(t, nil) },
		// One after which the process that asks gives up, and one after which it asks
		// again. The one that is asked does the same after any.
		errors: func(step string) []error {
			switch {
			case strings.Contains(step, "is asked: dial"):
				return []error{unix.EMFILE}
			case strings.Contains(step, "is asked: "):
				return []error{errInjected, unix.ECONNRESET}
			}
			return []error{errInjected}
		},
	}
}

// Whichever step at a socket fails in whichever process, before it is made or
// after: each process is active or paused, says what has failed, and is paused
// or resumed by the next attempt.
func TestFaultsAtSockets(t *testing.T) {
	both := func(all ...*process) {
		for i, p := range all {
			for _, other := range all[:i] {
				together(t, p, other)
			}
		}
	}
	for _, c := range []struct {
		name           string
		count, joining int
		asked          string // of processes that are all alike, one is enough
		share          func(all []*process)
	}{
		{"two", 2, 2, "process 0 ", func(all []*process) { both(all...) }},
		{"three", 3, 3, "process 0 ", func(all []*process) { both(all...) }},
		{"one maps the other", 2, 2, "", func(all []*process) { all[0].maps(t, all[1]) }},
		{"one does not pause", 3, 2, "", func(all []*process) {
			both(all[0], all[1])
			all[0].maps(t, all[2])
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRanks(t, c.count, c.joining, c.share)
			r.faults(t, atAllSockets(), func(_ bool, step string) bool { return strings.HasPrefix(step, c.asked) })
		})
	}
}

// Whichever driver call fails in whichever of two processes.
func TestFaults(t *testing.T) {
	r := newRanks(t, 2, 2, func(all []*process) { together(t, all[0], all[1]) })
	r.faults(t, atTheDriver(), func(bool, string) bool { return true })
}

func atTheDriver() seam {
	var before map[string]int64
	var failing string
	return seam{
		fail: func(t *testing.T, call string, n int, err error) {
			before, failing = simtest.Driver().Calls(), call
			if n > 0 {
				simtest.Fault(t, call, n, err.(cuda.Result))
			}
		},
		heal: func(t *testing.T) map[string]int {
			if failing != "" {
				simtest.Fault(t, failing, 0, 0)
			}
			calls := map[string]int{}
			for call, count := range simtest.Driver().Calls() {
				if made := int(count - before[call]); made > 0 {
					calls[call] = made
				}
			}
			return calls
		},
		errors: func(string) []error { return []error{cuda.ErrUnknown} },
	}
}

// A peer that can't be told of a pause is waited for, since it may have ended, and
// then the error says why it was not told.
func TestPauseSaysWhyAPeerWasNotTold(t *testing.T) {
	r := newRanks(t, 2, 2, func(all []*process) { together(t, all[0], all[1]) })
	atSockets(t, func(step string, _ int) error {
		if step == "process 1 is asked: dial" || step == "process 1 is asked: send stopped" { // on a connection that is there
			return unix.EMFILE
		}
		return nil
	})
	err := r.all[0].hurried(r.all[0].Pause)
	require.ErrorIs(t, err, unix.EMFILE)
	var timeout *peer.TimeoutError
	require.ErrorAs(t, err, &timeout)
	r.whole(t)
	r.cycle(t)
}
