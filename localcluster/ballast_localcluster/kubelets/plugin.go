package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const endpoint = "ballast-gpus.sock"

// plugin offers devices that are numbers alone, as kubelet's device plugin API wants them.
type plugin struct {
	api.UnimplementedDevicePluginServer
	count     int
	unhealthy string            // a file with the numbers of unhealthy devices, one a line; it may be missing
	variables map[string]string // further ones for each container that has a device
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch sends the devices at once, and again whenever the file of unhealthy ones has changed.
func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	last := "none sent"
	for {
		content, _ := os.ReadFile(p.unhealthy)
		if string(content) != last {
			last = string(content)
			sick := map[string]bool{}
			for _, number := range strings.Fields(last) {
				sick[number] = true
			}
			answer := &api.ListAndWatchResponse{}
			for number := range p.count {
				health := api.Healthy
				if sick[strconv.Itoa(number)] {
					health = api.Unhealthy
				}
				answer.Devices = append(answer.Devices, &api.Device{ID: strconv.Itoa(number), Health: health})
			}
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// Allocate tells a container its devices by the variable that NVIDIA's plugin sets.
func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		variables := maps.Clone(p.variables)
		variables["NVIDIA_VISIBLE_DEVICES"] = strings.Join(container.DevicesIds, ",")
		answer.ContainerResponses = append(answer.ContainerResponses, &api.ContainerAllocateResponse{Envs: variables})
	}
	return answer, nil
}

// servePlugin registers RESOURCE with COUNT devices at the kubelet of this mount namespace; it registers again
// whenever a kubelet has started anew, which removes the sockets of all plugins.
func servePlugin(arguments []string) error {
	if len(arguments) < 3 {
		return fmt.Errorf("want RESOURCE COUNT FILE [NAME=VALUE...], got %q", arguments)
	}
	variables := map[string]string{}
	for _, variable := range arguments[3:] {
		name, value, _ := strings.Cut(variable, "=")
		variables[name] = value
	}
	count, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	socket := api.DevicePluginPath + endpoint
	for {
		if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
			return err
		}
		listener, err := net.Listen("unix", socket)
		if err != nil { // kubelet has not made its folder yet
			time.Sleep(200 * time.Millisecond)
			continue
		}
		server := grpc.NewServer()
		api.RegisterDevicePluginServer(server, &plugin{count: count, unhealthy: arguments[2], variables: variables})
		go func() { _ = server.Serve(listener) }()
		for registered := false; ; time.Sleep(200 * time.Millisecond) {
			if _, err := os.Stat(socket); err != nil {
				break
			}
			if !registered {
				// A socket that a killed kubelet left answers nobody.
				err := register(arguments[0])
				registered = err == nil
				fmt.Println("registered:", registered, err)
			}
		}
		server.Stop()
	}
}

func register(resource string) error {
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	limited, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(
		limited, &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: resource})
	return err
}
