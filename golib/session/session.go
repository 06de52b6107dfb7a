// Package session is the state machine of a process's memory: NCCL's and that of
// each region is active or paused, with steps between. It decides; vmm, offload
// and peer do.
//
// Pause and resume take turns. A step that fails leaves the process as it was,
// with one exception: when a resume has brought this process's memory back but
// a peer is not ready in time, the memory stays, launches stay refused, and
// the next resume goes on from there, since a peer may have written to the
// memory by then.
package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/vmm"
)

// State of the process, as amem_state_t counts.
type State int

// The states of a process whose NCCL is hooked.
const (
	Active State = 2
	Paused State = 3
)

func (s State) String() string {
	if s == Paused {
		return "paused"
	}
	return "active"
}

// Guard says whether NCCL may launch kernels, as AMEM_GUARD_* count.
type Guard int

// The positions of the guard.
const (
	Open     Guard = 0
	Closed   Guard = 1
	Stale    Guard = 2 // a peer's memory is paused, was replaced or never came: resume first
	Arriving Guard = 3 // peers' memory is being mapped: wait for it
)

// The errors that callers tell apart, beside those of vmm, offload and peer.
var (
	ErrNoCuMem  = errors.New("NCCL allocates no memory that can be paused")
	ErrNoDevice = errors.New("there is nothing to pause, since CUDA has no device in this process; see nvidia-smi and CUDA_VISIBLE_DEVICES")
	ErrArgument = errors.New("invalid argument")
	ErrState    = errors.New("not possible now")
)

// Options of a Session.
type Options struct {
	Group    int
	Timeout  time.Duration // of each pause and each resume
	Space    vmm.Options
	SetGuard func(Guard)
	Launches func() int // kernel launches of NCCL's that are under way
	Prealloc bool       // get the host memory for a pause ahead, in the background
	Folder   string     // where BackupDisk keeps files, unless SetDiskFolder says
	// Paused is told how many more regions have memory that is not there, paused or
	// recalled by its owner, or fewer.
	Paused func(more int)
	// Margin answers how many bytes of a device regions leave free. nil: none.
	Margin func() uint64
}

// Session is the pausable memory of this process: NCCL's, and that of regions.
type Session struct {
	options Options
	driver  *cuda.Driver
	space   *vmm.Space
	node    *peer.Node
	arena   *offload.Arena  // used by who has the turn
	closed  context.Context // ends with Close
	end     context.CancelFunc

	regions regions

	turn chan struct{} // holds one token: who has it may change the state of NCCL's memory

	mu         sync.Mutex
	state      State
	guard      Guard
	moved      chan struct{} // closed, and replaced, when guard changes
	unfinished bool          // paused, but this process's memory is back already
	// relied are the peers that paused relying on a pause that failed here.
	relied []peer.Identity
	pauses int
	resume int
	last   struct {
		pause  PauseReport
		resume ResumeReport
	}
}

// New starts a session: from now on peers can reach this process.
func New(driver *cuda.Driver, options Options) (*Session, error) {
	s := &Session{
		options: options, driver: driver, arena: offload.NewArena(driver),
		turn: make(chan struct{}, 1), state: Active, moved: make(chan struct{}),
	}
	options.Space.Imported = s.PeerChanged
	s.space = vmm.New(driver, options.Space)
	node, err := peer.Listen(options.Group, s, options.Timeout)
	if err != nil {
		return nil, err
	}
	s.node = node
	s.space.SetPeers(node)
	s.closed, s.end = context.WithCancel(context.Background())
	if options.Prealloc {
		go s.preallocate(s.space, s.growHost)
	}
	return s, nil
}

// Close stops serving peers.
func (s *Session) Close() {
	s.node.Close()
	s.closeRegions()
	s.end()
}

// Space is the memory that NCCL's calls are for.
func (s *Session) Space() *vmm.Space { return s.space }

// Describe implements peer.Handler: NCCL's memory is described by descriptors
// that NCCL passes on.
func (s *Session) Describe(peer.Part) []byte { return nil }

var errNotLent = errors.New("NCCL's memory is paused by every process itself")

// Leave implements peer.Handler.
func (s *Session) Leave(context.Context, peer.Identity, []uint64, func() bool) error {
	return errNotLent
}

// Return implements peer.Handler.
func (s *Session) Return(context.Context, peer.Identity, []uint64) error { return errNotLent }

// Serve implements peer.Handler.
func (s *Session) Serve(ctx context.Context, to peer.Identity, blocks []uint64) ([]peer.Memory, uint64, error) {
	return s.space.Serve(ctx, to, blocks)
}

// Held implements peer.Handler.
func (s *Session) Held(owner peer.Identity, parts []peer.Part) []peer.Part {
	return s.space.Held(owner, parts)
}

// Settled implements peer.Handler.
func (s *Session) Settled(part peer.Part) { s.space.Settled(part) }

