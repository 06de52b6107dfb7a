package vmm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"amem/golib/cuda"
	"amem/golib/peer"
)

// descriptor says which part of whose memory a file descriptor stands for. It
// is the contents of a sealed memfd, which NCCL passes on as it would pass the
// driver's own descriptor.
type descriptor struct {
	Magic     string
	Owner     peer.Identity
	Block     uint64
	BlockSize uint64
	Offset    uint64
	Size      uint64
	Prop      cuda.Prop
}

const (
	descriptorMagic = "amem memory 1"
	maxDescriptor   = 4 << 10
	seals           = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
)

// describe makes a descriptor, the caller's to close, of the handle's memory.
func (s *Space) describe(h *handle) (int, error) {
	b := h.block
	owner := s.peers.Self()
	if b.owner != nil {
		owner = *b.owner
	}
	body, err := json.Marshal(descriptor{descriptorMagic, owner, b.id, b.size, h.off, h.size, h.prop})
	if err != nil {
		return -1, err
	}
	fd, err := unix.MemfdCreate("amem", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("make a memory descriptor: %w", err)
	}
	if _, err = unix.Write(fd, body); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("make a memory descriptor: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// readDescriptor answers ErrPass for a file that is no descriptor of amem's.
func readDescriptor(fd int) (descriptor, error) {
	// Only a memfd has seals: a file of the driver's is not read.
	if got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || got != seals {
		return descriptor{}, ErrPass
	}
	body := make([]byte, maxDescriptor)
	n, err := unix.Pread(fd, body, 0)
	var d descriptor
	if err != nil || json.Unmarshal(body[:n], &d) != nil || d.Magic != descriptorMagic {
		return descriptor{}, ErrPass
	}
	if d.Size == 0 || d.BlockSize == 0 || d.Offset > d.BlockSize || d.Size > d.BlockSize-d.Offset ||
		(d.Offset+d.Size)%smallUnit != 0 || d.BlockSize > 1<<46 {
		return descriptor{}, fmt.Errorf("a memory descriptor of %s claims %d bytes at %d of %d: %w",
			d.Owner, d.Size, d.Offset, d.BlockSize, cuda.ErrInvalidValue)
	}
	return d, nil
}

// share makes the block's memory available to peers. structure is held.
func (s *Space) share(b *block) error {
	s.mu.Lock()
	if b.owner != nil || b.shared {
		s.mu.Unlock()
		return nil
	}
	live, phys := b.live, b.phys
	s.mu.Unlock()
	fd := -1
	if live {
		var err error
		if fd, err = s.driver.ExportFD(phys); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.shared { // another thread was faster
		if fd >= 0 {
			s.driver.CloseFD(fd)
		}
		return nil
	}
	b.shared, b.fd = true, fd
	s.broadcast()
	return nil
}

// Serve implements peer.Handler. It makes no driver call.
func (s *Space) Serve(ctx context.Context, to peer.Identity, ids []uint64) (fds []int, generation uint64, err error) {
	defer func() {
		if err != nil {
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
			fds = nil
		}
	}()
	for _, id := range ids {
		fd, of, err := s.serveOne(ctx, to, id)
		if err != nil {
			return fds, 0, err
		}
		if len(fds) == 0 { // the oldest: one that is too new would hide that the memory was replaced
			generation = of
		}
		fds = append(fds, fd)
	}
	return fds, generation, nil
}

func (s *Space) serveOne(ctx context.Context, to peer.Identity, id uint64) (fd int, generation uint64, err error) {
	for {
		s.mu.Lock()
		b := s.blocks[id]
		if b == nil || !b.shared {
			s.mu.Unlock()
			return -1, 0, peer.ErrGone
		}
		if b.live && b.fd >= 0 && (b.keep != "" || !s.leaving) {
			defer s.mu.Unlock()
			if to.Group != s.peers.Self().Group && b.keep == "" {
				b.keep = KeepGroup
			}
			fd, err = unix.FcntlInt(uintptr(b.fd), unix.F_DUPFD_CLOEXEC, 0)
			return fd, s.generation, err
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return -1, 0, errors.New("its memory is paused: resume it first")
		}
	}
}

// Import answers a handle of the memory that fd stands for. NCCL closes fd.
func (s *Space) Import(fd int) (cuda.Handle, error) {
	d, err := readDescriptor(fd)
	if err != nil {
		return 0, err
	}
	if d.Owner.ID == s.peers.Self().ID {
		return s.importOwn(d)
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	for {
		id, wait, err := s.view(d)
		if err != nil || wait == nil {
			return id, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return 0, fmt.Errorf("import memory of %s: another thread's fetch did not end: %w", d.Owner, cuda.ErrOperatingSystem)
		}
	}
}

// importOwn answers the handle of memory that another thread of this process
// exported.
func (s *Space) importOwn(d descriptor) (cuda.Handle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.blocks[d.Block]
	if b == nil {
		return 0, fmt.Errorf("import freed memory: %w", cuda.ErrInvalidValue)
	}
	h := b.handleAt(d.Offset)
	if h == nil || h.off != d.Offset {
		return 0, fmt.Errorf("import freed memory: %w", cuda.ErrInvalidValue)
	}
	h.refs++
	return h.id, nil
}

// view answers a handle of a part of an imported block, fetching the block if
// no thread has. Where another thread is about to, it answers what to wait for.
func (s *Space) view(d descriptor) (cuda.Handle, <-chan struct{}, error) {
	key := importKey{d.Owner.ID, d.Block}
	s.mu.Lock()
	b := s.imports[key]
	if b == nil {
		owner := d.Owner
		b = &block{id: d.Block, owner: &owner, prop: d.Prop, size: d.BlockSize, fd: -1, fetching: make(chan struct{})}
		s.imports[key] = b
		s.mu.Unlock()
		id, err := s.firstView(b, d)
		s.mu.Lock()
		close(b.fetching)
		b.fetching = nil
		if err != nil {
			delete(s.imports, key)
		}
		s.mu.Unlock()
		return id, nil, err
	}
	defer s.mu.Unlock()
	if b.fetching != nil {
		return 0, b.fetching, nil
	}
	if d.BlockSize != b.size {
		return 0, nil, fmt.Errorf("import memory of %s: a block of %d bytes is said to have %d: %w", d.Owner, b.size, d.BlockSize,
			cuda.ErrInvalidValue)
	}
	return s.viewOf(b, d).id, nil, nil
}

// viewOf answers the handle of a part of an imported block. mu is held.
func (s *Space) viewOf(b *block, d descriptor) *handle {
	h := b.handleAt(d.Offset)
	if h != nil && h.off == d.Offset && h.size == d.Size {
		h.refs++
		return h
	}
	h = s.newHandle(d.Size, d.Prop)
	h.block, h.off = b, d.Offset
	b.addHandle(h)
	return h
}

// firstView fetches, imports and maps a peer's block.
func (s *Space) firstView(b *block, d descriptor) (cuda.Handle, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.options.Timeout)
	defer cancel()
	fds, generation, err := s.peers.Fetch(ctx, *b.owner, []uint64{b.id})
	if err != nil {
		return 0, fmt.Errorf("import memory of %s: %w", b.owner, err)
	}
	defer unix.Close(fds[0])
	s.structure.RLock()
	defer s.structure.RUnlock()
	home, err := s.driver.Reserve(b.size, 0, 0, 0)
	if err == nil {
		b.home = home
		if err = s.attach(b, fds[0], generation); err != nil {
			err = errors.Join(err, s.driver.AddressFree(home, b.size))
		}
	}
	if err != nil {
		s.peers.Drop(*b.owner, b.id)
		return 0, fmt.Errorf("import memory of %s: %w", b.owner, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.owner.Group != s.peers.Self().Group {
		b.keep = KeepGroup
	}
	s.addRange(addressRange{at: b.home, size: b.size, block: b})
	return s.viewOf(b, d).id, nil
}

// attach imports a peer's memory from fd and maps it at the block's home.
// structure is held.
func (s *Space) attach(b *block, fd int, generation uint64) error {
	phys, err := s.driver.ImportFD(fd)
	if err != nil {
		return err
	}
	if err := s.mapAll(b.places(), phys); err != nil {
		return errors.Join(err, s.driver.Release(phys))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b.phys, b.generation, b.live = phys, generation, true
	return nil
}
