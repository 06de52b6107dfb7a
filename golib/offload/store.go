package offload

import "amem/golib/cuda"

// Store is the place where a pause keeps contents: host memory (Arena) or a
// file (Disk). It is used by one goroutine at a time, but for Bytes. Sizes are
// bytes.
type Store interface {
	// Prefer makes new host memory come from a memory node of the host, if it
	// has any left; -1: any.
	Prefer(node int)

	// Begin forgets all that was kept, and gets ready for total bytes. It fails
	// with a *HostMemoryError or a *DiskError where there is no room for them.
	Begin(total uint64) error

	// More gets ready for total bytes more, beside what is kept. It fails as Begin does.
	More(total uint64) error

	// Save copies the contents out, in stream order. What the copies read may
	// be released once the stream's work until now has ended. On failure nothing
	// is kept of the contents, and once that work has ended, Begin may follow. A
	// context must be current.
	Save(c *Contents, stream cuda.Stream) error

	// Restore starts to copy back what Save kept, in stream order. It is kept
	// until the next Begin or Free, so a Restore that failed may be tried again.
	// It fails with a *CorruptError rather than bring back what was not saved. A
	// context must be current.
	Restore(c *Contents, stream cuda.Stream) error

	// Done ends what Begin began: no Save follows before the next Begin. What was
	// got ahead for one goes back, and what other processes were kept from getting.
	Done()

	// Bytes answers how much host memory is held, to any goroutine.
	Bytes() uint64

	// Free forgets all that was kept and gives everything back. No copy may be
	// under way to or from what is kept in host memory. A context must be
	// current. What could not be given back stays, and Free may be tried again.
	//
	// To unpin memory the driver waits for all kernels that run, and lets nobody
	// launch one meanwhile. So ready is called before each part of the memory, which
	// takes the driver half a millisecond where nothing runs. Its error ends Free.
	Free(ready func() error) error
}

var (
	_ Store = (*Arena)(nil)
	_ Store = (*Disk)(nil)
)

// keeper is a store as Contents know it: where they are read without a device.
type keeper interface {
	// age counts the times that all that was kept was forgotten.
	age() uint64
	// read answers what is kept from an offset on, over all ranges and rows.
	read(c *Contents, from uint64, to []byte) error
}