// PeerChanged implements peer.Handler: what a peer has done, or what has become of its
// memory here, may open the guard of an active process, or close it.
func (s *Session) PeerChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == Active && len(s.turn) == 0 {
		s.setGuard()
	}
}

// setGuard puts the guard of an active process where it belongs. mu is held.
func (s *Session) setGuard() {
	relied := s.relied[:0]
	for _, who := range s.relied {
		if s.node.Stopped(who) {
			relied = append(relied, who)
		}
	}
	s.relied = relied
	imports := s.space.Imports(s.node.Generation)
	switch {
	case len(relied) > 0 || imports == vmm.Stale:
		s.moveGuard(Stale)
	case imports == vmm.Arriving:
		s.moveGuard(Arriving)
	default:
		s.moveGuard(Open)
	}
}

// moveGuard tells the hook where the guard is. mu is held.
func (s *Session) moveGuard(to Guard) {
	if s.guard == to {
		return
	}
	s.guard = to
	s.options.SetGuard(to)
	close(s.moved)
	s.moved = make(chan struct{})
}

// Arrived waits while the guard says Arriving.
func (s *Session) Arrived() error {
	// What brings it gives up after each owner's time.
	ctx, cancel := context.WithTimeout(context.Background(), 2*s.options.Timeout)
	defer cancel()
	for {
		s.mu.Lock()
		guard, moved := s.guard, s.moved
		s.mu.Unlock()
		if guard != Arriving {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("peers' memory has not been mapped in time: %w", ctx.Err())
		}
	}
}

// State answers the state of NCCL's memory; during a change, that before it.
func (s *Session) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// take waits for this caller's turn.
func (s *Session) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("another thread's pause or resume has not ended: %w", ctx.Err())
	}
}

// give ends this caller's turn and settles the guard.
func (s *Session) give() {
	s.mu.Lock()
	defer s.mu.Unlock()
	<-s.turn
	if s.state == Active {
		s.setGuard()
	}
}

func (s *Session) is(state State, unfinished bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state == state && s.unfinished == unfinished
}

// PauseReport says what a pause did. Sizes are bytes, times seconds.
type PauseReport struct {
	Seconds  float64 `json:"seconds"`
	Quiesce  float64 `json:"quiesce_seconds"` // until no kernel ran here or in any peer
	Copy     float64 `json:"copy_seconds"`    // until the last copy had ended
	Release  float64 `json:"release_seconds"` // what was left to give back then
	Released uint64  `json:"bytes"`           // own memory given back
	Detached uint64  `json:"detached_bytes"`  // peers' memory let go
	Copied   uint64  `json:"copied_bytes"`
}

