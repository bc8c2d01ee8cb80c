package main

import (
	"context"
	"fmt"
	"log"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// plugin answers the kubelet as NVIDIA's device plugin does with its default strategy, "envvar": a container gets the
// UUIDs of its GPUs in its environment, and the container runtime does the rest.
type plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	inventory *inventory
}

func (p *plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

func (p *plugin) ListAndWatch(
	_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse],
) error {
	for {
		devices, changed := p.inventory.current()
		if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: listed(devices)}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func listed(devices []device) []*v1beta1.Device {
	var answer []*v1beta1.Device
	for _, device := range devices {
		health := v1beta1.Unhealthy
		if device.healthy {
			health = v1beta1.Healthy
		}
		answer = append(answer, &v1beta1.Device{ID: device.UUID, Health: health})
	}
	return answer
}

// GetPreferredAllocation asks for the lowest minor numbers: the kubelet alone would choose at random.
func (p *plugin) GetPreferredAllocation(
	_ context.Context, request *v1beta1.PreferredAllocationRequest,
) (*v1beta1.PreferredAllocationResponse, error) {
	devices, _ := p.inventory.current()
	answer := &v1beta1.PreferredAllocationResponse{}
	for _, container := range request.ContainerRequests {
		chosen := slices.Clone(container.MustIncludeDeviceIDs)
		for _, device := range devices {
			free := slices.Contains(container.AvailableDeviceIDs, device.UUID) && !slices.Contains(chosen, device.UUID)
			if free && len(chosen) < int(container.AllocationSize) {
				chosen = append(chosen, device.UUID)
			}
		}
		preferred := &v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: chosen}
		answer.ContainerResponses = append(answer.ContainerResponses, preferred)
	}
	return answer, nil
}

func (p *plugin) Allocate(_ context.Context, request *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	answer := &v1beta1.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		devices, err := p.inventory.find(container.DevicesIds)
		if err != nil {
			log.Print(err)
			return nil, err
		}
		var uuids []string
		for _, device := range devices {
			uuids = append(uuids, device.UUID)
		}
		visible := strings.Join(uuids, ",")
		log.Printf("%s: allocated to a container", visible)
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": visible},
		})
	}
	return answer, nil
}

// PreStartContainer is not among the options, so a call is a slip of the kubelet's.
func (p *plugin) PreStartContainer(
	context.Context, *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	return nil, fmt.Errorf("%s: cannot prepare a container: not among this plugin's options", resource)
}
