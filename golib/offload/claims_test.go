package offload

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"amem/golib/simtest"
)

// inFolder makes this process's claims be in a folder of the test's own.
func inFolder(t *testing.T, folder string) {
	t.Helper()
	claims = ledger{folder: folder}
	wait := claimWait
	claimWait = 200 * time.Millisecond
	t.Cleanup(func() {
		claimWait = wait
		if claims.opened && claims.fd >= 0 {
			_ = unix.Close(claims.fd)
		}
		claims = ledger{}
	})
}

// available makes the host have so many bytes, for all who read the root.
func available(t *testing.T, root string, bytes uint64) {
	t.Helper()
	name := filepath.Join(root, "proc", "meminfo")
	require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
	require.NoError(t, os.WriteFile(name+".new", fmt.Appendf(nil, "MemAvailable: %d kB\n", bytes>>10), 0o644))
	require.NoError(t, os.Rename(name+".new", name))
}

// claimant is another process that gets host memory: TestClaimant in a process of its own.
type claimant struct {
	command *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Scanner
}

func newClaimant(t *testing.T, folder string) *claimant {
	t.Helper()
	c := &claimant{command: exec.Command(os.Args[0], "-test.run", "^TestClaimant$", "-test.v")}
	c.command.Env = append(os.Environ(), "AMEM_TEST_CLAIMS="+folder)
	c.command.Stderr = os.Stderr
	var err error
	c.in, err = c.command.StdinPipe()
	require.NoError(t, err)
	out, err := c.command.StdoutPipe()
	require.NoError(t, err)
	c.out = bufio.NewScanner(out)
	require.NoError(t, c.command.Start())
	t.Cleanup(c.end)
	return c
}

func (c *claimant) end() {
	_ = c.command.Process.Kill()
	_ = c.command.Wait()
}

func (c *claimant) tell(t *testing.T, words ...any) {
	t.Helper()
	_, err := fmt.Fprintln(c.in, words...)
	require.NoError(t, err)
}

// answer is what the process says next.
func (c *claimant) answer(t *testing.T) string {
	t.Helper()
	for c.out.Scan() {
		if text, is := strings.CutPrefix(c.out.Text(), "> "); is {
			return text
		}
	}
	t.Fatal("the process ended without an answer")
	return ""
}

// resident answers how much the process has populated since it said that it is ready.
func (c *claimant) resident(t *testing.T) uint64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", c.command.Process.Pid))
	require.NoError(t, err)
	pages, err := strconv.ParseUint(strings.Fields(string(text))[1], 10, 64)
	require.NoError(t, err)
	return pages * uint64(os.Getpagesize())
}

// It does what newClaimant's test says: begins a pause, and gets the memory for it.
func TestClaimant(t *testing.T) {
	folder := os.Getenv("AMEM_TEST_CLAIMS")
	if folder == "" {
		t.Skip("a test's process, started by others")
	}
	simtest.On(t, 0)
	root = folder
	claims = ledger{folder: folder}
	a := NewArena(simtest.Driver())
	fmt.Println("> ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		var err error
		size := uint64(0)
		if len(words) > 1 {
			size, err = strconv.ParseUint(words[1], 10, 64)
			require.NoError(t, err)
		}
		switch words[0] {
		case "begin":
			err = a.Begin(size)
		case "take":
			_, err = a.Take(size)
		case "done":
			a.Done()
		}
		fmt.Println(">", strings.ReplaceAll(fmt.Sprint(err), "\n", " "))
	}
}

// Of processes that begin at one time, as many go on as the host has room for. Pages that
// they have populated leave what the host has available, as in the kernel.
func TestProcessesThatRaceForTheHost(t *testing.T) {
	const want, count = 96 << 20, 4
	folder := t.TempDir()
	room := uint64(5 * want / 2) // of two
	available(t, folder, room)
	var all []*claimant
	before := map[*claimant]uint64{}
	for range count {
		c := newClaimant(t, folder)
		require.Equal(t, "ready", c.answer(t))
		before[c] = c.resident(t)
		all = append(all, c)
	}
	for _, c := range all {
		c.tell(t, "begin", want)
	}
	var going []*claimant
	for _, c := range all {
		if text := c.answer(t); text == "<nil>" {
			going = append(going, c)
		} else {
			require.Contains(t, text, "other processes are getting")
			require.Contains(t, text, "MemAvailable")
		}
	}
	require.Len(t, going, 2)
	populated := func() (n uint64) {
		for _, c := range all {
			n += c.resident(t) - min(before[c], c.resident(t))
		}
		return n
	}
	for i, c := range going {
		c.tell(t, "take", want)
		require.Equal(t, "<nil>", c.answer(t))
		require.Less(t, populated(), room)
		available(t, folder, room-uint64(i+1)*want)
	}
	for _, c := range going {
		c.tell(t, "done")
		require.Equal(t, "<nil>", c.answer(t))
	}
	// What is populated is not claimed any more: half of a share is left for anybody.
	c := newClaimant(t, folder)
	require.Equal(t, "ready", c.answer(t))
	c.tell(t, "begin", want/2)
	require.Equal(t, "<nil>", c.answer(t))
	c.tell(t, "begin", want)
	require.Contains(t, c.answer(t), fmt.Sprintf("leaves %d;", room-2*want))
}

