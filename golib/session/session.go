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
	"amem/golib/rescue"
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
	Timeout  time.Duration // of each wait of a pause or a resume
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
	// Reached answers which devices have peer access to a device, by bits. nil: none.
	Reached func(device int32) uint64
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
	pausing    bool          // a pause has closed the guard, which stays so until its end
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
		rescue.Go(func() { s.preallocate(s.space, s.growHost) })
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

// Outlived implements peer.Handler: which chunks of this process's memory are no more.
func (s *Session) Outlived(chunks []peer.Chunk) []peer.Chunk { return s.space.Outlived(chunks) }

// Settled implements peer.Handler.
func (s *Session) Settled(part peer.Part) { s.space.Settled(part) }

// PeerChanged implements peer.Handler: what a peer has done, or what has become of its
// memory here, may open the guard of an active process, or close it.
func (s *Session) PeerChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == Active && !s.pausing {
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

// within calls wait with a deadline of its own. Each wait of a pause or a resume has one:
// copies take as long as they take, and must not use up the time of a wait that follows.
func (s *Session) within(wait func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	return wait(ctx)
}

// give ends this caller's turn and settles the guard.
func (s *Session) give() {
	s.mu.Lock()
	defer s.mu.Unlock()
	<-s.turn
	if s.pausing && s.state == Active && !s.space.Whole() { // a panic has ended the pause
		s.state, s.unfinished = Paused, false
	}
	s.pausing = false
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
	Freed    float64 `json:"freed_seconds"`   // until no peer mapped it any more
	Released uint64  `json:"bytes"`           // own memory given back
	Detached uint64  `json:"detached_bytes"`  // peers' memory let go
	Copied   uint64  `json:"copied_bytes"`
	// Of Released, what peers still mapped when the deadline had passed: it is not free yet.
	Held   uint64   `json:"held_bytes"`
	HeldBy []Holder `json:"held_by"`
}

// Holder is a peer that still maps memory which this process has given back.
type Holder struct {
	PID   int    `json:"pid"`
	Group int    `json:"group"`
	Bytes uint64 `json:"bytes"`
}

// pauseNCCL gives NCCL's memory back to the device.
func (s *Session) pauseNCCL() (done Transition, err error) {
	if err := s.within(s.take); err != nil {
		return done, err
	}
	defer s.give()
	if s.is(Paused, false) {
		return s.pauseMore()
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
	s.mu.Lock()
	s.pausing = true
	s.moveGuard(Closed)
	s.mu.Unlock()
	report, err := s.pause()
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
	return s.notePause(report), nil
}

// notePause notes what a pause did. mu is held.
func (s *Session) notePause(report PauseReport) Transition {
	s.pauses++
	s.last.pause = report
	return Transition{Changed: true, Bytes: report.Released, Copied: report.Copied, Held: report.Held, HeldBy: report.HeldBy}
}

// pauseMore gives back what NCCL has allocated since the pause, which stays.
func (s *Session) pauseMore() (done Transition, err error) {
	if !s.space.Pausable() {
		return done, nil
	}
	clock := newClock()
	report, err := s.vacate(clock, s.node.StayStopped)
	if err != nil {
		return done, fmt.Errorf("NCCL's memory is paused, but what it has allocated since is not given back: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notePause(report), nil
}

// pause is a pause of an active process's memory, or after a resume that has not ended.
func (s *Session) pause() (r PauseReport, err error) {
	r, err = s.vacate(newClock(), func(ctx context.Context) error {
		relied, err := s.node.Quiesce(ctx)
		if err != nil {
			s.mu.Lock()
			s.relied = relied
			s.mu.Unlock()
		}
		return err
	})
	if errors.Is(err, errVacate) && s.space.Whole() {
		s.standDown()
	}
	return r, err
}

// errVacate says that a pause has failed after all peers had relied on it.
var errVacate = errors.New("give memory back")

// vacate gives the memory back once quiesce says that no peer uses it.
func (s *Session) vacate(clock *clock, quiesce func(ctx context.Context) error) (r PauseReport, err error) {
	if err := s.within(s.launched); err != nil {
		return r, err
	}
	if err := s.within(s.space.Synchronize); err != nil {
		return r, fmt.Errorf("synchronize: %w", err)
	}
	s.space.Leave(true)
	defer s.space.Leave(false)
	if err := s.within(quiesce); err != nil {
		return r, fmt.Errorf("quiesce: %w", err)
	}
	r.Quiesce = clock.lap()
	p, err := vacate(s.space, s.arena)
	if err != nil {
		return r, fmt.Errorf("%w: %w", errVacate, err)
	}
	r.Copy = p.Copying.Seconds()
	r.Release = clock.lap() - r.Copy
	r.Released, r.Detached, r.Copied = p.Released, p.Detached, p.Copied
	r.Held, r.HeldBy = s.unmapped()
	r.Freed = clock.lap()
	r.Seconds = clock.total()
	return r, nil
}

// vacate makes a panic an error, so that the pause is taken back as after any other.
func vacate(space *vmm.Space, store offload.Store) (p vmm.Paused, err error) {
	err = rescue.Err(func() (err error) {
		p, err = space.Vacate(store)
		return err
	})
	return p, err
}

// unmapped waits until no peer maps what was released, so that it is free on the device.
// It answers how many bytes of it are not when the deadline has passed, and who maps them.
func (s *Session) unmapped() (held uint64, by []Holder) {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	var blocks []uint64
	for _, h := range s.node.WaitUnmapped(ctx, s.space.Absent()) {
		by = append(by, Holder{h.PID, h.Group, s.space.Sizes(h.Blocks)})
		blocks = append(blocks, h.Blocks...)
	}
	if held = s.space.Sizes(blocks); held > 0 {
		slog.Warn("paused, but peers still map memory that was given back: it is free once they have paused, resumed or ended",
			"held_bytes", held, "held_by", by)
	}
	return held, by
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
	s.tellReady()
	s.mu.Lock()
	s.relied = s.space.Owners()
	s.mu.Unlock()
}

// tellReady tells the peers that this process's memory has its contents.
func (s *Session) tellReady() {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	s.node.Ready(ctx, s.space.Generation())
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
func (s *Session) resumeNCCL() (done Transition, err error) {
	if err := s.within(s.take); err != nil {
		return done, err
	}
	defer s.give()
	if s.is(Active, false) {
		return done, s.refresh()
	}
	clock := newClock()
	report := ResumeReport{}
	if !s.is(Paused, true) {
		if report, err = s.restore(s.space, s.node.Generation, clock); err != nil {
			return done, err
		}
		s.mu.Lock()
		s.unfinished = true
		s.mu.Unlock()
	}
	if err := s.meet(); err != nil {
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
func (s *Session) restore(space *vmm.Space, current func(owner peer.Identity) uint64, clock *clock) (r ResumeReport, err error) {
	restored, err := space.Restore()
	if err != nil {
		return r, errors.Join(err, space.Fill())
	}
	r.Restored, r.Copied = restored.Bytes, restored.Copied
	r.Create = clock.lap()
	err = s.within(func(ctx context.Context) error { return space.Attach(ctx, current) })
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
func (s *Session) meet() error {
	s.space.Resumed(false)
	s.tellReady()
	for {
		if err := s.within(s.node.WaitReady); err != nil {
			return err
		}
		if !s.space.Stale(s.node.Generation) {
			return nil
		}
		err := s.within(func(ctx context.Context) error { return s.space.Attach(ctx, s.node.Generation) })
		if err != nil {
			return err
		}
	}
}

// refresh maps peers' memory that was replaced while this process was active.
func (s *Session) refresh() error {
	if err := s.within(s.space.Arrived); err != nil {
		return err
	}
	s.mu.Lock()
	behind := len(s.relied) > 0
	s.mu.Unlock()
	if !behind && !s.space.Stale(s.node.Generation) {
		return nil
	}
	// What is replaced is unmapped first: a kernel from before it was may use it still.
	if err := s.within(s.launched); err != nil {
		return err
	}
	if err := s.within(s.space.Synchronize); err != nil {
		return fmt.Errorf("synchronize: %w", err)
	}
	return s.meet()
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
