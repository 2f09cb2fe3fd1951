package upstream

import (
	"crypto/tls"
	"crypto/x509"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

const (
	eventsHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	firstEvent = "9\r\ndata: {}\n\r\n"
)

// gracefulEngine is an engine that sends the head of a stream, and an event on command
// to. It tells when it has met the end of the connection.
type gracefulEngine struct {
	*engine
	headAt chan time.Time
	event  chan struct{} // one for each event
	gone   chan time.Time
}

func startGracefulEngine(t *testing.T, secure *tls.Config) *gracefulEngine {
	d := &gracefulEngine{headAt: make(chan time.Time, 1), event: make(chan struct{}), gone: make(chan time.Time, 1)}
	d.engine = newEngine(t, func(p *peer) {
		if secure != nil {
			p.Conn = tls.Server(p.Conn, secure)
			p.br.Reset(p.Conn)
		}
		if _, _, ok := p.request(); !ok {
			return
		}
		d.headAt <- time.Now()
		p.send(eventsHead)
		ended := make(chan struct{})
		go func() {
			p.gone()
			d.gone <- time.Now()
			close(ended)
		}()
		for {
			select {
			case <-d.event:
				p.send(firstEvent)
			case <-ended:
				return
			}
		}
	})
	return d
}

// callEnders are the ways in which a call is given up whose head has come.
var callEnders = map[string]func(t *testing.T, resp *Response, call *Call){
	"release": func(_ *testing.T, resp *Response, _ *Call) { resp.Release() },
	"cut":     func(_ *testing.T, resp *Response, call *Call) { call.Cancel(); resp.Release() },
	"hang up": func(_ *testing.T, resp *Response, call *Call) { call.HalfClose(); resp.Release() },
	"cut while it is read": func(t *testing.T, resp *Response, call *Call) {
		startRead(t, call.Cancel, func() error { _, err := resp.ReadRaw(make([]byte, 100)); return err })
		resp.Release()
	},
	"hung up while it is read": func(t *testing.T, resp *Response, call *Call) {
		startRead(t, call.HalfClose, func() error { _, err := resp.Peek(); return err })
		resp.Release()
	},
	"deadline": func(t *testing.T, resp *Response, _ *Call) {
		resp.SetDeadline(time.Now().Add(10 * time.Millisecond))
		if _, err := resp.ReadAll(nil, 100); err == nil || !strings.Contains(err.Error(), ErrTimeout.Error()) {
			t.Errorf("a read until the deadline: %v", err)
		}
		resp.Release()
	},
	"cut while it is lent": func(t *testing.T, resp *Response, call *Call) {
		stopped := make(chan struct{})
		if _, _, ok := resp.Detach(new(Detachment), dialInProgress(func() { close(stopped) })); !ok {
			t.Fatal("it is not to be lent")
		}
		call.Cancel()
		<-stopped
		resp.Release()
	},
	"released while it is lent": func(t *testing.T, resp *Response, _ *Call) {
		if _, _, ok := resp.Detach(new(Detachment), dialInProgress(func() {})); !ok {
			t.Fatal("it is not to be lent")
		}
		resp.Release()
	},
}

// startRead ends a read that has begun, or is about to.
func startRead(t *testing.T, end func(), read func() error) {
	t.Helper()
	failed := make(chan error, 1)
	go func() { failed <- read() }()
	time.Sleep(5 * time.Millisecond)
	end()
	select {
	case err := <-failed:
		if err == nil || !strings.Contains(err.Error(), ErrCancelled.Error()) {
			t.Errorf("the read of a cut call: %v", err)
		}
	case <-time.After(long):
		t.Fatal("the read of a cut call goes on")
	}
}

func callGracefulEngine(t *testing.T, e *Endpoint, grace time.Duration) (*Response, *Call) {
	t.Helper()
	req, call := post("x"), new(Call)
	req.Grace = grace
	resp, err := e.Do(req, call)
	if err != nil {
		t.Fatal(err)
	}
	return resp, call
}

// TestGraceUntilAnEvent: an engine that has sent the head of a stream and nothing else
// does not learn of the call's end before it has sent something.
func TestGraceUntilAnEvent(t *testing.T) {
	for name, giveUp := range callEnders {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			d := startGracefulEngine(t, nil)
			e := d.endpoint(t, Options{})
			resp, call := callGracefulEngine(t, e, time.Hour)
			giveUp(t, resp, call)
			select {
			case <-d.gone:
				t.Fatal("the engine has met the end before its first event")
			case <-time.After(30 * time.Millisecond):
			}
			if n := e.Stats().Open; n != 1 {
				t.Errorf("%d connections are counted, want the one that waits", n)
			}
			d.event <- struct{}{}
			select {
			case <-d.gone:
			case <-time.After(long):
				t.Fatal("the engine has not met the end behind its first event")
			}
			testwait.Until(t, "nothing is open", func() bool { return e.Stats().Open == 0 })
		})
	}
}

