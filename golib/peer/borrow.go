package peer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"amem/golib/safe"
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

// Leave makes all who map any of this process's blocks let go of them. Its error
// names who has not.
func (n *Node) Leave(ctx context.Context, blocks []uint64) error {
	return n.tellBorrowers(ctx, kindLeave, "let go of this process's memory, which it has opened", blocks)
}

// Return makes all who mapped any of this process's blocks map them again.
func (n *Node) Return(ctx context.Context, blocks []uint64) error {
	return n.tellBorrowers(ctx, kindReturn, "map this process's memory again, which it has opened", blocks)
}

func (n *Node) tellBorrowers(ctx context.Context, kind, what string, blocks []uint64) error {
	lent := map[Identity][]uint64{}
	n.mu.Lock()
	for _, l := range n.links {
		for _, b := range blocks {
			if !l.gone && l.exports[b] {
				lent[l.who] = append(lent[l.who], b)
			}
		}
	}
	n.mu.Unlock()
	var wg sync.WaitGroup
	errs := make(chan error, len(lent))
	for who, blocks := range lent {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for part := range slices.Chunk(blocks, maxBlocks) {
				err := safe.Try("ask a borrower", func() error {
					_, fds, err := n.request(ctx, who, message{Kind: kind, Blocks: part})
					closeAll(fds)
					return err
				})
				if timeout := (*TimeoutError)(nil); errors.As(err, &timeout) || errors.Is(err, os.ErrDeadlineExceeded) {
					err = &TimeoutError{For: []Identity{who}, To: what}
				}
				if err != nil && !errors.Is(err, ErrGone) {
					errs <- err
					return
				}
			}
		}()
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
