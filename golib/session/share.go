package session

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"amem/golib/cuda"
	"amem/golib/peer"
	"amem/golib/rescue"
	"amem/golib/vmm"
)

// A region's memory is shared with other processes by handles of the size of
// CUDA's own for cudaMalloc's memory (cudaIpcMemHandle_t), so that programs that
// share memory in this way need not know. Memory that is opened has the
// owner's tag, in a region of its own. When the owner pauses it, the
// processes that have opened it let go of it, and with the owner's resume they map
// it again; each may also pause its tag itself.

// HandleSize is the size of a handle, in bytes.
const HandleSize = 64

var handleMagic = [8]byte{'a', 'm', 'e', 'm', 'i', 'p', 'c', 1}

// wireHandle is what a handle says.
type wireHandle struct {
	Magic         [8]byte
	Owner         peer.ID
	PID, Group    int32
	Block, Offset uint64
	Number        uint64 // of what stands there
	_             [8]byte
}

// never is the generation of owners who tell when their memory is replaced.
func never(peer.Identity) uint64 { return 0 }

// sharing serves the processes that share memory of regions. They are no
// neighbours of NCCL's, and a pause of NCCL's waits for none of them: hence a
// node of its own.
type sharing struct {
	session *Session
	node    *peer.Node
}

func newSharing(s *Session) (*sharing, error) {
	share := &sharing{session: s}
	node, err := peer.Listen(s.Group(), share, s.options.Timeout)
	if err != nil {
		return nil, err
	}
	share.node = node
	return share, nil
}

// ShareHandle answers a handle of the memory that starts at p, for another
// process. known is false where it is not a region's. enabled says that processes
// to come have amem. Where they don't, and there is no other process with amem,
// nobody could open the handle: it fails then, rather than they.
func (s *Session) ShareHandle(p cuda.Ptr, enabled bool) (handle [HandleSize]byte, known bool, err error) {
	r, live := s.at(p)
	if r == nil {
		return handle, false, nil
	}
	if !live {
		return handle, true, fmt.Errorf("%w: tag %q is paused, so its memory can't be shared: call amem.resume(%q) first", ErrState, r.tag, r.tag)
	}
	if !enabled && !s.accompanied() {
		return handle, true, fmt.Errorf("%w: no other process has amem, so none can open memory of tag %q: set AMEM_ENABLE=1 in the "+
			"environment of all processes, or share a clone made inside amem.disable()", peer.ErrGone, r.tag)
	}
	block, offset, number, err := r.space.Share(p)
	if err != nil {
		return handle, true, fmt.Errorf("share memory of tag %q: %w", r.tag, err)
	}
	self := s.regions.share.node.Self()
	w := wireHandle{Magic: handleMagic, Owner: self.ID, PID: int32(self.PID), Group: int32(self.Group), Block: block, Offset: offset,
		Number: number}
	_, err = binary.Encode(handle[:], binary.LittleEndian, w)
	return handle, true, err
}

// accompanied tells whether another process of this machine has amem.
func (s *Session) accompanied() bool {
	sockets, err := peer.Sockets()
	if err != nil {
		return true // nobody knows
	}
	own := []peer.ID{s.node.Self().ID, s.regions.share.node.Self().ID}
	return slices.ContainsFunc(sockets, func(id peer.ID) bool { return !slices.Contains(own, id) })
}

// OpenHandle maps the memory of a handle and answers where. known is false where
// the handle is not of amem's.
func (s *Session) OpenHandle(handle [HandleSize]byte) (p cuda.Ptr, known bool, err error) {
	var w wireHandle
	if _, err := binary.Decode(handle[:], binary.LittleEndian, &w); err != nil || w.Magic != handleMagic {
		return 0, false, nil
	}
	owner := peer.Identity{ID: w.Owner, PID: int(w.PID), Group: int(w.Group)}
	p, err = s.open(owner, peer.Chunk{w.Block, w.Offset, w.Number})
	if err != nil {
		return 0, true, fmt.Errorf("open memory of %s: %w", owner, err)
	}
	return p, true, nil
}

func (s *Session) open(owner peer.Identity, chunk peer.Chunk) (cuda.Ptr, error) {
	share, err := s.sharing()
	if err != nil {
		return 0, err
	}
	body, err := share.describe(owner, peer.Part{chunk[0], chunk[1]})
	if err != nil {
		return 0, err
	}
	d, err := vmm.ParseDescriptor(body)
	if err == nil && (d.Owner.ID != owner.ID || d.Block != chunk[0] || d.Offset != chunk[1]) {
		err = errors.New("the owner describes other memory")
	}
	if err == nil && d.Number != chunk[2] {
		err = fmt.Errorf("%w: other memory stands there now", peer.ErrGone)
	}
	if err != nil {
		return 0, err
	}
	r := share.owner(d.Block)
	if owner.ID != share.node.Self().ID {
		r, _, err = s.region(d.Tag, opened)
	}
	if err != nil {
		return 0, err
	}
	return r.space.Open(d)
}

