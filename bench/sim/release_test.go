package sim

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestReleases holds every release's handle and pairs it with a decode of the
// same release: both legs carry one X-Request-Id, which is what names the blocks
// before 0.13.
func TestReleases(t *testing.T) {
	var all strings.Builder
	for _, rel := range []string{"0.9.0", "0.9.2", "0.10.2", "0.11.1", "0.13", "0.17", "0.18", "0.21", "0.22", "0.24", "0.26", "0.28", "0.29", "0.31", "0.32", "0.33"} {
		p, d := startPair(t, Options{Release: rel})
		prompt := idPrompt(40, 1)
		h := prefill(t, p, prompt, "X-Request-Id", "r1")
		fmt.Fprintf(&all, "%s\n%s\n\n", rel, normalized(h))
		if a := decode(t, d, prompt, h, "X-Request-Id", "r1"); a.status != 200 || d.Stats().Sum().Transfers != 1 {
			t.Errorf("%s: decode %d %s; %+v", rel, a.status, a.body, d.Stats().Sum())
		}
		testwait.Until(t, rel+": blocks are free", func() bool { return p.Stats().Sum().BlocksLeased == 0 })
		if n := p.Stats().Sum().LeasesReleased; n != 1 {
			t.Errorf("%s: %d leases freed", rel, n)
		}
	}
	golden(t, "handles.txt", all.String())
}

func TestReleaseRequestID(t *testing.T) {
	// Up to 0.12 a decode under another id finds nothing, and frees nothing.
	p, d := startPair(t, Options{Release: "0.12"})
	prompt := idPrompt(40, 1)
	h := prefill(t, p, prompt, "X-Request-Id", "one")
	decode(t, d, prompt, h, "X-Request-Id", "two")
	if s := p.Stats().Sum(); s.LeasesReleased != 0 || s.BlocksLeased == 0 || d.Stats().Sum().GarbageReads != 1 {
		t.Errorf("prefill %+v, %d garbage reads", s, d.Stats().Sum().GarbageReads)
	}
}

func TestReleaseLease(t *testing.T) {
	for rel, want := range map[string]time.Duration{"0.9.2": 100 * 365 * 24 * time.Hour, "0.10.0": 120 * time.Second, "0.11.0": 120 * time.Second, "0.11.1": 480 * time.Second, "0.21": 480 * time.Second, "0.22": 30 * time.Second, "0.33": 30 * time.Second} {
		o, err := Options{Release: rel}.WithDefaults()
		if err != nil || o.Lease != want {
			t.Errorf("%s: lease %v, want %v (%v)", rel, o.Lease, want, err)
		}
	}
	for _, bad := range []string{"1", "0.8.5", "0.34", "x", "0.9.1.2", "0.x"} {
		if _, err := (Options{Release: bad}).WithDefaults(); err == nil {
			t.Errorf("release %q was taken", bad)
		}
	}
	// Before 0.22 nobody renews: a decode that queues for longer than the timeout
	// reads what is no longer held; since then its heartbeats keep it.
	for rel, garbage := range map[string]int{"0.21": 1, "0.22": 0} {
		for lease := 600 * time.Millisecond; ; lease *= 2 { // a busy machine may be late with a heartbeat
			o := Options{Release: rel, Lease: lease}
			p := fastOptions(t, o)
			o.Speed, o.Cost.Handshake = 1, 2*lease
			d := fastOptions(t, o)
			prompt := idPrompt(40, 1)
			a := decode(t, d, prompt, prefill(t, p, prompt))
			got := d.Stats().Sum().GarbageReads
			if a.status == 200 && got == garbage {
				break
			}
			if a.status != 200 || got < garbage || lease > 2*time.Second {
				t.Fatalf("%s: %d, %d garbage reads, want %d", rel, a.status, got, garbage)
			}
		}
	}
}

func TestReleaseStop(t *testing.T) {
	body := `{"prompt":` + idPrompt(40, 1) + `,"max_tokens":50,"stop":[" ",".","a","e","o"],"kv_transfer_params":` + prefillParams + `}`
	for rel, handle := range map[string]bool{"0.20": false, "0.21": true} {
		p := fastOptions(t, Options{Release: rel})
		if a := post(t, p, "/v1/completions", body); (a.handle() != "null") != handle || (p.Stats().Sum().BlocksLeased > 0) != handle {
			t.Errorf("%s: a prefill that ended with stop answered %s, %d blocks leased", rel, a.handle(), p.Stats().Sum().BlocksLeased)
		}
	}
}

func TestReleaseStreamsHandle(t *testing.T) {
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		for rel, want := range map[string]int{"0.32": 0, "0.33": 1} {
			p := fastOptions(t, Options{Release: rel})
			a := post(t, p, path, `{"prompt":[300,301],"messages":[{"role":"user","content":"Hello"}],"max_tokens":1,"stream":true,"kv_transfer_params":`+prefillParams+`}`)
			n := strings.Count(string(a.body), `"kv_transfer_params":{"do_remote_prefill":true`)
			if n != want || n == 1 && !strings.Contains(string(a.body), `"finish_reason":"length"`) {
				t.Errorf("%s on %s: %d handles in %s", rel, path, n, a.body)
			}
		}
	}
}

func TestReleaseSurface(t *testing.T) {
	old, now := fastOptions(t, Options{Release: "0.10.0", Ranks: 2}), fastOptions(t, Options{Release: "0.33", Ranks: 2})
	if a := post(t, old, "/v1/completions", `{"prompt":[]}`); !strings.HasPrefix(string(a.body), `{"object":"error","message":`) {
		t.Errorf("0.10.0 error: %s", a.body)
	}
	if a := post(t, now, "/v1/completions", `{"prompt":[]}`); !strings.HasPrefix(string(a.body), `{"error":{"message":`) {
		t.Errorf("0.33 error: %s", a.body)
	}
	for _, path := range []string{"/kv_event_sources"} {
		if code, _ := get(t, old.URL()+path); code != 404 {
			t.Errorf("0.10.0 has %s: %d", path, code)
		}
		if code, _ := get(t, now.URL()+path); code != 200 {
			t.Errorf("0.33 has no %s: %d", path, code)
		}
	}
	if a := post(t, old, "/v1/messages", `{}`); a.status != 404 {
		t.Errorf("0.10.0 has /v1/messages: %d", a.status)
	}
	if a := post(t, old, "/v1/completions", `{"prompt":[300],"max_tokens":1,"return_token_ids":true}`, "X-data-parallel-rank", "9"); a.status != 200 || a.ids() != nil {
		t.Errorf("0.10.0 knows the rank header or return_token_ids: %d %s", a.status, a.body)
	}
	if _, page := get(t, old.URL()+"/metrics"); !strings.Contains(page, "vllm:gpu_cache_usage_perc{") || strings.Contains(page, "vllm:kv_cache_usage_perc{") {
		t.Error("0.10.0 has the metric names of 0.12")
	}
	for rel, want := range map[string]string{"0.9.2": "vllm-0.9.2", "0.10.1": "vllm-0.9.2", "0.16": "vllm-0.14", "0.23": "vllm-0.22", "0.24": "vllm-0.24", "0.32": "vllm-0.26", "0.33": "vllm-0.33"} {
		if o, _ := (Options{Release: rel}).WithDefaults(); o.Encoding != want {
			t.Errorf("%s publishes %s, want %s", rel, o.Encoding, want)
		}
	}
}
