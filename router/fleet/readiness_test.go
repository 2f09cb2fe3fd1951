package fleet

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// bootstrapServer answers as SGLang's does: 503 until its ranks have registered,
// 400 to the arguments of the other releases. What it does was read in SGLang
// 0.5.9 and 0.5.23, common/conn.py; it is not their server.
type bootstrapServer struct {
	*httptest.Server
	registered atomic.Bool
	broken     atomic.Int32 // a status instead
	old        bool         // 0.5.9's arguments
	last       atomic.Pointer[string]
	keyed      atomic.Int32 // requests that showed a key
}

func newBootstrap(t *testing.T, old bool) *bootstrapServer {
	b := &bootstrapServer{old: old}
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			fmt.Fprint(w, "OK")
			return
		}
		q := r.URL.RequestURI()
		b.last.Store(&q)
		if r.Header.Get("Authorization") != "" {
			b.keyed.Add(1)
		}
		want := []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"}
		if b.old {
			want = []string{"engine_rank", "target_dp_group", "target_pp_rank"}
		}
		for _, arg := range want {
			if r.URL.Query().Get(arg) != "-1" {
				http.Error(w, "Missing inputs for bootstrap server.", 400)
				return
			}
		}
		switch {
		case b.broken.Load() != 0:
			w.WriteHeader(int(b.broken.Load()))
		case !b.registered.Load():
			http.Error(w, "Prefill server not fully registered yet", http.StatusServiceUnavailable)
		default:
			fmt.Fprint(w, `{"attn_tp_size":1,"dp_size":1}`)
		}
	}))
	t.Cleanup(b.Close)
	return b
}

func (b *bootstrapServer) port() string { return b.URL[strings.LastIndexByte(b.URL, ':')+1:] }

func sglangEngine(t *testing.T, info string) *testEngine {
	e := newEngine(t)
	e.sglang.Store(true)
	e.setModels(&e.models, `{"data":[{"id":"tiny","owned_by":"sglang"}]}`)
	e.metrics.Store(nil)
	e.setModels(&e.info, info)
	return e
}

func TestPrefillWaitsForItsBootstrapServer(t *testing.T) {
	for _, old := range []bool{false, true} {
		t.Run(map[bool]string{false: "0.5.10 and later", true: "before"}[old], func(t *testing.T) {
			b := newBootstrap(t, old)
			e := sglangEngine(t, `{"disaggregation_mode":"prefill","page_size":1,"dp_size":1,"disaggregation_bootstrap_port":`+b.port()+`}`)
			f, _ := newFleet(t, Options{})
			mustAdd(t, f, worker.Spec{ID: "p", URL: e.url(), Role: worker.Prefill})
			waits := func(word string) func() bool {
				return func() bool {
					s, why := stateOf(f, "p")
					return s != worker.Ready && strings.Contains(why, "bootstrap") && strings.Contains(why, word)
				}
			}
			testwait.Until(t, "it says what it waits for", waits("some ranks have not registered"))
			b.broken.Store(500)
			testwait.Until(t, "it says what is wrong", waits("returned 500"))
			b.broken.Store(0)
			b.registered.Store(true)
			p := waitRanks(t, f, "tiny", 1)
			if got := p.Prefill[0].Worker.Info().BootstrapPort; strconv.Itoa(got) != b.port() {
				t.Errorf("bootstrap port %d; want %s", got, b.port())
			}
			b.CloseClientConnections()
			b.Close()
			testwait.Until(t, "it is out when its bootstrap server is gone", waits("refused"))
		})
	}
}

// Only prefill workers of SGLang have a bootstrap server; a decode worker of it,
// and a prefill worker of vLLM, are not asked for one.
func TestOnlySGLangHasBootstrapServer(t *testing.T) {
	decode := sglangEngine(t, `{"disaggregation_mode":"decode","page_size":1,"dp_size":1}`)
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "d", URL: decode.url(), Role: worker.Decode})
	mustAdd(t, f, worker.Spec{ID: "p", URL: newEngine(t).url(), Role: worker.Prefill})
	waitRanks(t, f, "tiny", 2)
}

// The engines' key is for their API: a bootstrap server asks for none, and what goes
// there can be read on the way.
func TestBootstrapServerGetsNoKey(t *testing.T) {
	b := newBootstrap(t, false)
	b.registered.Store(true)
	e := sglangEngine(t, `{"disaggregation_mode":"prefill","page_size":1,"dp_size":1,"disaggregation_bootstrap_port":`+b.port()+`}`)
	f, _ := newFleet(t, Options{Upstream: upstream.Options{Key: "the-engines-key"}})
	mustAdd(t, f, worker.Spec{ID: "p", URL: e.url(), Role: worker.Prefill})
	waitRanks(t, f, "tiny", 1)
	if n := b.keyed.Load(); n > 0 || b.last.Load() == nil {
		t.Errorf("asked %v, %d times with the engines' key", b.last.Load() != nil, n)
	}
}

func TestBootstrapPortOfTheSpecWins(t *testing.T) {
	b := newBootstrap(t, false)
	b.registered.Store(true)
	e := sglangEngine(t, `{"disaggregation_mode":"prefill","page_size":1,"dp_size":1,"disaggregation_bootstrap_port":1}`)
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "p", URL: e.url(), Role: worker.Prefill, Options: map[string][]string{"bootstrap_port": {b.port()}}})
	waitRanks(t, f, "tiny", 1)
}

func TestRankMapMustBeKnown(t *testing.T) {
	e := newEngine(t) // shows engines 0 and 1
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.url(), Ranks: []uint16{0, 1, 2, 3}})
	testwait.Until(t, "it says what is wrong", func() bool {
		s, why := stateOf(f, "w")
		return s == worker.Joining && strings.Contains(why, "ranks 0 to 1") && strings.Contains(why, "rank 3")
	})
	e.setModels(&e.metrics, strings.ReplaceAll(*e.metrics.Load(), `engine="1"`, `engine="3"`))
	waitRanks(t, f, "tiny", 4)
}
