// Command nvidia-device-plugin offers a node's GPUs to the kubelet as nvidia.com/gpu.
//
// It stands for NVIDIA's k8s-device-plugin with its default settings, over the same gRPC interface (v1beta1), and takes
// the GPUs from /proc/driver/nvidia instead of NVML, so that it needs no C library. Ends on SIGTERM.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"kube/runtime/driver"
)

const (
	retryInterval  = time.Second
	rescanInterval = 2 * time.Second // the kernel tells nobody of changes below /proc
)

func main() {
	proc := flag.String("proc", driver.Proc, "where the driver lists its GPUs")
	plugins := flag.String("plugins", filepath.Clean(v1beta1.DevicePluginPath), "the folder of the kubelet's socket")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *proc, *plugins); err != nil {
		log.Print(err)
		os.Exit(1)
	}
	log.Print("ended by a signal")
}

// run serves until the context ends. Returns as an error what no later event could mend: an unreadable driver at the
// start, or no watch on the folder of plugins.
func run(ctx context.Context, proc, plugins string) error {
	gpus, err := driver.Read(proc)
	if err != nil {
		return err
	}
	events, err := watch(plugins)
	if err != nil {
		return fmt.Errorf("%s: cannot watch: %w; check --plugins", plugins, err)
	}
	defer func() { _ = events.Close() }()
	known := newInventory()
	logLines(known.update(gpus))
	log.Printf("%s: %d GPUs", proc, len(gpus))
	registered := &registration{plugin: &plugin{inventory: known}, folder: plugins}
	defer registered.close()
	return loop(ctx, proc, events, registered)
}

func watch(folder string) (*fsnotify.Watcher, error) {
	if err := os.MkdirAll(folder, 0o750); err != nil {
		return nil, err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return watcher, watcher.Add(folder)
}

func loop(ctx context.Context, proc string, events *fsnotify.Watcher, registered *registration) error {
	rescan := time.NewTicker(rescanInterval)
	defer rescan.Stop()
	attempt := time.After(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-events.Errors:
			return fmt.Errorf("%s: cannot watch: %w; start again", registered.folder, err)
		case event := <-events.Events:
			if event.Name == registered.kubelet() && event.Has(fsnotify.Create) {
				attempt = time.After(0)
			}
		case <-attempt:
			attempt = retry(ctx, registered.renew(ctx))
		case <-rescan.C:
			look(proc, registered.plugin.inventory)
		}
	}
}

// retry returns when to try again: not at all after a success or at the end, nor without a kubelet, whose start is an
// event.
func retry(ctx context.Context, err error) <-chan time.Time {
	if err == nil || ctx.Err() != nil {
		return nil
	}
	log.Print(err)
	if errors.Is(err, errNoKubelet) {
		return nil
	}
	return time.After(retryInterval)
}

func look(proc string, known *inventory) {
	gpus, err := driver.Read(proc)
	if err != nil {
		log.Print(err)
		return
	}
	logLines(known.update(gpus))
}

func logLines(lines []string) {
	for _, line := range lines {
		log.Print(line)
	}
}
