package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"amem/golib/cuda"
	"amem/golib/offload"
	"amem/golib/rescue"
	"amem/golib/vmm"
)

// Backup says what a pause does with a region's contents.
type Backup int

// The kinds of backup, as amem_backup_t counts.
const (
	BackupNone Backup = 0
	BackupCPU  Backup = 1
	BackupDisk Backup = 2

	opened Backup = 3 // not this process's memory: another's, which it has opened
)

func (b Backup) String() string { return [...]string{"none", "cpu", "disk", "opened"}[b] }

const (
	maxRegions = 128 // as many functions as the hook has for allocators
	maxTag     = 64
)

// Region is memory of the program's own under a tag, with one kind of backup. It
// is paused and resumed by itself.
type Region struct {
	session *Session
	tag     string
	backup  Backup
	space   *vmm.Space

	turn chan struct{} // holds one token: who has it may change what follows

	recall uint64 // the last one of its memory, from those who have opened it

	paused atomic.Bool
	over   atomic.Uint64 // the last recall that is over: who was told of it is to be told so

	mu    sync.Mutex
	store offload.Store // made when first needed
	away  bool          // counted among the regions with memory that is not there
}

// regions are those of a Session. They are never removed.
type regions struct {
	mu      sync.Mutex
	list    []*Region
	share   *sharing // made with the first
	numbers atomic.Uint64
	kept    atomic.Uint64 // of what Keep has noted
	folder  string        // for BackupDisk; "": Options.Folder
	named   bool          // the files there have names
	retain  atomic.Bool
}

func (s *Session) allRegions() []*Region {
	s.regions.mu.Lock()
	defer s.regions.mu.Unlock()
	return s.regions.list[:len(s.regions.list):len(s.regions.list)]
}

// Region answers the region of a tag and a backup, and its number, and makes it
// if there is none.
func (s *Session) Region(tag string, backup Backup) (*Region, int, error) {
	if tag == "" || len(tag) > maxTag || tag == Tag || strings.ContainsAny(tag, ",\x00") {
		return nil, 0, fmt.Errorf("%w: %q is no tag for a region: it has 1 to %d bytes without commas, and is not %q",
			ErrArgument, tag, maxTag, Tag)
	}
	if backup < BackupNone || backup > BackupDisk {
		return nil, 0, fmt.Errorf("%w: backup %d; 0 is none, 1 cpu, 2 disk", ErrArgument, int(backup))
	}
	return s.region(tag, backup)
}

func (s *Session) region(tag string, backup Backup) (*Region, int, error) {
	s.regions.mu.Lock()
	defer s.regions.mu.Unlock()
	for i, r := range s.regions.list {
		if r.tag == tag && r.backup == backup {
			return r, i, nil
		}
	}
	if len(s.regions.list) == maxRegions {
		return nil, 0, fmt.Errorf("%w: this process has %d regions already, which is as many as it can have", ErrState, maxRegions)
	}
	if s.regions.share == nil {
		share, err := newSharing(s)
		if err != nil {
			return nil, 0, err
		}
		s.regions.share = share
	}
	r := &Region{session: s, tag: tag, backup: backup, turn: make(chan struct{}, 1), space: vmm.New(s.driver, vmm.Options{
		Arena: true, Timeout: s.options.Timeout, Region: tag, Discard: backup == BackupNone, Numbers: &s.regions.numbers,
		Margin: s.options.Margin, Reached: s.options.Reached,
	})}
	r.space.SetPeers(s.regions.share.node)
	s.regions.list = append(s.regions.list, r)
	if s.options.Prealloc && backup == BackupCPU {
		rescue.Go(func() { s.preallocate(r.space, r.growHost) })
	}
	return r, len(s.regions.list) - 1, nil
}

// Allocate answers memory of the region of a number.
func (s *Session) Allocate(number int, size uint64, device int32) (cuda.Ptr, error) {
	r := s.allRegions()[number]
	p, err := r.space.Allocate(size, device)
	if err != nil {
		return 0, fmt.Errorf("region %q: %w", r.tag, err)
	}
	return p, nil
}

