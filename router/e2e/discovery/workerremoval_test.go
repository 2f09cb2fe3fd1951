package discovery

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer/completion"
	"sluice/router/worker"
)

// removal is a discovery source that finds a prefill and a decode worker, and its way to remove the
// prefill worker.
type removal struct {
	name string
	// start runs a router that finds both. id is the id of the prefill worker; leave removes it.
	start func(t *testing.T, mod func(*config.Config), p, d *sim.Engine) (r *harness.Router, id string, leave func())
}

var removals = []removal{
	{"workers file", func(t *testing.T, mod func(*config.Config), p, d *sim.Engine) (*harness.Router, string, func()) {
		path := filepath.Join(t.TempDir(), "workers.yaml")
		decode := fmt.Sprintf("workers:\n  - {id: stays, role: decode, url: %q}\n", d.URL())
		harness.WriteFile(t, path, decode+fmt.Sprintf("  - {id: leaver, role: prefill, url: %q}\n", p.URL()))
		r := harness.LaunchRouter(t, harness.AllOf(mod, func(c *config.Config) { c.Discovery.File, c.Discovery.FilePollInterval = path, 20*time.Millisecond }))
		return r, "leaver", func() { harness.WriteFile(t, path, decode) }
	}},
	{"config file", func(t *testing.T, _ func(*config.Config), p, d *sim.Engine) (*harness.Router, string, func()) {
		path := filepath.Join(t.TempDir(), "sluice.yaml")
		text := "listen: 127.0.0.1:0\nadmin: {listen: off}\ndiscovery: {file_poll_interval: 20ms}\nhealth: {interval: 50ms}\ntransfers: {zmq_listen: \"tcp://127.0.0.1:*\"}\nworkers:\n" +
			fmt.Sprintf("  - {id: stays, role: decode, url: %q}\n", d.URL())
		harness.WriteFile(t, path, text+fmt.Sprintf("  - {id: leaver, role: prefill, url: %q}\n", p.URL()))
		return harness.LaunchConfigured(t, path), "leaver", func() { harness.WriteFile(t, path, text) }
	}},
	{"deregistered", func(t *testing.T, mod func(*config.Config), p, d *sim.Engine) (*harness.Router, string, func()) {
		r := harness.LaunchRouter(t, harness.AllOf(mod, withRegister))
		keepAnnounced(t, r, "stays", "decode", d.URL())
		stop := keepAnnounced(t, r, "leaver", "prefill", p.URL())
		return r, "leaver", func() {
			stop()
			if status := announce(t, r, "DELETE", "leaver", ""); status != 204 {
				t.Errorf("deregistered with status %d", status)
			}
		}
	}},
	{"lease ended", func(t *testing.T, mod func(*config.Config), p, d *sim.Engine) (*harness.Router, string, func()) {
		r := harness.LaunchRouter(t, harness.AllOf(mod, withRegister))
		keepAnnounced(t, r, "stays", "decode", d.URL())
		return r, "leaver", keepAnnounced(t, r, "leaver", "prefill", p.URL())
	}},
	{"DNS", func(t *testing.T, mod func(*config.Config), p, d *sim.Engine) (*harness.Router, string, func()) {
		dns := harness.StartFakeDNS(t)
		dns.SetTarget("_p._tcp.engines.", p.URL())
		dns.SetTarget("_d._tcp.engines.", d.URL())
		r := harness.LaunchRouter(t, harness.AllOf(mod, func(c *config.Config) {
			for name, role := range map[string]worker.Role{"_p._tcp.engines": worker.Prefill, "_d._tcp.engines": worker.Decode} {
				c.Discovery.DNS = append(c.Discovery.DNS, config.DNS{Name: name, Type: "srv", Role: role, Scheme: "http", Server: dns.Addr, MinInterval: 100 * time.Millisecond, MaxInterval: time.Second})
			}
		}))
		return r, "prefill@" + harness.HostPort(p), func() { dns.SetTarget("_p._tcp.engines.", "") }
	}},
	{"Kubernetes", func(t *testing.T, mod func(*config.Config), p, d *sim.Engine) (*harness.Router, string, func()) {
		cluster := harness.StartFakeKubeAPI(t, map[string]string{"leaver": harness.PodText("leaver", "prefill", p.URL()), "stays": harness.PodText("stays", "decode", d.URL())})
		r := harness.LaunchRouter(t, harness.AllOf(mod, func(c *config.Config) {
			c.Kube.Selector, c.Kube.Kubeconfig, c.Kube.Port = "app in (prefill,decode)", cluster.Kubeconfig(t), "http"
		}))
		return r, "leaver", func() { cluster.Remove("leaver") }
	}},
}

