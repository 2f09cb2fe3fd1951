package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/e2e/harness"
)

// readBundle returns the files of an archive, unpacked where they are compressed themselves.
func readBundle(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(h.Name, ".gz") {
			in, err := gzip.NewReader(bytes.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			if text, err = io.ReadAll(in); err != nil {
				t.Fatal(err)
			}
		}
		files[strings.TrimPrefix(h.Name, "sluice-support/")] = string(text)
	}
}

// TestSupportBundleHasNoSecret: the archive of a running router has what a report needs, and none of
// the router's tokens and keys and nothing of a prompt or an answer's key.
func TestSupportBundleHasNoSecret(t *testing.T) {
	e := harness.StartSim(t, nil)
	env, dir := harness.ServeEnv(t)
	key := apikey.New()
	const adminToken, registrationToken, engineKey, prompt = "the-admin-token-0123456789", "the-registration-token-0123", "the-key-of-the-engines", "xyzzy plugh and the swordfish"
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	harness.WriteFile(t, path, fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0, token: %s}\nregistration: {listen: '127.0.0.1:0', token: %s}\nengine_key: %s\n"+
		"api_keys: [{name: team-a, sha256: %s}]\nlog: {level: debug}\nworkers: [{url: %q, id: one}]\n", adminToken, registrationToken, engineKey, apikey.HashOf(key), e.URL()))
	p := harness.Launch(t, env, "serve", "--config", path)
	p.Ready(t)
	for _, auth := range []string{key, "sk-wrong-key-of-a-client"} {
		req, err := http.NewRequest("POST", "http://"+p.Addr+"/v1/chat/completions", strings.NewReader(harness.ChatOf(prompt)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+auth)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	testwait.UntilWithin(t, 10*time.Second, "the refusal is logged", func() bool { return strings.Contains(p.Stderr.String(), "request refused") })
	log := filepath.Join(t.TempDir(), "router.log")
	harness.WriteFile(t, log, p.Stderr.String()+"a line with Bearer "+adminToken+" and http://user:hunter2@host/ and "+key+"\n")

	archive := filepath.Join(t.TempDir(), "bundle.tar.gz")
	args := []string{"support-bundle", "--output", archive, "--log", log}
	bundleCmd := func() (string, string, error) {
		cmd := exec.CommandContext(t.Context(), harness.BuiltBinary(t), args...)
		cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+dir, "SLUICE_REGISTRATION_TOKEN="+registrationToken)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		err := cmd.Run()
		return out.String(), errs.String(), err
	}
	out, errs, err := bundleCmd()
	if err != nil {
		t.Fatalf("%v: %s", err, errs)
	}
	if info, err := os.Stat(archive); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v; want mode 0600", info.Mode(), err)
	}
	if !strings.Contains(errs, fmt.Sprintf("pid %d", p.Cmd.Process.Pid)) {
		t.Errorf("it does not say which router it reads: %s", errs)
	}
	files := readBundle(t, archive)
	for name, want := range map[string]string{
		"version.json": `"version"`, "doctor.json": `"findings"`, "machine.json": "cpus", "router.json": path, "config.json": "[masked]", "health.json": "one", "workers.json": `"one"`,
		"discovery.json": "sources", "transfers.json": "active", "stats.json": "uptime_s", "metrics.txt": "sluice_requests", "goroutines.txt": "goroutine ", "heap.pb.gz": "",
		"requests.json": `"done":true`, "explain.json": `"decisions"`, "log.txt": "request refused", "contents.json": "goroutines.txt",
	} {
		text, ok := files[name]
		if !ok || !strings.Contains(text, want) {
			t.Errorf("%s is missing (%v) or has no %q: %.300s", name, ok, want, text)
		}
		if !strings.Contains(out, name) {
			t.Errorf("%s is not in what is printed:\n%s", name, out)
		}
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(text)) {
			t.Errorf("%s is not JSON: %.300s", name, text)
		}
	}
	if strings.Contains(out, "missing") {
		t.Errorf("something is missing:\n%s", out)
	}
	for what, secret := range map[string]string{"the admin token": adminToken, "the registration token": registrationToken, "the engines' key": engineKey, "a client's key": key,
		"a wrong key": "sk-wrong-key-of-a-client", "the hash of a key": apikey.HashOf(key).String(), "the prompt": "plugh", "a password": "hunter2"} {
		for name, text := range files {
			if strings.Contains(text, secret) {
				i := strings.Index(text, secret)
				t.Errorf("%s is in %s: …%s…", what, name, text[max(0, i-100):min(len(text), i+len(secret)+20)])
			}
		}
	}
	if _, errs, err := bundleCmd(); err == nil || !strings.Contains(errs, "file exists") {
		t.Errorf("an existing file is overwritten: %v %s", err, errs)
	}
}

