package main

import (
	"context"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestServeFindsPods: with kube.selector, the binary serves through the pods of a cluster.
func TestServeFindsPods(t *testing.T) {
	e := harness.StartSim(t, harness.SimRole("decode"))
	cluster := harness.StartFakeKubeAPI(t, map[string]string{"d-0": harness.PodText("d-0", "decode", e.URL())})
	pr := harness.Launch(t, nil, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--set", "kube.selector=app in (prefill,decode)", "--set", "kube.port=http",
		"--set", "kube.kubeconfig="+cluster.Kubeconfig(t))
	testwait.UntilWithin(t, 60*time.Second, "the pod serves", func() bool {
		a, err := harness.TryPost(context.Background(), "http://"+pr.Addr+"/v1/chat/completions", harness.Chat(""))
		return err == nil && a.Status == 200 && a.Header.Get("X-Sluice-Worker") == "d-0"
	})
}