// A claim ends with its process, however that ends, and with its pause.
func TestClaimsEnd(t *testing.T) {
	folder := t.TempDir()
	inRoot(t, nil)
	root = folder
	inFolder(t, folder)
	available(t, folder, 100*mib)
	simtest.On(t, 0)
	a := NewArena(simtest.Driver())
	other := newClaimant(t, folder)
	require.Equal(t, "ready", other.answer(t))
	other.tell(t, "begin", 80*mib)
	require.Equal(t, "<nil>", other.answer(t))
	err := a.Begin(40 * mib)
	require.ErrorContains(t, err, fmt.Sprintf("other processes are getting %d (pid %d)", 80*mib, other.command.Process.Pid))
	require.Zero(t, a.claim.bytes)
	other.tell(t, "begin", 40*mib)
	require.Equal(t, "<nil>", other.answer(t))
	require.NoError(t, a.Begin(40*mib))
	other.tell(t, "begin", 80*mib)
	require.Contains(t, other.answer(t), fmt.Sprintf("pid %d", os.Getpid()))
	a.Done()
	other.tell(t, "begin", 80*mib)
	require.Equal(t, "<nil>", other.answer(t))
	require.Error(t, a.Begin(40*mib))
	other.end()
	require.NoError(t, a.Begin(40*mib))
	require.NoError(t, a.Free(always))
}

// The file may be removed while processes have claims in it.
func TestClaimsAreSeenAfterTheFileWasRemoved(t *testing.T) {
	const want = 64 << 20
	folder := t.TempDir()
	available(t, folder, 3*want)
	first, second := newClaimant(t, folder), newClaimant(t, folder)
	require.Equal(t, "ready", first.answer(t))
	require.Equal(t, "ready", second.answer(t))
	for _, c := range []*claimant{first, second} {
		c.tell(t, "begin", want)
		require.Equal(t, "<nil>", c.answer(t))
		files, err := filepath.Glob(filepath.Join(folder, "amem-claims-*"))
		require.NoError(t, err)
		require.Len(t, files, 1)
		require.NoError(t, os.Remove(files[0]))
	}
	third := newClaimant(t, folder)
	require.Equal(t, "ready", third.answer(t))
	for _, c := range []*claimant{first, second} {
		c.tell(t, "begin", want)
		require.Equal(t, "<nil>", c.answer(t))
	}
	third.tell(t, "begin", 2*want)
	require.Contains(t, third.answer(t), "other processes are getting")
}

// What another process has populated and still claims counts twice, so a claim that is in
// the way of another may be about to end.
func TestAClaimWaitsForOthersToEnd(t *testing.T) {
	folder := t.TempDir()
	inRoot(t, nil)
	root = folder
	inFolder(t, folder)
	claimWait = 20 * time.Second
	available(t, folder, 100*mib)
	a := NewArena(nil)
	other := newClaimant(t, folder)
	require.Equal(t, "ready", other.answer(t))
	other.tell(t, "begin", 80*mib)
	require.Equal(t, "<nil>", other.answer(t))
	began := make(chan error, 1)
	go func() { began <- a.Begin(40 * mib) }()
	time.Sleep(100 * time.Millisecond)
	require.Empty(t, began)
	other.tell(t, "done")
	require.NoError(t, <-began)
	a.Done()
	started := time.Now()
	require.Error(t, a.Begin(101*mib), "no other's end makes room for this")
	require.Less(t, time.Since(started), 10*time.Second)
}

// Who waits for the moment at which another process claims does not wait for ever.
func TestAClaimantThatStopped(t *testing.T) {
	folder := t.TempDir()
	inFolder(t, folder)
	other := newClaimant(t, folder)
	require.Equal(t, "ready", other.answer(t))
	other.tell(t, "begin", 2*mib)
	require.Equal(t, "<nil>", other.answer(t))
	a := NewArena(nil)
	require.NoError(t, a.Begin(2*mib))
	a.Done()
	// As if it had been stopped there.
	name := filepath.Join(folder, fmt.Sprintf("amem-claims-%d", os.Geteuid()))
	script := "import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1); print('> ready', flush=True); time.sleep(60)"
	stopped := exec.Command("python3", "-c", script, name)
	out, err := stopped.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, stopped.Start())
	c := &claimant{command: stopped, out: bufio.NewScanner(out)}
	t.Cleanup(c.end)
	require.Equal(t, "ready", c.answer(t))
	started := time.Now()
	require.ErrorContains(t, a.Begin(2*mib), fmt.Sprintf("process %d has been claiming", stopped.Process.Pid))
	require.Less(t, time.Since(started), 10*time.Second)
}

