package eventloop

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

// collectingSink is a Sink that keeps what it is given. After every each bytes it is full; '!'
// makes it panic, '#' fail.
type collectingSink struct {
	got         []byte
	each, since int
	sends       int
	flusher     Flusher
}

type countingFlusher struct{ n atomic.Int64 }

func (f *countingFlusher) Flush() { f.n.Add(1) }

var errSink = errors.New("a Sink's")

func (g *collectingSink) Send(p []byte) (due Flusher, full bool, err error) {
	g.sends++
	g.got = append(g.got, p...)
	switch {
	case bytes.IndexByte(p, '!') >= 0:
		panic("a Sink's")
	case bytes.IndexByte(p, '#') >= 0:
		return nil, false, errSink
	}
	if g.since += len(p); g.each > 0 && g.since >= g.each {
		g.since, full = 0, true
	}
	return g.flusher, full, nil
}

// TestSink: what comes is put into the Sink, whole and in order, over any number of
// Tasks that left because it was full.
func TestSink(t *testing.T) {
	s := begin(t, 1)
	near, far := pair(t)
	want := bytes.Repeat([]byte("0123456789abcdef\n"), 60_000)
	go func() {
		for rest := want; len(rest) > 0; { // in writes of all sizes
			n := min(len(rest), 1+len(rest)%70_000)
			if _, err := far.Write(rest[:n]); err != nil {
				return
			}
			rest = rest[n:]
		}
		_, _ = far.Write([]byte{'$'})
	}()
	flushed := new(countingFlusher)
	sink := &collectingSink{each: 50_000, flusher: flushed}
	sent, tasks := int64(0), 0
	for {
		e := &echo{ends: make(chan End, 1)}
		s.Attach(&Task{In: near, Out: -1, Sink: sink, Handler: e})
		tasks++
		select {
		case end := <-e.ends:
			sent += end.Sent
			if end.Reason == SinkFull && !bytes.HasSuffix(sink.got, []byte{'$'}) {
				continue
			}
			if end.Reason != Done && end.Reason != SinkFull || end.Unsent != nil {
				t.Fatalf("left by %v (%v)", end.Reason, end.Err)
			}
		case <-time.After(testTimeout):
			t.Fatal("the Task does not leave")
		}
		break
	}
	if want = append(want, '$'); !bytes.Equal(sink.got, want) || sent != int64(len(want)) {
		t.Errorf("got %d bytes, %d reported, %d sent", len(sink.got), sent, len(want))
	}
	if tasks < 5 {
		t.Errorf("%d Tasks for a Sink that was full every 50 kB", tasks)
	}
	s.Close() // the last flush was on its thread
	if n := flushed.n.Load(); n != int64(sink.sends) {
		t.Errorf("%d flushes of %d that were due", n, sink.sends)
	}
}

// TestSinkFails: a Sink's error ends its stream, a panic too, and no other.
func TestSinkFails(t *testing.T) {
	s := begin(t, 1)
	near, far := pair(t)
	well := &echo{ends: make(chan End, 1)}
	s.Attach(&Task{In: near, Out: -1, Sink: &collectingSink{}, Handler: well})
	for _, c := range []struct {
		send string
		why  Reason
	}{{"#", SendFailed}, {"!", Panicked}} {
		in, out := pair(t)
		e := &echo{ends: make(chan End, 1)}
		// The Handler passes "!" on, so that it is the Sink's to panic.
		s.Attach(&Task{In: in, Out: -1, Sink: &collectingSink{}, Handler: passThrough{e}})
		if _, err := out.Write([]byte(c.send)); err != nil {
			t.Fatal(err)
		}
		select {
		case end := <-e.ends:
			if end.Reason != c.why || c.why == SendFailed && end.Err != errSink {
				t.Errorf("%s: left by %v (%v)", c.send, end.Reason, end.Err)
			}
		case <-time.After(testTimeout):
			t.Fatal("the Task does not leave")
		}
	}
	if _, err := far.Write([]byte("x$")); err != nil {
		t.Fatal(err)
	}
	select {
	case end := <-well.ends:
		if end.Reason != Done || end.Sent != 2 {
			t.Errorf("the other stream left by %v, %d bytes", end.Reason, end.Sent)
		}
	case <-time.After(testTimeout):
		t.Fatal("the other stream is stuck")
	}
}

// passThrough is a Handler to which every byte is one to pass on.
type passThrough struct{ *echo }

func (passThrough) Process(p []byte, _ time.Time) (out []byte, done bool) { return p, false }
