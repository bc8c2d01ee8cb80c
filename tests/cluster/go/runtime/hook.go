package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"kube/runtime/driver"
)

// below are the places in a container that the kernel fills on a node with a real driver.
const (
	procDriver  = "/proc/driver"
	procDevices = "/proc/devices"
)

// hook shows a container the driver's part of /proc; runc calls it as an OCI createContainer hook: in the container's
// mount namespace, with its /proc mounted, before the root is changed, so that the node's own files are still in reach.
//
// A container given GPUs sees those alone below /proc/driver/nvidia/gpus, as NVIDIA's toolkit has it; another one sees what
// the kernel shows everywhere, all of them. All is bound read-only from the node, so that a change there is seen at once,
// and goes with the container's mount namespace.
func hook(arguments []string) error {
	flags := flag.NewFlagSet("hook", flag.ContinueOnError)
	root := flags.String("rootfs", "", "the container's root directory")
	only := flags.String("only", "", "PCI addresses, comma separated; without the flag all GPUs are shown")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if *root == "" {
		return fmt.Errorf("hook: cannot run without --rootfs; it is for runc to call")
	}
	for _, path := range []string{procDriver, procDevices} {
		if err := bind(path, filepath.Join(*root, path)); err != nil {
			return err
		}
	}
	filtered := false
	flags.Visit(func(given *flag.Flag) { filtered = filtered || given.Name == "only" })
	if !filtered {
		return nil
	}
	return filter(filepath.Join(*root, driver.Proc), strings.FieldsFunc(*only, func(r rune) bool { return r == ',' }))
}

// bind does nothing in a container without a /proc of the kernel's.
func bind(source, target string) error {
	if _, err := os.Stat(target); os.IsNotExist(err) {
		return nil
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("%s: cannot bind to %s: %w", source, target, err)
	}
	return seal(target)
}

// seal makes a mount read-only, and keeps later mounts below it in this namespace: with shared propagation, as of a pod
// that asks for Bidirectional, they would appear on the node itself.
func seal(target string) error {
	attributes := &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
		Propagation: unix.MS_SLAVE,
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_RECURSIVE, attributes); err != nil {
		return fmt.Errorf("%s: cannot make it read-only: %w; needs Linux 5.12", target, err)
	}
	return nil
}

// filter covers the driver's directory with one that has the same files and these GPUs only.
func filter(target string, addresses []string) error {
	if _, err := os.Stat(target); os.IsNotExist(err) {
		return nil
	}
	if err := unix.Mount("tmpfs", target, "tmpfs", 0, "mode=0555,size=1m"); err != nil {
		return fmt.Errorf("%s: cannot cover: %w", target, err)
	}
	if err := copyFiles(driver.Proc, target); err != nil {
		return fmt.Errorf("%s: cannot copy to %s: %w", driver.Proc, target, err)
	}
	if err := os.Mkdir(filepath.Join(target, "gpus"), 0o555); err != nil {
		return fmt.Errorf("%s: cannot fill: %w", target, err)
	}
	for _, address := range addresses {
		place := filepath.Join(target, "gpus", address)
		if err := os.Mkdir(place, 0o555); err != nil {
			return fmt.Errorf("%s: cannot make: %w", place, err)
		}
		if err := bind(filepath.Join(driver.Proc, "gpus", address), place); err != nil {
			return err
		}
	}
	return seal(target)
}

func copyFiles(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.Type().IsRegular() {
			continue
		}
		if err := copyFile(filepath.Join(from, entry.Name()), filepath.Join(to, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }()
	target, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	if _, err := io.Copy(target, source); err != nil {
		return err
	}
	return target.Close()
}
