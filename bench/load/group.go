package load

import (
	"cmp"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// window is the time whose requests the report is of: from, until; a zero until is the end of
// the run.
type window struct{ from, until time.Time }

func (w window) has(t time.Time) bool {
	return !t.Before(w.from) && (w.until.IsZero() || t.Before(w.until))
}

// group collects the results of all requests, or of those of a source, a class or a tenant.
type group struct {
	// Of the requests that were due in the window.
	sent, dropped, ok, good, refused, unanswered, failed int64
	prompt, cached, output                               int64
	refusedAfterWait                                     int64
	ttft, tpot, refusal                                  *hdrhistogram.Histogram

	// Of the answers that ended in the window.
	served, servedOutput, servedComputed int64
}

func newGroup() *group {
	return &group{ttft: newHistogram(), tpot: newHistogram(), refusal: newHistogram()}
}

// Group is the part of a report that is about all requests, or about those of one source,
// class or tenant. Its first counts are of the requests that were due in the measured time:
// requests = ok + refused + unanswered + failed + dropped.
type Group struct {
	Requests int64 `json:"requests"`
	Dropped  int64 `json:"dropped"` // not sent, because too many were in flight
	OK       int64 `json:"ok"`
	Refused  int64 `json:"refused"` // status 429 or 503
	// RefusedAfterWait are the refused ones that had waited in the server's queue (X-Sluice-Queue-Time).
	RefusedAfterWait int64   `json:"refused_after_wait"`
	Unanswered       int64   `json:"unanswered"` // no complete answer within the timeout, or by the end of the run
	Failed           int64   `json:"failed"`     // in any other way
	Good             int64   `json:"good"`       // complete answers within the targets of their source
	Goodput          float64 `json:"goodput_per_second"`

	// TTFT includes each unanswered request that has no first token, with the time that it had
	// waited, so that an answer that never comes does not make the others look fast. TPOT is of
	// complete answers, Refusal from the time of sending to the end of a refusal that did not wait.
	TTFT    Quantiles `json:"ttft"`
	TPOT    Quantiles `json:"tpot"`
	Refusal Quantiles `json:"refusal"`

	PromptTokens int64 `json:"prompt_tokens"`
	CachedTokens int64 `json:"cached_tokens"` // as engines reported
	OutputTokens int64 `json:"output_tokens"`

	// What was served in the measured time, whenever it was due.
	Served         int64   `json:"served"`
	ServedOutput   int64   `json:"served_output_tokens"`
	ServedComputed int64   `json:"served_computed_tokens"` // output, and prompt that was not cached
	ServedPerSec   float64 `json:"served_per_second"`
	OutputPerSec   float64 `json:"served_output_tokens_per_second"`
}

func (g *group) due(s *Source, r *Result) {
	g.sent++
	if r.TTFT > 0 && r.Status == 200 { // the body of an error has no token
		record(g.ttft, r.TTFT)
	}
	switch {
	case r.Err == nil:
		g.ok++
		g.prompt += int64(max(0, r.Prompt))
		g.cached += int64(max(0, r.Cached))
		g.output += int64(r.Output)
		if r.TPOT > 0 {
			record(g.tpot, r.TPOT)
		}
		if s.good(r) {
			g.good++
		}
	case r.refused():
		if g.refused++; r.Queued {
			g.refusedAfterWait++
		} else {
			record(g.refusal, r.Total-r.SendDelay)
		}
	case r.unanswered():
		g.unanswered++
		if r.TTFT == 0 {
			record(g.ttft, r.Total)
		}
	default:
		g.failed++
	}
}

func (g *group) ended(r *Result) {
	if r.Err != nil {
		return
	}
	g.served++
	g.servedOutput += int64(r.Output)
	g.servedComputed += computed(r)
}

// computed returns the tokens that engines computed for an answer.
func computed(r *Result) int64 {
	return int64(max(0, r.Prompt) - max(0, r.Cached) + r.Output)
}

func (g *group) report(seconds float64) Group {
	return Group{
		Requests: g.sent + g.dropped, Dropped: g.dropped, OK: g.ok, Refused: g.refused, RefusedAfterWait: g.refusedAfterWait, Unanswered: g.unanswered, Failed: g.failed,
		Good: g.good, Goodput: float64(g.good) / seconds,
		TTFT: quantiles(g.ttft), TPOT: quantiles(g.tpot), Refusal: quantiles(g.refusal),
		PromptTokens: g.prompt, CachedTokens: g.cached, OutputTokens: g.output,
		Served: g.served, ServedOutput: g.servedOutput, ServedComputed: g.servedComputed,
		ServedPerSec: float64(g.served) / seconds, OutputPerSec: float64(g.servedOutput) / seconds,
	}
}

// grouping is the groups of a run: of all requests, and by source, class and tenant.
type grouping struct {
	all                         *group
	bySource, byClass, byTenant map[string]*group
	of                          [][]*group // of each source, the groups that count its requests
}

func newGrouping(sources []Source, named bool) grouping {
	g := grouping{all: newGroup(), bySource: map[string]*group{}, byClass: map[string]*group{}, byTenant: map[string]*group{}}
	get := func(m map[string]*group, name string) *group {
		if m[name] == nil {
			m[name] = newGroup()
		}
		return m[name]
	}
	for _, s := range sources {
		list := []*group{g.all}
		if named {
			list = append(list, get(g.bySource, s.Name))
		}
		if s.Class != "" {
			list = append(list, get(g.byClass, s.Class))
		}
		if tenant := cmp.Or(s.Tenant, s.Key); tenant != "" {
			list = append(list, get(g.byTenant, tenant))
		}
		g.of = append(g.of, list)
	}
	return g
}

func reportGroups(m map[string]*group, seconds float64) map[string]Group {
	out := make(map[string]Group, len(m))
	for name, g := range m {
		out[name] = g.report(seconds)
	}
	return out
}

// fairness returns Jain's index over the tokens computed for each tenant in the measured time:
// (Σx)² / (n Σx²), which is 1 if all have the same and 1/n if one has all. It is 0 without
// tenants or tokens.
func fairness(tenants map[string]*group) float64 {
	var sum, squares float64
	for _, g := range tenants {
		x := float64(g.servedComputed)
		sum += x
		squares += x * x
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(tenants)) * squares)
}