// Reach gives regions' memory of a device to the devices that have peer access to
// it now, as the driver does with cudaMalloc's.
func (s *Session) Reach(device int32) error {
	var errs []error
	for _, r := range s.allRegions() {
		if err := r.space.Reach(device); err != nil {
			errs = append(errs, fmt.Errorf("region %q: %w", r.tag, err))
		}
	}
	return errors.Join(errs...)
}

// DeviceOf returns the device of a context; 0 is the calling thread's.
func (s *Session) DeviceOf(ctx cuda.Context) (device int32, err error) {
	if ctx == 0 {
		return s.driver.CurrentDevice()
	}
	err = s.driver.With(ctx, func() (err error) {
		device, err = s.driver.CurrentDevice()
		return err
	})
	return device, err
}

// Free gives memory of the region of a number back.
func (s *Session) Free(number int, p cuda.Ptr) error { return s.allRegions()[number].free(p) }

func (r *Region) free(p cuda.Ptr) error {
	err := r.space.Free(p)
	r.tidy()
	if err != nil {
		return fmt.Errorf("region %q: %w", r.tag, err)
	}
	return nil
}

// FreeMemory gives memory back, of whichever region it is. known is false for
// other memory.
func (s *Session) FreeMemory(p cuda.Ptr) (known bool, err error) {
	r, _ := s.at(p)
	if r == nil || r.backup == opened {
		return false, nil
	}
	return true, r.free(p)
}

// RetainBackups makes a resume, from now on, leave backups in host memory readable
// until the next pause, or not.
func (s *Session) RetainBackups(on bool) { s.regions.retain.Store(on) }

// SetDiskFolder says where BackupDisk keeps files from now on, and whether they
// have names.
func (s *Session) SetDiskFolder(folder string, named bool) error {
	info, err := os.Stat(folder)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrArgument, err)
	}
	if !info.IsDir() {
		return fmt.Errorf("%w: %s is not a folder", ErrArgument, folder)
	}
	s.regions.mu.Lock()
	defer s.regions.mu.Unlock()
	s.regions.folder, s.regions.named = folder, named
	return nil
}

func (s *Session) diskFolder() (folder string, named bool) {
	s.regions.mu.Lock()
	defer s.regions.mu.Unlock()
	if s.regions.folder != "" {
		return s.regions.folder, s.regions.named
	}
	return s.options.Folder, false
}

// at answers the region whose memory is at p, or nil.
func (s *Session) at(p cuda.Ptr) (r *Region, live bool) {
	for _, r := range s.allRegions() {
		if live, known := r.space.Live(p); known {
			return r, live
		}
	}
	return nil, false
}

// MemoryState answers whether a region's memory at p is paused. known is false
// for other memory.
func (s *Session) MemoryState(p cuda.Ptr) (state State, known bool) {
	r, live := s.at(p)
	if r == nil {
		return 0, false
	}
	if live {
		return Active, true
	}
	return Paused, true
}

// ReadBackup copies what the last pause has kept of len(to) bytes at p: while
// paused, and after a resume that has retained it.
func (s *Session) ReadBackup(p cuda.Ptr, to []byte) error {
	_, err := s.backup(p, uint64(len(to)), to)
	return err
}

// FindBackup answers where on the host that is, until the next pause or resume.
func (s *Session) FindBackup(p cuda.Ptr, size uint64) ([]byte, error) {
	found, err := s.backup(p, size, nil)
	if err == nil && found == nil {
		return nil, fmt.Errorf("%w: the backup of %d bytes at %#x is not in one piece in host memory; copy it instead",
			ErrState, size, uint64(p))
	}
	return found, err
}

