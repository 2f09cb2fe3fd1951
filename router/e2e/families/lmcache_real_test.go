package families

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// lmcacheSender starts a Python process that sends notifications like a prefill worker of an LMCache
// release: with that release's own message class, over its own ZMQ socket.
func lmcacheSender(t *testing.T, version, endpoint string) io.Writer {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache", "sluice")
	}
	venv := filepath.Join(cache, "connector-tests")
	if _, err := os.Stat(filepath.Join(venv, "lmcache", version)); err != nil {
		if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
			t.Fatalf("no LMCache releases in the cache: run scripts/connector-test.sh --setup: %v", err)
		}
		t.Skipf("no LMCache releases in the cache: run scripts/connector-test.sh --setup: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(venv, "bin", "python"), "../../../scripts/fixtures/lmcache.py", "push", version, endpoint, filepath.Join(venv, "lmcache"))
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	if !bufio.NewScanner(out).Scan() {
		t.Fatal("the sender does not begin")
	}
	return in
}

// TestReleasedLMCacheNotifications: the router sends decode only after both ranks of a prefill worker
// have sent a notification in the format of their release, one before prefill's response and one
// after it. The engines are scripted; the messages are LMCache's own.
func TestReleasedLMCacheNotifications(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.3.3", "0.3.5", "0.3.7", "0.4.4", "0.4.7", "0.5.6"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			port := harness.FreePort(t)
			var sender io.Writer
			var second atomic.Int64 // time of the second rank's notification, Unix ns
			p := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
				var body struct {
					Params struct {
						Spec struct {
							ID   string `json:"req_id"`
							Init []int  `json:"receiver_init_port"`
						} `json:"disagg_spec"`
					} `json:"kv_transfer_params"`
				}
				if err := json.NewDecoder(req.Body).Decode(&body); err != nil || body.Params.Spec.ID == "" || len(body.Params.Spec.Init) != 2 {
					t.Errorf("prefill was asked %+v: %v", body, err)
				}
				fmt.Fprintln(sender, body.Params.Spec.ID)
				time.AfterFunc(150*time.Millisecond, func() {
					second.Store(time.Now().UnixNano())
					fmt.Fprintln(sender, body.Params.Spec.ID)
				})
				harness.ReplyJSON(w, 200, `{"id":"cmpl-x","object":"text_completion","model":"sim","choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5},"kv_transfer_params":{"first_tok":7}}`)
			})
			d := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
				if at := second.Load(); at == 0 || time.Now().UnixNano() < at {
					t.Error("decode was sent before the second rank had notified")
				}
				harness.ReplyJSON(w, 200, `{"id":"cmpl-y","object":"text_completion","model":"sim","choices":[{"index":0,"text":"good","finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}`)
			})
			dw := d.Worker(worker.Decode, "d0")
			dw.Options = map[string][]string{"init_port": {"7300", "7301"}, "alloc_port": {"7400", "7401"}}
			r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("lmcache"), func(c *config.Config) { c.LMCache.ProxyPort = port }), p.Worker(worker.Prefill, "p0"), dw)
			sender = lmcacheSender(t, version, fmt.Sprintf("tcp://127.0.0.1:%d", port))
			for range 3 {
				second.Store(0)
				a := harness.Post(t, r.URL+"/v1/completions", `{"model":"sim","prompt":[1,2,3,4],"max_tokens":8}`)
				if a.Status != 200 || !strings.Contains(string(a.Body), "good") || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
					t.Fatalf("%d %v %s", a.Status, a.Header, a.Body)
				}
			}
			if got := r.Metric(`sluice_kv_notifications_total{outcome="received"}`); got != 6 {
				t.Errorf("%v notifications, want 6", got)
			}
			if n := r.Fallbacks("not_completed"); n != 0 || d.Requests() != 3 {
				t.Errorf("%v waits given up, %d decodes", n, d.Requests())
			}
		})
	}
}
