package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// drained is a stream under way and where it runs.
type drained struct {
	m    *migrants
	f    *face
	want heard
	got  chan *answer
	on   string
}

// under begins a stream of a face on engines that are slow enough to be drained under
// it, and waits until some of it is out.
func under(t *testing.T, m *migrants, f *face, id string) *drained {
	t.Helper()
	body := f.request(60, true)
	d := &drained{m: m, f: f, want: f.read(post(t, m.plain.URL()+f.path, body)), got: make(chan *answer, 1)}
	for _, e := range m.engines {
		e.Fault(sim.Fault{Kind: sim.Slow, Delay: 8 * time.Millisecond})
	}
	go func() {
		a, err := tryPost(context.Background(), m.URL+f.path, body, "X-Request-Id", id)
		if err != nil {
			t.Error(err)
		}
		d.got <- a
	}()
	eventually(t, 10*time.Second, "the stream is under way", func() bool {
		for i, e := range m.engines {
			if s := e.Stats().Sum(); s.Running > 0 && s.GeneratedTokens > 5 {
				d.on = fmt.Sprint("d", i)
			}
		}
		return d.on != ""
	})
	eventually(t, 5*time.Second, "a loop drives the stream", func() bool {
		threads, streams := m.front.Loops()
		return streams > 0 || threads == 0
	})
	return d
}

// ended waits for the stream and compares it.
func (d *drained) ended(t *testing.T) *answer {
	t.Helper()
	select {
	case a := <-d.got:
		if a != nil {
			d.m.heardSame(t, d.f.name+" on "+d.on, d.f, a, d.want)
		}
		return a
	case <-time.After(20 * time.Second):
		t.Fatal("the stream did not end")
	}
	return nil
}

func (d *drained) engine() *sim.Engine {
	if d.on == "d0" {
		return d.m.engines[0]
	}
	return d.m.engines[1]
}

// TestStreamsLeaveADrainedWorker: drained by the admin's call, or taken away: its
// streams go on from another, the client sees one.
func TestStreamsLeaveADrainedWorker(t *testing.T) {
	chat := face{name: "chat", path: "/v1/chat/completions", body: `"messages":[{"role":"user","content":"go on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, read: hearOpenAI}
	for _, f := range append([]face{chat}, faces...) {
		if strings.Contains(f.name, "to the end") {
			continue // it may be over too soon
		}
		for _, how := range []string{"drain", "remove"} {
			if how == "remove" && f.name != "chat" {
				continue
			}
			t.Run(f.name+" "+how, func(t *testing.T) {
				t.Parallel()
				m := startFace(t, &f, 2, func(c *config.Config) { c.Migration.DrainAfter = 0; c.Timeouts.StreamIdle = 10 * time.Second })
				d := under(t, m, &f, "leaves")
				if how == "drain" {
					if err := m.fleet.Drain(d.on, true); err != nil {
						t.Fatal(err)
					}
				} else if err := m.fleet.Remove(d.on); err != nil {
					t.Fatal(err)
				}
				eventually(t, 5*time.Second, "the worker is left", func() bool { return d.engine().Stats().Sum().Running == 0 })
				if m.migrated("drained") != 1 {
					t.Errorf("%v drained, %v done", m.migrated("drained"), m.migrated("done"))
				}
				d.ended(t)
				rec := m.outcome(t, "leaves")
				if rec.Outcome.Reason != "" || !strings.Contains(fmt.Sprint(rec.Notes), "drain") {
					t.Errorf("outcome %+v, notes %+v", rec.Outcome, rec.Notes)
				}
				quiet(t, m.testRouter, 5*time.Second, m.engines...)
			})
		}
	}
}

// TestDrainWaits: streams have migration.drain_after to end by themselves, and a
// worker taken back before keeps them.
func TestDrainWaits(t *testing.T) {
	f := faces[4]
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
			m := startFace(t, &f, 2, func(c *config.Config) {
				c.Migration.DrainAfter = k.after
				c.Timeouts.StreamIdle = 10 * time.Second
			})
			d := under(t, m, &f, "waits")
			began := time.Now()
			m.fleet.Drain(d.on, true)
			if k.back {
				m.fleet.Drain(d.on, false)
			}
			if k.moves > 0 {
				eventually(t, 5*time.Second, "the worker is left", func() bool { return d.engine().Stats().Sum().Running == 0 })
				if took := time.Since(began); took < k.after {
					t.Errorf("left after %s", took)
				}
			}
			d.ended(t)
			if n := m.migrated("drained"); n != k.moves {
				t.Errorf("%v moved, want %v", n, k.moves)
			}
		})
	}
}

// TestDrainWithoutAnother: a stream that nobody else takes stays where it is, to its
// end.
func TestDrainWithoutAnother(t *testing.T) {
	f := faces[4]
	m := startFace(t, &f, 2, func(c *config.Config) { c.Migration.DrainAfter = 0; c.Timeouts.StreamIdle = 10 * time.Second })
	d := under(t, m, &f, "stays")
	other := m.engines[0]
	if d.on == "d0" {
		other = m.engines[1]
	}
	other.Fault(sim.Fault{Kind: sim.Refuse})
	m.fleet.Drain(d.on, true)
	d.ended(t)
	if m.migrated("drained") != 0 || m.migrated("failed") == 0 {
		t.Errorf("%v drained, %v failed", m.migrated("drained"), m.migrated("failed"))
	}
	quiet(t, m.testRouter, 5*time.Second, d.engine())
}

// TestManyStreamsLeave: all at once, and none is lost or doubled.
func TestManyStreamsLeave(t *testing.T) {
	f := face{name: "chat", path: "/v1/chat/completions", body: `"messages":[{"role":"user","content":"go on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, read: hearOpenAI}
	m := startFace(t, &f, 2, func(c *config.Config) { c.Migration.DrainAfter = 0; c.Timeouts.StreamIdle = 10 * time.Second })
	const n = 60
	all := make([]*drained, n)
	for i := range all {
		all[i] = under(t, m, &f, fmt.Sprint("many-", i))
	}
	m.fleet.Drain("d0", true)
	for _, d := range all {
		d.ended(t)
	}
	state := func() worker.State { s, _ := m.fleet.View().Workers[0].State(); return s }
	if m.migrated("drained") == 0 || state() != worker.Draining {
		t.Errorf("%v drained, the worker is %v", m.migrated("drained"), state())
	}
	quiet(t, m.testRouter, 5*time.Second, m.engines...)
}
