package discovery

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

func withRegister(c *config.Config) {
	c.Registration.Listen, c.Registration.Token, c.Registration.Lease = "127.0.0.1:0", harness.RegisterToken, 2*time.Second
}

// keepRegistered runs `sluice register` until the returned function is called.
func keepRegistered(t *testing.T, r *harness.Router, id, kind, workerSpec string) (stop func()) {
	t.Helper()
	cmd := exec.Command(harness.BuiltBinary(t), "register", "--router", "http://"+r.Registration.Addr(), "--id", id, kind, workerSpec)
	cmd.Env = append(os.Environ(), "SLUICE_REGISTRATION_TOKEN="+harness.RegisterToken)
	errs := new(harness.SyncBuffer)
	cmd.Stdout, cmd.Stderr = errs, errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("sluice register ended with %v: %s", err, errs)
		}
	}
	t.Cleanup(stop)
	return stop
}

// TestRegisteredPairServes: a prefill and a decode worker register with a router without workers.
// Requests run on both. After one leaves, the router has dropped its index entries, reservations
// and metric series.
func TestRegisteredPairServes(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.LaunchRouter(t, withRegister)
	a := harness.Get(t, r.URL+"/readyz")
	if _, page := r.Pages.Ready(true); a.Status != 503 || !strings.Contains(string(page), "register 127.0.0.1") {
		t.Errorf("%d %s; want what is waited for, and from where", a.Status, page)
	}
	stopPrefill := keepRegistered(t, r, "p-0", "--prefill", p.URL())
	keepRegistered(t, r, "d-0", "--decode", d.URL())
	testwait.UntilWithin(t, 10*time.Second, "both are ready", func() bool { return r.State("p-0") == worker.Ready && r.State("d-0") == worker.Ready })
	testwait.UntilWithin(t, 10*time.Second, "cached tokens are predicted", func() bool {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		return a.Status == 200 && a.Header.Get("X-Sluice-Prefill-Worker") == "p-0" && a.Header.Get("X-Sluice-Worker") == "d-0" && a.Header.Get("X-Sluice-Cached-Tokens") != "0"
	})
	series := func() bool { return strings.Contains(string(harness.Get(t, r.URL+"/metrics").Body), `worker="p-0"`) }
	var old *worker.Rank
	for _, w := range r.Fleet.View().Workers {
		if w.Spec.ID == "p-0" {
			old = w.Ranks[0]
		}
	}
	// The router predicts the blocks of a request before events confirm them.
	testwait.UntilWithin(t, 10*time.Second, "there is something to forget: series, and blocks of p-0", func() bool { return series() && old.CachedBlocks.Load() > 0 })
	stopPrefill()
	testwait.UntilWithin(t, 10*time.Second, "p-0 is gone with its blocks and its series", func() bool {
		return old.CachedBlocks.Load() == 0 && !series() && r.State("p-0") == worker.Gone
	})
	if n := old.Requests.Load() + old.PrefillTokens.Load(); n != 0 {
		t.Errorf("%d still reserved on a rank that has gone", n)
	}
	probes := p.Stats().Ranks[0].Requests
	testwait.UntilWithin(t, 10*time.Second, "decode does it alone", func() bool {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		return a.Status == 200 && a.Header.Get("X-Sluice-Worker") == "d-0"
	})
	if now := p.Stats().Ranks[0].Requests; now != probes {
		t.Errorf("p-0 got %d requests after it had gone", now-probes)
	}

	// After it returns with the same name, it has no blocks.
	keepRegistered(t, r, "p-0", "--prefill", p.URL())
	testwait.UntilWithin(t, 10*time.Second, "p-0 is ready again", func() bool { return r.State("p-0") == worker.Ready })
	if !series() {
		t.Error("no series of the worker that came back")
	}
	if strings.Contains(r.Logs.String(), harness.RegisterToken) {
		t.Error("the token is in the log")
	}
}

// TestLostWorkerIsRemoved: the router removes a worker that does not renew its registration, for
// example because its machine has failed.
func TestLostWorkerIsRemoved(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.LaunchRouter(t, func(c *config.Config) { withRegister(c); c.Registration.Lease = time.Second })
	req, err := http.NewRequest("PUT", "http://"+r.Registration.Addr()+"/v1/workers/w", strings.NewReader(fmt.Sprintf(`{"version":1,"url":%q}`, e.URL())))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+harness.RegisterToken)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 201 {
		t.Fatal(resp.Status)
	}
	testwait.UntilWithin(t, 5*time.Second, "it is there", func() bool { return r.State("w") != worker.Gone })
	testwait.UntilWithin(t, 10*time.Second, "its lease ends", func() bool { return r.State("w") == worker.Gone })
}

