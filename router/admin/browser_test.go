package admin_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// Flags of TestConsoleInBrowser; scripts/console-test.sh sets the first two.
var (
	browser = flag.String("browser", "", "chromium to open the console with")
	modules = flag.String("modules", "", "folder whose node_modules has playwright-core and axe-core")
	shots   = flag.String("shots", "", "folder for a picture of each view")
	only    = flag.String("only", "", "run only the checks whose names contain this")
)

const (
	keyA, keyB = "sk-sluice-team-a", "sk-sluice-team-b"
	token      = "test-token-0123456789"
)

// TestConsoleInBrowser opens the console of a real router, over simulated engines and one that
// fails, in a browser. testdata/browser.mjs has the checks; it compares what the page shows with
// the admin API's answers, and asks this process for traffic and for changes of the configuration.
func TestConsoleInBrowser(t *testing.T) {
	if *browser == "" || *modules == "" {
		t.Skip("needs -browser CHROMIUM and -modules FOLDER; run scripts/console-test.sh")
	}
	f := startConsole(t)
	f.requests(t, 40)
	compared, ask := comparedRouter(t)
	control := httptest.NewServer(f.control(t, ask))
	defer control.Close()

	// Node.js resolves modules from the script's own folder upwards, so the script is copied there.
	script := filepath.Join(*modules, fmt.Sprintf("browser.%d.mjs", os.Getpid()))
	text, err := os.ReadFile("testdata/browser.mjs")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(script, text, 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(script)
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", script)
	cmd.Env = append(os.Environ(), "CHROMIUM="+*browser, "SHOTS="+*shots, "ONLY="+*only, "CONTROL="+control.URL,
		"CONSOLE=http://"+f.router.Admin.Addr(), "COMPARED="+compared.Admin.URL(), "TOKEN="+token,
		"NO_PROXY=127.0.0.1,localhost", "no_proxy=127.0.0.1,localhost")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	t.Logf("%s", out.String())
	if err != nil {
		t.Errorf("the browser's checks: %v", err)
	}
}

// consoleFleet is a router with a configuration file, and what sends it requests.
type consoleFleet struct {
	router *harness.Router
	path   string // of the configuration file
	base   string // its text
	next   int    // number of the next request
}

// startConsole starts a prefill and a decode pair for the model sim, one aggregated engine for the
// model small, and an engine for the model broken that fails every request. One worker is down.
func startConsole(t *testing.T) *consoleFleet {
	t.Helper()
	f := &consoleFleet{path: filepath.Join(t.TempDir(), "sluice.yaml")}
	var b strings.Builder
	fmt.Fprintf(&b, "listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0, token: %s, runtime_file: %s}\nhealth: {interval: 100ms}\n", token, filepath.Join(t.TempDir(), "rt.json"))
	b.WriteString("pd: {family: nixl}\nadmission: {classes: [{name: interactive}, {name: batch, models: [small]}], default_class: interactive}\napi_keys:\n")
	fmt.Fprintf(&b, "  - {name: team-a, sha256: %q}\n", apikey.HashOf(keyA))
	fmt.Fprintf(&b, "  - {name: team-b, sha256: %q, requests_per_minute: 6000, models: [sim, broken, none]}\n", apikey.HashOf(keyB))
	b.WriteString("workers:\n")
	add := func(id, url string, role worker.Role, models ...string) {
		fmt.Fprintf(&b, "  - {id: %s, url: %q, role: %v, models: [%s]}\n", id, url, role, strings.Join(models, ", "))
	}
	engine := func(role string) string {
		return harness.StartSim(t, func(o *sim.Options) {
			o.Role, o.Blocks = role, 2000
			o.Cost = sim.Cost{PerPrefill: 20 * time.Microsecond, Step: 5 * time.Millisecond}
		}).URL()
	}
	// Names as long as those of pods, which a phone must show in full.
	add("llama-70b-prefill-rack1-node07", engine("prefill"), worker.Prefill, "sim")
	add("llama-70b-prefill-rack1-node08", engine("prefill"), worker.Prefill, "sim")
	add("llama-70b-decode-rack2-node11", engine("decode"), worker.Decode, "sim")
	add("llama-70b-decode-rack2-node12", engine("decode"), worker.Decode, "sim")
	add("small-0", harness.StartSim(t, func(o *sim.Options) { o.Role, o.Model = "aggregated", "small" }).URL(), worker.Aggregated, "small")
	failing := harness.StartScripted(t, harness.ReplyHandler(500, `{"error":{"message":"out of memory"}}`))
	add("broken-0", failing.URL, worker.Aggregated, "broken")
	add("down-0", harness.RefusedURL(t), worker.Decode, "sim")
	f.base = b.String()
	harness.WriteFile(t, f.path, f.base)
	f.router = harness.LaunchConfigured(t, f.path)
	waitReady(t, f.router, 6)
	return f
}

// comparedRouter is a router that compares itself with another one; ask sends a request to both.
func comparedRouter(t *testing.T) (r *harness.Router, ask func() error) {
	t.Helper()
	other := harness.StartRouter(t, nil, harness.SimWorker(harness.StartSim(t, harness.SimRole("aggregated")), worker.Aggregated, "other-0"))
	r = harness.LaunchOptions(t, app.Options{Compared: other.Router}, func(c *config.Config) { c.Admin.RuntimeFile += "2" },
		harness.SimWorker(harness.StartSim(t, harness.SimRole("aggregated")), worker.Aggregated, "own-0"))
	r.AwaitReady(t)
	ask = func() error {
		for _, to := range []*harness.Router{other, r} {
			if a, err := harness.TryPost(context.Background(), to.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`)); err != nil || a.Status != 200 {
				return fmt.Errorf("%v, %+v", err, a)
			}
		}
		return nil
	}
	return r, ask
}

func waitReady(t *testing.T, r *harness.Router, want int) {
	t.Helper()
	ready := func() bool {
		n := 0
		for _, w := range r.Fleet.View().Workers {
			if s, _ := w.State(); s == worker.Ready {
				n++
			}
		}
		return n == want
	}
	testwait.UntilWithin(t, 30*time.Second, fmt.Sprintf("%d workers are ready", want), ready)
}

// requests sends n requests one after the other: most are P/D streams, some go to the other models.
func (f *consoleFleet) requests(t *testing.T, n int) {
	t.Helper()
	for range n {
		if err := f.request(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
}

func (f *consoleFleet) request(ctx context.Context) error {
	i := f.next
	f.next++
	model, key, want := "sim", keyA, 200
	switch i % 10 {
	case 3:
		model = "small"
	case 5, 9:
		key = keyB
	case 6:
		model, key, want = "broken", keyB, 502
	case 7:
		model, key, want = "none", keyB, 404
	}
	body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}],"max_tokens":12,"ignore_eos":true,"stream":%v}`,
		model, harness.PromptWords(200+i%4*400, i%4), i%4 != 3)
	a, err := harness.TryPost(ctx, f.router.URL+"/v1/chat/completions", body, "Authorization", "Bearer "+key, "X-Request-Id", fmt.Sprintf("request-%04d", i), "X-Sluice-Session", fmt.Sprint("session-", i%3))
	if err != nil {
		return err
	}
	if a.Status != want && !(want == 502 && a.Status >= 500) {
		return fmt.Errorf("request %d to %s: %d %s, want %d", i, model, a.Status, a.Body, want)
	}
	return nil
}

// control answers the script: /requests?n= sends requests and returns when they have ended, /start
// and /stop switch traffic without a pause, /compared asks the compared routers, and /config writes
// the body behind the configuration.
func (f *consoleFleet) control(t *testing.T, compared func() error) http.Handler {
	var mu sync.Mutex
	var running sync.WaitGroup
	stop := func() {}
	mux := http.NewServeMux()
	reply := func(w http.ResponseWriter, err error) {
		if err != nil {
			http.Error(w, err.Error(), 500)
		}
		json.NewEncoder(w).Encode(map[string]bool{"ok": err == nil})
	}
	mux.HandleFunc("POST /requests", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.Atoi(r.URL.Query().Get("n"))
		for range n {
			err = errors.Join(err, f.request(r.Context()))
		}
		reply(w, err)
	})
	mux.HandleFunc("POST /start", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		ctx, cancel := context.WithCancel(t.Context())
		stop = cancel
		running.Go(func() {
			for ctx.Err() == nil {
				_ = f.request(ctx) // a request that is cut is not an error
			}
		})
		reply(w, nil)
	})
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		stop()
		running.Wait()
		reply(w, nil)
	})
	mux.HandleFunc("POST /compared", func(w http.ResponseWriter, _ *http.Request) { reply(w, compared()) })
	mux.HandleFunc("POST /config", func(w http.ResponseWriter, r *http.Request) {
		var more bytes.Buffer
		_, err := more.ReadFrom(r.Body)
		reply(w, errors.Join(err, os.WriteFile(f.path, []byte(f.base+more.String()), 0o600)))
	})
	t.Cleanup(func() { mu.Lock(); defer mu.Unlock(); stop(); running.Wait() })
	return mux
}
