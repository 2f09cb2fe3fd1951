package liveness

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestStoppedProcess: the router itself is stopped for longer than its stream idle timeout, as on
// a paused or overloaded machine. It does not treat that time as silence of the engines, and its
// streams continue.
func TestStoppedProcess(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"loop", "goroutine"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			e := harness.StartSim(t, func(o *sim.Options) { o.Speed, o.Cost.Step = 1, 20*time.Millisecond })
			env, _ := harness.ServeEnv(t)
			r := harness.Launch(t, env, "serve", "--listen", "127.0.0.1:0", "--admin", "off", "--engine", e.URL(),
				"--set", "relay.driver="+driver, "--set", "timeouts.stream_idle=500ms")
			r.Ready(t)
			const streams = 4
			var readers [streams]*bufio.Scanner
			for i := range readers {
				resp, err := http.Post("http://"+r.Addr+"/v1/completions", "application/json",
					strings.NewReader(fmt.Sprintf(`{"model":"sim","prompt":"%d","max_tokens":320,"ignore_eos":true,"stream":true}`, i)))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				readers[i] = bufio.NewScanner(resp.Body)
				for range 5 {
					readers[i].Scan()
				}
			}
			for range 3 {
				if err := syscall.Kill(r.Cmd.Process.Pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				testwait.Pace(1600 * time.Millisecond)
				if err := syscall.Kill(r.Cmd.Process.Pid, syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
				testwait.Pace(200 * time.Millisecond)
			}
			for i, lines := range readers {
				last := ""
				for lines.Scan() {
					if line := lines.Text(); line != "" {
						last = line
					}
				}
				if err := lines.Err(); err != nil || last != "data: [DONE]" {
					t.Errorf("stream %d ends with %q, %v, want [DONE]", i, last, err)
				}
			}
			if driver == "loop" && !strings.Contains(r.Stderr.String(), "the router could not run") {
				t.Error("the log has nothing of it")
			}
		})
	}
}
