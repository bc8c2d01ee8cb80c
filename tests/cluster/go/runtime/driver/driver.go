// Package driver reads what NVIDIA's kernel driver says of a node's GPUs below /proc/driver/nvidia.
package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Proc is where the driver writes.
const Proc = "/proc/driver/nvidia"

// GPU is one whole GPU of the node.
type GPU struct {
	Address string // PCI address as the driver's directory has it, such as 0000:1b:00.0
	UUID    string
	Minor   int // of its device node, /dev/nvidia<minor>
}

// Node returns the path of the GPU's device node.
func (gpu GPU) Node() string {
	return fmt.Sprintf("/dev/nvidia%d", gpu.Minor)
}

// Read returns the node's GPUs by PCI address, which is the order of NVML's indexes.
//
// A node without a driver has none, and a GPU that goes away during the reading is left out. An entry that is there and
// does not say UUID and minor number is an error.
func Read(proc string) ([]GPU, error) {
	entries, err := os.ReadDir(filepath.Join(proc, "gpus")) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: cannot list GPUs: %w; check the driver", proc, err)
	}
	var gpus []GPU
	for _, entry := range entries {
		path := filepath.Join(proc, "gpus", entry.Name(), "information")
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: cannot read: %w; check the driver", path, err)
		}
		gpu, err := parse(entry.Name(), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: cannot read: %w; check the driver", path, err)
		}
		gpus = append(gpus, gpu)
	}
	return gpus, nil
}

func parse(address, text string) (GPU, error) {
	rows := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		rows[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	minor, err := strconv.Atoi(rows["Device Minor"])
	if err != nil || rows["GPU UUID"] == "" {
		return GPU{}, fmt.Errorf("no GPU UUID or no Device Minor in %d lines", strings.Count(text, "\n"))
	}
	return GPU{Address: address, UUID: rows["GPU UUID"], Minor: minor}, nil
}
