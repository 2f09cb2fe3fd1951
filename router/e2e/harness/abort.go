package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// AbortSlack is how long after a client's disconnect a test waits for the engine's request to
// be cancelled. The requirement is 100 ms; a loaded machine may take longer, so these tests only
// log the time. The tests of dataplane/front enforce 100 ms, with a few tries.
const AbortSlack = 2 * time.Second

// AbortingClient is a client connection with one request, which the test will abort.
type AbortingClient struct {
	Nc net.Conn
	Br *bufio.Reader
}

// StartRequest sends a request on a new connection and does not wait for the response.
func StartRequest(t *testing.T, r *Router, id, body string) *AbortingClient {
	t.Helper()
	l := DialClient(t, r)
	l.Send(id, body)
	return l
}

// DialClient connects a client to the router and sends nothing. The connection is closed when the
// test ends.
func DialClient(t *testing.T, r *Router) *AbortingClient {
	t.Helper()
	nc, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	return &AbortingClient{Nc: nc, Br: bufio.NewReader(nc)}
}

// Send is SendTo for chat completions.
func (l *AbortingClient) Send(id, body string) { l.SendTo("/v1/chat/completions", id, body) }

// SendTo writes one POST request with a JSON body and the request id. It does not read the response
// and ignores write errors: the read that follows fails instead.
func (l *AbortingClient) SendTo(path, id, body string) {
	fmt.Fprintf(l.Nc, "POST "+path+" HTTP/1.1\r\nHost: x\r\nX-Request-Id: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", id, len(body), body)
}

// WantClosed reads until the router closes the connection.
func (l *AbortingClient) WantClosed(t *testing.T) {
	t.Helper()
	l.Nc.SetReadDeadline(time.Now().Add(30 * time.Second))
	answer, err := io.ReadAll(l.Br)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		l.Nc.Close()
		t.Errorf("the client did not leave within 30 s; it was answered %.300q", answer)
	}
}

// Event waits for the response head and the first event of the stream.
func (l *AbortingClient) Event(t *testing.T) {
	t.Helper()
	l.Nc.SetReadDeadline(time.Now().Add(10 * time.Second))
	for {
		line, err := l.Br.ReadString('\n')
		if err != nil {
			t.Fatalf("no event came: %v", err)
		}
		if strings.HasPrefix(line, "data: ") {
			return
		}
	}
}

// Disconnect closes the connection, at random with FIN or RST, and returns the time.
func (l *AbortingClient) Disconnect() time.Time {
	if rand.IntN(2) == 0 {
		l.Nc.(*net.TCPConn).SetLinger(0)
	}
	l.Nc.Close()
	return time.Now()
}

// HangingHandler returns an engine handler that does not answer until its request is cancelled.
// The first channel receives the time at which a request arrived, the second the time at which
// it was cancelled.
func HangingHandler() (http.HandlerFunc, chan time.Time, chan time.Time) {
	arrived, cancelled := make(chan time.Time, 100), make(chan time.Time, 100)
	return func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // net/http watches the connection only after the body was read
		arrived <- time.Now()
		<-r.Context().Done()
		cancelled <- time.Now()
	}, arrived, cancelled
}

// ReceiveTime returns the next time sent to c. It ends the test if none arrives within 10 s; what
// names the missing event in the message.
func ReceiveTime(t *testing.T, c chan time.Time, what string) time.Time {
	t.Helper()
	select {
	case at := <-c:
		return at
	case <-time.After(10 * time.Second):
		t.Fatalf("not within 10s: %s", what)
	}
	return time.Time{}
}

// WantPrompt logs how long after the client's disconnect something happened, and fails the test if
// that took longer than AbortSlack. what is the start of the message, such as "prefill cancelled".
func WantPrompt(t *testing.T, what string, elapsed time.Duration) {
	t.Helper()
	t.Logf("%s %v after the client left", what, elapsed.Round(100*time.Microsecond))
	if elapsed > AbortSlack {
		t.Errorf("%s only %v after the client left; want 100ms", what, elapsed)
	}
}

// WantClientGone waits for the end of a request's record and checks that its reason is
// client_gone.
func WantClientGone(t *testing.T, r *Router, id string) {
	t.Helper()
	if o := r.Outcome(t, id).Outcome; o.Reason != "client_gone" {
		t.Errorf("%s: outcome %+v, want client_gone", id, o)
	}
}

// ModuleGoroutines counts the goroutines that run code of router/ or dataplane/. Others are not
// counted, because idle workers of fasthttp and connections of simulated engines come and go.
func ModuleGoroutines() (n int) {
	buf := make([]byte, 16<<20)
	for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(g, "sluice/router/") || strings.Contains(g, "sluice/dataplane/") {
			n++
		}
	}
	return n
}
