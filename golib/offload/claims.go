package offload

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Ranks of one host pause together, and each needs host memory that takes seconds to
// get. So each claims first what it is about to get, and counts what the others claim.
//
// A claim is a lock on a range of an empty file that is its user's own: the range is as
// long as the claim has bytes, and begins at the process's slot. The kernel keeps it,
// tells who has it, and drops it with the process. No process reads what another has
// written.
const (
	slotSize  = 1 << 40
	slotCount = 1 << 22 // as many as there can be pids
	maxClaim  = slotSize - 1
)

// How long a claim that the host has room for, but for what others claim, waits for
// theirs to end. What they have populated is counted twice until they say so, a piece
// of 512 MB each at most.
var claimWait = 2 * time.Second

// claims is what this process has claimed of its host.
var claims ledger

// ledger is the file of claims, and what this process has claimed there.
type ledger struct {
	folder string // "": the host's

	turn sync.Mutex // held by a thread that claims more

	mu     sync.Mutex
	fd     int
	opened bool
	slot   int64
	bytes  uint64 // of this process
}

// claim is a part of what this process has claimed. All goroutines may use it.
type claim struct {
	on    *ledger
	bytes uint64 // on.mu guards it
}

// held is what another process has claimed.
type held struct {
	pid   int // 0: it is in another PID namespace
	bytes uint64
}

// take claims so many bytes, and no others. It fails where the host has no room for them
// beside what is claimed already; nothing is claimed then.
func (c *claim) take(bytes uint64) error {
	c.shrink(math.MaxUint64)
	if bytes == 0 {
		return nil
	}
	return c.wait(bytes, func() (roomError, error) {
		c.on.turn.Lock()
		defer c.on.turn.Unlock()
		unlock, err := c.on.lock()
		if err != nil {
			return roomError{}, err
		}
		defer unlock()
		short := c.room(bytes)
		if short.fits() {
			c.on.mu.Lock()
			defer c.on.mu.Unlock()
			c.bytes = bytes
			c.on.set(c.on.bytes + bytes)
		}
		return short, nil
	})
}

// check fails where the host has no room any more for a part of what was claimed.
func (c *claim) check(bytes uint64) error {
	return c.wait(bytes, func() (roomError, error) { return c.room(bytes), nil })
}

// wait calls try until there is room, or waiting for others does not help.
func (c *claim) wait(bytes uint64, try func() (roomError, error)) error {
	for deadline := time.Now().Add(claimWait); ; time.Sleep(10 * time.Millisecond) {
		short, err := try()
		switch {
		case err != nil:
			return err
		case short.fits():
			return nil
		case short.alone < bytes || time.Now().After(deadline):
			return &short
		}
	}
}

// shrink says that so many bytes of a claim are populated, or not wanted any more.
func (c *claim) shrink(bytes uint64) {
	c.on.mu.Lock()
	defer c.on.mu.Unlock()
	bytes = min(bytes, c.bytes)
	c.bytes -= bytes
	c.on.set(c.on.bytes - bytes)
}

// roomError says what room the host has for bytes that are wanted.
type roomError struct {
	wanted uint64
	room   uint64
	limit  string // that says so
	alone  uint64 // the room if nobody claimed any
	others []held
	own    uint64 // claimed elsewhere in this process
}

func (e *roomError) fits() bool { return e.room >= e.wanted }

func (e *roomError) Error() string {
	text := fmt.Sprintf("%s leaves %d", e.limit, e.room)
	if len(e.others) > 0 {
		var bytes uint64
		var pids []string
		for _, h := range e.others {
			bytes += h.bytes
			pids = append(pids, fmt.Sprint(h.pid))
		}
		text += fmt.Sprintf(", since other processes are getting %d (pid %s)", bytes, strings.Join(pids, ", "))
	}
	if e.own > 0 {
		text += fmt.Sprintf(", since this process is getting %d for other tags", e.own)
	}
	return text
}

// room answers what room there is for bytes of the claim.
func (c *claim) room(bytes uint64) roomError {
	c.on.mu.Lock()
	defer c.on.mu.Unlock()
	e := roomError{wanted: bytes, own: c.on.bytes - c.bytes}
	if c.on.open() {
		e.others = c.on.others(slotSize, math.MaxInt64)
	}
	all := append([]held{{os.Getpid(), e.own}}, e.others...)
	e.alone, _ = hostRoom(nil)
	e.room, e.limit = hostRoom(all)
	return e
}