func (s *Session) backup(p cuda.Ptr, size uint64, to []byte) ([]byte, error) {
	r, live := s.at(p)
	switch {
	case r == nil:
		return nil, fmt.Errorf("%w: the memory at %#x is not of a region", ErrArgument, uint64(p))
	case r.backup == BackupNone && !live:
		return nil, fmt.Errorf("%w: tag %q keeps no backup of the memory at %#x", ErrState, r.tag, uint64(p))
	}
	// No pause or resume changes what is kept meanwhile.
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	if err := r.take(ctx); err != nil {
		return nil, err
	}
	defer r.give()
	found, err := r.space.Backup(p, size, to)
	switch {
	case errors.Is(err, cuda.ErrInvalidValue):
		err = fmt.Errorf("%w: %w", ErrArgument, err)
	case errors.Is(err, vmm.ErrNoBackup):
		err = fmt.Errorf("%w: tag %q: %w; what is not paused can be read as usual", ErrState, r.tag, err)
	}
	return found, err
}

func (r *Region) isPaused() bool { return r.paused.Load() }

// take waits for this caller's turn.
func (r *Region) take(ctx context.Context) error {
	select {
	case r.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("another thread's pause or resume has not ended: %w", ctx.Err())
	}
}

// keeper answers where a pause keeps the contents. The caller has the turn.
func (r *Region) keeper() offload.Store {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.store == nil {
		if r.backup == BackupDisk {
			folder, named := r.session.diskFolder()
			r.store = offload.NewDisk(r.session.driver, folder, named)
		} else {
			r.store = offload.NewArena(r.session.driver)
		}
	}
	return r.store
}

func (r *Region) give() {
	<-r.turn
	r.tidy()
}

// tidy gives back what a pause has taken for backups, if the region has no memory
// any more. Who has the turn meanwhile does it at the turn's end. While a device is
// busy it stays, until tidy is called again.
func (r *Region) tidy() {
	if !r.space.Empty() || !r.hasStore() {
		return
	}
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	default:
		return
	}
	if !r.space.Empty() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), brief)
	defer cancel()
	err := r.dropStore(func() error { return r.session.idle(ctx) })
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		slog.Info("host memory of a region without memory is kept while a GPU is busy: a later pause or resume, or "+
			"amem.free_host_memory(), gives it back", "tag", r.tag, "bytes", r.store.Bytes())
	case err != nil:
		slog.Warn("host memory of a region without memory is kept", "tag", r.tag, "error", err)
	}
}

func (r *Region) hasStore() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.store != nil
}

// dropStore gives back what backups take. The caller has the turn, and nothing is
// to be restored. See offload.Store for ready.
func (r *Region) dropStore(ready func() error) error {
	if r.store == nil {
		return nil
	}
	if err := r.space.AnyDevice(func() error { return r.store.Free(ready) }); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.store = nil // the next may be in another folder
	return nil
}

func (r *Region) pause() (done Transition, err error) {
	done, err = r.vacate()
	if err != nil {
		err = errors.Join(err, r.session.within(r.lend))
	}
	return done, err
}

// vacate is a pause, without what is said to those who had let go of the memory
// when it has failed.
func (r *Region) vacate() (done Transition, err error) {
	if err := r.session.within(r.take); err != nil {
		return done, err
	}
	defer r.give()
	already := r.isPaused()
	if already && !r.space.Pausable() {
		return done, nil
	}
	if err := r.session.within(r.space.Synchronize); err != nil {
		return done, fmt.Errorf("synchronize: %w", err)
	}
	r.space.Leave(true)
	defer r.space.Leave(false)
	err = r.session.within(func(ctx context.Context) (err error) {
		r.recall, err = r.session.regions.share.node.Leave(ctx, r.space.Shared())
		return err
	})
	defer func() {
		if err != nil {
			r.over.Store(r.recall)
		}
	}()
	if err != nil {
		return done, err
	}
	defer r.gate()()
	p, err := vacate(r.space, r.keeper())
	if already {
		if err != nil {
			return done, fmt.Errorf("the tag is paused, but what was allocated since is not given back: %w", err)
		}
		return Transition{Changed: true, Bytes: p.Released, Copied: p.Copied}, nil
	}
	if err != nil && r.space.Whole() {
		r.removeFiles()
		return done, err
	}
	r.paused.Store(true)
	if err != nil {
		return done, fmt.Errorf("some memory is given back and could not be restored, so the tag is paused; resume it: %w", err)
	}
	return Transition{Changed: true, Bytes: p.Released, Copied: p.Copied}, nil
}

