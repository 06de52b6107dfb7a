package vmm

import (
	"cmp"
	"fmt"
	"slices"
)

// Usage is the memory of one device. Sizes are bytes.
type Usage struct {
	Ordinal  int32  `json:"ordinal"`
	UUID     string `json:"uuid"`
	Slabs    int    `json:"slabs"`
	Chunks   int    `json:"chunks"`          // in slabs
	Slab     uint64 `json:"slab_bytes"`      // own, in slabs
	SlabUsed uint64 `json:"slab_used_bytes"` // of which NCCL uses
	Direct   uint64 `json:"direct_bytes"`    // own, one allocation a handle
	Device   uint64 `json:"device_bytes"`    // own, on the device now
	Paused   uint64 `json:"paused_bytes"`    // own, given back to the device
	Resident uint64 `json:"resident_bytes"`  // own, that a pause does not release
	Imported uint64 `json:"imported_bytes"`  // peers', mapped here now
	Free     uint64 `json:"free_bytes"`      // of the whole device
	Total    uint64 `json:"total_bytes"`
}

// Usage answers the memory of each device that NCCL has used, and the bytes
// that a pause does not release, by reason.
func (s *Space) Usage() ([]Usage, map[string]uint64) {
	list := []Usage{} // JSON's list, not null
	index := map[int32]int{}
	for _, d := range s.Devices() {
		u := Usage{Ordinal: d.Ordinal, UUID: uuidText(d.UUID)}
		_ = s.driver.With(d.Context, func() (err error) {
			u.Free, u.Total, err = s.driver.MemInfo()
			return err
		})
		index[d.Ordinal] = len(list)
		list = append(list, u)
	}
	resident := map[string]uint64{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.blocks {
		i, ok := index[b.mem.prop.Location]
		if !ok {
			continue
		}
		u := &list[i]
		if b.slab {
			u.Slabs++
			u.Chunks += len(b.handles)
			u.Slab += b.size
			u.SlabUsed += b.used()
		} else {
			u.Direct += b.size
		}
		if b.mem.live {
			u.Device += b.size
		} else {
			u.Paused += b.size
		}
		if b.mem.keep != "" {
			u.Resident += b.size
			resident[b.mem.keep] += b.size
		}
	}
	for _, m := range s.imported() {
		if !m.live {
			continue
		}
		for _, a := range m.access {
			if i, ok := index[a.Location]; ok {
				list[i].Imported += m.size
			}
		}
		if m.keep != "" {
			resident["imported:"+m.keep] += m.size
		}
	}
	slices.SortFunc(list, func(a, b Usage) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
	return list, resident
}

// uuidText writes a device's UUID as nvidia-smi does.
func uuidText(u [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
}
