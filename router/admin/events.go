package admin

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/schedule"
)

// Event is one event of the event stream.
type Event struct {
	Type string `json:"type"` // chosen, refused, hit, ended, state, skipped
	At   int64  `json:"t"`    // milliseconds since 1970

	// Fields of chosen, refused and hit; ended has ID too.
	ID      string  `json:"id,omitempty"` // request id
	Leg     string  `json:"leg,omitempty"`
	Attempt int     `json:"attempt,omitempty"`
	Rank    string  `json:"rank,omitempty"` // worker/rank
	Prompt  int     `json:"prompt_tokens,omitempty"`
	Cached  int     `json:"cached_tokens,omitempty"`
	Cost    float64 `json:"cost_ms,omitempty"`

	// Fields of chosen and hit, in full blocks of the rank: the prompt's blocks, and the blocks
	// predicted to be cached. Reported has the cached blocks that the engine reported, for hit.
	Blocks   *int `json:"isl_blocks,omitempty"`
	Overlap  *int `json:"overlap_blocks,omitempty"`
	Reported *int `json:"reported_blocks,omitempty"`
	DPRank   *int `json:"dp_rank,omitempty"` // for hit, with Worker

	// Fields of ended.
	Status int     `json:"status,omitempty"`
	TTFTMS float64 `json:"ttft_ms,omitempty"`
	Total  float64 `json:"total_ms,omitempty"`

	// Fields of state; hit has Worker too.
	Worker string `json:"worker,omitempty"`
	Role   string `json:"role,omitempty"`
	From   string `json:"from,omitempty"`
	To     string `json:"to,omitempty"`

	Reason  string `json:"reason,omitempty"`  // for ended and state
	Skipped int64  `json:"skipped,omitempty"` // for skipped: number of events that were dropped
}

const (
	hubQueue       = 1024
	subscriberSize = 512
	maxSubscribers = 16
	// maxPerSecond bounds the requests' events. The console cannot show more: a display of a
	// thousand choices a second looks the same as one of ten thousand.
	maxPerSecond  = 2000
	heartbeat     = 10 * time.Second
	flushInterval = 20 * time.Millisecond
)

// hub distributes events to subscribers. The request path only offers events and never blocks: if
// the queue is full, the event is dropped, and the stream reports how many were. The hub observes
// requests only while it has subscribers.
type hub struct {
	scheduler *schedule.Scheduler
	queue     chan Event
	dropped   atomic.Int64

	mu   sync.Mutex
	subs map[*subscriber]struct{}
	done bool
}

// subscriber has a bounded queue of encoded events. If the queue is full, the hub removes the
// subscriber and closes the queue.
type subscriber struct{ lines chan []byte }

func newHub(s *schedule.Scheduler) *hub {
	return &hub{scheduler: s, queue: make(chan Event, hubQueue), subs: map[*subscriber]struct{}{}}
}

func (h *hub) offer(e Event) {
	select {
	case h.queue <- e:
	default:
		h.dropped.Add(1)
	}
}

// decision is the scheduler's observer. It runs on the request path.
func (h *hub) decision(e *schedule.Event) {
	if len(h.queue) == cap(h.queue) {
		h.dropped.Add(1)
		return
	}
	out := Event{Type: e.Kind, At: e.At.UnixMilli(), ID: strings.Clone(e.RequestID)}
	if e.Kind == "ended" {
		out.Status, out.Reason = e.Outcome.Status, e.Outcome.Reason
		out.TTFTMS, out.Total = millis(e.Outcome.TTFT), millis(e.Outcome.Total)
	} else {
		out.Leg, out.Attempt, out.Prompt, out.Cached, out.Cost = e.Leg.String(), e.Attempt, e.Prompt, e.Cached, round(e.Cost)
		if e.Rank != nil {
			out.Rank = e.Rank.ID.String()
			blocks := [...]int{e.Blocks, e.Overlap, e.Reported, int(e.Rank.ID.Rank)}
			out.Blocks, out.Overlap = &blocks[0], &blocks[1]
			if e.Kind == "hit" {
				out.Reported, out.DPRank, out.Worker = &blocks[2], &blocks[3], e.Rank.ID.Worker
			}
		}
	}
	h.offer(out)
}

func (h *hub) run(ctx context.Context) {
	second, shown := int64(0), 0
	for {
		select {
		case <-ctx.Done():
			h.close()
			return
		case e := <-h.queue:
			if s := time.Now().Unix(); s != second {
				second, shown = s, 0
				if n := h.dropped.Swap(0); n > 0 {
					h.send(Event{Type: "skipped", At: e.At, Skipped: n})
				}
			}
			if shown++; shown > maxPerSecond && e.Type != "state" {
				h.dropped.Add(1)
				continue
			}
			h.send(e)
		}
	}
}

func (h *hub) send(e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.subs) == 0 {
		return
	}
	body, err := json.Marshal(e)
	if err != nil {
		return
	}
	line := append(append([]byte("data: "), body...), '\n', '\n')
	for s := range h.subs {
		select {
		case s.lines <- line:
		default:
			h.remove(s)
		}
	}
}

// remove removes a subscriber. The caller holds mu.
func (h *hub) remove(s *subscriber) {
	if _, ok := h.subs[s]; !ok {
		return
	}
	delete(h.subs, s)
	close(s.lines)
	if len(h.subs) == 0 {
		h.scheduler.SetObserver(nil)
	}
}

func (h *hub) subscribe() (*subscriber, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done || len(h.subs) >= maxSubscribers {
		return nil, false
	}
	s := &subscriber{lines: make(chan []byte, subscriberSize)}
	h.subs[s] = struct{}{}
	if len(h.subs) == 1 {
		h.scheduler.SetObserver(h.decision)
	}
	return s, true
}

func (h *hub) unsubscribe(s *subscriber) {
	h.mu.Lock()
	h.remove(s)
	h.mu.Unlock()
}

func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.done = true
	for s := range h.subs {
		h.remove(s)
	}
}

func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	sub, ok := s.hub.subscribe()
	if !ok {
		fail(w, http.StatusServiceUnavailable, "too_many_listeners", "the event stream has the maximum number of listeners; close one of them")
		return
	}
	defer s.hub.unsubscribe(sub)
	ctl := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	flush := func(b []byte) bool {
		if ctl.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil {
			return false
		}
		if _, err := w.Write(b); err != nil {
			return false
		}
		return ctl.Flush() == nil
	}
	if !flush([]byte(": sluice events\n\n")) {
		return
	}
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	var batch []byte
	for {
		select {
		case <-r.Context().Done():
			return
		case <-beat.C:
			if !flush([]byte(": still here\n\n")) {
				return
			}
		case line, ok := <-sub.lines:
			if !ok {
				// The subscriber was too slow, or the router is shutting down. The client may
				// connect again.
				flush([]byte("event: dropped\ndata: {}\n\n"))
				return
			}
			// One write sends all events of flushInterval, because a busy router has many.
			batch = append(batch[:0], line...)
			pause := time.NewTimer(flushInterval)
		gather:
			for len(batch) < 64<<10 {
				select {
				case line, ok := <-sub.lines:
					if !ok {
						break gather
					}
					batch = append(batch, line...)
				case <-pause.C:
					break gather
				}
			}
			pause.Stop()
			if !flush(batch) {
				return
			}
		}
	}
}
