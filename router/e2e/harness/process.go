package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/bench/testwait"
	"sluice/router/admin"
)

// Binary is the sluice binary of this process. A test that knows a built file runs Once with a
// function that sets Path, before any call of BuiltBinary, and so avoids a build.
var Binary struct {
	Once sync.Once
	Path string
	err  error
}

// BuiltBinary returns the path of the sluice binary, built as make build builds bin/sluice. All
// test packages of a checkout share one file, which go build does not rewrite while it is up to
// date. A lock prevents two packages from linking it at the same time.
func BuiltBinary(t *testing.T) string {
	t.Helper()
	Binary.Once.Do(func() { Binary.Path, Binary.err = buildBinary() })
	if Binary.err != nil {
		t.Fatal(Binary.err)
	}
	return Binary.Path
}

func buildBinary() (path string, err error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(home, ".cache", "sluice")
	}
	dir := filepath.Join(cache, "e2e", fmt.Sprintf("%016x", xxh3.Hash(root)))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	path = filepath.Join(dir, "sluice")
	if out, err := exec.Command("go", "build", "-o", path, "sluice/cmd/sluice").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
}

// Process is a running sluice process.
type Process struct {
	Cmd    *exec.Cmd
	Addr   string // first line of standard output
	Stdout *SyncBuffer
	Stderr *SyncBuffer
	ended  chan error
}

// Launch starts the binary and waits for its first line of output, the address.
func Launch(t *testing.T, env []string, args ...string) *Process {
	t.Helper()
	return LaunchAs(t, BuiltBinary(t), env, args...)
}

// LaunchAs is Launch with another file, such as a script that executes the binary.
func LaunchAs(t *testing.T, path string, env []string, args ...string) *Process {
	t.Helper()
	p := &Process{Cmd: exec.Command(path, args...), Stdout: new(SyncBuffer), Stderr: new(SyncBuffer), ended: make(chan error, 1)}
	p.Cmd.Env = append(os.Environ(), env...)
	p.Cmd.Stderr = p.Stderr
	out, err := p.Cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	first := make(chan string, 1)
	go func() {
		br := bufio.NewReader(io.TeeReader(out, p.Stdout))
		line, _ := br.ReadString('\n')
		first <- strings.TrimSpace(line)
		io.Copy(io.Discard, br)
		p.ended <- p.Cmd.Wait()
	}()
	t.Cleanup(func() {
		p.Cmd.Process.Kill()
		if t.Failed() {
			t.Logf("stderr of %v:\n%s", args, p.Stderr.Tail(4000))
		}
	})
	select {
	case p.Addr = <-first:
	case <-time.After(20 * time.Second):
		t.Fatalf("no line on standard output of %v; stderr: %s", args, p.Stderr)
	}
	return p
}

// Wait waits until the process ends and returns its exit code.
func (p *Process) Wait(t *testing.T, within time.Duration) int {
	t.Helper()
	select {
	case err := <-p.ended:
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode()
		}
		return 0
	case <-time.After(within):
		t.Fatalf("did not end within %s", within)
	}
	return -1
}

// Ready waits until /readyz returns 200, for at most 10 s.
func (p *Process) Ready(t *testing.T) {
	t.Helper()
	testwait.UntilWithin(t, 10*time.Second, "the router is ready", func() bool {
		resp, err := http.Get("http://" + p.Addr + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
}

// PlantedSecret is the admin token that the tests set in the environment. It must not appear in
// logs or pages.
const PlantedSecret = "planted-secret-0123456789abcdef"

// ServeEnv returns the variables to add to the environment of a sluice process: the admin token
// PlantedSecret, and a runtime directory of the test's own, whose path is the second result.
func ServeEnv(t *testing.T) ([]string, string) {
	dir := t.TempDir()
	return []string{"SLUICE_ADMIN_TOKEN=" + PlantedSecret, "XDG_RUNTIME_DIR=" + dir}, dir
}

// AdminHealth returns the /admin/v1/health page of the process started with env; nil if the
// process has not written its runtime file yet.
func AdminHealth(t *testing.T, env []string) []byte {
	t.Helper()
	for _, v := range env {
		dir, ok := strings.CutPrefix(v, "XDG_RUNTIME_DIR=")
		if !ok {
			continue
		}
		files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json"))
		if len(files) != 1 {
			return nil // no runtime file yet
		}
		rt, err := admin.ReadRuntimeFile(files[0])
		if err != nil {
			return nil
		}
		req, _ := http.NewRequest("GET", "http://"+rt.Address+"/admin/v1/health", nil)
		req.Header.Set("Authorization", "Bearer "+rt.Token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return body
	}
	t.Fatal("no XDG_RUNTIME_DIR")
	return nil
}
