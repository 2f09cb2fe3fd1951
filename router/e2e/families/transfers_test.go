package families

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// TestLostHandoverRunsAgain: a decode waits for KV that will never arrive. The router cancels it as
// soon as an engine reports that the transfer failed or expired, or the transfer stalls, and runs
// both legs again. The client receives one successful response.
func TestLostHandoverRunsAgain(t *testing.T) {
	for _, k := range []struct {
		name, event, status string
		stream              bool
		head                bool // decode sends its head before the report
		stock               bool // the engine is not known to run the connector
		stall               time.Duration
		kind                string
	}{
		{name: "failed", event: "recv", status: "failed", kind: "transfer_failed"},
		{name: "failed stream", event: "recv", status: "failed", stream: true, kind: "transfer_failed"},
		{name: "failed stream after its head", event: "recv", status: "failed", stream: true, head: true, kind: "transfer_failed"},
		{name: "failed, engine unknown", event: "recv", status: "failed", stock: true, kind: "transfer_failed"},
		{name: "expired", event: "expired", status: "ok", kind: "transfer_expired"},
		{name: "stalled", stall: 50 * time.Millisecond, kind: "transfer_stalled"},
	} {
		t.Run(k.name, func(t *testing.T) {
			var r *harness.TransferReporter
			type decode struct{ id, body string }
			reached := make(chan decode, 4)
			p := func(name string) *harness.ScriptedEngine {
				return harness.StartScripted(t, harness.ReplyHandler(200, harness.PrefillReply(harness.GoodHandle)))
			}
			p0, p1 := p("p0"), p("p1")
			var decodes int
			d := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
				decodes++
				body, _ := io.ReadAll(req.Body)
				requests := decode{req.Header.Get("X-Request-Id"), string(body)}
				if decodes == 1 {
					if k.head {
						w.Header().Set("Content-Type", "text/event-stream")
						w.(http.Flusher).Flush()
					}
					reached <- requests
					<-req.Context().Done() // like an engine that waits for its blocks
					return
				}
				r.Report("recv", "ok", requests.id, requests.body)
				if k.stream {
					w.Header().Set("Content-Type", "text/event-stream")
					w.Write([]byte("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"good\"}}]}\n\ndata: [DONE]\n\n"))
					return
				}
				harness.ReplyJSON(w, 200, harness.ChatReply("good"))
			})
			dw := d.Worker(worker.Decode, "d0")
			if !k.stock {
				dw = harness.WithReportingConnector(dw)
			}
			r = harness.StartTransferReporter(t, func(c *config.Config) { c.Transfers.StallTimeout = k.stall }, p0.Worker(worker.Prefill, "p0"), p1.Worker(worker.Prefill, "p1"), dw)
			cut := make(chan time.Time, 1)
			go func() {
				requests := <-reached
				if k.event != "" {
					r.Report(k.event, k.status, requests.id, requests.body)
				}
				cut <- time.Now()
			}()
			body := harness.Chat("")
			if k.stream {
				body = harness.Chat(`,"stream":true`)
			}
			a := harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "lost-1")
			took := time.Since(<-cut)
			if a.Status != 200 || a.Text(t) != "good" {
				t.Fatalf("status %d: %s", a.Status, a.Body)
			}
			if took > 2*time.Second {
				t.Errorf("%s from the report to the answer", took)
			}
			if n := r.Fallbacks(k.kind); n != 1 {
				t.Errorf("%s counted %v times, want 1", k.kind, n)
			}
			prefills := p0.Requests() + p1.Requests()
			if prefills != 2 || d.Requests() != 2 || k.kind != "transfer_expired" && (p0.Requests() != 1 || p1.Requests() != 1) {
				t.Errorf("%d prefills at p0, %d at p1, %d decodes", p0.Requests(), p1.Requests(), d.Requests())
			}
			slot := strings.Contains(d.Bodies[0], `,"sluice":{"slot":`)
			if slot == k.stock {
				t.Errorf("a completion slot: %v; decode's body %s", slot, d.Bodies[0])
			}
			if k.stock && !strings.Contains(d.Bodies[0], harness.GoodHandle) {
				t.Errorf("a stock engine's handle was changed: %s", d.Bodies[0])
			}
			testwait.UntilWithin(t, 5*time.Second, "no wait is left open", func() bool { return r.Transfers.Pending() == 0 })
		})
	}
}

// TestHandoverExpiresEveryAttempt: prefill frees the blocks in every attempt. The router runs both legs
// again while attempts remain, then decode alone; decode never waits on an expired handle.
func TestHandoverExpiresEveryAttempt(t *testing.T) {
	t.Parallel()
	var requests atomic.Pointer[string] // the id of the current attempt
	p := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
		id := req.Header.Get("X-Request-Id")
		requests.Store(&id)
		harness.ReplyJSON(w, 200, harness.PrefillReply(harness.GoodHandle))
	})
	d := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		if strings.Contains(string(body), "remote_block_ids") {
			<-req.Context().Done() // waits for blocks that were freed
			return
		}
		harness.ReplyJSON(w, 200, harness.ChatReply("good"))
	})
	r := harness.StartTransferReporter(t, nil, p.Worker(worker.Prefill, "p0"), harness.WithReportingConnector(d.Worker(worker.Decode, "d0")))
	// Repeat the report, so that it reaches each attempt as soon as the router waits, before or
	// just after it sends decode.
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				if id := requests.Load(); id != nil {
					r.Transfers.HandleMessage([]byte("SLUICE1 expired ok - - 0 0 0/0/1 p0 chatcmpl-" + *id + "-0badcafe"))
				}
				runtime.Gosched()
			}
		}
	}()
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "early-1")
	close(stop)
	<-done
	if a.Status != 200 || a.Text(t) != "good" {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if n, m := r.Fallbacks("transfer_expired"), r.Fallbacks("decode_only"); n != 3 || m != 1 || p.Requests() != 3 {
		t.Errorf("transfer_expired counted %v times, decode_only %v, %d prefills; want 3, 1, 3", n, m, p.Requests())
	}
}

