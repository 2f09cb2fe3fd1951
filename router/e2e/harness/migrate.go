package harness

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// StreamContent is all that a client can read from a stream.
type StreamContent struct {
	identity string // id, object, created, model: the same in every event
	Text     string
	roles    int
	Finish   []string
	ids      []uint32
	usage    string
	Done     int
	Err      string
	Broken   []string // violations: content that no stream may have
}

// ReadStreamContent parses a stream in OpenAI's format, with or without an error event. It does not
// fail the test: what no stream may contain is in Broken.
func ReadStreamContent(a *Answer) (s StreamContent) {
	for _, event := range strings.Split(strings.TrimSuffix(string(a.Body), "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			s.Broken = append(s.Broken, event)
			continue
		}
		if data == "[DONE]" {
			s.Done++
			continue
		}
		var v struct {
			ID, Object, Model string
			Created           int64
			Choices           []struct {
				Index int
				Text  string
				Delta struct{ Role, Content string }
				Ends  string   `json:"finish_reason"`
				IDs   []uint32 `json:"token_ids"`
			}
			Usage json.RawMessage
			Error *struct{ Message string }
			PIDs  []uint32 `json:"prompt_token_ids"`
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			s.Broken = append(s.Broken, data)
			continue
		}
		if v.Error != nil {
			s.Err = v.Error.Message
			continue
		}
		identity := fmt.Sprint(v.ID, " ", v.Object, " ", v.Created, " ", v.Model)
		if s.identity == "" {
			s.identity = identity
		}
		if identity != s.identity || s.Done > 0 {
			s.Broken = append(s.Broken, identity)
		}
		for _, c := range v.Choices {
			s.Text += c.Text + c.Delta.Content
			s.ids = append(s.ids, c.IDs...)
			if c.Delta.Role != "" {
				if s.roles++; s.Text != "" {
					s.Broken = append(s.Broken, "a role behind text")
				}
			}
			if c.Ends != "" {
				s.Finish = append(s.Finish, c.Ends)
			}
		}
		if len(v.Usage) > 0 && string(v.Usage) != "null" {
			var u struct {
				P int `json:"prompt_tokens"`
				T int `json:"total_tokens"`
				C int `json:"completion_tokens"`
			}
			json.Unmarshal(v.Usage, &u)
			s.usage = fmt.Sprint(u)
		}
	}
	return s
}

// WantSameContent checks that a stream has the same content as undisturbed, the stream of an
// engine without faults.
func WantSameContent(t *testing.T, a, undisturbed *Answer) StreamContent {
	t.Helper()
	got, want := ReadStreamContent(a), ReadStreamContent(undisturbed)
	if a.Status != 200 || got.Err != "" || len(got.Broken) > 0 || got.Text != want.Text || got.roles != want.roles || got.Done != 1 ||
		!slices.Equal(got.Finish, want.Finish) || !slices.Equal(got.ids, want.ids) || got.usage != want.usage {
		t.Errorf("status %d\ngot  %+v\nwant %+v\n%s", a.Status, got, want, a.Body)
	}
	return got
}

// MigrationFleet is a router over some engines, and a reference engine without faults.
type MigrationFleet struct {
	Reference *sim.Engine
	Prefill   *sim.Engine   // nil: none
	Engines   []*sim.Engine // decode or aggregated engines
	*Router
}

// StartMigrationFleet starts n engines, the reference engine and a router over the n. The router chooses
// them in turn and keeps failing ones in the pools. The engines are aggregated; with pd they are
// decode engines and there is one prefill engine, too. mod may change the configuration; it may be nil.
func StartMigrationFleet(t *testing.T, pd bool, n int, mod func(*config.Config)) *MigrationFleet {
	t.Helper()
	m := &MigrationFleet{Reference: StartSim(t, nil)}
	var workers []config.Worker
	role := worker.Aggregated
	if pd {
		role = worker.Decode
		p := StartSim(t, func(o *sim.Options) { o.Role = "prefill" })
		m.Prefill = p
		workers = append(workers, SimWorker(p, worker.Prefill, "p0"))
	}
	for i := range n {
		e := StartSim(t, func(o *sim.Options) {
			if pd {
				o.Role = "decode"
			}
		})
		m.Engines = append(m.Engines, e)
		workers = append(workers, SimWorker(e, role, fmt.Sprint("d", i)))
	}
	m.Router = StartRouter(t, func(c *config.Config) {
		c.Schedule.Policy = "round_robin"
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000 // keep the few engines, which fail repeatedly, in the pools
		if mod != nil {
			mod(c)
		}
	}, workers...)
	return m
}

// Migrated returns the number of migrations with an outcome, such as "done", since the router
// started.
func (m *MigrationFleet) Migrated(outcome string) float64 {
	return m.Metric(`sluice_migrations_total{outcome="` + outcome + `"}`)
}

// Fail arms a fault on every engine for the first leg of a request, but not for the legs that
// resume it.
func (m *MigrationFleet) Fail(id string, f sim.Fault) {
	f.ID = id
	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Slow, ID: id + "-"}) // without effect: it matches the resumed legs, so that the next fault does not
		e.Fault(f)
	}
}

// Clear disarms the faults of the engines and deletes their records of requests.
func (m *MigrationFleet) Clear() {
	for _, e := range m.Engines {
		e.ClearFaults()
		e.ForgetRequests()
	}
}
