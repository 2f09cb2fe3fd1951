package migration

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// exactStream is a stream of exactly known size: its prompt and its output in tokens, and what delays its output.
type exactStream struct {
	prompt, output int
	delay          sim.Fault
}

// slowly is a delay before every token.
func slowly(pace time.Duration) sim.Fault { return sim.Fault{Kind: sim.Slow, Delay: pace} }

// endpoint returns the stream as a case of the endpoint that takes tokens, salt tells its prompt from others.
func (s *exactStream) endpoint(salt int) *harness.EndpointCase {
	ids, _ := json.Marshal(harness.TokenIDs(s.prompt, salt)) // json.Marshal never fails for numbers
	return &harness.EndpointCase{Name: "generate", Path: "/inference/v1/generate", Read: readOpenAIStream,
		Body: `"token_ids":` + string(ids) + `,"sampling_params":{"max_tokens":%d,"ignore_eos":true},"stream_options":{"include_usage":true}`}
}

// causeQueue is admission.engine_queue in the tests of the causes.
const causeQueue = 50 * time.Millisecond

// causesOn returns what keeps a request from a rank at present, of what a router reads from an engine's reports
// and of the work that waits there.
func causesOn(m *harness.MigrationFleet, r *worker.Rank, s *exactStream) (all []string) {
	if schedule.MissingKV(r, s.prompt, s.output) > 0 {
		all = append(all, "full KV")
	}
	if schedule.UnderPressure(r) {
		all = append(all, "pressure")
	}
	if m.Scheduler.IsBatchFull(r, schedule.EngineQueue{Time: causeQueue}) {
		all = append(all, "full batch")
	}
	if m.Scheduler.IsQueueFull(r, schedule.EngineQueue{Time: causeQueue}) {
		all = append(all, "work")
	}
	return all
}

// learnBatch sends requests until the router knows that the engine runs two at a time.
func learnBatch(t *testing.T, m *harness.MigrationFleet, r *worker.Rank) {
	t.Helper()
	slowStreams("learn", 30*time.Millisecond, m.Engines...)
	s := exactStream{prompt: 20, output: 10}
	f := s.endpoint(3)
	var all []<-chan *harness.Answer
	for i := range 8 {
		all = append(all, sendAsync(t, m.URL+f.Path, f.Request(s.output, true), "X-Request-Id", fmt.Sprint("learn", i)))
	}
	testwait.Until(t, "the size of the batch is known", func() bool {
		m.Scheduler.IsBatchFull(r, schedule.EngineQueue{Time: causeQueue}) // reads the reports, as for a request that arrives
		return r.Pace.Batch() == 2
	})
	for _, got := range all {
		harness.WantStatus(t, receive(t, got, "a request for learning"), 200)
	}
	harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
	m.Clear()
}