// Regions that grow at one time in one process count each other's claims.
func TestClaimsOfOneProcess(t *testing.T) {
	folder := t.TempDir()
	inRoot(t, nil)
	root = folder
	inFolder(t, folder)
	available(t, folder, 100*mib)
	a, b := NewArena(nil), NewArena(nil)
	require.NoError(t, a.Begin(80*mib))
	require.ErrorContains(t, b.Begin(40*mib), "this process is getting")
	a.Done()
	require.NoError(t, b.Begin(40*mib))
	b.Done()
	require.Zero(t, claims.bytes)
}

// What was there when a pause began may have gone to other programs before it is taken.
func TestRoomIsLookedForAgainForEachPiece(t *testing.T) {
	folder := t.TempDir()
	inRoot(t, nil)
	root = folder
	inFolder(t, folder)
	simtest.On(t, 0)
	available(t, folder, 100*mib)
	a := NewArena(simtest.Driver())
	require.NoError(t, a.Begin(80*mib))
	available(t, folder, 60*mib)
	_, err := a.Take(80 * mib)
	var host *HostMemoryError
	require.ErrorAs(t, err, &host)
	require.ErrorContains(t, err, "MemAvailable) leaves")
	require.Zero(t, a.Bytes())
	require.Zero(t, claims.bytes, "others can have it")
}

// A claim counts for the limits of the control groups that its process is in.
func TestClaimsCountWhereTheyAreTaken(t *testing.T) {
	files := map[string]string{
		"proc/meminfo": "MemAvailable: 900 kB\n", "proc/self/cgroup": "4:memory:/job/one\n0::/job/one\n",
		"proc/7/cgroup": "4:memory:/job/two\n0::/job/two\n", "proc/8/cgroup": "4:memory:/other\n0::/other\n",
		"proc/9/cgroup":                    "4:memory:/job/one/below\n0::/job/one/below\n",
		"sys/fs/cgroup/job/one/memory.max": "300000\n", "sys/fs/cgroup/job/one/memory.current": "0\n",
		"sys/fs/cgroup/job/memory.max": "400000\n", "sys/fs/cgroup/job/memory.current": "0\n",
		"sys/fs/cgroup/memory/job/one/memory.limit_in_bytes": "300000\n", "sys/fs/cgroup/memory/job/one/memory.usage_in_bytes": "0\n",
	}
	for _, c := range []struct {
		name  string
		pid   int
		room  uint64
		limit string
	}{
		{"beside", 7, 200000, "/job/memory.max"},
		{"elsewhere", 8, 300000, "/job/one/memory"},
		{"below", 9, 100000, "/job/one/memory"},
		{"unknown", 0, 100000, "/job/one/memory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inRoot(t, files)
			room, limit := hostRoom([]held{{c.pid, 200000}})
			require.Equal(t, c.room, room)
			require.Contains(t, limit, c.limit)
		})
	}
	inRoot(t, map[string]string{"proc/self/cgroup": files["proc/self/cgroup"], "proc/9/cgroup": files["proc/9/cgroup"],
		"sys/fs/cgroup/memory/job/one/memory.limit_in_bytes": "300000\n", "sys/fs/cgroup/memory/job/one/memory.usage_in_bytes": "0\n"})
	room, limit := hostRoom([]held{{9, 200000}})
	require.EqualValues(t, 100000, room)
	require.Contains(t, limit, "memory.limit_in_bytes", "version 1")
}

// A file that somebody else may lock says nothing.
func TestTheFileOfClaimsIsItsUsersOwn(t *testing.T) {
	folder := t.TempDir()
	name := filepath.Join(folder, fmt.Sprintf("amem-claims-%d", os.Geteuid()))
	try := func(known bool) {
		t.Helper()
		inFolder(t, folder)
		a := NewArena(nil)
		require.NoError(t, a.Begin(2*mib), "it does without")
		a.Done()
		require.Equal(t, known, claims.fd >= 0)
	}
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	require.NoError(t, os.Chmod(name, 0o666))
	try(false)
	require.NoError(t, os.Remove(name))
	require.NoError(t, os.Symlink("/dev/null", name))
	try(false)
	require.NoError(t, os.Remove(name))
	require.NoError(t, unix.Mkfifo(name, 0o600))
	try(false)
	require.NoError(t, os.Remove(name))
	try(true)
}
