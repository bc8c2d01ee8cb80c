package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const deadline = 20 * time.Second

// kubelet is the kubelet's side of the interface: it registers plugins, and removes their sockets when it starts.
type kubelet struct {
	v1beta1.UnimplementedRegistrationServer
	registered chan *v1beta1.RegisterRequest
	server     *grpc.Server
}

func (k *kubelet) Register(_ context.Context, request *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	k.registered <- request
	return &v1beta1.Empty{}, nil
}

func startKubelet(t *testing.T, folder string) *kubelet {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(folder, "*.sock"))
	if err != nil {
		t.Fatal(err)
	}
	for _, socket := range sockets {
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", filepath.Join(folder, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false) // a kubelet that is killed leaves it
	started := &kubelet{registered: make(chan *v1beta1.RegisterRequest, 9), server: grpc.NewServer()}
	v1beta1.RegisterRegistrationServer(started.server, started)
	go func() { _ = started.server.Serve(listener) }()
	t.Cleanup(started.server.Stop)
	return started
}

func (k *kubelet) awaitPlugin(t *testing.T) *v1beta1.RegisterRequest {
	t.Helper()
	select {
	case request := <-k.registered:
		return request
	case <-time.After(deadline):
		t.Fatal("no plugin came")
		return nil
	}
}

func watchDevices(t *testing.T, socket string) grpc.ServerStreamingClient[v1beta1.ListAndWatchResponse] {
	t.Helper()
	connection, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	stream, err := v1beta1.NewDevicePluginClient(connection).ListAndWatch(ctx, &v1beta1.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func receive(t *testing.T, stream grpc.ServerStreamingClient[v1beta1.ListAndWatchResponse]) map[string]string {
	t.Helper()
	answer, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	health := map[string]string{}
	for _, device := range answer.Devices {
		health[device.ID] = device.Health
	}
	return health
}

func describe(t *testing.T, proc, address, text string) {
	t.Helper()
	folder := filepath.Join(proc, "gpus", address)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "information"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The whole program: it waits for a kubelet, registers with it and with the next one, tells of a lost GPU, and ends.
func TestEveryKubeletIsRegisteredWith(t *testing.T) {
	proc, folder := t.TempDir(), t.TempDir()
	describe(t, proc, "0000:1a:00.0", "GPU UUID: GPU-a\nDevice Minor: 0\n")
	describe(t, proc, "0000:1b:00.0", "GPU UUID: GPU-b\nDevice Minor: 1\n")
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, proc, folder) }()

	for range 2 {
		current := startKubelet(t, folder)
		request := current.awaitPlugin(t)
		if request.ResourceName != "nvidia.com/gpu" || request.Version != "v1beta1" {
			t.Fatalf("registered %v", request)
		}
		stream := watchDevices(t, filepath.Join(folder, request.Endpoint))
		if health := receive(t, stream); len(health) != 2 || health["GPU-b"] != "Healthy" {
			t.Fatalf("devices: %v", health)
		}
		current.server.Stop()
	}

	last := startKubelet(t, folder)
	stream := watchDevices(t, filepath.Join(folder, last.awaitPlugin(t).Endpoint))
	receive(t, stream)
	if err := os.RemoveAll(filepath.Join(proc, "gpus", "0000:1b:00.0")); err != nil {
		t.Fatal(err)
	}
	if health := receive(t, stream); health["GPU-a"] != "Healthy" || health["GPU-b"] != "Unhealthy" {
		t.Fatalf("after a loss: %v", health)
	}
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(folder, "nvidia-gpu.sock")); !os.IsNotExist(err) {
		t.Fatalf("the socket is still there: %v", err)
	}
}