// TestGraceEnds: an engine that sends nothing meets the end when the grace is over, and
// not before.
func TestGraceEnds(t *testing.T) {
	const grace = 100 * time.Millisecond
	for name, giveUp := range callEnders {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			d := startGracefulEngine(t, nil)
			e := d.endpoint(t, Options{})
			resp, call := callGracefulEngine(t, e, grace)
			giveUp(t, resp, call)
			select {
			case at := <-d.gone:
				if took := at.Sub(<-d.headAt); took < grace {
					t.Errorf("the engine met the end %v behind its head; want %v at least", took, grace)
				}
			case <-time.After(long):
				t.Fatal("the engine has not met the end")
			}
			testwait.Until(t, "nothing is open", func() bool { return e.Stats().Open == 0 })
		})
	}
}

// TestNoGraceAfterEvent: once a byte of the body has come the engine hears of the end
// at once, and without Request.Grace always.
func TestNoGraceAfterEvent(t *testing.T) {
	for name, c := range map[string]struct {
		grace time.Duration
		end   func(t *testing.T, d *gracefulEngine, resp *Response, call *Call)
	}{
		"behind a read": {time.Hour, func(t *testing.T, d *gracefulEngine, resp *Response, call *Call) {
			d.event <- struct{}{}
			if n, err := resp.ReadRaw(make([]byte, 100)); n == 0 || err != nil {
				t.Error(n, err)
			}
			call.Cancel()
		}},
		"behind a look": {time.Hour, func(t *testing.T, d *gracefulEngine, resp *Response, call *Call) {
			d.event <- struct{}{}
			if b, err := resp.Peek(); len(b) == 0 || err != nil {
				t.Error(b, err)
			}
			call.Cancel()
		}},
		"ended by its borrower": {time.Hour, func(t *testing.T, _ *gracefulEngine, resp *Response, call *Call) {
			if _, _, ok := resp.Detach(new(Detachment), dialInProgress(func() {})); !ok {
				t.Fatal("it is not to be lent")
			}
			resp.NoteBodyStarted()
			call.Cancel()
		}},
		"none was asked for": {0, func(_ *testing.T, _ *gracefulEngine, _ *Response, call *Call) { call.Cancel() }},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			d := startGracefulEngine(t, nil)
			e := d.endpoint(t, Options{})
			resp, call := callGracefulEngine(t, e, c.grace)
			c.end(t, d, resp, call)
			resp.Release()
			select {
			case <-d.gone:
			case <-time.After(long):
				t.Fatal("the engine has not met the end")
			}
			if n := e.Stats().Open; n != 0 {
				t.Errorf("%d connections are open", n)
			}
		})
	}
}

// TestGraceUnderTLS: what keeps the connection open is below the encryption.
func TestGraceUnderTLS(t *testing.T) {
	noLeaks(t)
	some := httptest.NewTLSServer(nil) // for its certificate
	some.Close()
	pool := x509.NewCertPool()
	pool.AddCert(some.Certificate())
	d := startGracefulEngine(t, &tls.Config{Certificates: some.TLS.Certificates})
	e, err := NewEndpoint("https://"+d.ln.Addr().String(), Options{TLS: alwaysScript(&tls.Config{RootCAs: pool}), ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	resp, call := callGracefulEngine(t, e, time.Hour)
	callEnders["cut while it is read"](t, resp, call)
	select {
	case <-d.gone:
		t.Fatal("the engine has met the end before its first event")
	case <-time.After(30 * time.Millisecond):
	}
	d.event <- struct{}{}
	select {
	case <-d.gone:
	case <-time.After(long):
		t.Fatal("the engine has not met the end behind its first event")
	}
}

// TestConcurrentGrace: cuts and releases that meet, with and without an event, leave nothing
// open, and no engine without its head's time.
func TestConcurrentGrace(t *testing.T) {
	noLeaks(t)
	const grace = 20 * time.Millisecond
	early := make(chan time.Duration, 1000)
	e := newEngine(t, func(p *peer) {
		if _, _, ok := p.request(); !ok {
			return
		}
		at := time.Now()
		p.send(eventsHead)
		p.gone()
		if took := time.Since(at); took < grace {
			early <- took
		}
	}).endpoint(t, Options{})
	ended := make(chan struct{})
	for range 8 {
		go func() {
			defer func() { ended <- struct{}{} }()
			for range 40 {
				req, call := post("x"), new(Call)
				req.Grace = grace
				resp, err := e.Do(req, call)
				if err != nil {
					t.Error(err)
					return
				}
				met := make(chan struct{})
				go func() {
					call.Cancel()
					close(met)
				}()
				resp.Release()
				<-met
			}
		}()
	}
	for range 8 {
		<-ended
	}
	testwait.Until(t, "nothing is open", func() bool { return e.Stats().Open == 0 })
	select {
	case took := <-early:
		t.Errorf("an engine met the end %v behind its head, want %v at least", took, grace)
	default:
	}
}
