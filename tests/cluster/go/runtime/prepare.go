package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"kube/runtime/driver"
)

// driverDirectory is where container runtimes of the large clouds have the driver's libraries.
const driverDirectory = "/usr/local/nvidia/lib64"

var (
	neededNodes   = []string{"/dev/nvidiactl"}
	optionalNodes = []string{"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} // only once the module nvidia-uvm is loaded
)

// prepare edits the bundle's config.json; a node without a driver leaves a container without GPUs as it is.
func prepare(bundle, self string) error {
	path := filepath.Join(bundle, "config.json")
	spec, err := load(path)
	if err != nil {
		return fmt.Errorf("%s: cannot read: %w; look for what wrote it", path, err)
	}
	node, err := driver.Read(driver.Proc)
	if err != nil {
		return err
	}
	given := grant{}
	if spec.Process != nil {
		given, err = granted(spec.Process.Env, node)
	}
	if err != nil {
		return err
	}
	if given.driver {
		devices, err := nodes(given)
		if err != nil {
			return err
		}
		give(spec, devices)
	}
	if _, err := os.Stat(driver.Proc); err == nil && spec.Root != nil {
		show(spec, self, rootfs(bundle, spec), given)
	}
	if err := store(path, spec); err != nil {
		return fmt.Errorf("%s: cannot write: %w; check the disk", path, err)
	}
	return nil
}

func rootfs(bundle string, spec *specs.Spec) string {
	path := spec.Root.Path
	if !filepath.IsAbs(path) {
		path = filepath.Join(bundle, path)
	}
	if absolute, err := filepath.Abs(path); err == nil {
		return absolute
	}
	return path
}

// nodes returns the device nodes of the grant as they are on the node.
func nodes(given grant) ([]specs.LinuxDevice, error) {
	if _, err := os.Stat(driverDirectory); err != nil {
		return nil, fmt.Errorf("driver: cannot give to a container: %w; install the driver on the node", err)
	}
	paths := slices.Clone(neededNodes)
	for _, gpu := range given.gpus {
		paths = append(paths, gpu.Node())
	}
	var devices []specs.LinuxDevice
	for _, path := range paths {
		device, err := stat(path)
		if err != nil {
			return nil, fmt.Errorf("%s: cannot give to a container: %w; load the driver on the node", path, err)
		}
		devices = append(devices, device)
	}
	for _, path := range optionalNodes {
		if device, err := stat(path); err == nil {
			devices = append(devices, device)
		}
	}
	return devices, nil
}

func stat(path string) (specs.LinuxDevice, error) {
	var status unix.Stat_t
	if err := unix.Stat(path, &status); err != nil {
		return specs.LinuxDevice{}, err
	}
	if status.Mode&unix.S_IFMT != unix.S_IFCHR {
		return specs.LinuxDevice{}, fmt.Errorf("no character device")
	}
	mode := os.FileMode(status.Mode & 0o777)
	return specs.LinuxDevice{
		Path: path, Type: "c", FileMode: &mode, UID: &status.Uid, GID: &status.Gid,
		Major: int64(unix.Major(status.Rdev)), Minor: int64(unix.Minor(status.Rdev)),
	}, nil
}

func load(path string) (*specs.Spec, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{}
	return spec, json.Unmarshal(text, spec)
}

// store replaces the file by rename, so that a failure leaves the old one whole.
func store(path string, spec *specs.Spec) error {
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	draft := path + ".nvidia"
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return err
	}
	return os.Rename(draft, path)
}