// TestRemovedWorkerLeavesNoState: whichever source removes a worker, the router keeps no metric
// series, index entries, predictions, reservations or transfer rates of it. The other worker then
// serves requests alone.
func TestRemovedWorkerLeavesNoState(t *testing.T) {
	t.Parallel()
	for _, by := range removals {
		t.Run(by.name, func(t *testing.T) {
			p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
			r, id, leave := by.start(t, func(c *config.Config) { c.Transfers.ZMQListen = "tcp://127.0.0.1:*" }, p, d)
			var ranks map[string]*worker.Rank // by role
			testwait.UntilWithin(t, 60*time.Second, "requests go to both", func() bool {
				a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.Chat(""))
				if err != nil || a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") != id {
					return false
				}
				ranks = map[string]*worker.Rank{}
				for _, w := range r.Fleet.View().Workers {
					ranks[w.Spec.Role.String()] = w.Ranks[0]
				}
				return len(ranks) == 2 && ranks["prefill"].CachedBlocks.Load() > 0
			})
			left := ranks["prefill"]
			// Record a transfer as a connector's report would.
			r.Transfers.RecordTransfer(left, ranks["decode"], 100, &completion.Result{State: completion.Done, Bytes: 1 << 20, Duration: time.Millisecond})
			before := rankSeries(t, r, id)
			for _, want := range []string{"sluice_worker_state", "sluice_rank_legs_total", "sluice_rank_requests", "sluice_rank_cached_blocks", "sluice_kv_feed_total", "sluice_kv_rank_transfers_total"} {
				if !slices.Contains(before, want) {
					t.Errorf("no series of %s to be taken away: the test shows little", want)
				}
			}
			leave()
			testwait.UntilWithin(t, 60*time.Second, "it is gone with all of its series", func() bool {
				return r.State(id) == worker.Gone && len(rankSeries(t, r, id)) == 0
			})
			testwait.UntilWithin(t, 60*time.Second, "nothing is known of what it held", func() bool { return left.CachedBlocks.Load() == 0 && indexedBlocks(r, left) == 0 })
			if n := left.Requests.Load() + left.PrefillTokens.Load() + left.DecodeBlocks.Load(); n != 0 {
				t.Errorf("%d still reserved", n)
			}
			for _, pair := range r.Transfers.TransferRates() {
				if pair.From == int(left.Slot) || pair.To == int(left.Slot) {
					t.Errorf("%+v is still known of transfers", pair)
				}
			}
			testwait.UntilWithin(t, 60*time.Second, "the other does it alone", func() bool {
				a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
				return a.Status == 200 && a.Header.Get("X-Sluice-Prefill-Worker") == ""
			})
			if again := rankSeries(t, r, id); len(again) > 0 {
				t.Errorf("series of %s are back: %v", id, again)
			}
		})
	}
}

// rankSeries returns the metrics that have a series with this worker, or a rank of it, in any label.
func rankSeries(t *testing.T, r *harness.Router, id string) []string {
	t.Helper()
	families := map[string]bool{}
	for line := range strings.Lines(string(harness.Get(t, r.URL+"/metrics").Body)) {
		if strings.Contains(line, `="`+id+`"`) || strings.Contains(line, `="`+id+`/`) {
			name, _, _ := strings.Cut(line, "{")
			families[name] = true
		}
	}
	return slices.Sorted(maps.Keys(families))
}

// indexedBlocks counts the blocks of a rank's slot in the exact and the approximate index.
func indexedBlocks(r *harness.Router, rank *worker.Rank) (n int) {
	count := func(x *kvindex.Exported) bool { n += len(x.Seqs); return true }
	if index, ok := r.Index.(kvindex.Exporter); ok {
		index.Export(rank.Slot, count)
	}
	r.Approx.Export(rank.Slot, count)
	return n
}

// announce sends a request to the registration listener and returns the status.
func announce(t *testing.T, r *harness.Router, method, id, body string) int {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+r.Registration.Addr()+"/v1/workers/"+id, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+harness.RegisterToken)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return 0
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// keepAnnounced registers a worker and renews the registration until stop is called or the test
// ends.
func keepAnnounced(t *testing.T, r *harness.Router, id, role, url string) (stop func()) {
	t.Helper()
	body, _ := json.Marshal(map[string]any{"version": 1, "url": url, "role": role})
	if status := announce(t, r, "PUT", id, string(body)); status != 201 {
		t.Fatalf("%s: status %d", id, status)
	}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			case <-time.After(100 * time.Millisecond):
				announce(t, r, "PUT", id, string(body))
			}
		}
	}()
	stop = sync.OnceFunc(func() { close(end); <-ended })
	t.Cleanup(stop)
	return stop
}

// TestLateMessagesOfRemovedWorkerAreDropped: if a worker leaves during a request, the router drops
// what it learns from the request about the worker, because another worker may reuse its slot.
func TestLateMessagesOfRemovedWorkerAreDropped(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, func(o *sim.Options) { o.Speed, o.Cost.Step = 1, 3*time.Millisecond })
	w := harness.SimWorker(e, worker.Aggregated, "w")
	w.KVEvents = []string{"off"} // so that its cached blocks are predicted
	r := harness.StartRouter(t, nil, w)
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200)
	rank := r.Fleet.View().Workers[0].Ranks[0]
	testwait.UntilWithin(t, 20*time.Second, "something is guessed", func() bool { return indexedBlocks(r, rank) > 0 })
	compared := func() int {
		for line := range strings.Lines(string(harness.Get(t, r.URL+"/metrics").Body)) {
			if v, ok := strings.CutPrefix(line, "sluice_cache_reported_tokens_total "); ok {
				n, _ := strconv.Atoi(strings.TrimSpace(v))
				return n
			}
		}
		return 0
	}
	sent := compared()
	resp, err := http.Post(r.URL+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(
		`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":300,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`, harness.Prompt)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := r.Fleet.Remove("w"); err != nil {
		t.Fatal(err)
	}
	testwait.UntilWithin(t, 20*time.Second, "nothing is guessed of it", func() bool { return indexedBlocks(r, rank) == 0 })
	if rest, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(rest), "data: [DONE]") {
		t.Fatalf("the stream ended with %v", err)
	}
	testwait.UntilWithin(t, 20*time.Second, "the engine's word of its cache is in", func() bool { return compared() > sent && rank.Requests.Load() == 0 })
	testwait.UntilWithin(t, 20*time.Second, "it is not kept", func() bool { return indexedBlocks(r, rank) == 0 })
}
