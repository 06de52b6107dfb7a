package session

import (
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"amem/golib/cuda"
	"amem/golib/simtest"
)

// tensor is memory of a region, and who has opened it.
type tensor struct {
	buffer
	owner  int
	tag    string
	region int
	opened map[int]buffer
}

// sharers are processes that do at random what programs do with shared tensors.
type sharers struct {
	all     []*process
	random  *rand.Rand
	backups map[string]Backup
	tensors []*tensor
	seeds   uint64
}

// Tensors are allocated, opened, closed and freed at random, and all processes
// pause and resume at once, while calls of the driver fail. SHARING_CYCLES says how
// often, SHARING_SEED repeats a run.
func TestSharingAtRandom(t *testing.T) {
	number := func(name string, otherwise uint64) uint64 {
		if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
			return n
		}
		return otherwise
	}
	cycles, seed := number("SHARING_CYCLES", 60), number("SHARING_SEED", uint64(time.Now().UnixNano()))
	t.Logf("SHARING_SEED=%d", seed)
	s := &sharers{
		all: bare(t, 3, 20*time.Second), random: rand.New(rand.NewPCG(seed, 0)),
		backups: map[string]Backup{"weights": BackupCPU, "swapped": BackupDisk, "kv_cache": BackupNone},
	}
	folder := t.TempDir()
	for i, p := range s.all {
		require.NoError(t, p.SetDiskFolder(folder, i == 0))
	}
	for range cycles {
		for range s.random.IntN(6) {
			s.change(t)
		}
		failed := s.transit(t, "pause")
		if failed != "cuMemUnmap" && failed != "cuMemRelease" { // else what could not be let go is there still
			require.Zero(t, simtest.Used(t, 0), "after a fault in %q", failed)
		}
		s.transit(t, "resume")
		s.look(t)
	}
	for len(s.tensors) > 0 {
		s.free(t)
	}
}

// change allocates a tensor, opens, closes or frees one.
func (s *sharers) change(t *testing.T) {
	choice := s.random.IntN(10)
	if len(s.tensors) == 0 || (choice < 3 && len(s.tensors) < 12) {
		tag := []string{"weights", "swapped", "kv_cache"}[s.random.IntN(3)]
		x := &tensor{owner: s.random.IntN(len(s.all)), tag: tag, opened: map[int]buffer{}}
		x.region = s.all[x.owner].region(t, tag, s.backups[tag])
		s.seeds++
		x.buffer = s.all[x.owner].torch(t, x.region, (1+s.random.Uint64N(5))*mib/2, s.seeds)
		s.tensors = append(s.tensors, x)
		return
	}
	x := s.tensors[s.random.IntN(len(s.tensors))]
	other := (x.owner + 1 + s.random.IntN(len(s.all)-1)) % len(s.all)
	b, open := x.opened[other]
	switch {
	case choice >= 8:
		s.free(t)
	case !open:
		x.opened[other] = shares(t, s.all[x.owner], s.all[other], x.buffer)
	case choice == 7:
		s.all[other].closes(t, b)
		delete(x.opened, other)
	}
}

func (s *sharers) free(t *testing.T) {
	i := s.random.IntN(len(s.tensors))
	x := s.tensors[i]
	s.tensors = append(s.tensors[:i], s.tensors[i+1:]...)
	for other, b := range x.opened {
		s.all[other].closes(t, b)
	}
	s.all[x.owner].give(t, x.region, x.buffer)
}

// transit pauses or resumes all, with a call of the driver that fails in some
// process most of the time. Answers its name.
func (s *sharers) transit(t *testing.T, verb string) (failed string) {
	calls := map[string][]string{
		"pause":  {"cuCtxSynchronize", "cuMemHostRegister", "cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemRelease"},
		"resume": {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"},
	}[verb]
	if s.random.IntN(4) > 0 {
		failed = calls[s.random.IntN(len(calls))]
		simtest.Fault(t, failed, 1+s.random.IntN(12), cuda.ErrUnknown)
		defer simtest.Fault(t, failed, 0, cuda.Success)
	}
	delays := make([]time.Duration, len(s.all))
	for i := range delays {
		delays[i] = time.Duration(s.random.IntN(2)*s.random.IntN(2000)) * time.Microsecond
	}
	require.NoError(t, each(s.all, func(p *process) error {
		for i, other := range s.all {
			if other == p {
				time.Sleep(delays[i])
			}
		}
		var errs []error
		for range 5 { // one's failure may fail others
			err := p.Pause
			if verb == "resume" {
				err = p.Resume
			}
			e := err("")
			if e == nil {
				return nil
			}
			errs = append(errs, e)
		}
		return errors.Join(errs...)
	}))
	return failed
}

// look checks what was kept; then somebody writes each tensor, and all see it.
func (s *sharers) look(t *testing.T) {
	for _, x := range s.tensors {
		everywhere := map[int]buffer{x.owner: x.buffer}
		for other, b := range x.opened {
			everywhere[other] = b
		}
		holds := func(what string, seed uint64) {
			for i, b := range everywhere {
				state, known := s.all[i].MemoryState(b.at)
				require.True(t, known && state == Active, "process %d has no memory of %s for %+v", i, x.tag, x)
				require.True(t, simtest.Holds(b.at, seed, b.size), "process %d: contents %s of %s: %+v", i, what, x.tag, x)
			}
		}
		if x.tag != "kv_cache" {
			holds("kept", x.seed)
		}
		s.seeds++
		x.seed = s.seeds
		writer := s.random.IntN(len(s.all))
		b, there := everywhere[writer]
		if !there {
			b = x.buffer
		}
		b.fill(x.seed)
		holds("written", x.seed)
		for other, b := range x.opened {
			b.seed = x.seed
			x.opened[other] = b
		}
	}
}
