package restart

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestSidecarOfSystemd: what the packaged units of the sidecar rely on. It serves on the socket that
// systemd passes, a USR2 replaces it without a lost request, and systemd hears who the main process is.
func TestSidecarOfSystemd(t *testing.T) {
	e := harness.StartSim(t, nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	socket, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	words := filepath.Join(t.TempDir(), "notify")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: words, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	hear := func() string {
		t.Helper()
		buf := make([]byte, 256)
		notify.SetReadDeadline(time.Now().Add(20 * time.Second))
		n, err := notify.Read(buf)
		if err != nil {
			t.Fatalf("systemd hears nothing: %v", err)
		}
		return string(buf[:n])
	}
	cmd := exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh", harness.BuiltBinary(t), "sidecar", "--engine", e.URL(), "--listen", "127.0.0.1:1", "--drain", "5s")
	cmd.Env = append(os.Environ(), "LISTEN_FDS=1", "LISTEN_FDNAMES=client", "NOTIFY_SOCKET="+words)
	cmd.ExtraFiles = []*os.File{socket}
	logs := new(harness.SyncBuffer)
	cmd.Stderr = logs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan string, 1)
	go func() { // not cmd.Wait, which waits for the new process too: it has the same standard error
		state, _ := cmd.Process.Wait()
		ended <- state.String()
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		if t.Failed() {
			t.Log(logs.Tail(4000))
		}
	})
	if heard := hear(); heard != "READY=1" {
		t.Fatalf("systemd heard %q at the start", heard)
	}
	url := "http://" + ln.Addr().String()
	testwait.UntilWithin(t, 10*time.Second, "a request is served on the socket passed", func() bool {
		return oneRequest(http.DefaultClient, url, false) == nil
	})
	load := startTraffic(url, 4)
	defer load.stop()
	cmd.Process.Signal(syscall.SIGUSR2)
	pid := 0
	for range 2 { // the new process announces itself, the old one names it, in either order
		if rest, named := strings.CutPrefix(hear(), "MAINPID="); named {
			pid, _ = strconv.Atoi(strings.TrimSuffix(rest, "\nREADY=1"))
		}
	}
	if pid == 0 || pid == cmd.Process.Pid {
		t.Fatalf("systemd was notified of the main process %d; the old one is %d", pid, cmd.Process.Pid)
	}
	t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	select {
	case state := <-ended:
		if state != "exit status 0" {
			t.Errorf("the old process: %s", state)
		}
	case <-time.After(harness.TestTimeout):
		t.Fatal("the old process has not ended")
	}
	from := load.done.Load()
	testwait.UntilWithin(t, 20*time.Second, "the new process serves", func() bool { return load.done.Load() > from+20 })
	load.stop()
	load.work.Wait()
	if load.failed.Load() > 0 {
		t.Errorf("%d of %d requests failed: %s", load.failed.Load(), load.done.Load(), *load.first.Load())
	}
	syscall.Kill(pid, syscall.SIGTERM)
	testwait.UntilWithin(t, harness.TestTimeout, "the new process has ended", func() bool { return !harness.IsRunning(pid) })
}
