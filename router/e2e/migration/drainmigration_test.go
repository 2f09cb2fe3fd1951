package migration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// drainingStream is a stream in progress and its worker.
type drainingStream struct {
	m          *harness.MigrationFleet
	endpoint   *harness.EndpointCase
	want       harness.StreamRecord
	got        chan *harness.Answer
	engineName string
}

// startDrainingStream starts a stream of an endpoint on engines that are slow enough to be drained
// during it, and waits for the first output.
func startDrainingStream(t *testing.T, m *harness.MigrationFleet, f *harness.EndpointCase, id string) *drainingStream {
	t.Helper()
	body := f.Request(60, true)
	d := &drainingStream{m: m, endpoint: f, want: f.Read(harness.Post(t, m.Reference.URL()+f.Path, body)), got: make(chan *harness.Answer, 1)}
	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Slow, Delay: 8 * time.Millisecond})
	}
	go func() {
		a, err := harness.TryPost(context.Background(), m.URL+f.Path, body, "X-Request-Id", id)
		if err != nil {
			t.Error(err)
		}
		d.got <- a
	}()
	testwait.UntilWithin(t, 10*time.Second, "the stream is in progress", func() bool {
		for i, e := range m.Engines {
			if s := e.Stats().Sum(); s.Running > 0 && s.GeneratedTokens > 5 {
				d.engineName = fmt.Sprint("d", i)
			}
		}
		return d.engineName != ""
	})
	testwait.UntilWithin(t, 5*time.Second, "a loop drives the stream", func() bool {
		threads, streams := m.Front.Loops()
		return streams > 0 || threads == 0
	})
	return d
}

// ended waits for the end of the stream and compares it with that of the reference engine.
func (d *drainingStream) ended(t *testing.T) *harness.Answer {
	t.Helper()
	select {
	case a := <-d.got:
		if a != nil {
			d.m.WantSameRecord(t, d.endpoint.Name+" on "+d.engineName, d.endpoint, a, d.want)
		}
		return a
	case <-time.After(20 * time.Second):
		t.Fatal("the stream did not end")
	}
	return nil
}

func (d *drainingStream) engine() *sim.Engine {
	if d.engineName == "d0" {
		return d.m.Engines[0]
	}
	return d.m.Engines[1]
}

// TestStreamsMigrateFromDrainingWorker: a worker is drained over the admin API, or removed. Its
// streams resume on another worker, and each client sees one uninterrupted stream.
func TestStreamsMigrateFromDrainingWorker(t *testing.T) {
	t.Parallel()
	chat := harness.EndpointCase{Name: "chat", Path: "/v1/chat/completions", Body: `"messages":[{"role":"user","content":"go on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, Read: readOpenAIStream}
	for _, f := range append([]harness.EndpointCase{chat}, endpointCases...) {
		if strings.Contains(f.Name, "to the end") {
			continue // the stream may end before the drain
		}
		for _, how := range []string{"drain", "remove"} {
			if how == "remove" && f.Name != "chat" {
				continue
			}
			t.Run(f.Name+" "+how, func(t *testing.T) {
				t.Parallel()
				m := startEndpointFleet(t, &f, 2, func(c *config.Config) { c.Migration.DrainDelay = 0; c.Timeouts.StreamIdle = 10 * time.Second })
				d := startDrainingStream(t, m, &f, "leaves")
				if how == "drain" {
					if err := m.Fleet.Drain(d.engineName, true); err != nil {
						t.Fatal(err)
					}
				} else if err := m.Fleet.Remove(d.engineName); err != nil {
					t.Fatal(err)
				}
				testwait.UntilWithin(t, 5*time.Second, "the worker is left", func() bool { return d.engine().Stats().Sum().Running == 0 })
				if m.Migrated("drained") != 1 {
					t.Errorf("%v drained, %v done", m.Migrated("drained"), m.Migrated("done"))
				}
				d.ended(t)
				rec := m.Outcome(t, "leaves")
				if rec.Outcome.Reason != "" || !strings.Contains(fmt.Sprint(rec.Notes), "drain") {
					t.Errorf("outcome %+v, notes %+v", rec.Outcome, rec.Notes)
				}
				harness.WantIdle(t, m.Router, 5*time.Second, m.Engines...)
			})
		}
	}
}

// TestDrainWaits: streams migrate only after migration.drain_delay, and stay if the drain is
// cancelled before.
func TestDrainWaits(t *testing.T) {
	t.Parallel()
	f := endpointCases[4]
	for name, k := range map[string]struct {
		after time.Duration
		back  bool
		moves float64
	}{
		"in time":    {150 * time.Millisecond, false, 1},
		"taken back": {150 * time.Millisecond, true, 0},
		"never":      {-1, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, &f, 2, func(c *config.Config) {
				c.Migration.DrainDelay = k.after
				c.Timeouts.StreamIdle = 10 * time.Second
			})
			d := startDrainingStream(t, m, &f, "waits")
			began := time.Now()
			m.Fleet.Drain(d.engineName, true)
			if k.back {
				m.Fleet.Drain(d.engineName, false)
			}
			if k.moves > 0 {
				testwait.UntilWithin(t, 5*time.Second, "the worker is left", func() bool { return d.engine().Stats().Sum().Running == 0 })
				if took := time.Since(began); took < k.after {
					t.Errorf("left after %s", took)
				}
			}
			d.ended(t)
			if n := m.Migrated("drained"); n != k.moves {
				t.Errorf("%v moved, want %v", n, k.moves)
			}
		})
	}
}

// TestDrainOfOnlyWorker: a stream for which there is no other worker completes on the draining
// worker.
func TestDrainOfOnlyWorker(t *testing.T) {
	t.Parallel()
	f := endpointCases[4]
	m := startEndpointFleet(t, &f, 2, func(c *config.Config) { c.Migration.DrainDelay = 0; c.Timeouts.StreamIdle = 10 * time.Second })
	d := startDrainingStream(t, m, &f, "stays")
	other := m.Engines[0]
	if d.engineName == "d0" {
		other = m.Engines[1]
	}
	other.Fault(sim.Fault{Kind: sim.Refuse})
	m.Fleet.Drain(d.engineName, true)
	d.ended(t)
	if m.Migrated("drained") != 0 || m.Migrated("failed") == 0 {
		t.Errorf("%v drained, %v failed", m.Migrated("drained"), m.Migrated("failed"))
	}
	harness.WantIdle(t, m.Router, 5*time.Second, d.engine())
}

// TestManyStreamsMigrate: many streams migrate at once; none loses or repeats output.
func TestManyStreamsMigrate(t *testing.T) {
	t.Parallel()
	f := harness.EndpointCase{Name: "chat", Path: "/v1/chat/completions", Body: `"messages":[{"role":"user","content":"go on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, Read: readOpenAIStream}
	m := startEndpointFleet(t, &f, 2, func(c *config.Config) { c.Migration.DrainDelay = 0; c.Timeouts.StreamIdle = 10 * time.Second })
	const n = 60
	all := make([]*drainingStream, n)
	for i := range all {
		all[i] = startDrainingStream(t, m, &f, fmt.Sprint("many-", i))
	}
	m.Fleet.Drain("d0", true)
	for _, d := range all {
		d.ended(t)
	}
	state := func() worker.State { s, _ := m.Fleet.View().Workers[0].State(); return s }
	if m.Migrated("drained") == 0 || state() != worker.Draining {
		t.Errorf("%v drained, the worker is %v", m.Migrated("drained"), state())
	}
	harness.WantIdle(t, m.Router, 5*time.Second, m.Engines...)
}