// lend makes those who have opened memory of the region map what is there of it again, if
// they were told to let go of it and not yet of the end of that. The caller does not have the
// turn: they may wait for theirs, and somebody for this one.
func (r *Region) lend(ctx context.Context) error {
	return r.session.regions.share.node.Return(ctx, r.over.Load(), r.space.Lendable())
}

func (r *Region) resume() (done Transition, err error) {
	if done, err = r.restore(); err != nil {
		return done, err
	}
	if err := r.session.within(r.lend); err != nil {
		return done, fmt.Errorf("this process's memory is back; resume again, to have it back in all others: %w", err)
	}
	return done, nil
}

// restore is a resume, but for other processes' mappings of the memory. Of an
// active tag it maps what is missing of other processes' memory.
func (r *Region) restore() (done Transition, err error) {
	if err := r.session.within(r.take); err != nil {
		return done, err
	}
	defer r.give()
	defer r.gate()()
	if !r.isPaused() {
		return done, r.session.within(func(ctx context.Context) error { return r.space.Attach(ctx, never) })
	}
	defer r.space.Leave(false) // nobody has got any of it before
	report, err := r.session.restore(r.space, never, newClock())
	if err != nil {
		return done, err
	}
	r.space.Resumed(r.backup == BackupCPU && r.session.regions.retain.Load())
	r.removeFiles()
	r.paused.Store(false)
	r.over.Store(r.recall)
	return Transition{Changed: true, Bytes: report.Restored, Copied: report.Copied}, nil
}

// removeFiles removes the files of a pause that have names: all memory is back.
func (r *Region) removeFiles() {
	if d, is := r.store.(*offload.Disk); is {
		d.Remove()
	}
}

// closeRegions stops serving those who share memory of regions.
func (s *Session) closeRegions() {
	s.regions.mu.Lock()
	defer s.regions.mu.Unlock()
	if s.regions.share != nil {
		s.regions.share.node.Close()
	}
}

// Keep notes that memory in the range, NCCL's or a region's, must stay where it is, and
// answers a number for it, or 0 where there is none. buffer: see vmm.Space.Keep.
func (s *Session) Keep(p cuda.Ptr, size uint64, why string, buffer bool) uint64 {
	number, known := s.regions.kept.Add(1), false
	for _, space := range s.spaces() {
		known = space.Keep(number, p, size, why, buffer) || known
	}
	if !known {
		return 0
	}
	return number
}

// Registered says how the NIC's library names what Keep has numbered; 0: the
// registration has failed, or ended.
func (s *Session) Registered(number uint64, mr uintptr) {
	for _, space := range s.spaces() {
		space.Registered(number, mr)
	}
}

// Deregister answers the number of what is about to be deregistered, or 0 where none of
// it is amem's. Registered says whether it has.
func (s *Session) Deregister(mr uintptr) (number uint64) {
	for _, space := range s.spaces() {
		number = max(number, space.Deregister(mr))
	}
	return number
}

// spaces lists NCCL's memory and that of all regions.
func (s *Session) spaces() []*vmm.Space {
	list := []*vmm.Space{s.space}
	for _, r := range s.allRegions() {
		list = append(list, r.space)
	}
	return list
}

// gate makes the hook look at all copies, since some of the region's memory may be
// taken away. The returned function ends that, unless some of it is: paused, or recalled
// by its owner.
func (r *Region) gate() (end func()) {
	r.session.countPaused(1)
	return func() {
		r.mu.Lock()
		away := r.isPaused() || r.space.Missing()
		change := 0
		if away != r.away {
			r.away, change = away, 1
			if !away {
				change = -1
			}
		}
		r.mu.Unlock()
		r.session.countPaused(change - 1)
	}
}

// countPaused tells the hook how many more regions have memory that is not there.
func (s *Session) countPaused(more int) {
	if s.options.Paused != nil && more != 0 {
		s.options.Paused(more)
	}
}