// TestPreemptionCauses: a stream of a low class is suspended for a request of a higher one that its engine
// cannot start, for each cause that the engine's reports show: its KV has no space, it reports pressure, or
// its batch is full. The stream equals an undisturbed one, and the other stream there is left alone,
// although its class is lower, too.
func TestPreemptionCauses(t *testing.T) {
	t.Parallel()
	for name, k := range map[string]struct {
		engine           func(*sim.Options)
		prepare          func(*testing.T, *harness.MigrationFleet, *worker.Rank)
		low, other, high exactStream
	}{
		// 64 blocks, of which the streams use 30 and 10 at first.
		"full KV": {
			engine: func(o *sim.Options) { o.Blocks = 65 },
			low:    exactStream{480, 120, slowly(5 * time.Millisecond)}, other: exactStream{160, 150, slowly(5 * time.Millisecond)}, high: exactStream{prompt: 400, output: 8},
		},
		// 4000 blocks, of which the streams use 3760 and 190 at first. The low stream takes the rest, and the engine
		// preempts the other one, which pauses: it waits in the engine while more than 95 % are in use, and the
		// high one would fit.
		"pressure": {
			engine: func(o *sim.Options) { o.Blocks, o.BlockSize = 4001, 4 },
			low:    exactStream{15040, 600, slowly(5 * time.Millisecond)}, other: exactStream{760, 8, sim.Fault{Kind: sim.Stall, After: 2, Delay: 4 * time.Second}}, high: exactStream{prompt: 20, output: 4},
		},
		"full batch": {
			engine: func(o *sim.Options) { o.MaxSeqs = 2 }, prepare: learnBatch,
			low: exactStream{40, 100, slowly(5 * time.Millisecond)}, other: exactStream{40, 120, slowly(5 * time.Millisecond)}, high: exactStream{prompt: 40, output: 4},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &harness.MigrationFleet{Reference: harness.StartSim(t, nil), Engines: []*sim.Engine{harness.StartSim(t, k.engine)}}
			m.Router = harness.StartRouter(t, func(c *config.Config) {
				preempting(c)
				c.Limits.RankRequests = 0
				c.Admission.EngineQueue, c.Health.MetricsInterval = causeQueue, 20*time.Millisecond
			}, harness.SimWorker(m.Engines[0], worker.Aggregated, "d0"))
			e, rank := m.Engines[0], m.AllRanks()[0]
			if k.prepare != nil {
				k.prepare(t, m, rank)
			}
			k.low.delay.ID, k.other.delay.ID = "low", "other"
			e.Fault(k.low.delay)
			e.Fault(k.other.delay)

			low, other, high := k.low.endpoint(0), k.other.endpoint(1), k.high.endpoint(2)
			want := func(f *harness.EndpointCase, s *exactStream) harness.StreamRecord {
				return f.Read(harness.Post(t, m.Reference.URL()+f.Path, f.Request(s.output, true)))
			}
			lowAlone, otherAlone, highAlone := want(low, &k.low), want(other, &k.other), want(high, &k.high)
			start := func(f *harness.EndpointCase, s *exactStream, id, class string, n int) <-chan *harness.Answer {
				got := sendAsync(t, m.URL+f.Path, f.Request(s.output, true), "X-Request-Id", id, "X-Sluice-Priority", class)
				testwait.Until(t, id+" generates", func() bool { return e.Stats().Sum().Running+e.Stats().Sum().Waiting == n && rank.Pending.Load() == 0 })
				return got
			}
			gotLow := start(low, &k.low, "low", "low", 1)
			gotOther := start(other, &k.other, "other", "middle", 2)
			testwait.Until(t, "the cause is there, and no other", func() bool { return slices.Equal(causesOn(m, rank, &k.high), []string{name}) })

			gotHigh := receive(t, sendAsync(t, m.URL+high.Path, high.Request(k.high.output, true), "X-Request-Id", "high", "X-Sluice-Priority", "high"), "the request of the high class")
			select {
			case <-gotLow:
				t.Fatal("the stream of the low class ended before the request of the high class was answered")
			default:
			}
			if got := high.Read(gotHigh); gotHigh.Status != 200 || len(got.Broken) > 0 || !slices.Equal(got.Ids, highAlone.Ids) || got.End != highAlone.End {
				t.Errorf("the request of the high class: status %d, %+v; want %+v", gotHigh.Status, got, highAlone)
			}
			m.WantSameRecord(t, "other", other, receive(t, gotOther, "the other stream"), otherAlone)
			m.WantSameRecord(t, "low", low, receive(t, gotLow, "the suspended stream"), lowAlone)
			harness.WantIdle(t, m.Router, 10*time.Second, e)
			if got := fmt.Sprint(harness.Ids(harness.GenerateRequests(e))); got != "[low other high low-2]" {
				t.Errorf("the engine received the requests %s; want low, other, high, and the rest of low", got)
			}
			for series, n := range map[string]int{
				`sluice_admission_preemptions_total{class="low"}`: 1, `sluice_admission_preemptions_total{class="middle"}`: 0,
				`sluice_admission_suspensions_ended_total{class="low",outcome="resumed"}`: 1, `sluice_admission_suspended_streams{class="low"}`: 0,
			} {
				if got := int(m.Metric(series)); got != n {
					t.Errorf("%s is %d, want %d", series, got, n)
				}
			}
			if notes := fmt.Sprint(m.Outcome(t, "high").Notes); !strings.Contains(notes, "the suspension of 1 stream of lower classes on d0/0 was requested") {
				t.Errorf("the explain record of the request has the notes %s", notes)
			}
		})
	}
}
