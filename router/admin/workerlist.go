package admin

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// sharedFor is how long a list of workers serves the clients that poll it. Several open consoles then
// cost about as much as one. It is shorter than the interval at which the console polls.
const sharedFor = 450 * time.Millisecond

// workerList makes the list of workers for status documents. With a thousand ranks the list is by far
// the largest part of a document. It is therefore encoded without reflection, and once for all clients
// that ask within sharedFor. It is safe for concurrent use.
type workerList struct {
	stale atomic.Bool // a worker has changed since the list was made

	mu   sync.Mutex
	last *workerDocument
	at   time.Time // when last was made
}

// workerDocument is one list of workers with the counts over it, which do not change any more.
type workerDocument struct {
	body     []byte // JSON, a list of Worker
	fleet    Fleet
	inFlight InFlight
}

// changed makes the next document a new one. It does not block.
func (l *workerList) changed() { l.stale.Store(true) }

// document returns a list that is at most sharedFor old and has every change that was reported to
// changed. build makes one; size is the number of bytes of the list before it.
func (l *workerList) document(now time.Time, build func(size int) *workerDocument) *workerDocument {
	l.mu.Lock()
	defer l.mu.Unlock()
	stale := l.stale.Swap(false)
	if l.last == nil || stale || now.Sub(l.at) >= sharedFor {
		size := 0
		if l.last != nil {
			size = len(l.last.body)
		}
		l.last, l.at = build(size), now
	}
	return l.last
}

// workerDocument makes a list of all workers.
func (s *Server) workerDocument(size int) *workerDocument {
	list := s.opt.Workers.View().Workers
	d := &workerDocument{body: append(make([]byte, 0, size+size/16+1024), '['), fleet: Fleet{Workers: len(list)}}
	for i, wk := range list {
		if i > 0 {
			d.body = append(d.body, ',')
		}
		state, reason := wk.State()
		if state == worker.Ready {
			d.fleet.Ready++
		}
		d.body = s.appendWorker(d.body, wk, state, reason, func(requests int64) { d.inFlight.add(wk.Spec.Role, requests) })
	}
	d.body = append(d.body, ']')
	return d
}

// appendWorker appends workerView's Worker as JSON. count is called with the requests of each rank.
func (s *Server) appendWorker(b []byte, wk *worker.Worker, state worker.State, reason string, count func(requests int64)) []byte {
	info := wk.Info()
	b = appendText(append(b, '{'), `"id":`, wk.Spec.ID)
	b = appendText(b, `,"url":`, maskURL(wk.Spec.URL))
	b = appendText(b, `,"role":`, wk.Spec.Role.String())
	b = appendText(b, `,"state":`, state.String())
	b = appendOptional(b, `,"reason":`, reason)
	b = appendTexts(b, `,"models":`, info.Models)
	b = appendOptional(b, `,"engine":`, info.Engine)
	b = appendOptional(b, `,"version":`, info.Version)
	if len(wk.Spec.Labels) > 0 {
		b = appendTexts(b, `,"labels":`, wk.Spec.Labels)
	}
	b = appendOptional(b, `,"source":`, wk.Spec.Source)
	b = append(b, `,"ranks":[`...)
	for i, r := range wk.Ranks {
		if i > 0 {
			b = append(b, ',')
		}
		requests := r.Requests.Load()
		count(requests)
		b = s.appendRank(b, r, info.TotalBlocks, requests)
	}
	return append(b, "]}"...)
}

func (s *Server) appendRank(b []byte, r *worker.Rank, totalBlocks int, requests int64) []byte {
	cached := r.CachedBlocks.Load()
	b = append(b, `{"id":"`...)
	b = appendEscaped(b, r.ID.Worker)
	b = strconv.AppendUint(append(b, '/'), uint64(r.ID.Rank), 10)
	b = appendInt(append(b, '"'), `,"rank":`, int64(r.ID.Rank))
	b = appendText(b, `,"feed":`, worker.FeedState(r.Feed.Load()).String())
	b = appendText(b, `,"breaker":`, worker.BreakerState(r.Breaker.Load()).String())
	b = appendInt(b, `,"block_size":`, int64(r.BlockSize()))
	b = appendInt(b, `,"total_blocks":`, int64(totalBlocks))
	b = appendInt(b, `,"cached_blocks":`, cached)
	b = appendInt(b, `,"held_blocks":`, cached)
	b = appendFloat(b, `,"kv_usage":`, r.KVUsage(), -1)
	b = appendInt(b, `,"requests":`, requests)
	b = appendInt(b, `,"prefill_tokens":`, r.PrefillTokens.Load())
	b = appendInt(b, `,"decode_blocks":`, r.DecodeBlocks.Load())
	b = appendInt(b, `,"engine_running":`, r.Running.Load())
	b = appendInt(b, `,"engine_waiting":`, r.Waiting.Load())
	rates := s.opt.Scheduler.RatesOf(r)
	b = appendFloat(b, `,"rates_ms":{"prefill":`, rates.Prefill, 0)
	b = appendFloat(b, `,"transfer":`, rates.Transfer, 0)
	b = appendFloat(b, `,"block":`, rates.Block, 0)
	b = append(b, `},"rates_learned_from":{`...)
	for w := range worker.NumWork {
		if w > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, '"'), w.String()...), '"')
		b = appendInt(b, `:`, learnedLegs(r, w))
	}
	return append(b, "}}"...)
}

// The functions below append name, which is JSON already, and a value.

func appendText(b []byte, name, value string) []byte {
	return jsonscan.AppendQuoted(append(b, name...), strings.ToValidUTF8(value, "\uFFFD"))
}

// appendOptional leaves out an empty value.
func appendOptional(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	return appendText(b, name, value)
}

func appendTexts(b []byte, name string, values []string) []byte {
	b = append(append(b, name...), '[')
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendText(b, "", v)
	}
	return append(b, ']')
}

// appendEscaped appends a string's content, without quotes.
func appendEscaped(b []byte, value string) []byte {
	from := len(b)
	b = appendText(b, "", value)
	return slices.Delete(b[:len(b)-1], from, from+1)
}

func appendInt(b []byte, name string, value int64) []byte {
	return strconv.AppendInt(append(b, name...), value, 10)
}

// appendFloat appends unknown instead of a value that JSON does not have.
func appendFloat(b []byte, name string, value, unknown float64) []byte {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		value = unknown
	}
	return strconv.AppendFloat(append(b, name...), value, 'g', -1, 64)
}
