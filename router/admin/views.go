package admin

import (
	"net/http"

	"sluice/router/obs"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Worker is a worker in the response of /admin/v1/workers.
type Worker struct {
	ID      string   `json:"id"`
	URL     string   `json:"url"`
	Role    string   `json:"role"`
	State   string   `json:"state"`
	Reason  string   `json:"reason,omitempty"` // why the worker is in this state
	Models  []string `json:"models"`
	Engine  string   `json:"engine,omitempty"`
	Version string   `json:"version,omitempty"`
	Labels  []string `json:"labels,omitempty"`
	Source  string   `json:"source,omitempty"`
	Ranks   []Rank   `json:"ranks"`
}

// Rank is one data-parallel rank of a Worker.
type Rank struct {
	ID            string  `json:"id"` // worker/rank
	Rank          int     `json:"rank"`
	Feed          string  `json:"feed"`       // state of the KV event feed: none, syncing, live, broken, silent
	Breaker       string  `json:"breaker"`    // closed, half open, open
	BlockSize     int     `json:"block_size"` // in tokens; 0: unknown
	TotalBlocks   int     `json:"total_blocks"`
	CachedBlocks  int64   `json:"cached_blocks"` // blocks in the KV index
	HeldBlocks    int64   `json:"held_blocks"`   // former name of cached_blocks, kept for one release
	KVUsage       float64 `json:"kv_usage"`      // 0…1, as the engine reports; -1: not reported
	Requests      int64   `json:"requests"`
	PrefillTokens int64   `json:"prefill_tokens"`
	DecodeBlocks  int64   `json:"decode_blocks"`
	Running       int64   `json:"engine_running"` // -1: not reported
	Waiting       int64   `json:"engine_waiting"` // -1: not reported
	// Rates are the scheduler's current cost estimates for work on the rank, in ms per unit.
	// LearnedFrom is the number of the worker's legs from which each rate was learned; 0: the rate
	// is the fleet's or the configured one.
	Rates       schedule.Rates   `json:"rates_ms"`
	LearnedFrom map[string]int64 `json:"rates_learned_from"`
}

func (s *Server) workerView(w *worker.Worker) Worker {
	state, reason := w.State()
	info := w.Info()
	v := Worker{ID: w.Spec.ID, URL: maskURL(w.Spec.URL), Role: w.Spec.Role.String(), State: state.String(), Reason: reason,
		Models: info.Models, Engine: info.Engine, Version: info.Version, Labels: w.Spec.Labels, Source: w.Spec.Source}
	for _, r := range w.Ranks {
		v.Ranks = append(v.Ranks, Rank{ID: r.ID.String(), Rank: int(r.ID.Rank), Feed: worker.FeedState(r.Feed.Load()).String(), Breaker: worker.BreakerState(r.Breaker.Load()).String(),
			BlockSize: r.BlockSize(), TotalBlocks: info.TotalBlocks, CachedBlocks: r.CachedBlocks.Load(), HeldBlocks: r.CachedBlocks.Load(), KVUsage: r.KVUsage(),
			Requests: r.Requests.Load(), PrefillTokens: r.PrefillTokens.Load(), DecodeBlocks: r.DecodeBlocks.Load(),
			Running: r.Running.Load(), Waiting: r.Waiting.Load(), Rates: s.opt.Scheduler.RatesOf(r), LearnedFrom: learnedFrom(r)})
	}
	return v
}

func learnedFrom(r *worker.Rank) map[string]int64 {
	from := make(map[string]int64, worker.NumWork)
	for w := range worker.NumWork {
		from[w.String()] = learnedLegs(r, w)
	}
	return from
}

// learnedLegs returns the number of legs from which the rank's rate was learned, 0 if it was not.
func learnedLegs(r *worker.Rank, w worker.Work) (n int64) {
	if r.Price[w].Load() != 0 {
		_, _, n = r.Worker.Speed.Rate(w)
	}
	return n
}

func (s *Server) workers(w http.ResponseWriter, r *http.Request) {
	d := s.workerDocument(0)
	answerBody(w, []byte(`{"workers":`), d.body, []byte("}\n"))
}

// Request is one entry of /admin/v1/requests. It has the last choice of each leg.
type Request struct {
	ID           string  `json:"id"`
	At           int64   `json:"t"` // milliseconds since 1970
	PromptTokens int     `json:"prompt_tokens"`
	Prefill      string  `json:"prefill,omitempty"` // worker/rank
	Decode       string  `json:"decode,omitempty"`
	Whole        string  `json:"whole,omitempty"`
	Predicted    int     `json:"cached_predicted"`
	Model        string  `json:"model,omitempty"` // known if Timeline
	Key          string  `json:"key,omitempty"`   // name of the API key
	Class        string  `json:"class,omitempty"` // admission class; none if there is one and the request did not wait
	Tenant       string  `json:"tenant,omitempty"`
	Endpoint     string  `json:"endpoint,omitempty"`
	Stream       bool    `json:"stream,omitempty"`
	Outcome      string  `json:"outcome,omitempty"` // as in sluice_model_requests_total
	Retries      int     `json:"retries,omitempty"`
	Migrations   int     `json:"migrations,omitempty"`
	Timeline     bool    `json:"timeline,omitempty"` // /admin/v1/timeline has it
	Attempts     int     `json:"attempts"`
	Notes        int     `json:"notes"`
	Done         bool    `json:"done"`
	Status       int     `json:"status,omitempty"`
	Reason       string  `json:"reason,omitempty"`
	Reported     int     `json:"cached_reported"` // -1: unknown
	OutputTokens int     `json:"output_tokens,omitempty"`
	TTFTMS       float64 `json:"ttft_ms,omitempty"`
	TotalMS      float64 `json:"total_ms,omitempty"`
}

func requestOf(rec *schedule.Record) Request {
	q := Request{ID: rec.RequestID, At: rec.Started.UnixMilli(), Notes: len(rec.Notes) + rec.LostNotes, Reported: -1}
	for i := range rec.Decisions {
		d := &rec.Decisions[i]
		q.PromptTokens = d.PromptTokens
		q.Attempts = max(q.Attempts, d.Attempt)
		switch d.Leg {
		case schedule.PrefillLeg.String():
			q.Prefill = d.Chosen
		case schedule.DecodeLeg.String():
			q.Decode = d.Chosen
		default:
			q.Whole = d.Chosen
		}
		if d.Leg == schedule.DecodeLeg.String() && q.Prefill != "" {
			continue // a prefill leg ran: its overlap is the one that saved work
		}
		for j := range d.Shown {
			if d.Shown[j].Chosen {
				q.Predicted = d.Shown[j].Cached
			}
		}
	}
	if o := rec.Outcome; o != nil {
		q.Done, q.Status, q.Reason, q.Reported = true, o.Status, o.Reason, o.CachedTokens
		q.Outcome = obs.Outcome(o.Status, o.Reason)
		q.OutputTokens, q.TTFTMS, q.TotalMS = o.OutputTokens, o.TTFTMS, o.TotalMS
	}
	return q
}