// open opens the file, once. mu is held.
func (l *ledger) open() bool {
	if l.opened {
		return l.fd >= 0
	}
	l.opened = true
	folder := l.folder
	if folder == "" {
		if folder = "/dev/shm"; unix.Access(folder, unix.W_OK) != nil {
			folder = os.TempDir()
		}
	}
	var err error
	path := filepath.Join(folder, fmt.Sprintf("amem-claims-%d", os.Geteuid()))
	if l.fd, err = ownFile(path); err != nil {
		l.fd = -1
		slog.Warn("what other processes claim of the host's memory is not known, so pauses of several may be too much for it",
			"file", path, "error", err)
		return false
	}
	l.slot = int64(os.Getpid()%slotCount) * slotSize
	if l.slot == 0 {
		l.slot = slotSize // the first slot's place is for the lock
	}
	return true
}

// renew goes on in a new file where the old one was removed, as systemd-logind does when
// the user's last session ends: who starts later would not see what is claimed in the old
// one. mu is held.
func (l *ledger) renew() {
	var s unix.Stat_t
	if !l.opened || l.fd < 0 || unix.Fstat(l.fd, &s) != nil || s.Nlink > 0 {
		return
	}
	_ = unix.Close(l.fd)
	bytes := l.bytes
	l.opened, l.bytes = false, 0
	l.set(bytes)
}

// ownFile opens an empty file that nobody but this user can have made or can lock.
func ownFile(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return -1, err
	}
	var s unix.Stat_t
	if err = unix.Fstat(fd, &s); err == nil && (s.Mode&unix.S_IFMT != unix.S_IFREG || int(s.Uid) != os.Geteuid() || s.Mode&0o077 != 0) {
		err = errors.New("it is not this user's own file; remove it")
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// lock keeps other processes from claiming, until unlock is called. It does not wait
// long: they hold it for as long as it takes to read a few files.
func (l *ledger) lock() (unlock func(), err error) {
	l.mu.Lock()
	l.renew()
	known := l.open()
	l.mu.Unlock()
	if !known {
		return func() {}, nil
	}
	for deadline := time.Now().Add(claimWait); ; time.Sleep(time.Millisecond) {
		err := l.fcntl(unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1})
		if err == nil {
			return func() { _ = l.fcntl(unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Len: 1}) }, nil
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			slog.Warn("what other processes claim of the host's memory is not known", "error", err)
			return func() {}, nil
		}
		if time.Now().After(deadline) {
			by := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
			_ = l.fcntl(unix.F_GETLK, &by)
			return nil, fmt.Errorf("process %d has been claiming host memory for %v and does not go on", by.Pid, claimWait)
		}
	}
}

func (l *ledger) fcntl(command int, lock *unix.Flock_t) error {
	return retried(func() error { return unix.FcntlFlock(uintptr(l.fd), command, lock) })
}

// set changes what this process claims. mu is held.
func (l *ledger) set(bytes uint64) {
	before := min(l.bytes, maxClaim)
	l.bytes = bytes
	bytes = min(bytes, maxClaim)
	if bytes == before || !l.open() {
		return
	}
	if bytes < before {
		_ = l.fcntl(unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: l.slot + int64(bytes), Len: int64(before - bytes)})
		return
	}
	var err error
	for range 64 { // a process of another PID namespace may be in the slot
		if err = l.fcntl(unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: l.slot, Len: int64(bytes)}); err == nil {
			return
		}
		if before > 0 {
			break
		}
		l.slot = slotSize + (l.slot+65537*slotSize)%((slotCount-1)*slotSize)
	}
	slog.Warn("other processes do not know what this one claims of the host's memory", "error", err)
}

// others lists what other processes claim between two offsets of the file. mu is held.
func (l *ledger) others(from, to int64) []held {
	if from >= to {
		return nil
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: from, Len: to - from}
	if err := l.fcntl(unix.F_GETLK, &lock); err != nil || lock.Type == unix.F_UNLCK {
		return nil
	}
	end := lock.Start + lock.Len
	if lock.Len == 0 || end > to || end <= from { // to the file's end
		end = to
	}
	found := held{int(max(lock.Pid, 0)), uint64(end - max(lock.Start, from))}
	return slices.Concat(l.others(from, lock.Start), []held{found}, l.others(end, to))
}
