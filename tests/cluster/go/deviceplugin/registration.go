package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource         = "nvidia.com/gpu"
	registerDeadline = 5 * time.Second
)

// connecting: a kubelet that starts refuses for some milliseconds between making its socket and listening to it.
var connecting = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 2, MaxDelay: time.Second},
	MinConnectTimeout: time.Second,
}

var errNoKubelet = errors.New("no kubelet yet")

// registration is the plugin's socket beside the kubelet's, and what the kubelet knows of it.
//
// A kubelet that starts removes all sockets but its own and knows no plugin: both are done again for it.
type registration struct {
	plugin *plugin
	folder string
	server *grpc.Server
}

func (r *registration) kubelet() string {
	return filepath.Join(r.folder, filepath.Base(v1beta1.KubeletSocket))
}
func (r *registration) socket() string { return filepath.Join(r.folder, "nvidia-gpu.sock") }

// renew serves on a new socket and registers it with the kubelet; blocks up to five seconds.
//
// Without a kubelet's socket the error is errNoKubelet.
func (r *registration) renew(ctx context.Context) error {
	if _, err := os.Stat(r.kubelet()); err != nil {
		return fmt.Errorf("kubelet: cannot register %s: %w; waits for %s", resource, errNoKubelet, r.kubelet())
	}
	if err := r.serve(); err != nil {
		return fmt.Errorf("%s: cannot serve: %w; check the folder's owner and disk", r.socket(), err)
	}
	if err := r.register(ctx); err != nil {
		return fmt.Errorf("kubelet: cannot register %s: %w; tried again every %s", resource, err, retryInterval)
	}
	log.Printf("kubelet: registered %s at %s", resource, r.socket())
	return nil
}

// close ends the kubelet's streams and takes the socket away.
func (r *registration) close() {
	if r.server != nil {
		r.server.Stop()
		r.server = nil
	}
	if err := os.Remove(r.socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Printf("%s: cannot remove: %v", r.socket(), err)
	}
}

func (r *registration) serve() error {
	r.close()
	listener, err := net.Listen("unix", r.socket())
	if err != nil {
		return err
	}
	r.server = grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(r.server, r.plugin)
	go func(server *grpc.Server) {
		if err := server.Serve(listener); err != nil {
			log.Printf("%s: cannot serve: %v", r.socket(), err)
		}
	}(r.server)
	return nil
}

func (r *registration) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registerDeadline)
	defer cancel()
	connection, err := grpc.NewClient("unix:"+r.kubelet(),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(connecting))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	_, err = v1beta1.NewRegistrationClient(connection).Register(ctx, &v1beta1.RegisterRequest{
		Version:      v1beta1.Version,
		Endpoint:     filepath.Base(r.socket()),
		ResourceName: resource,
		Options:      &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	}, grpc.WaitForReady(true))
	return err
}
