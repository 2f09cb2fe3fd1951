package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestWaitForCredit: what ends a stream whose caller gives no credit, and when.
func TestWaitForCredit(t *testing.T) {
	const stall = 30 * time.Second
	credit := binary.BigEndian.AppendUint32(nil, 64)
	for _, c := range []struct {
		name     string
		deadline time.Duration // 0: none
		caller   func(feed func(Kind, []byte))
		want     error
		code     string
		after    time.Duration
	}{
		{"nothing is taken", 0, func(func(Kind, []byte)) {}, ErrStalled, CodeStalled, stall},
		{"the deadline", 7 * time.Second, func(func(Kind, []byte)) {}, ErrDeadline, CodeDeadline, 7 * time.Second},
		{"a deadline behind the stall", time.Minute, func(func(Kind, []byte)) {}, ErrStalled, CodeStalled, stall},
		{"a deadline over, with credit", time.Nanosecond, func(func(Kind, []byte)) {}, ErrDeadline, CodeDeadline, 0},
		{"a slow caller at its deadline", time.Minute, func(feed func(Kind, []byte)) {
			for range 10 {
				time.Sleep(20 * time.Second) // in a bubble
				feed(Credit, credit)
			}
		}, ErrDeadline, CodeDeadline, time.Minute},
		{"a slow caller who stops", 0, func(feed func(Kind, []byte)) {
			for i := range 10 {
				time.Sleep(20 * time.Second) // in a bubble
				feed(Credit, credit)
				if i == 1 {
					time.Sleep(5 * time.Second) // in a bubble
					feed(Stop, nil)
				}
			}
		}, ErrStalled, CodeStalled, 45*time.Second + stall},
		{"a stop makes no wait longer", time.Minute, func(feed func(Kind, []byte)) {
			time.Sleep(25 * time.Second) // in a bubble
			feed(Stop, nil)
		}, ErrStalled, CodeStalled, stall},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := make(chan error, 1)
				began, sent := time.Now(), 0
				h := handlerFunc(func(s *Stream) {
					if c.deadline > 0 {
						s.SetDeadline(began.Add(c.deadline))
						time.Sleep(time.Nanosecond)
					}
					for {
						if err := s.Send(make([]byte, 64)); err != nil {
							ended <- err
							return
						}
						sent++
					}
				})
				srv, err := New(Options{Handler: h, StallTimeout: stall})
				if err != nil {
					t.Fatal(err)
				}
				link := new(discardLink)
				conn := newConn(srv, link, &net.UnixAddr{Net: "unix"})
				feed := func(k Kind, stream uint32, payload []byte) {
					if _, bad := conn.feed(appendFrame(nil, k, stream, payload)); bad != nil {
						t.Error(bad)
					}
				}
				hello := greeting{protocol: protocolName, version: 1, oldest: 1, window: 128}
				feed(Hello, 0, hello.append(nil))
				feed(Request, 1, []byte("x"))
				done := make(chan struct{})
				go func() {
					defer close(done)
					c.caller(func(k Kind, p []byte) { feed(k, 1, p) })
				}()
				if err := <-ended; !errors.Is(err, c.want) {
					t.Errorf("ended by %v, want %v", err, c.want)
				}
				if took := time.Since(began).Truncate(time.Millisecond); took != c.after {
					t.Errorf("ended after %v, want %v", took, c.after)
				}
				if sent < 2 {
					t.Errorf("%d items were sent within a window of two", sent)
				}
				synctest.Wait()
				link.mu.Lock()
				if !bytes.Contains(link.out, []byte(c.code)) {
					t.Errorf("no END of code %s in %q", c.code, link.out)
				}
				link.mu.Unlock()
				<-done
				conn.endStreams(nil)
			})
		})
	}
}
