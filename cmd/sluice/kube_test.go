package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// serve finds pods by becoming the build that can, in the same process; without it, it
// says what is missing, and one of another build does not run.
func TestServeBecomesTheBuildWithKubernetes(t *testing.T) {
	e := startSim(t, role("decode"))
	cluster := startCluster(t, map[string]string{"d-0": podText("d-0", "decode", e.URL())})
	args := []string{"serve", "--listen", "127.0.0.1:0", "--admin", "off", "--set", "kube.selector=app in (prefill,decode)", "--set", "kube.port=http",
		"--set", "kube.kubeconfig=" + cluster.kubeconfig(t)}
	dir := t.TempDir()
	alone := filepath.Join(dir, "sluice")
	text, err := os.ReadFile(builtBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(alone, text, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(alone, args...).CombinedOutput(); err == nil || !strings.Contains(string(out), filepath.Join(dir, kubeBinary)) || !strings.Contains(string(out), "kube.selector") {
		t.Errorf("alone: %v, %s; want an error with kube.selector and the file that is missing", err, out)
	}

	whole := filepath.Join(dir, kubeBinary)
	if out, err := exec.Command("go", "build", "-o", whole, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	pr := launchAs(t, alone, nil, args...)
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pr.cmd.Process.Pid)); err == nil && filepath.Base(exe) != kubeBinary {
		t.Errorf("it runs %s; want %s", exe, kubeBinary)
	}
	eventually(t, 60*time.Second, "the pod serves", func() bool {
		a, err := tryPost(context.Background(), "http://"+pr.first+"/v1/chat/completions", chat(""))
		return err == nil && a.Status == 200 && a.Header.Get("X-Sluice-Worker") == "d-0"
	})

	cmd := exec.Command(whole, "version")
	cmd.Env = append(os.Environ(), envBuild+"=another")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "install both of one build") {
		t.Errorf("of another build: %v, %s", err, out)
	}
}
