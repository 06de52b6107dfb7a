package offload

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/rescue"
)

const (
	// What is written and read without the page cache begins and ends at a
	// multiple of this, in the file and in memory: of every disk's block size.
	block = 4096
	// Contents are written and read in chunks of this size, so many of them at
	// once: enough for a disk to be as fast as it can, and little memory.
	chunkSize = 8 << 20
	ringSize  = 8
)

// Disk keeps contents in a file without a name: nothing is left of it once the
// process has ended, however it did. Where the file system allows it, the page
// cache is not used: it is made of the very memory that is short.
//
// With names, each Save has a file of its own, which the folder shows until Remove,
// for callers who look for them there. The next Disk with names in the folder removes
// those of processes that have ended.
//
// Each chunk's checksum is kept in memory, so nothing comes back that was not
// saved. Chunks pass through a ring of pinned buffers, so copies of the device
// and the disk's work overlap. Sizes are bytes.
type Disk struct {
	driver *cuda.Driver
	file   spool    // without a name; with names, what is known of the folder
	spools []*spool // with names
	named  bool
	node   int // the memory node to prefer; -1: any

	wanted uint64 // what Begin was told
	saved  uint64 // of that
	end    uint64 // of what was saved, in the file
	begun  uint64 // how often all was forgotten

	chunkSize uint64
	ringSize  int
	ring      []*buffer
	next      int                           // in the ring, to be used
	events    map[cuda.Context][]cuda.Event // one for each buffer
	bytes     atomic.Uint64                 // of the ring
	fileBytes atomic.Uint64                 // of the files with names
}

// chunk is a part of contents that is read and written at once.
type chunk struct {
	from uint64 // where it begins in what is kept of the contents
	size uint64
	file *spool
	at   uint64 // where it begins in the file
	sum  uint32 // CRC-32C
}

// buffer is pinned memory that chunks pass through.
type buffer struct {
	memory []byte
	slot   int          // in the ring
	disk   chan error   // answers once the disk's work with it has ended; nil: there is none
	copied func() error // waits until copies with it have ended; nil: there are none
}

// NewDisk makes a store that keeps contents in a file in the folder, or in several
// with names. Nothing is taken before it is needed.
func NewDisk(driver *cuda.Driver, folder string, named bool) *Disk {
	if named {
		sweep(folder)
	}
	return &Disk{
		driver: driver, file: spool{folder: folder, fd: -1, direct: true}, named: named, node: -1,
		chunkSize: chunkSize, ringSize: ringSize, events: map[cuda.Context][]cuda.Event{},
	}
}

// Folder answers where the files are.
func (d *Disk) Folder() string { return d.file.folder }

// Bytes answers how much host memory is held, to any goroutine: pinned buffers.
func (d *Disk) Bytes() uint64 { return d.bytes.Load() }

// FileBytes answers how much of the disk is held, to any goroutine.
func (d *Disk) FileBytes() uint64 { return d.file.size.Load() + d.fileBytes.Load() }

// Prefer makes new host memory come from a memory node of the host, if it has any left.
func (d *Disk) Prefer(node int) { d.node = node }

// Begin forgets all that was saved, and makes the file as large as total bytes
// need. It fails with a *DiskError. With names, the files are made by Save.
func (d *Disk) Begin(total uint64) error {
	d.begun++
	d.wanted, d.saved, d.end = total, 0, 0
	size := blocks(total)
	switch {
	case d.named:
		d.Remove()
	case d.file.fd >= 0 && size < d.file.size.Load():
		return d.file.truncate(size)
	case d.file.fd >= 0:
		return d.file.reserve(size)
	case total > 0:
		return d.file.open(size)
	}
	return nil
}

