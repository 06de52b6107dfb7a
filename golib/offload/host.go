package offload

import (
	"bufio"
	"bytes"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// root is where /proc and /sys are; tests have their own.
var root = "/"

// hostRoom answers how many bytes this process can still take of the host's
// memory beside what is claimed, and which limit says so: what the host has
// available, or what a control group (version 2 or 1) allows it or one of its
// parents. What it can't read it takes for no limit.
func hostRoom(claimed []held) (room uint64, limit string) {
	room, limit = math.MaxUint64, "no limit"
	if n, ok := field("proc/meminfo", "MemAvailable:"); ok {
		room, limit = n<<10, "the host's memory (MemAvailable)"
		for _, h := range claimed {
			room -= min(room, h.bytes)
		}
	}
	for _, group := range controlGroups("self") {
		for dir := group.path; ; dir = path.Dir(dir) {
			at := path.Join("sys/fs/cgroup", group.mount, dir)
			most, limited := number(path.Join(at, group.limit))
			used, ok := number(path.Join(at, group.usage))
			if limited && ok {
				// The cache of files is given up before the limit is hit.
				cache, _ := field(path.Join(at, "memory.stat"), group.cache)
				left := most - min(most, used-min(used, cache))
				for _, h := range claimed {
					if h.isIn(group, dir) {
						left -= min(left, h.bytes)
					}
				}
				if left < room {
					room, limit = left, "the control group's limit ("+path.Join("/", at, group.limit)+")"
				}
			}
			if dir == "/" || dir == "." {
				break
			}
		}
	}
	return room, limit
}

type controlGroup struct{ mount, path, limit, usage, cache string }

// isIn tells whether a control group's limit counts what a process claims: it is in the
// group or below. One whose groups can't be read may be.
func (h held) isIn(group controlGroup, dir string) bool {
	for _, other := range controlGroups(strconv.Itoa(h.pid)) {
		if other.mount == group.mount {
			return other.path == dir || strings.HasPrefix(other.path, strings.TrimSuffix(dir, "/")+"/") &&
				!strings.HasPrefix(other.path, "/..")
		}
	}
	return true
}

// controlGroups lists a process's, as proc(5) has them.
func controlGroups(pid string) []controlGroup {
	var groups []controlGroup
	text, _ := os.ReadFile(path.Join(root, "proc", pid, "cgroup"))
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		if parts[0] == "0" {
			groups = append(groups, controlGroup{"", parts[2], "memory.max", "memory.current", "inactive_file"})
		} else if parts[1] == "memory" {
			groups = append(groups, controlGroup{"memory", parts[2], "memory.limit_in_bytes", "memory.usage_in_bytes",
				"total_inactive_file"})
		}
	}
	return groups
}

// number reads a file that holds one; "max" is none.
func number(file string) (uint64, bool) {
	text, err := os.ReadFile(path.Join(root, file))
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}

// field reads a number that follows its name on a line.
func field(file, name string) (uint64, bool) {
	text, err := os.ReadFile(path.Join(root, file))
	if err != nil {
		return 0, false
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if len(words) > 1 && words[0] == name {
			n, err := strconv.ParseUint(words[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// preferNode makes the kernel take the memory's pages from the node while it
// has any (mbind(2)). A kernel without nodes refuses, which is as good.
func preferNode(memory []byte, node int) {
	if node < 0 || node >= 64 {
		return
	}
	const preferred = 1
	mask := uint64(1) << node
	_, _, _ = unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)), preferred,
		uintptr(unsafe.Pointer(&mask)), 65, 0)
}
