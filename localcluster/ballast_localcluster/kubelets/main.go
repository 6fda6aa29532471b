// Command node is kubelet, kube-proxy and a device plugin without devices in one binary: what a node of
// `ballast up --real-nodes` runs beside containerd.  The name it is started by (a link, or the first argument)
// says which of them it is.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	if name == "node" && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	var command *cobra.Command
	switch name {
	case "kubelet":
		command = kubelet.NewKubeletCommand(context.Background())
	case "kube-proxy":
		command = kubeproxy.NewProxyCommand()
	case "device-plugin":
		if err := servePlugin(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "device-plugin:", err)
			os.Exit(1)
		}
		return
	default:
		fmt.Fprintf(os.Stderr, "%q is none of kubelet, kube-proxy, device-plugin\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