// Save copies the ranges kept out, in stream order, and returns once they are in
// the file. It fails with a *DiskError, a *HostMemoryError or the driver's; no
// copy is under way then. A context must be current.
func (d *Disk) Save(c *Contents, stream cuda.Stream) (err error) {
	c.forget()
	total := c.Bytes()
	if total > d.wanted-d.saved {
		return fmt.Errorf("%d bytes more than was said are to be kept", total-(d.wanted-d.saved))
	}
	if total == 0 {
		c.keeper, c.age = d, d.begun
		return nil
	}
	file, start := &d.file, d.end
	if d.named {
		if file, err = d.open(blocks(total)); err != nil {
			return err
		}
		start = 0
	}
	chunks, end := d.cut(file, start, total)
	if err := file.reserve(end); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.settle())
		}
	}()
	var last *buffer
	for i := range len(chunks) + 1 {
		var b *buffer
		if i < len(chunks) {
			if b, err = d.buffer(true); err != nil {
				return err
			}
			k := &chunks[i]
			if err := d.copy(b, stream, func() error { return c.copyOut(d.driver, k.from, b.memory[:k.size], stream) }); err != nil {
				return err
			}
		}
		if i > 0 { // while the next is copied
			if err := last.wait(); err != nil {
				return err
			}
			k, memory := &chunks[i-1], last.memory
			last.start(func() error { return file.write(k, memory) })
		}
		last = b
	}
	for _, b := range d.ring {
		if err := b.wait(); err != nil {
			return err
		}
	}
	if err := file.flush(); err != nil {
		return err
	}
	d.saved += total
	d.end = end
	c.keeper, c.age, c.chunks = d, d.begun, chunks
	return nil
}