// pauseNCCL gives NCCL's memory back to the device.
func (s *Session) pauseNCCL(ctx context.Context) (done Transition, err error) {
	if err := s.take(ctx); err != nil {
		return done, err
	}
	defer s.give()
	if s.is(Paused, false) {
		return done, nil
	}
	if len(s.space.Devices()) == 0 {
		if os.Getenv("NCCL_CUMEM_ENABLE") == "0" {
			return done, ErrNoCuMem
		}
		if count, err := s.driver.DeviceCount(); count == 0 {
			return done, errors.Join(ErrNoDevice, err)
		}
		slog.Warn("pause: NCCL has no memory in this process: nothing to do")
		return done, nil
	}
	s.mu.Lock() // so that a PeerChanged that began before can't open it again
	s.moveGuard(Closed)
	s.mu.Unlock()
	report, err := s.pause(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !s.space.Whole() {
		s.state, s.unfinished = Paused, false
		return done, fmt.Errorf("some memory is given back and could not be restored, so the process is paused; resume it: %w", err)
	}
	if err != nil {
		return done, err
	}
	s.state, s.unfinished, s.relied = Paused, false, nil
	s.pauses++
	s.last.pause = report
	return Transition{Changed: true, Bytes: report.Released, Copied: report.Copied}, nil
}

func (s *Session) pause(ctx context.Context) (r PauseReport, err error) {
	clock := newClock()
	if err := s.launched(ctx); err != nil {
		return r, err
	}
	if err := s.space.Synchronize(ctx); err != nil {
		return r, fmt.Errorf("synchronize: %w", err)
	}
	s.space.Leave(true)
	defer s.space.Leave(false)
	relied, err := s.node.Quiesce(ctx)
	if err != nil {
		s.mu.Lock()
		s.relied = relied
		s.mu.Unlock()
		return r, fmt.Errorf("quiesce: %w", err)
	}
	r.Quiesce = clock.lap()
	p, err := s.space.Vacate(s.arena)
	if err != nil {
		if s.space.Whole() {
			s.standDown()
		}
		return r, err
	}
	r.Copy = p.Copying.Seconds()
	r.Release = clock.lap() - r.Copy
	r.Released, r.Detached, r.Copied = p.Released, p.Detached, p.Copied
	r.Seconds = clock.total()
	return r, nil
}

// launched waits until no thread is in a launch that it began before the guard
// was closed. That takes microseconds, unless the device's queue is full.
func (s *Session) launched(ctx context.Context) error {
	for s.options.Launches() > 0 {
		select {
		case <-ctx.Done():
			return fmt.Errorf("a thread that launches a collective has not come back: %w", ctx.Err())
		case <-time.After(50 * time.Microsecond):
		}
	}
	return nil
}

// standDown ends a pause that failed after all peers had relied on it.
func (s *Session) standDown() {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	s.node.Ready(ctx, s.space.Generation())
	s.mu.Lock()
	s.relied = s.space.Owners()
	s.mu.Unlock()
}

// ResumeReport says what a resume did. Sizes are bytes, times seconds.
type ResumeReport struct {
	Seconds  float64 `json:"seconds"`
	Create   float64 `json:"create_seconds"` // physical memory, mapped
	Peers    float64 `json:"peers_seconds"`  // peers' memory, fetched and mapped
	Copy     float64 `json:"copy_seconds"`   // what was left of the copy then
	Ready    float64 `json:"ready_seconds"`  // until all peers' contents were in
	Restored uint64  `json:"bytes"`
	Copied   uint64  `json:"copied_bytes"`
}

// resumeNCCL restores NCCL's memory. In an active process it restores what a
// failed pause has left stale, if anything.
func (s *Session) resumeNCCL(ctx context.Context) (done Transition, err error) {
	if err := s.take(ctx); err != nil {
		return done, err
	}
	defer s.give()
	if s.is(Active, false) {
		return done, s.refresh(ctx)
	}
	clock := newClock()
	report := ResumeReport{}
	if !s.is(Paused, true) {
		if report, err = s.restore(ctx, s.space, s.node.Generation, clock); err != nil {
			return done, err
		}
		s.mu.Lock()
		s.unfinished = true
		s.mu.Unlock()
	}
	if err := s.meet(ctx); err != nil {
		return done, fmt.Errorf("this process's memory is back, a peer's is not: %w", err)
	}
	report.Ready = clock.lap()
	report.Seconds = clock.total()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.unfinished = Active, false
	s.resume++
	s.last.resume = report
	return Transition{Changed: true, Bytes: report.Restored, Copied: report.Copied}, nil
}

// restore brings back everything whose failure can be undone. current answers
// the generation that an owner has said is ready.
func (s *Session) restore(ctx context.Context, space *vmm.Space, current func(owner peer.Identity) uint64, clock *clock) (
	r ResumeReport, err error) {
	restored, err := space.Restore()
	if err != nil {
		return r, errors.Join(err, space.Fill())
	}
	r.Restored, r.Copied = restored.Bytes, restored.Copied
	r.Create = clock.lap()
	err = space.Attach(ctx, current)
	r.Peers = clock.lap()
	err = errors.Join(err, space.Fill())
	r.Copy = clock.lap()
	if err != nil {
		return r, errors.Join(err, space.Abandon())
	}
	return r, nil
}

// meet tells the peers that this process's memory is ready, and waits until
// theirs is. A peer that had to start again has new memory by then.
func (s *Session) meet(ctx context.Context) error {
	s.space.Resumed(false)
	s.node.Ready(ctx, s.space.Generation())
	for {
		if err := s.node.WaitReady(ctx); err != nil {
			return err
		}
		if !s.space.Stale(s.node.Generation) {
			return nil
		}
		if err := s.space.Attach(ctx, s.node.Generation); err != nil {
			return err
		}
	}
}

// refresh maps peers' memory that was replaced while this process was active.
func (s *Session) refresh(ctx context.Context) error {
	if err := s.space.Arrived(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	behind := len(s.relied) > 0
	s.mu.Unlock()
	if !behind && !s.space.Stale(s.node.Generation) {
		return nil
	}
	return s.meet(ctx)
}

// Group answers the group ID.
func (s *Session) Group() int { return s.node.Self().Group }

// SetGroup changes the group ID, which peers must not have learned yet.
func (s *Session) SetGroup(group int) error {
	if group == s.Group() {
		return nil
	}
	if len(s.space.Devices()) > 0 {
		return fmt.Errorf("%w: the group ID is %d already, as of NCCL's first allocation; set it before the first communicator",
			ErrState, s.Group())
	}
	if err := s.node.SetGroup(group); err != nil {
		return fmt.Errorf("%w: set the group ID before the first communicator: %w", ErrState, err)
	}
	return nil
}

// clock measures the steps of one pause or resume.
type clock struct{ start, last time.Time }

func newClock() *clock {
	now := time.Now()
	return &clock{now, now}
}

// lap answers the seconds since the last lap.
func (c *clock) lap() float64 {
	now := time.Now()
	defer func() { c.last = now }()
	return now.Sub(c.last).Seconds()
}

func (c *clock) total() float64 { return time.Since(c.start).Seconds() }
