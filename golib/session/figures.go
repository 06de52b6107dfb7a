package session

import (
	"encoding/json"
	"errors"

	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/vmm"
)

// maxWaited is how many processes an error's figures name at most: the text that
// they go into is short.
const maxWaited = 8

// Figures are what an error knows beside its text. Sizes are bytes.
type Figures struct {
	Device  *int32   `json:"device,omitempty"`
	Needed  *uint64  `json:"needed_bytes,omitempty"`
	Free    *uint64  `json:"free_bytes,omitempty"`
	Waiting []Waited `json:"waiting_for,omitempty"` // the first ones
}

// Waited is a process that was waited for.
type Waited struct {
	PID   int `json:"pid"`
	Group int `json:"group"`
}

// FiguresOf returns the figures of an error as JSON text, "" if it has none.
func FiguresOf(err error) string {
	var f Figures
	var timeout *peer.TimeoutError
	var oom *vmm.OutOfMemoryError
	var host *offload.HostMemoryError
	var disk *offload.DiskError
	switch {
	case errors.As(err, &oom):
		f.Device, f.Needed, f.Free = &oom.Device, &oom.Needed, &oom.Free
	case errors.As(err, &host):
		f.Needed = &host.Bytes
	case errors.As(err, &disk) && disk.Needed > 0:
		f.Needed, f.Free = &disk.Needed, &disk.Free
	case errors.As(err, &timeout):
		for _, who := range timeout.For[:min(len(timeout.For), maxWaited)] {
			f.Waiting = append(f.Waiting, Waited{who.PID, who.Group})
		}
	}
	if f.Device == nil && f.Needed == nil && f.Waiting == nil {
		return ""
	}
	text, err := json.Marshal(f)
	if err != nil {
		return ""
	}
	return string(text)
}
