package offload

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// DiskError says that a folder has no room for contents, or that its file system
// has failed.
type DiskError struct {
	Tried  string
	Folder string
	Needed uint64 // bytes of room that were tried to get; 0: it did not fail for that
	Free   uint64 // bytes of room that there were
	Err    error
	advice string
}

const elsewhere = "choose another folder with amem.set_disk_directory() or AMEM_DISK_DIRECTORY"

func (e *DiskError) Error() string {
	text := fmt.Sprintf("%s in the folder %s: %v", e.Tried, e.Folder, e.Err)
	if e.Needed > 0 {
		text += fmt.Sprintf(": %d more bytes of disk are needed to keep the contents in, %d are free", e.Needed, e.Free)
	}
	return text + "; " + e.advice
}

func (e *DiskError) Unwrap() error { return e.Err }

// CorruptError says that the file does not hold what was written to it.
type CorruptError struct {
	Folder string
	Offset uint64 // bytes, in the file
	Size   uint64 // bytes
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("%d bytes at offset %d of the file in the folder %s are not what was written: the disk is at fault, "+
		"or a program has changed them; if they are so at the next attempt, the contents are lost", e.Size, e.Offset, e.Folder)
}

// The system's calls that tests make fail.
var (
	pwrite    = unix.Pwrite
	pread     = unix.Pread
	fallocate = unix.Fallocate
	fstatfs   = unix.Fstatfs
	tmpfile   = unix.O_TMPFILE
	flock     = unix.Flock
)

// spool is a file without a name, or with one that goes with it. Several goroutines
// may read and write it.
type spool struct {
	folder string
	fd     int           // -1: there is none yet
	named  bool          // it is to have a name
	path   string        // its name; "": it has none
	direct bool          // the page cache is not used, as far as is known
	known  bool          // what is said of the folder was found out with another file
	size   atomic.Uint64 // in blocks; all of it has room on the disk, where the file system can tell
}

// blocks answers the size of the blocks that hold size bytes.
func blocks(size uint64) uint64 { return (size + block - 1) &^ (block - 1) }

