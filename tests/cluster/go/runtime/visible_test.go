package main

import (
	"slices"
	"strings"
	"testing"

	"kube/runtime/driver"
)

var node = []driver.GPU{{Address: "0000:1a:00.0", UUID: "GPU-a", Minor: 1}, {Address: "0000:1b:00.0", UUID: "GPU-b", Minor: 0}}

// What a value of NVIDIA_VISIBLE_DEVICES gives, as NVIDIA's toolkit documents it.
func TestVisibleDevices(t *testing.T) {
	for _, example := range []struct {
		name   string
		env    []string
		driver bool
		uuids  []string
	}{
		{"unset", []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES_ALL=all"}, false, nil},
		{"empty", []string{"NVIDIA_VISIBLE_DEVICES="}, false, nil},
		{"void", []string{"NVIDIA_VISIBLE_DEVICES=void"}, false, nil},
		{"none is the driver alone", []string{"NVIDIA_VISIBLE_DEVICES=none"}, true, nil},
		{"all", []string{"NVIDIA_VISIBLE_DEVICES=all"}, true, []string{"GPU-a", "GPU-b"}},
		{"an index is a place and no minor number", []string{"NVIDIA_VISIBLE_DEVICES=0"}, true, []string{"GPU-a"}},
		{"UUIDs in the node's order", []string{"NVIDIA_VISIBLE_DEVICES=GPU-b,GPU-a"}, true, []string{"GPU-a", "GPU-b"}},
		{"one GPU by two names", []string{"NVIDIA_VISIBLE_DEVICES=1, GPU-b"}, true, []string{"GPU-b"}},
		{"the last value counts", []string{"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"}, false, nil},
	} {
		given, err := granted(example.env, node)
		var uuids []string
		for _, gpu := range given.gpus {
			uuids = append(uuids, gpu.UUID)
		}
		if err != nil || given.driver != example.driver || !slices.Equal(uuids, example.uuids) {
			t.Errorf("%s: got %+v, %v", example.name, given, err)
		}
	}
}

// A pod must not start with fewer GPUs than it asked for.
func TestAnUnknownGPUIsAnError(t *testing.T) {
	for _, value := range []string{"2", "-1", "GPU-c", "GPU-a,GPU-c", "GPU-a,", "0,all", "GPU"} {
		given, err := granted([]string{"NVIDIA_VISIBLE_DEVICES=" + value}, node)
		if err == nil || !strings.Contains(err.Error(), "NVIDIA_VISIBLE_DEVICES="+value) {
			t.Errorf("%s: got %+v, %v", value, given, err)
		}
	}
}