// TestRecentLog: the log of a process whose standard error is a file is found; only its end is read.
func TestRecentLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteString(strings.Repeat("a line of the log\n", maxBundleLog/18+100) + "the last line\n")
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	cmd.Stderr = f
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	text, err := recentLog(t.Context(), "", cmd.Process.Pid)
	if err != nil || !strings.HasSuffix(string(text), "the last line\n") || !strings.HasPrefix(string(text), "a line") || len(text) > maxBundleLog {
		t.Errorf("%v: %d bytes, %.40q", err, len(text), text)
	}
	if _, err := recentLog(t.Context(), "", 1<<30); err == nil || !strings.Contains(err.Error(), "--log") {
		t.Errorf("no such process: %v", err)
	}
}

func TestRedactor(t *testing.T) {
	redact := redactor([]string{"topsecret", "a", ""})
	for text, want := range map[string]string{
		"x topsecret y": "x [masked] y", "banana": "banana", "Authorization: Bearer abc.def-123": "Authorization: Bearer [masked]",
		"key sk-sluice-0123456789": "key [masked]", "authorization=Basic dTpw0": "authorization=Basic [masked]", "Basic authentication": "Basic authentication",
		"https://token@h/x": "https://[masked]@h/x", "https://u:p@ss@h/x": "https://[masked]@h/x", "http://h/x?api_key=abcd&n=1": "http://h/x?api_key=[masked]&n=1", "?sig=a": "?sig=[masked]",
		"X-Api-Key: 0a1b2c3d": "X-Api-Key: [masked]", `{"engine_key":"abcd","hf_token": "abcde"}`: `{"engine_key":"[masked]","hf_token": "[masked]"}`, "HF_TOKEN=hf_0123456789abcdefghij": "HF_TOKEN=[masked]",
		`{"prompt_tokens":12345,"last_token":12345}`: `{"prompt_tokens":12345,"last_token":12345}`, "Set-Cookie: s=abc": "Set-Cookie: [masked]", "request=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln-_x y": "request=[masked] y",
		"a hf_0123456789abcdefghij b": "a [masked] b", "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nx": "-----BEGIN RSA PRIVATE KEY-----[masked]-----END RSA PRIVATE KEY-----\nx",
		"-----BEGIN PRIVATE KEY-----\nMIIE": "-----BEGIN PRIVATE KEY-----[masked]", "https://u:p@h/x": "https://[masked]@h/x", "tcp://h:1": "tcp://h:1", "http://h:1/a@b": "http://h:1/a@b",
	} {
		if got := string(redact([]byte(text))); got != want {
			t.Errorf("%q: %q; want %q", text, got, want)
		}
	}
}

func TestSecretValues(t *testing.T) {
	got := secretValues([]string{"SLUICE_ADMIN_TOKEN=one", "SLUICE_LISTEN=two", "OTHER_TOKEN=three", "OTEL_EXPORTER_OTLP_HEADERS=authorization=Basic%20x=, x-key = four", "OTEL_EXPORTER_OTLP_TRACES_HEADERS=five"})
	if want := []string{"one", "Basic%20x=", "four", ""}; !slices.Equal(got, want) {
		t.Errorf("%q; want %q", got, want)
	}
}
