package relay

import (
	"testing"
	"time"
	"unsafe"

	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
)

// discardConn is a client that takes everything at no cost.
type discardConn struct{ noHooks }

func (discardConn) Write(p []byte) (int, error)      { return len(p), nil }
func (discardConn) SetWriteDeadline(time.Time) error { return nil }

const chunkEvent = `data: {"id":"chatcmpl-a568d0fa46c23b2d","object":"chat.completion.chunk","created":1795233404,"model":"tiny","choices":[{"index":0,"delta":{"content":" issues"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n"

func newDiscardStream() *stream {
	s := &stream{dst: discardConn{}, resp: new(upstream.Response), extras: &noExtras, streamSettings: &streamSettings{writeTimeout: time.Minute}, chunked: true, scanning: true}
	s.scan.usage = noUsage
	return s
}

func TestChunkAllocatesNothing(t *testing.T) {
	chunk := []byte(chunksOf(chunkEvent))
	two := []byte(chunksOf(chunkEvent, chunkEvent))
	s := newDiscardStream()
	s.intervals = &Intervals{Fine: func(time.Duration, uint64) {}}
	for name, f := range map[string]func(){
		"whole chunk": func() { s.forward(chunk, time.Now()) },
		"two chunks":  func() { s.forward(two, time.Now()) },
		"two halves":  func() { s.forward(chunk[:50], time.Now()); s.forward(chunk[50:], time.Now()) },
	} {
		if n := testing.AllocsPerRun(1000, f); n != 0 && !raceEnabled {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	if s.scan.events < 4000 || s.scan.tooBig != 0 || !s.scan.token || s.err != nil {
		t.Errorf("%+v %v", s.scan, s.err)
	}
}

// BenchmarkStreamChunk is all of relay's own work for one chunk of one event:
// framing, scan, time, bookkeeping; without the two system calls.
func BenchmarkStreamChunk(b *testing.B) {
	chunk := []byte(chunksOf(chunkEvent))
	for name, intervals := range map[string]*Intervals{"": nil, "intervals": {}} {
		b.Run(name, func(b *testing.B) {
			s := newDiscardStream()
			s.intervals = intervals
			b.ReportAllocs()
			b.SetBytes(int64(len(chunk)))
			for b.Loop() {
				if s.forward(chunk, time.Now()) {
					b.Fatal("ended")
				}
			}
		})
	}
}

// TestIntervals: the time between tokens counts from the first token on, once for each event, and
// events of one read share it.
func TestIntervals(t *testing.T) {
	s := newDiscardStream()
	s.intervals = new(Intervals)
	at := time.Now()
	read := func(after time.Duration, events ...string) {
		at = at.Add(after)
		s.forward([]byte(chunksOf(events...)), at)
	}
	read(0, `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`+"\n\n")
	read(3*time.Second, chunkEvent)                   // the first token: no interval
	read(2*time.Millisecond, chunkEvent)              // bucket 1
	read(60*time.Millisecond, chunkEvent, chunkEvent) // 30 ms each: bucket 7
	read(time.Millisecond, ": keep-alive\n\n")        // no event
	read(5*time.Second, chunkEvent)                   // 5.001 s: beyond the bounds
	want := map[int]uint64{1: 1, 7: 2, len(IntervalBounds): 1}
	for i := range s.intervals.Buckets {
		if got := s.intervals.Buckets[i].Load(); got != want[i] {
			t.Errorf("bucket %d has %d intervals, want %d", i, got, want[i])
		}
	}
	if got, want := time.Duration(s.intervals.Sum.Load()), 5063*time.Millisecond; got != want {
		t.Errorf("sum %v, want %v", got, want)
	}
}

// BenchmarkScanEvent is the scan of one event, as the first and as a later one.
func BenchmarkScanEvent(b *testing.B) {
	for _, c := range []struct {
		name     string
		protocol sse.Protocol
		event    string
	}{
		{"openai", sse.OpenAI, chunkEvent},
		{"openai-usage", sse.OpenAI, `data: {"id":"chatcmpl-a568d0fa46c23b2d","object":"chat.completion.chunk","created":1795233404,"model":"tiny","choices":[],"usage":{"prompt_tokens":13,"total_tokens":18,"completion_tokens":5},"system_fingerprint":"vllm-0.32.0-f639f6f8"}` + "\n\n"},
		{"anthropic", sse.Anthropic, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello\"}}\n\n"},
		{"comment", sse.OpenAI, ": keep-alive\n\n"},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := newScanner(c.protocol)
			ev := []byte(c.event)
			b.ReportAllocs()
			b.SetBytes(int64(len(ev)))
			for b.Loop() {
				s.feed(ev)
			}
		})
	}
	b.Run("openai-split", func(b *testing.B) {
		s := newScanner(sse.OpenAI)
		ev := []byte(chunkEvent)
		b.ReportAllocs()
		for b.Loop() {
			s.feed(ev[:100])
			s.feed(ev[100:])
		}
	})
}

// TestStreamSize: there are thousands of streams, and a few bytes more would take each
// into the next size class.
func TestStreamSize(t *testing.T) {
	if size := unsafe.Sizeof(stream{}); size > 320 {
		t.Errorf("a stream has %d bytes; a size class ends at 320", size)
	}
	if size := unsafe.Sizeof(streamExtras{}); size > 64 {
		t.Errorf("what a stream that may move has besides has %d bytes; a size class ends at 64", size)
	}
	if size := unsafe.Sizeof(editor{}); size > 48 {
		t.Errorf("what rewrites events has %d bytes; a size class ends at 48", size)
	}
	if size := unsafe.Sizeof(loopState{}); size > 144 {
		t.Errorf("what a loop needs of it has %d bytes; a size class ends at 144", size)
	}
}

// Streams of one server have their terms once, together.
func TestStreamsShareSettings(t *testing.T) {
	of := func(idle time.Duration) *streamSettings {
		return streamSettings{writeTimeout: time.Second, idleTimeout: idle}.share()
	}
	if one := of(1); one != of(1) || one == of(2) || one.idleTimeout != 1 {
		t.Error("streams with the same terms have each their own, or others' with other ones")
	}
}

// TestEditorHoldsNoBufferBetweenEvents: what goes out is laid in memory that is lent until it
// was passed on, of thousands of streams.
func TestEditorHoldsNoBufferBetweenEvents(t *testing.T) {
	s := newDiscardStream()
	s.editor = &editor{rewriter: &transcript.Transcript{Format: transcript.ChatFormat, Prompt: transcript.PackIDs([]uint32{1})}}
	event := []byte(chunksOf(chunkEvent))
	for _, part := range [][]byte{event, event[:50], event[50:]} {
		if s.forward(part, time.Now()); s.editor.out != nil {
			t.Fatal("a stream keeps the room of an event that was passed on")
		}
	}
	if n := testing.AllocsPerRun(1000, func() { s.forward(event, time.Now()) }); n != 0 && !raceEnabled {
		t.Errorf("%v allocations an event", n)
	}
}
