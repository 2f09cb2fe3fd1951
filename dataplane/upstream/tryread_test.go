package upstream

import (
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestTryRead: what has come behind a head is taken without waiting, and is the body's
// beginning for who reads then; an engine that has begun has no grace any more.
func TestTryRead(t *testing.T) {
	noLeaks(t)
	d := startGracefulEngine(t, nil)
	e := d.endpoint(t, Options{})
	resp, _ := callGracefulEngine(t, e, long)
	begun := time.Now()
	if resp.TryRead(); resp.Buffered() != 0 || time.Since(begun) > long/2 {
		t.Fatalf("%d bytes in %v, of an engine that has sent a head only", resp.Buffered(), time.Since(begun))
	}
	d.event <- struct{}{}
	testwait.Until(t, "the event is seen", func() bool { resp.TryRead(); return resp.Buffered() > 0 })
	if resp.TryRead(); resp.Buffered() != len(firstEvent) {
		t.Errorf("%d bytes with a second look, want %d", resp.Buffered(), len(firstEvent))
	}
	if resp.c.graceUntil.Load() != 0 {
		t.Error("there is grace behind an event")
	}
	if _, _, ok := resp.Detach(new(Detachment), dialInProgress(func() {})); ok {
		t.Error("it is lent with bytes that nobody has read")
	}
	body := make([]byte, 100)
	if n, err := resp.ReadRaw(body); err != nil || string(body[:n]) != firstEvent {
		t.Errorf("%q, %v", body[:n], err)
	}
	if _, _, ok := resp.Detach(new(Detachment), dialInProgress(func() {})); !ok {
		t.Error("it is not to be lent")
	}
	resp.Release()
}

// TestTryReadAtEnd: the end of a connection is reported by the read, not by the peek.
func TestTryReadAtEnd(t *testing.T) {
	noLeaks(t)
	e := serve(t, eventsHead, Options{})
	resp, err := e.Do(post(""), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		resp.TryRead()
		testwait.Pace(time.Millisecond)
	}
	if n, err := resp.ReadRaw(make([]byte, 100)); n != 0 || err == nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	resp.Release()
}
