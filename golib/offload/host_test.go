package offload

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// inRoot makes /proc and /sys what the files say, by path.
func inRoot(t *testing.T, files map[string]string) {
	t.Helper()
	inFolder(t, t.TempDir()) // what other tests' processes claim is not of this host
	dir := t.TempDir()
	for name, text := range files {
		file := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	old := root
	root = dir
	t.Cleanup(func() { root = old })
}

func TestHostRoom(t *testing.T) {
	meminfo := "MemTotal: 100 kB\nMemAvailable:   9000 kB\n"
	for _, c := range []struct {
		name  string
		files map[string]string
		room  uint64
		limit string
	}{
		{"nothing is known", nil, math.MaxUint64, "no limit"},
		{"the host", map[string]string{"proc/meminfo": meminfo}, 9000 << 10, "MemAvailable"},
		{"version 2", map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "5000\n", "sys/fs/cgroup/a/b/memory.current": "3000\n",
		}, 2000, "/sys/fs/cgroup/a/b/memory.max"},
		{"its parent's", map[string]string{
			"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "3000\n",
			"sys/fs/cgroup/a/memory.max": "7000\n", "sys/fs/cgroup/a/memory.current": "4000\n",
		}, 3000, "/sys/fs/cgroup/a/memory.max"},
		{"files in the cache are given up", map[string]string{
			"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "4900\n",
			"sys/fs/cgroup/memory.stat": "anon 100\ninactive_file 1500\n",
		}, 1600, "/sys/fs/cgroup/memory.max"},
		{"above the limit already", map[string]string{
			"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "5100\n",
		}, 0, "memory.max"},
		{"version 1", map[string]string{
			"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "800\n",
			"sys/fs/cgroup/memory/x/memory.usage_in_bytes": "300\n",
		}, 500, "/sys/fs/cgroup/memory/x/memory.limit_in_bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inRoot(t, c.files)
			room, limit := hostRoom(nil)
			require.Equal(t, c.room, room)
			require.Contains(t, limit, c.limit)
		})
	}
}

// A pause that the host has no memory for must fail before the kernel kills the process.
func TestNoRoom(t *testing.T) {
	inRoot(t, map[string]string{
		"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "10000000\n", "sys/fs/cgroup/job/memory.current": "9000000\n",
	})
	a := NewArena(nil)
	err := a.Begin(4 * mib)
	var host *HostMemoryError
	require.ErrorAs(t, err, &host)
	require.Equal(t, 4*mib, host.Bytes)
	require.ErrorContains(t, err, "/sys/fs/cgroup/job/memory.max) leaves 1000000")
	require.NoError(t, a.Begin(0))
}