// TestTransferIsShown: the explain record, the metrics, the admin API and /health contain the reported
// transfer.
func TestTransferIsShown(t *testing.T) {
	p := harness.StartScripted(t, harness.ReplyHandler(200, harness.PrefillReply(harness.GoodHandle)))
	var r *harness.TransferReporter
	d := harness.StartScripted(t, func(w http.ResponseWriter, req *http.Request) {
		id := req.Header.Get("X-Request-Id")
		body, _ := io.ReadAll(req.Body)
		r.Report("recv", "ok", id, string(body))
		r.Report("sent", "ok", id, "")
		if !testwait.Poll(5*time.Second, func() bool { return r.Transfers.Reports()["recv_ok"] > 0 }) {
			t.Error("the router has not read the report")
		}
		harness.ReplyJSON(w, 200, harness.ChatReply("good"))
	})
	r = harness.StartTransferReporter(t, nil, p.Worker(worker.Prefill, "p0"), harness.WithReportingConnector(d.Worker(worker.Decode, "d0")))
	harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "shown-1")
	var rec schedule.Record
	testwait.UntilWithin(t, 5*time.Second, "the record is closed", func() bool {
		js, ok := r.Scheduler.Explain("shown-1")
		return ok && json.Unmarshal(js, &rec) == nil && rec.Outcome != nil
	})
	if tr := rec.Outcome.Transfer; tr == nil || tr.State != "done" || tr.Bytes != 1<<20 || tr.TookMS != 2.5 || tr.AfterMS <= 0 {
		t.Errorf("explain: %+v", tr)
	}
	metrics := string(harness.Get(t, r.URL+"/metrics").Body)
	for _, want := range []string{`sluice_kv_tier_up{tier="zmq"} 1`, `sluice_kv_tier_up{tier="nixl"} 0`, `sluice_kv_transfers_total{outcome="done"} 1`,
		`sluice_kv_reports_total{report="recv_ok"} 1`, `sluice_kv_rank_transfers_total{from="p0/0",to="d0/0"} 1`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in the metrics", want)
		}
	}
	_, page := r.Pages.Health(true)
	health := string(page)
	if !strings.Contains(health, `"active":"zmq"`) || !strings.Contains(health, `"tier":"nixl","state":"off"`) {
		t.Errorf("health: %s", health)
	}
	js := harness.Get(t, "http://"+r.Admin.Addr()+"/admin/v1/transfers", "Authorization", "Bearer "+r.Config.Admin.Token).Body
	if !strings.Contains(string(js), `"from":"p0/0","to":"d0/0","transfers":1,"bytes_per_s":419430400,`) || !strings.Contains(string(js), `"pending":0,"watched":0,`) {
		t.Errorf("admin: %s", js)
	}
}

// TestNoTiersByDefault: without registration and transfers.zmq_listen the router opens no tier.
func TestNoTiersByDefault(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	if r.Transfers != nil {
		t.Error("tiers were opened that nobody can reach")
	}
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 {
		t.Errorf("status %d", a.Status)
	}
	if _, h := r.Pages.Health(true); !strings.Contains(string(h), `"active":"http"`) {
		t.Errorf("health: %s", h)
	}
}

// TestNetworksOfZMQSockets: only peers in the configured networks may connect to the ZMQ sockets of the
// reports and of LMCache. The router closes other connections at once and counts them.
func TestNetworksOfZMQSockets(t *testing.T) {
	away := []string{"203.0.113.0/24"}
	port := harness.FreePort(t)
	r := harness.LaunchRouter(t, harness.AllOf(harness.UsingFamily("lmcache"), func(c *config.Config) {
		c.Transfers.ZMQListen, c.Transfers.ZMQNetworks = "tcp://127.0.0.1:*", away
		c.LMCache.ProxyPort, c.LMCache.Networks = port, away
	}))
	testwait.UntilWithin(t, 30*time.Second, "the ZMQ tier is up", func() bool { return r.Transfers.Up(nixl.TierZMQ) })
	d, err := r.Transfers.Document(netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	for socket, at := range map[string]string{"reports": strings.TrimPrefix(d.ZMQ.Endpoint, "tcp://"), "lmcache": fmt.Sprintf("127.0.0.1:%d", port)} {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if b, err := io.ReadAll(c); len(b) > 0 {
			t.Errorf("%s: a stranger is greeted with %q, %v", socket, b, err)
		}
		c.Close()
		testwait.UntilWithin(t, 30*time.Second, socket+" counts it", func() bool {
			return r.Metric(`sluice_zmq_refused_total{socket="`+socket+`",reason="network"}`) == 1
		})
		if n := r.Metric(`sluice_zmq_connections{socket="` + socket + `"}`); n != 0 {
			t.Errorf("%s: %v connections", socket, n)
		}
	}
}