// Restore starts to copy everything back, in stream order, and returns once it
// is read. It fails with a *DiskError, a *CorruptError or the driver's; no copy
// from the file is under way then, and it may be tried again. A context must be
// current.
func (d *Disk) Restore(c *Contents, stream cuda.Stream) (err error) {
	if err := c.keptIn(d); err != nil {
		return err
	}
	if err := c.clear(d.driver, stream); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.settle())
		}
	}()
	// So many are read ahead. Two buffers are for copies: nothing waits for the last.
	ahead := max(0, len(d.ring)-2)
	var reading []*buffer
	for i := range len(c.chunks) + ahead {
		if i < len(c.chunks) {
			b, err := d.buffer(false)
			if err != nil {
				return err
			}
			k := c.chunks[i]
			b.start(func() error { return k.file.read(k, b.memory) })
			reading = append(reading, b)
		}
		if i >= ahead {
			b, k := reading[i-ahead], c.chunks[i-ahead]
			if err := b.wait(); err != nil {
				return err
			}
			if err := d.copy(b, stream, func() error { return c.copyIn(d.driver, k.from, b.memory[:k.size], stream) }); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Disk) age() uint64 { return d.begun }

// read answers what is kept of c from an offset on.
func (d *Disk) read(c *Contents, from uint64, to []byte) error {
	memory, err := aligned(d.chunkSize)
	if err != nil {
		return fmt.Errorf("memory to read with: %w", err)
	}
	defer func() { _ = unix.Munmap(memory) }()
	for _, k := range c.chunks {
		if from >= k.from+k.size || len(to) == 0 {
			continue
		}
		if err := k.file.read(k, memory); err != nil {
			return err
		}
		n := copy(to, memory[from-k.from:k.size])
		to = to[n:]
		from += uint64(n)
	}
	return nil
}

// aligned maps memory that is read to and written from without the page cache.
func aligned(size uint64) ([]byte, error) {
	return unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
}

// Free forgets all that was saved and gives the file and the buffers back. A
// context must be current. What can't be unpinned stays.
func (d *Disk) Free() error {
	d.begun++
	d.wanted, d.saved, d.end = 0, 0, 0
	d.file.close()
	d.Remove()
	for len(d.ring) > 0 {
		b := d.ring[len(d.ring)-1]
		if err := b.wait(); err != nil {
			return err
		}
		if err := d.driver.HostUnregister(unsafe.Pointer(&b.memory[0])); err != nil {
			return err
		}
		d.ring = d.ring[:len(d.ring)-1]
		d.bytes.Add(-uint64(len(b.memory)))
		if err := unix.Munmap(b.memory); err != nil {
			return err
		}
	}
	return nil
}

// Remove forgets what was saved to files with names, and removes them. No Restore
// may be under way.
func (d *Disk) Remove() {
	if len(d.spools) == 0 {
		return
	}
	d.begun++
	for _, f := range d.spools {
		f.close()
	}
	d.spools = nil
	d.fileBytes.Store(0)
}

// open makes a file with a name, of size bytes, in blocks.
func (d *Disk) open(size uint64) (*spool, error) {
	f := &spool{folder: d.file.folder, fd: -1, named: true, direct: d.file.direct, known: d.file.known}
	if err := f.open(size); err != nil {
		return nil, err
	}
	d.file.direct, d.file.known = f.direct, f.known
	d.spools = append(d.spools, f)
	d.fileBytes.Add(size)
	return f, nil
}

// cut says in which chunks contents go to the file from start on, each at a block's
// beginning, and where the last of them ends.
func (d *Disk) cut(file *spool, start, total uint64) (chunks []chunk, end uint64) {
	end = start
	for from := uint64(0); from < total; from += d.chunkSize {
		size := min(total-from, d.chunkSize)
		chunks = append(chunks, chunk{from: from, size: size, file: file, at: end})
		end += blocks(size)
	}
	return chunks, end
}

// buffer answers one that is not in use: a new one while the ring may grow, or
// else the one whose use began first.
func (d *Disk) buffer(grow bool) (*buffer, error) {
	if grow && len(d.ring) < d.ringSize {
		if err := d.grow(); err != nil {
			return nil, err
		}
		d.next = len(d.ring) - 1
	}
	b := d.ring[d.next]
	d.next = (d.next + 1) % len(d.ring)
	return b, b.wait()
}

// grow adds a buffer.
func (d *Disk) grow() error {
	if room, limit := hostRoom(); room < d.chunkSize {
		return &HostMemoryError{d.chunkSize, fmt.Errorf("%s leaves %d", limit, room)}
	}
	memory, err := populated(d.chunkSize, d.node)
	if err != nil {
		return &HostMemoryError{d.chunkSize, err}
	}
	if err := d.driver.HostRegister(unsafe.Pointer(&memory[0]), d.chunkSize); err != nil {
		return errors.Join(&HostMemoryError{d.chunkSize, fmt.Errorf("pin it: %w", err)}, unix.Munmap(memory))
	}
	d.ring = append(d.ring, &buffer{memory: memory, slot: len(d.ring)})
	d.bytes.Add(d.chunkSize)
	return nil
}

// copy calls f, which starts copies with the buffer: until they have ended, the
// buffer waits for them.
func (d *Disk) copy(b *buffer, stream cuda.Stream, f func() error) error {
	event, err := d.event(b)
	if err != nil {
		return err
	}
	b.copied = func() error { return d.driver.StreamSynchronize(stream) }
	if err := f(); err != nil {
		return err // some may have been started
	}
	if err := d.driver.Record(event, stream); err != nil {
		return err
	}
	b.copied = func() error { return d.driver.Wait(event) }
	return nil
}

// event answers the current context's event for a buffer. Events are kept.
func (d *Disk) event(b *buffer) (cuda.Event, error) {
	ctx, err := d.driver.CurrentContext()
	if err != nil {
		return 0, err
	}
	for len(d.events[ctx]) <= b.slot {
		e, err := d.driver.NewEvent()
		if err != nil {
			return 0, err
		}
		d.events[ctx] = append(d.events[ctx], e)
	}
	return d.events[ctx][b.slot], nil
}

// settle waits until no buffer is in use. What the disk failed at then is not
// said: a failure that came first ended its Save or Restore.
func (d *Disk) settle() error {
	var errs []error
	for _, b := range d.ring {
		if b.disk != nil {
			<-b.disk
			b.disk = nil
		}
		errs = append(errs, b.wait())
	}
	return errors.Join(errs...)
}

// start begins the disk's work with the buffer.
func (b *buffer) start(work func() error) {
	done := make(chan error, 1)
	b.disk = done
	rescue.Go(func() { done <- rescue.Err(work) })
}

// wait waits until the buffer is not in use, and answers how the disk's work
// with it has ended. Copies that could not be waited for are waited for again.
func (b *buffer) wait() error {
	if b.disk != nil {
		err := <-b.disk
		b.disk = nil
		if err != nil {
			return err
		}
	}
	if b.copied != nil {
		if err := b.copied(); err != nil {
			return err
		}
		b.copied = nil
	}
	return nil
}