// TestOwnAddressIsNoWorker: the router refuses a worker at one of its own listeners. It would send
// its requests to itself.
func TestOwnAddressIsNoWorker(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	path := filepath.Join(t.TempDir(), "workers.yaml")
	harness.WriteFile(t, path, "workers: []\n")
	r := harness.LaunchRouter(t, func(c *config.Config) {
		withRegister(c)
		c.Discovery.File, c.Discovery.FilePollInterval = path, 20*time.Millisecond
	}, harness.SimWorker(e, worker.Aggregated, "w"))
	_, port, err := net.SplitHostPort(r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ body, field string }{
		{fmt.Sprintf(`{"version":1,"url":%q}`, r.URL), "url"},
		{fmt.Sprintf(`{"version":1,"url":"http://*:%s"}`, port), "url"}, // the caller's address
		{fmt.Sprintf(`{"version":1,"url":%q,"ranks":[0,1],"rank_urls":[%q,%q]}`, e.URL(), e.URL(), r.URL), "rank_urls[1]"},
	} {
		req, err := http.NewRequest("PUT", "http://"+r.Registration.Addr()+"/v1/workers/own", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+harness.RegisterToken)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if s := string(text); resp.StatusCode != 400 || !strings.Contains(s, c.field+": ") || !strings.Contains(s, ":"+port) || !strings.Contains(s, "own listener") {
			t.Errorf("%s: %d %s; want 400 that names %s and the address", c.body, resp.StatusCode, s, c.field)
		}
	}
	harness.WriteFile(t, path, fmt.Sprintf("workers:\n  - {id: own, url: %q}\n", r.URL))
	testwait.UntilWithin(t, 5*time.Second, "the source says why", func() bool {
		for _, s := range sourceStates(t, r) {
			if strings.Contains(s.Error, "own listener") {
				return true
			}
		}
		return false
	})
	if s := r.State("own"); s != worker.Gone {
		t.Errorf("the router is its own worker, %v", s)
	}
}

func sourceStates(t *testing.T, r *harness.Router) []discovery.State {
	t.Helper()
	req, _ := http.NewRequest("GET", "http://"+r.Admin.Addr()+"/admin/v1/discovery", nil)
	req.Header.Set("Authorization", "Bearer "+r.Config.Admin.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var v struct{ Sources []discovery.State }
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v.Sources
}

// TestWorkersFile: the workers follow the text of the file. An invalid edit changes nothing and is
// reported with its position. Removed workers are not probed.
func TestWorkersFile(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	var asked atomic.Int64
	counting := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer counting.Close()
	path := filepath.Join(t.TempDir(), "workers.yaml")
	list := func(ids ...string) string {
		text := "workers:\n"
		for _, id := range ids {
			text += fmt.Sprintf("  - {id: %s, url: %q}\n", id, map[string]*sim.Engine{"a": a, "b": b}[id].URL())
		}
		return text
	}
	harness.WriteFile(t, path, list("a", "b")+fmt.Sprintf("  - {id: x, url: %q}\n", counting.URL))
	r := harness.LaunchRouter(t, func(c *config.Config) { c.Discovery.File, c.Discovery.FilePollInterval = path, 20*time.Millisecond })
	both := func() bool { return r.State("a") == worker.Ready && r.State("b") == worker.Ready }
	testwait.UntilWithin(t, 10*time.Second, "both are ready", both)
	before := r.Fleet.View().Workers
	testwait.UntilWithin(t, 5*time.Second, "x is probed", func() bool { return asked.Load() > 3 })

	harness.WriteFile(t, path, list("a", "b"))
	testwait.UntilWithin(t, 5*time.Second, "x is gone", func() bool { return r.State("x") == worker.Gone })
	last := testwait.Settled(t, r.Config.Health.Interval/2, "the count of probes that were in progress", asked.Load)
	testwait.Holds(t, 6*r.Config.Health.Interval, "x is not probed after it was removed", func() bool { return asked.Load() == last })

	harness.WriteFile(t, path, list("a", "b")+"  - {id: c, url: nonsense}\n")
	testwait.UntilWithin(t, 5*time.Second, "the fault is shown with its place", func() bool {
		for _, s := range sourceStates(t, r) {
			if strings.Contains(s.Error, "workers.yaml:4:18") && strings.Contains(s.Error, "nonsense") && s.Workers == 2 {
				return true
			}
		}
		return false
	})
	if !strings.Contains(r.Logs.String(), "workers.yaml:4:18") {
		t.Error("the fault's place is not in the log")
	}
	harness.WriteFile(t, path, list("a"))
	testwait.UntilWithin(t, 5*time.Second, "b is gone", func() bool { return r.State("b") == worker.Gone })
	if now := r.Fleet.View().Workers; len(now) != 1 || now[0] != before[0] {
		t.Error("a was taken out and in though nothing of it changed")
	}
	harness.WriteFile(t, path, list("a", "b"))
	testwait.UntilWithin(t, 10*time.Second, "b is back", both)
}

// TestConfigFileIsReloaded: the workers follow edits of the --config file; the log says that other
// edited fields are not in effect.
func TestConfigFileIsReloaded(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	text := "listen: 127.0.0.1:0\nadmin: {listen: off}\ndiscovery: {file_poll_interval: 20ms}\nhealth: {interval: 50ms}\n"
	harness.WriteFile(t, path, text+fmt.Sprintf("workers: [{url: %q}, {url: %q}]\n", a.URL(), b.URL()))
	r := harness.LaunchConfigured(t, path)
	testwait.UntilWithin(t, 10*time.Second, "both are ready", func() bool {
		return r.State("aggregated-0") == worker.Ready && r.State("aggregated-1") == worker.Ready
	})
	harness.WriteFile(t, path, text+fmt.Sprintf("timeouts: {prefill: 7s}\nworkers: [{url: %q}]\n", b.URL()))
	testwait.UntilWithin(t, 5*time.Second, "the first is gone", func() bool { return r.State("aggregated-0") == worker.Gone })
	if s := r.State("aggregated-1"); s != worker.Ready {
		t.Errorf("the other is %v: it has no id of its own, and must keep the one it had", s)
	}
	if log := r.Logs.String(); !strings.Contains(log, "timeouts.prefill") || !strings.Contains(log, "sluice reload") {
		t.Error("the log says nothing of the field that was edited too")
	}
}
