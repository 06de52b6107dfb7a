package session

import (
	"amem/golib/offload"
	"amem/golib/peer"
	"amem/golib/vmm"
)

// Stats is what amem_stats_json tells. Sizes are bytes, times seconds.
type Stats struct {
	Version     string            `json:"version"`
	State       string            `json:"state"`
	PID         int               `json:"pid"`
	ProcessID   string            `json:"process_id"`
	Group       int               `json:"group"`
	DeviceBytes uint64            `json:"device_bytes"` // own memory, on the devices now
	PausedBytes uint64            `json:"paused_bytes"` // own memory, given back
	Devices     []vmm.Usage       `json:"devices"`
	Resident    map[string]uint64 `json:"resident"` // what a pause does not release, by reason
	Host        HostStats         `json:"host"`
	Peers       []PeerStats       `json:"peers"`
	Regions     []RegionStats     `json:"regions"`
	Sharers     []PeerStats       `json:"sharers"` // of regions' memory
	Pauses      int               `json:"pauses"`
	Resumes     int               `json:"resumes"`
	LastPause   PauseReport       `json:"last_pause"`
	LastResume  ResumeReport      `json:"last_resume"`
	DriverCalls map[string]int64  `json:"driver_calls"`  // made by amem
	Messages    int64             `json:"messages_sent"` // to peers
}

// HostStats is the host memory that amem holds.
type HostStats struct {
	Arena uint64 `json:"arena_bytes"`
}

// PeerStats is one process that shares memory with this one.
type PeerStats struct {
	PID     int    `json:"pid"`
	ID      string `json:"process_id"`
	Group   int    `json:"group"`
	Imports int    `json:"imports"` // blocks of theirs that this process maps
	Exports int    `json:"exports"` // blocks of this process that they map
	Stopped bool   `json:"stopped"`
}

// RegionStats is the program's own memory of one tag and backup.
type RegionStats struct {
	Tag         string            `json:"tag"`
	Backup      string            `json:"backup"`
	State       string            `json:"state"`
	Allocations int               `json:"allocations"`
	Allocated   uint64            `json:"allocated_bytes"`
	Device      uint64            `json:"device_bytes"` // own, on the devices now
	Paused      uint64            `json:"paused_bytes"` // own, given back
	Opened      uint64            `json:"opened_bytes"` // other processes', mapped here now
	Resident    map[string]uint64 `json:"resident"`     // what a pause does not release, by reason
	Host        uint64            `json:"host_bytes"`   // for backups
	Disk        uint64            `json:"disk_bytes"`   // for backups
}

func (r *Region) stats() RegionStats {
	devices, resident := r.space.Usage()
	stats := RegionStats{Tag: r.tag, Backup: r.backup.String(), State: Active.String(), Resident: resident}
	if r.isPaused() {
		stats.State = Paused.String()
	}
	stats.Allocations, stats.Allocated = r.space.Allocated()
	for _, d := range devices {
		stats.Device += d.Device
		stats.Paused += d.Paused
		stats.Opened += d.Imported
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.store != nil {
		stats.Host = r.store.Bytes()
		if disk, is := r.store.(*offload.Disk); is {
			stats.Disk = disk.FileBytes()
		}
	}
	return stats
}

func peerStats(node *peer.Node) []PeerStats {
	list := []PeerStats{}
	for _, p := range node.Peers() {
		list = append(list, PeerStats{p.PID, p.ID.String(), p.Group, p.Imports, p.Exports, p.Stopped})
	}
	return list
}

// Stats answers the figures as they are now.
func (s *Session) Stats(version string) Stats {
	self := s.node.Self()
	devices, resident := s.space.Usage()
	stats := Stats{
		Version: version, PID: self.PID, ProcessID: self.ID.String(), Group: self.Group,
		Devices: devices, Resident: resident, Host: HostStats{Arena: s.arena.Bytes()}, Peers: peerStats(s.node),
		Regions: []RegionStats{}, Sharers: []PeerStats{}, DriverCalls: s.driver.Calls(), Messages: s.node.Sent(),
	}
	for _, r := range s.allRegions() {
		stats.Regions = append(stats.Regions, r.stats())
		stats.Sharers = peerStats(r.session.regions.share.node)
	}
	for _, d := range devices {
		stats.DeviceBytes += d.Device
		stats.PausedBytes += d.Paused
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stats.State = s.state.String()
	stats.Pauses, stats.Resumes = s.pauses, s.resume
	stats.LastPause, stats.LastResume = s.last.pause, s.last.resume
	stats.LastPause.HeldBy = append([]Holder{}, s.last.pause.HeldBy...) // a list, if there are none too
	return stats
}
