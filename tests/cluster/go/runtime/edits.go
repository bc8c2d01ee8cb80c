package main

import (
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// give adds device nodes, the right to use them, and the driver's directory.
//
// A node or mount that the container has by other means stays as it is: a privileged one has all nodes of /dev.
func give(spec *specs.Spec, devices []specs.LinuxDevice) {
	if spec.Linux == nil {
		spec.Linux = &specs.Linux{}
	}
	if spec.Linux.Resources == nil {
		spec.Linux.Resources = &specs.LinuxResources{}
	}
	for _, device := range devices {
		addNode(spec.Linux, device)
		addRule(spec.Linux.Resources, device)
	}
	if !slices.ContainsFunc(spec.Mounts, func(mount specs.Mount) bool { return mount.Destination == driverDirectory }) {
		spec.Mounts = append(spec.Mounts, specs.Mount{
			Destination: driverDirectory,
			Type:        "bind",
			Source:      driverDirectory,
			Options:     []string{"rbind", "rw", "nosuid", "nodev", "rprivate"}, // rw: the simulation's locks are in it
		})
	}
}

func addNode(linux *specs.Linux, device specs.LinuxDevice) {
	if !slices.ContainsFunc(linux.Devices, func(known specs.LinuxDevice) bool { return known.Path == device.Path }) {
		linux.Devices = append(linux.Devices, device)
	}
}

func addRule(resources *specs.LinuxResources, device specs.LinuxDevice) {
	if last := len(resources.Devices) - 1; last >= 0 && allowsAll(resources.Devices[last]) {
		return
	}
	rule := specs.LinuxDeviceCgroup{
		Allow: true, Type: device.Type, Major: &device.Major, Minor: &device.Minor, Access: "rwm",
	}
	resources.Devices = append(resources.Devices, rule)
}

func allowsAll(rule specs.LinuxDeviceCgroup) bool {
	return rule.Allow && (rule.Type == "" || rule.Type == "a") && rule.Major == nil && rule.Minor == nil
}

// show adds the hook that puts the driver's files below the container's /proc, where runc allows no mounts.
func show(spec *specs.Spec, self, rootfs string, given grant) {
	if spec.Hooks == nil {
		spec.Hooks = &specs.Hooks{}
	}
	arguments := []string{self, "hook", "--rootfs=" + rootfs}
	if given.driver {
		var addresses []string
		for _, gpu := range given.gpus {
			addresses = append(addresses, gpu.Address)
		}
		arguments = append(arguments, "--only="+strings.Join(addresses, ","))
	}
	spec.Hooks.CreateContainer = append(spec.Hooks.CreateContainer, specs.Hook{Path: self, Args: arguments})
}
