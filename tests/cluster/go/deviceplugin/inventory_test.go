package main

import (
	"context"
	"slices"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"kube/runtime/driver"
)

var (
	first  = driver.GPU{Address: "0000:1a:00.0", UUID: "GPU-a", Minor: 0}
	second = driver.GPU{Address: "0000:1b:00.0", UUID: "GPU-b", Minor: 1}
	third  = driver.GPU{Address: "0000:1c:00.0", UUID: "GPU-c", Minor: 2}
)

func holding(gpus ...driver.GPU) *inventory {
	known := newInventory()
	known.update(gpus)
	return known
}

// The node keeps its capacity and loses what can be allocated.
func TestAGPUThatGoesIsUnhealthyUntilItIsBack(t *testing.T) {
	known := holding(first, second)
	_, changed := known.current()
	news := known.update([]driver.GPU{first})
	devices, _ := known.current()
	if !slices.Equal(devices, []device{{first, true}, {second, false}}) || len(news) != 1 {
		t.Fatalf("gone: %+v, %q", devices, news)
	}
	select {
	case <-changed:
	default:
		t.Fatal("gone: nobody was told")
	}
	known.update([]driver.GPU{second, first})
	devices, _ = known.current()
	if !slices.Equal(devices, []device{{first, true}, {second, true}}) {
		t.Fatalf("back: %+v", devices)
	}
}

// The kubelet hears of changes only.
func TestTheSameGPUsAreNoNews(t *testing.T) {
	known := holding(first, second)
	_, changed := known.current()
	if news := known.update([]driver.GPU{first, second}); news != nil {
		t.Fatalf("news: %q", news)
	}
	select {
	case <-changed:
		t.Fatal("a change was told")
	default:
	}
}

// A container's GPUs are named by minor number, whatever order the kubelet has them in.
func TestAllocationNamesUUIDsByMinorNumber(t *testing.T) {
	p := &plugin{inventory: holding(first, second, third)}
	answer, err := p.Allocate(context.Background(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{
			{DevicesIds: []string{"GPU-c", "GPU-a"}}, {DevicesIds: []string{"GPU-b"}},
		},
	})
	if err != nil || len(answer.ContainerResponses) != 2 {
		t.Fatalf("got %v, %v", answer, err)
	}
	for i, want := range []string{"GPU-a,GPU-c", "GPU-b"} {
		if got := answer.ContainerResponses[i].Envs["NVIDIA_VISIBLE_DEVICES"]; got != want {
			t.Errorf("container %d: got %s, want %s", i, got, want)
		}
	}
}

// A pod fails rather than starts on a GPU that is gone.
func TestAGPUThatIsGoneIsNotAllocated(t *testing.T) {
	known := holding(first, second)
	known.update([]driver.GPU{first})
	p := &plugin{inventory: known}
	for _, uuid := range []string{"GPU-b", "GPU-x"} {
		answer, err := p.Allocate(context.Background(), &v1beta1.AllocateRequest{
			ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{"GPU-a", uuid}}},
		})
		if err == nil {
			t.Errorf("%s: got %v", uuid, answer)
		}
	}
}

// What must be included comes first, the lowest minor numbers fill up.
func TestTheLowestMinorNumbersArePreferred(t *testing.T) {
	p := &plugin{inventory: holding(first, second, third)}
	answer, err := p.GetPreferredAllocation(context.Background(), &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: []string{"GPU-c", "GPU-b", "GPU-a"}, AllocationSize: 2},
			{AvailableDeviceIDs: []string{"GPU-c", "GPU-b"}, MustIncludeDeviceIDs: []string{"GPU-c"}, AllocationSize: 2},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]string{{"GPU-a", "GPU-b"}, {"GPU-c", "GPU-b"}} {
		if got := answer.ContainerResponses[i].DeviceIDs; !slices.Equal(got, want) {
			t.Errorf("container %d: got %v, want %v", i, got, want)
		}
	}
}
