package main

import (
	"fmt"
	"slices"
	"sync"

	"kube/runtime/driver"
)

// device is a GPU that the plugin has seen, and whether it was there at the last look.
type device struct {
	driver.GPU
	healthy bool
}

// inventory holds the node's GPUs, and tells every reader when they change.
type inventory struct {
	mutex   sync.Mutex
	devices []device
	changed chan struct{}
}

func newInventory() *inventory {
	return &inventory{changed: make(chan struct{})}
}

// current returns the GPUs by minor number, and a channel that is closed when they are no longer these.
func (i *inventory) current() ([]device, <-chan struct{}) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	return i.devices, i.changed
}

// update takes what is on the node now, and returns a line for each GPU that came, went or came back.
func (i *inventory) update(present []driver.GPU) []string {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	merged := merge(i.devices, present)
	if slices.Equal(i.devices, merged) {
		return nil
	}
	news := differences(i.devices, merged)
	i.devices = merged
	close(i.changed)
	i.changed = make(chan struct{})
	return news
}

// find returns the GPUs of these UUIDs by minor number. An unknown or unhealthy one is an error.
func (i *inventory) find(uuids []string) ([]device, error) {
	devices, _ := i.current()
	var found []device
	for _, device := range devices {
		if slices.Contains(uuids, device.UUID) && device.healthy {
			found = append(found, device)
		}
	}
	for _, uuid := range uuids {
		if !slices.ContainsFunc(found, func(d device) bool { return d.UUID == uuid }) {
			return nil, fmt.Errorf("%s: cannot allocate: not among the node's healthy GPUs; see %s/gpus", uuid, driver.Proc)
		}
	}
	return found, nil
}

// merge keeps a GPU that is gone as an unhealthy one, as NVIDIA's plugin does, so that the node's capacity stays.
func merge(known []device, present []driver.GPU) []device {
	var merged []device
	for _, gpu := range present {
		merged = append(merged, device{gpu, true})
	}
	for _, old := range known {
		if !slices.ContainsFunc(present, func(gpu driver.GPU) bool { return gpu.UUID == old.UUID }) {
			merged = append(merged, device{old.GPU, false})
		}
	}
	slices.SortFunc(merged, func(a, b device) int { return a.Minor - b.Minor })
	return merged
}

func differences(before, after []device) []string {
	var lines []string
	for _, device := range after {
		if slices.Contains(before, device) {
			continue
		}
		state := "unhealthy: it is gone from the driver's list"
		if device.healthy {
			state = "healthy"
		}
		lines = append(lines, fmt.Sprintf("%s (minor %d): %s", device.UUID, device.Minor, state))
	}
	return lines
}
