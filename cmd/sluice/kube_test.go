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

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestServeExecsKubeBuild: if kube.selector is set, serve executes the build with the Kubernetes client
// in the same process. If that build is missing or of another version, serve fails and says so.
func TestServeExecsKubeBuild(t *testing.T) {
	e := harness.StartSim(t, harness.SimRole("decode"))
	cluster := harness.StartFakeKubeAPI(t, map[string]string{"d-0": harness.PodText("d-0", "decode", e.URL())})
	args := []string{"serve", "--listen", "127.0.0.1:0", "--admin", "off", "--set", "kube.selector=app in (prefill,decode)", "--set", "kube.port=http",
		"--set", "kube.kubeconfig=" + cluster.Kubeconfig(t)}
	dir := t.TempDir()
	alone := filepath.Join(dir, "sluice")
	text, err := os.ReadFile(harness.BuiltBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(alone, text, 0o755); err != nil {
		t.Fatal(err)
	}
	checks := func() (string, error) {
		out, err := exec.Command(alone, "check", "--set", "kube.selector=app in (prefill,decode)", "--set", "kube.port=http").CombinedOutput()
		return string(out), err
	}
	missing := func(what string, out string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(out, filepath.Join(dir, kubeBinary)) || !strings.Contains(out, "kube.selector") || !strings.Contains(out, "make build") {
			t.Errorf("%s alone: %v, %s; want an error with kube.selector, the file that is missing and what makes it", what, err, out)
		}
	}
	served, err := exec.Command(alone, args...).CombinedOutput()
	missing("serve", string(served), err)
	checked, err := checks()
	missing("check", checked, err)

	whole := filepath.Join(dir, kubeBinary)
	if out, err := exec.Command("go", "build", "-o", whole, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := checks(); err != nil {
		t.Errorf("check, with it: %v, %s", err, out)
	}
	pr := harness.LaunchAs(t, alone, nil, args...)
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pr.Cmd.Process.Pid)); err == nil && filepath.Base(exe) != kubeBinary {
		t.Errorf("it runs %s; want %s", exe, kubeBinary)
	}
	testwait.UntilWithin(t, 60*time.Second, "the pod serves", func() bool {
		a, err := harness.TryPost(context.Background(), "http://"+pr.Addr+"/v1/chat/completions", harness.Chat(""))
		return err == nil && a.Status == 200 && a.Header.Get("X-Sluice-Worker") == "d-0"
	})

	other := "#!/bin/sh\necho of another version >&2\nexit 1\n"
	if err := os.Remove(whole); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(whole, []byte(other), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := checks(); err == nil || !strings.Contains(out, "of another version") {
		t.Errorf("check, with one that refuses: %v, %s", err, out)
	}
}

// TestBuildVersionsMatch: a build refuses to run if a build of another version executed it.
func TestBuildVersionsMatch(t *testing.T) {
	cmd := exec.Command(harness.BuiltBinary(t), "version")
	cmd.Env = append(os.Environ(), envBuild+"=another")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "install both of one build") {
		t.Errorf("of another build: %v, %s", err, out)
	}
}
