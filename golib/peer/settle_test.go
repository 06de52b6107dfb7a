package peer

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// uses makes p use a part of others' memory, or not.
func (p process) uses(part Part, use bool) {
	p.memory.mu.Lock()
	defer p.memory.mu.Unlock()
	if p.memory.held == nil {
		p.memory.held = map[Part]bool{}
	}
	p.memory.held[part] = use
}

func (p process) settled(parts ...Part) func() bool {
	return func() bool {
		p.memory.mu.Lock()
		defer p.memory.mu.Unlock()
		return !slices.ContainsFunc(parts, func(part Part) bool { return !slices.Contains(p.memory.settled, part) })
	}
}

func soon(t *testing.T, what func() bool) {
	t.Helper()
	require.Eventually(t, what, 5*time.Second, time.Millisecond)
}

func TestSettleWithoutPeers(t *testing.T) {
	owner, importer := newProcess(t, 0, 2), newProcess(t, 0, 0)
	require.True(t, owner.Settle(Part{1, 0}), "nobody maps anything")
	importer.maps(t, owner, 2)
	require.True(t, owner.Settle(Part{1, 0}), "nobody maps that block")
}

func TestSettleWaitsForWhoUsesIt(t *testing.T) {
	owner, one, two := newProcess(t, 0, 1), newProcess(t, 0, 0), newProcess(t, 0, 0)
	one.maps(t, owner, 1)
	two.maps(t, owner, 1)
	used, unused := Part{1, 64}, Part{1, 128}
	one.uses(used, true)
	require.False(t, owner.Settle(used))
	require.False(t, owner.Settle(unused))
	soon(t, owner.settled(unused))
	time.Sleep(20 * time.Millisecond) // time for a wrong answer to arrive
	require.False(t, owner.settled(used)(), "one uses it still")
	one.uses(used, false)
	one.Ended(owner.Self(), used)
	soon(t, owner.settled(used))
}

func TestSettleManyParts(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	var parts []Part
	for i := range uint64(3*maxParts + 7) {
		parts = append(parts, Part{1, i << 40})
		owner.Settle(parts[i])
	}
	soon(t, owner.settled(parts...))
}

func TestSettleAfterDropOrEnd(t *testing.T) {
	for name, end := range map[string]func(owner, importer process){
		"drop": func(owner, importer process) { importer.Drop(owner.Self(), 1) },
		"end":  func(_, importer process) { importer.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
			importer.maps(t, owner, 1)
			importer.uses(Part{1, 0}, true)
			require.False(t, owner.Settle(Part{1, 0}))
			time.Sleep(20 * time.Millisecond)
			require.False(t, owner.settled(Part{1, 0})())
			end(owner, importer)
			soon(t, owner.settled(Part{1, 0}))
		})
	}
}

// What a peer was asked while it did not answer is asked again.
func TestSettleAsksAgain(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	importer.memory.mu.Lock() // it does not answer
	require.False(t, owner.Settle(Part{1, 0}))
	time.Sleep(second + 100*time.Millisecond) // longer than the owner waits
	importer.memory.mu.Unlock()
	require.False(t, owner.settled(Part{1, 0})())
	require.False(t, owner.Settle(Part{1, 64}))
	soon(t, owner.settled(Part{1, 0}, Part{1, 64}))
}

func TestClaim(t *testing.T) {
	owner, importer := newProcess(t, 0, 1), newProcess(t, 0, 0)
	importer.maps(t, owner, 1)
	var chunks []Chunk
	outlived := map[Chunk]bool{}
	for i := range uint64(2*maxParts + 7) {
		chunks = append(chunks, Chunk{1<<63 + i, 1<<63 + i, 1<<63 + i})
		outlived[chunks[i]] = i%900 == 5
	}
	owner.memory.mu.Lock()
	owner.memory.outlived = outlived
	owner.memory.mu.Unlock()
	freed, err := importer.Claim(context.Background(), owner.Self(), chunks)
	require.NoError(t, err)
	require.Equal(t, []Chunk{chunks[5], chunks[905], chunks[1805]}, freed)
	reply, _, err := importer.request(context.Background(), owner.Self(), message{Kind: kindClaim, Chunks: chunks[:maxParts+1]})
	require.Error(t, err, reply)
	owner.Close()
	_, err = importer.Claim(context.Background(), owner.Self(), chunks[:1])
	require.Error(t, err)
}
