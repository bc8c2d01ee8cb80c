package main

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

var gpuNode = specs.LinuxDevice{Path: "/dev/nvidia0", Type: "c", Major: 195, Minor: 0}

func container(rules ...specs.LinuxDeviceCgroup) *specs.Spec {
	return &specs.Spec{Linux: &specs.Linux{Resources: &specs.LinuxResources{Devices: rules}}}
}

// The node, the right to use it and the driver.
func TestAContainerIsGivenNodeRuleAndMount(t *testing.T) {
	spec := container(specs.LinuxDeviceCgroup{Allow: false, Access: "rwm"})
	give(spec, []specs.LinuxDevice{gpuNode})
	if !slices.Equal(spec.Linux.Devices, []specs.LinuxDevice{gpuNode}) {
		t.Errorf("devices: %+v", spec.Linux.Devices)
	}
	rule := spec.Linux.Resources.Devices[1]
	if !rule.Allow || rule.Type != "c" || *rule.Major != 195 || *rule.Minor != 0 || rule.Access != "rwm" {
		t.Errorf("rule: %+v", rule)
	}
	if len(spec.Mounts) != 1 || spec.Mounts[0].Source != driverDirectory || spec.Mounts[0].Destination != driverDirectory {
		t.Errorf("mounts: %+v", spec.Mounts)
	}
}

// What a privileged container has it has once, and a volume that the pod mounts itself stays.
func TestWhatAContainerHasStaysAsItIs(t *testing.T) {
	theirs := specs.LinuxDevice{Path: "/dev/nvidia0", Type: "c", Major: 4, Minor: 30}
	spec := container(specs.LinuxDeviceCgroup{Allow: true, Access: "rwm"})
	spec.Linux.Devices = []specs.LinuxDevice{theirs}
	spec.Mounts = []specs.Mount{{Destination: driverDirectory, Source: "/other"}}
	give(spec, []specs.LinuxDevice{gpuNode})
	if !slices.Equal(spec.Linux.Devices, []specs.LinuxDevice{theirs}) || len(spec.Linux.Resources.Devices) != 1 {
		t.Errorf("linux: %+v", spec.Linux)
	}
	if len(spec.Mounts) != 1 || spec.Mounts[0].Source != "/other" {
		t.Errorf("mounts: %+v", spec.Mounts)
	}
}

// A bundle without any of the sections gets them.
func TestAnEmptySpecIsFilled(t *testing.T) {
	spec := &specs.Spec{}
	give(spec, []specs.LinuxDevice{gpuNode})
	show(spec, "/bin/runtime", "/b/rootfs", grant{})
	if len(spec.Linux.Devices) != 1 || len(spec.Hooks.CreateContainer) != 1 {
		t.Errorf("got %+v", spec)
	}
}

// With the driver only the GPUs given are shown, without it all of them: an empty --only is not the same as none.
func TestTheHookIsToldWhatToShow(t *testing.T) {
	for _, example := range []struct {
		name  string
		given grant
		last  string
	}{
		{"no driver", grant{}, "--rootfs=/b/rootfs"},
		{"driver alone", grant{driver: true}, "--only="},
		{"two GPUs", grant{driver: true, gpus: node}, "--only=0000:1a:00.0,0000:1b:00.0"},
	} {
		spec := container()
		spec.Hooks = &specs.Hooks{CreateContainer: []specs.Hook{{Path: "/theirs"}}}
		show(spec, "/bin/runtime", "/b/rootfs", example.given)
		hooks := spec.Hooks.CreateContainer
		if len(hooks) != 2 || hooks[1].Path != "/bin/runtime" || hooks[1].Args[len(hooks[1].Args)-1] != example.last {
			t.Errorf("%s: got %+v", example.name, hooks)
		}
	}
}

// A bundle passes unharmed through reading and writing, numbers beyond 53 bits and unset pointers included.
func TestASpecSurvives(t *testing.T) {
	const text = `{"ociVersion":"1.0.2","process":{"user":{"uid":0,"gid":0,"umask":18},"cwd":"/","args":["a"],` +
		`"rlimits":[{"type":"RLIMIT_NOFILE","hard":18446744073709551615,"soft":1}],"noNewPrivileges":true,"oomScoreAdj":-998},` +
		`"root":{"path":"rootfs","readonly":true},"linux":{"resources":{"memory":{"limit":9223372036854771712,"swap":0},` +
		`"cpu":{"shares":2}},"cgroupsPath":"/k","seccomp":{"defaultAction":"SCMP_ACT_ERRNO"},"maskedPaths":["/proc/kcore"]}}`
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	before, err := load(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := store(path, before); err != nil {
		t.Fatal(err)
	}
	after, err := load(path)
	if err != nil || !reflect.DeepEqual(before, after) {
		t.Fatalf("got %+v, %v; want %+v", after, err, before)
	}
	if hard := after.Process.Rlimits[0].Hard; hard != 18446744073709551615 {
		t.Errorf("hard limit %d", hard)
	}
}