// sharing answers the node for regions' memory, made if there is none.
func (s *Session) sharing() (*sharing, error) {
	s.regions.mu.Lock()
	defer s.regions.mu.Unlock()
	var err error
	if s.regions.share == nil {
		s.regions.share, err = newSharing(s)
	}
	return s.regions.share, err
}

func (h *sharing) describe(owner peer.Identity, part peer.Part) ([]byte, error) {
	if owner.ID == h.node.Self().ID {
		if body := h.Describe(part); body != nil {
			return body, nil
		}
		return nil, peer.ErrGone
	}
	ctx, cancel := context.WithTimeout(context.Background(), h.session.options.Timeout)
	defer cancel()
	return h.node.Describe(ctx, owner, part)
}

// CloseHandle undoes one OpenHandle. known is false for memory that it did not open.
func (s *Session) CloseHandle(p cuda.Ptr) (known bool, err error) {
	r, _ := s.at(p)
	if r == nil {
		return false, nil
	}
	defer r.gate()()
	return true, r.space.Close(p)
}

// owner answers the region that an own block is of, or nil.
func (h *sharing) owner(block uint64) *Region {
	for _, r := range h.session.allRegions() {
		if r.space.Owns(block) {
			return r
		}
	}
	return nil
}

// Serve implements peer.Handler.
func (h *sharing) Serve(ctx context.Context, to peer.Identity, blocks []uint64) ([]peer.Memory, uint64, error) {
	if len(blocks) == 0 {
		return nil, 0, nil
	}
	r := h.owner(blocks[0])
	if r == nil {
		return nil, 0, peer.ErrGone
	}
	return r.space.Serve(ctx, to, blocks)
}

// Describe implements peer.Handler.
func (h *sharing) Describe(part peer.Part) []byte {
	r := h.owner(part[0])
	if r == nil {
		return nil
	}
	d, known := r.space.Describe(part[0], part[1])
	if !known {
		return nil
	}
	body, err := json.Marshal(d)
	if err != nil {
		return nil
	}
	return body
}

// Held implements peer.Handler.
func (h *sharing) Held(owner peer.Identity, parts []peer.Part) (held []peer.Part) {
	for _, r := range h.session.allRegions() {
		held = append(held, r.space.Held(owner, parts)...)
	}
	return held
}

// Outlived implements peer.Handler.
func (h *sharing) Outlived(chunks []peer.Chunk) (freed []peer.Chunk) {
	for _, c := range chunks {
		if r := h.owner(c[0]); r == nil || len(r.space.Outlived([]peer.Chunk{c})) > 0 {
			freed = append(freed, c)
		}
	}
	return freed
}

// Settled implements peer.Handler.
func (h *sharing) Settled(part peer.Part) {
	if r := h.owner(part[0]); r != nil {
		r.space.Settled(part)
	}
}

// PeerChanged implements peer.Handler.
func (h *sharing) PeerChanged() {}

// Leave implements peer.Handler: it waits for this process's kernels, which may
// use the memory, and unmaps it, if the owner needs that still.
func (h *sharing) Leave(ctx context.Context, owner peer.Identity, blocks []uint64, stands func() bool) error {
	return h.eachBorrower(ctx, owner, blocks, func(r *Region) error {
		if err := r.space.Synchronize(ctx); err != nil {
			return err
		}
		defer r.gate()()
		return r.space.LetGo(owner, blocks, stands)
	})
}

// Return implements peer.Handler.
func (h *sharing) Return(ctx context.Context, owner peer.Identity, blocks []uint64) error {
	return h.eachBorrower(ctx, owner, blocks, func(r *Region) error { return r.attachAgain(ctx, owner, blocks) })
}

// eachBorrower calls f for each region that has some of an owner's blocks. It
// answers when ctx ends, whatever f waits for then.
func (h *sharing) eachBorrower(ctx context.Context, owner peer.Identity, blocks []uint64, f func(r *Region) error) error {
	done := make(chan error, 1)
	rescue.Go(func() {
		var errs []error
		for _, r := range h.session.allRegions() {
			if r.space.Borrows(owner, blocks) {
				errs = append(errs, rescue.Err(func() error { return f(r) }))
			}
		}
		done <- errors.Join(errs...)
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// attachAgain maps what is back, unless this process has paused the tag itself:
// then its resume does. Owners wait for the turn here, so they hold none of theirs.
func (r *Region) attachAgain(ctx context.Context, owner peer.Identity, blocks []uint64) error {
	if err := r.take(ctx); err != nil {
		return err
	}
	defer r.give()
	if r.isPaused() {
		return nil
	}
	defer r.gate()()
	return r.space.AttachAgain(ctx, owner, blocks)
}