// retried calls f until no signal interrupts it.
func retried(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// open makes the file, of size bytes, in blocks.
func (f *spool) open(size uint64) (err error) {
	if f.fd, err = f.create(); err != nil {
		f.fd = -1
		return f.failed("make a file", size, err)
	}
	if err := f.reserve(size); err != nil {
		f.close()
		return err
	}
	if s, err := f.status(); err == nil && inMemory(s) && !f.known {
		slog.Warn("the folder for paused memory is in the host's memory, not on a disk", "folder", f.folder)
	}
	if f.direct = f.direct && f.avoidCache(); !f.direct {
		_ = unix.Fadvise(f.fd, 0, 0, unix.FADV_RANDOM) // no reading ahead into what was dropped
	}
	f.known = true
	return nil
}

func (f *spool) create() (fd int, err error) {
	if f.named {
		return f.createNamed()
	}
	const flags = unix.O_RDWR | unix.O_EXCL | unix.O_CLOEXEC
	open := func(name string, flags int) error {
		return retried(func() error {
			fd, err = unix.Open(name, flags, 0o600)
			return err
		})
	}
	if err := open(f.folder, flags|tmpfile); err == nil {
		return fd, nil
	}
	// The file system may know only files with names.
	name := filepath.Join(f.folder, fmt.Sprintf(".amem-%x", rand.Uint64()))
	if err := open(name, flags|unix.O_CREAT); err != nil {
		return -1, err
	}
	if err := unix.Unlink(name); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// Files with names are locked while their process lives, so that another can tell
// and remove those that a process has left behind.
var (
	numbers  atomic.Uint64 // in the names of this process's
	fileName = regexp.MustCompile(`^amem-backup-[0-9]+-[0-9]+$`)
)

// lock locks a file, and tells whether it has its name still. A file system that
// knows no locks fails with another error than EWOULDBLOCK.
func lock(fd int) (linked bool, err error) {
	err = retried(func() error { return flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	var s unix.Stat_t
	linked = unix.Fstat(fd, &s) == nil && s.Nlink > 0 && s.Mode&unix.S_IFMT == unix.S_IFREG
	return linked, err
}

func (f *spool) createNamed() (fd int, err error) {
	for {
		path := filepath.Join(f.folder, fmt.Sprintf("amem-backup-%d-%d", os.Getpid(), numbers.Add(1)))
		err := retried(func() error {
			fd, err = unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
			return err
		})
		if errors.Is(err, unix.EEXIST) { // of an earlier process of this number, or of another namespace
			continue
		}
		if err != nil {
			return -1, err
		}
		linked, err := lock(fd)
		if linked && !errors.Is(err, unix.EWOULDBLOCK) {
			f.path = path
			return fd, nil
		}
		_ = unix.Close(fd) // a sweep was faster, and removes it
	}
}

// sweep removes the files with names in the folder whose processes have ended.
func sweep(folder string) {
	list, err := os.ReadDir(folder)
	if err != nil {
		return // who makes a file here says so
	}
	for _, e := range list {
		if !fileName.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(folder, e.Name())
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			continue // another user's
		}
		if linked, err := lock(fd); linked && err == nil {
			err := unix.Unlink(path)
			slog.Info("a file that an ended process has left behind", "path", path, "removed", err == nil)
		}
		_ = unix.Close(fd)
	}
}

// failed makes an error of the system's a DiskError. needed is how many bytes of
// room were tried to get.
func (f *spool) failed(tried string, needed uint64, err error) *DiskError {
	e := &DiskError{Tried: tried, Folder: f.folder, Err: err, advice: elsewhere}
	for _, full := range []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG} {
		if errors.Is(err, full) {
			e.Needed, e.advice = needed, "free some, or "+elsewhere
			e.Free, _, _ = f.room()
		}
	}
	return e
}

// avoidCache makes the file do without the page cache, and tells whether it does.
func (f *spool) avoidCache() bool {
	set := func(direct int) error {
		flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
		if err == nil {
			_, err = unix.FcntlInt(uintptr(f.fd), unix.F_SETFL, flags&^unix.O_DIRECT|direct)
		}
		return err
	}
	if set(unix.O_DIRECT) != nil {
		return false
	}
	if f.known {
		return true
	}
	memory, err := aligned(block)
	if err == nil {
		err = f.writeAt(memory, 0) // some file systems refuse only this, or want larger blocks
		_ = unix.Munmap(memory)
	}
	return !errors.Is(err, unix.EINVAL) || set(0) != nil
}

// status answers the state of the file system.
func (f *spool) status() (s unix.Statfs_t, err error) {
	err = retried(func() error { return fstatfs(f.fd, &s) })
	return s, err
}

// inMemory tells whether the file system has no disk.
func inMemory(s unix.Statfs_t) bool { return s.Type == unix.TMPFS_MAGIC || s.Type == unix.RAMFS_MAGIC }

// room answers how many bytes the file may still grow by, and which limit says so.
func (f *spool) room() (room uint64, limit error, err error) {
	if f.fd < 0 {
		return 0, nil, unix.EBADF
	}
	s, err := f.status()
	if err != nil {
		return 0, nil, err
	}
	room, limit = s.Bavail*uint64(s.Frsize), unix.ENOSPC
	if inMemory(s) {
		if host := (&claim{on: &claims}).room(0); host.room < room {
			room, limit = host.room, fmt.Errorf("%s: %w", host.limit, unix.ENOSPC)
		}
	}
	// To write behind this limit would end the process.
	var most unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &most); err == nil {
		if left := most.Cur - min(most.Cur, f.size.Load()); left < room {
			room, limit = left, fmt.Errorf("the process's limit of a file's size (ulimit -f): %w", unix.EFBIG)
		}
	}
	return room, limit, nil
}

// reserve takes room on the disk until the file has size bytes, in blocks. On
// failure it is as it was.
func (f *spool) reserve(size uint64) error {
	was := f.size.Load()
	if size <= was {
		return nil
	}
	room, limit, err := f.room()
	if err == nil && room < size-was {
		err = limit
	}
	// By steps: a signal makes the kernel undo one.
	for at := was; at < size && err == nil; at += min(size-at, 1<<30) {
		err = retried(func() error { return fallocate(f.fd, 0, int64(at), int64(min(size-at, 1<<30))) })
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		err = f.truncate(size) // the writes will tell
	}
	if err != nil {
		// Of what was taken before it failed nothing is needed.
		_ = f.truncate(was)
		return f.failed("reserve room for a file", size-was, err)
	}
	f.size.Store(size)
	return nil
}

// truncate makes the file end at size, in blocks.
func (f *spool) truncate(size uint64) error {
	if err := retried(func() error { return unix.Ftruncate(f.fd, int64(size)) }); err != nil {
		return f.failed("change the size of a file", size, err)
	}
	f.size.Store(size)
	return nil
}

// close ends the file. It is emptied first: a child of fork() may have it too.
func (f *spool) close() {
	if f.fd < 0 {
		return
	}
	_ = f.truncate(0) // closing it does the same
	if f.path != "" {
		_ = unix.Unlink(f.path)
	}
	_ = unix.Close(f.fd)
	f.fd = -1
	f.size.Store(0)
}

// write writes a chunk, which lies at the beginning of memory, and notes its checksum.
func (f *spool) write(k *chunk, memory []byte) error {
	k.sum = checksum(memory[:k.size])
	whole := memory[:blocks(k.size)]
	if err := f.writeAt(whole, k.at); err != nil {
		return f.failed(fmt.Sprintf("write at offset %d of a file", k.at), uint64(len(whole)), err)
	}
	f.drop(k.at, uint64(len(whole)))
	return nil
}

// writeAt writes blocks.
func (f *spool) writeAt(p []byte, at uint64) error {
	for len(p) > 0 {
		n := 0
		err := retried(func() (err error) {
			n, err = pwrite(f.fd, p, int64(at))
			return err
		})
		if err != nil {
			return err
		}
		n &^= block - 1 // it can't go on within a block
		if n == 0 {
			return io.ErrShortWrite
		}
		p = p[n:]
		at += uint64(n)
	}
	return nil
}

// read reads a chunk to the beginning of memory, and fails if it is not what was
// written.
func (f *spool) read(k chunk, memory []byte) error {
	corrupt := &CorruptError{f.folder, k.at, k.size}
	whole := memory[:blocks(k.size)]
	for p, at := whole, k.at; len(p) > 0; {
		n := 0
		err := retried(func() (err error) {
			n, err = pread(f.fd, p, int64(at))
			return err
		})
		if err != nil {
			return &DiskError{Tried: fmt.Sprintf("read at offset %d of a file", at), Folder: f.folder, Err: err,
				advice: "the contents are still kept: try again"}
		}
		if n &^= block - 1; n == 0 { // the file ends here
			return corrupt
		}
		p = p[n:]
		at += uint64(n)
	}
	f.drop(k.at, uint64(len(whole)))
	if checksum(whole[:k.size]) != k.sum {
		return corrupt
	}
	return nil
}

// drop makes the page cache give up what was written or read.
func (f *spool) drop(at, size uint64) {
	if f.direct {
		return
	}
	const now = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	_ = retried(func() error { return unix.SyncFileRange(f.fd, int64(at), int64(size), now) }) // a wish only
	_ = unix.Fadvise(f.fd, int64(at), int64(size), unix.FADV_DONTNEED)
}

// flush waits until the disk has taken what is in the page cache, which says
// only now that there is no room for it.
func (f *spool) flush() error {
	if f.direct {
		return nil
	}
	if err := retried(func() error { return unix.Fdatasync(f.fd) }); err != nil {
		return f.failed("write a file", block, err)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(p []byte) uint32 { return crc32.Checksum(p, castagnoli) }
