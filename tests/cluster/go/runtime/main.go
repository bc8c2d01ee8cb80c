// Command nvidia-container-runtime is runc with NVIDIA's GPUs: containerd calls it with runc's arguments.
//
// It stands for NVIDIA's container toolkit with its default settings. For `create` it adds to the bundle's config.json
// what the container's NVIDIA_VISIBLE_DEVICES asks for, then becomes runc; all else goes to runc as it came. The real
// toolkit mounts single files of the driver and runs ldconfig; here the container gets the driver's whole directory.
//
// The same program is the hook that shows a container the driver's files below /proc (hook.go).
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

func main() {
	var err error
	arguments := os.Args[1:]
	if len(arguments) > 0 && arguments[0] == "hook" {
		err = hook(arguments[1:])
	} else {
		err = become(arguments)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// become prepares the container, if one is to be created, and replaces this process by runc.
func become(arguments []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("nvidia-container-runtime: cannot find itself: %w; mount /proc", err)
	}
	called := parse(arguments)
	if called.creates() {
		if err := prepare(called.bundle, self); err != nil {
			called.report(err)
			return err
		}
	}
	runc, err := findRunc(filepath.SplitList(os.Getenv("PATH")), self)
	if err != nil {
		called.report(err)
		return err
	}
	err = syscall.Exec(runc, append([]string{"runc"}, arguments...), os.Environ())
	return fmt.Errorf("%s: cannot start: %w; install runc again", runc, err)
}

// findRunc returns the first program called runc that is not this one.
func findRunc(folders []string, self string) (string, error) {
	own, err := os.Stat(self)
	if err != nil {
		return "", fmt.Errorf("%s: cannot stat: %w; install it again", self, err)
	}
	for _, folder := range folders {
		path := filepath.Join(folder, "runc")
		found, err := os.Stat(path)
		if err == nil && found.Mode().IsRegular() && found.Mode()&0o111 != 0 && !os.SameFile(own, found) {
			return path, nil
		}
	}
	return "", errors.New("runc: cannot find it in PATH; install runc, or set PATH of containerd")
}
