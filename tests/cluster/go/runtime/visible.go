package main

import (
	"fmt"
	"strconv"
	"strings"

	"kube/runtime/driver"
)

const variable = "NVIDIA_VISIBLE_DEVICES"

// grant is what a container gets of the node's driver.
type grant struct {
	driver bool // its directory and control nodes
	gpus   []driver.GPU
}

// granted reads the container's environment as NVIDIA's toolkit does: unset, empty or "void" is nothing at all, "none" the
// driver without GPUs, "all" every GPU, and else a list of indexes and UUIDs. One that the node lacks is an error.
func granted(env []string, node []driver.GPU) (grant, error) {
	value := lookup(env)
	switch value {
	case "", "void":
		return grant{}, nil
	case "none":
		return grant{driver: true}, nil
	case "all":
		return grant{driver: true, gpus: node}, nil
	}
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(value, ",") {
		gpu, ok := find(strings.TrimSpace(name), node)
		if !ok {
			return grant{}, fmt.Errorf("%s=%s: cannot give GPU %q: not one of the node's %d; see %s/gpus",
				variable, value, name, len(node), driver.Proc)
		}
		wanted[gpu.UUID] = true
	}
	var gpus []driver.GPU
	for _, gpu := range node {
		if wanted[gpu.UUID] {
			gpus = append(gpus, gpu)
		}
	}
	return grant{driver: true, gpus: gpus}, nil
}

// lookup returns the last value, which is the one that counts for the toolkit.
func lookup(env []string) string {
	found := ""
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, variable+"="); ok {
			found = strings.TrimSpace(value)
		}
	}
	return found
}

func find(name string, node []driver.GPU) (driver.GPU, bool) {
	for index, gpu := range node {
		if name == gpu.UUID || name == strconv.Itoa(index) {
			return gpu, true
		}
	}
	return driver.GPU{}, false
}
