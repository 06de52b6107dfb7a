package peer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"amem/golib/rescue"
)

// The memory of a program's regions that another process has opened is not
// agreed on by both, as NCCL's is: its owner pauses it when it likes, and tells
// those who borrow it to let go of it before, and when it is back.

// maxBlocks keeps a message of blocks below maxMessage.
const maxBlocks = 2000

// Describe asks an owner for the descriptor of a part of its memory.
func (n *Node) Describe(ctx context.Context, owner Identity, part Part) ([]byte, error) {
	reply, fds, err := n.request(ctx, owner, message{Kind: kindDescribe, Parts: []Part{part}})
	closeAll(fds)
	if err != nil {
		return nil, err
	}
	if len(reply.Descriptor) == 0 {
		return nil, fmt.Errorf("%s: %w", owner, ErrGone)
	}
	return reply.Descriptor, nil
}

// A borrower may be slow, and let go when the owner has given up and goes on. So
// recalls have numbers: a borrower that hears that a recall is over lets go of
// nothing for it any more, and maps again what it has let go of. Who was told of
// a recall is told of its end, whatever has come of it.

// ErrOver says that the owner of the memory has ended the recall.
var ErrOver = errors.New("the owner needs its memory let go no more")

// Leave recalls blocks of this process: it makes all who map any of them let go of
// them. Its error names who has not. Whether it succeeds or not, Return with the
// recall's number must follow, when the memory is there again or still is.
func (n *Node) Leave(ctx context.Context, blocks []uint64) (recall uint64, err error) {
	n.mu.Lock()
	n.recalls++
	recall = n.recalls
	lent := n.lent(blocks, func(l *link, b uint64) bool { return l.exports[b] })
	for who, blocks := range lent {
		for _, b := range blocks {
			n.link(who).recalled[b] = recall
		}
	}
	n.mu.Unlock()
	return recall, n.tellBorrowers(ctx, message{Kind: kindLeave, Recall: recall}, lent,
		"let go of this process's memory, which it has opened", func(Identity, []uint64) {})
}

// Return ends all recalls of the blocks up to the one of the number: all who were told
// of one map the blocks again. Who does not answer is told by the next Return.
func (n *Node) Return(ctx context.Context, recall uint64, blocks []uint64) error {
	n.mu.Lock()
	lent := n.lent(blocks, func(l *link, b uint64) bool { return l.recalled[b] != 0 && l.recalled[b] <= recall })
	n.mu.Unlock()
	return n.tellBorrowers(ctx, message{Kind: kindReturn, Recall: recall}, lent,
		"map this process's memory again, which it has opened", func(who Identity, blocks []uint64) {
			n.mu.Lock()
			defer n.mu.Unlock()
			for _, b := range blocks {
				if l := n.link(who); l.recalled[b] <= recall {
					delete(l.recalled, b)
				}
			}
		})
}

// lent lists the blocks that choose chooses for each process. n.mu is held.
func (n *Node) lent(blocks []uint64, choose func(l *link, block uint64) bool) map[Identity][]uint64 {
	lent := map[Identity][]uint64{}
	for _, l := range n.links {
		for _, b := range blocks {
			if !l.gone && choose(l, b) {
				lent[l.who] = append(lent[l.who], b)
			}
		}
	}
	return lent
}

// stands tells whether a recall is not over: its owner has not said so, and waits still.
func (n *Node) stands(ctx context.Context, owner Identity, m message) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.link(owner)
	return ctx.Err() == nil && !slices.ContainsFunc(m.Blocks, func(b uint64) bool { return l.returned[b] >= m.Recall })
}

// tellBorrowers sends a message of the blocks to those to whom they are lent, and
// tells done who has answered.
func (n *Node) tellBorrowers(ctx context.Context, m message, lent map[Identity][]uint64, what string,
	done func(who Identity, blocks []uint64)) error {
	var wg sync.WaitGroup
	errs := make(chan error, len(lent))
	for who, blocks := range lent {
		wg.Add(1)
		rescue.Go(func() {
			defer wg.Done()
			for part := range slices.Chunk(blocks, maxBlocks) {
				m := m
				m.Blocks = part
				var fds []int
				err := rescue.Err(func() (err error) {
					_, fds, err = n.request(ctx, who, m)
					return err
				})
				closeAll(fds)
				if timeout := (*TimeoutError)(nil); errors.As(err, &timeout) || errors.Is(err, os.ErrDeadlineExceeded) {
					err = &TimeoutError{For: []Identity{who}, To: what}
				}
				if err != nil && !errors.Is(err, ErrGone) {
					errs <- err
					return
				}
				done(who, part)
			}
		})
	}
	wg.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// Sockets lists the identities that processes of this machine listen by.
func Sockets() ([]ID, error) {
	body, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	var list []ID
	for line := range strings.Lines(string(body)) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if name, ours := strings.CutPrefix(fields[len(fields)-1], socketPrefix); ours {
			var id ID
			if id.UnmarshalText([]byte(name)) == nil && !slices.Contains(list, id) {
				list = append(list, id)
			}
		}
	}
	return list, nil
}
