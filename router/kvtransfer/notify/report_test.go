//go:build cgo

package notify

import (
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// TestReportsOfTheConnector: the connector's reports may arrive at the socket of LMCache's
// notifications.
func TestReportsOfTheConnector(t *testing.T) {
	lines := make(chan string, 8)
	b, err := Listen(Options{Endpoint: "tcp://127.0.0.1:*", Report: func(frame []byte) bool {
		lines <- string(frame)
		return frame[0] == 'S'
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	push, err := zmq.NewSocket(zmq.PUSH)
	if err != nil {
		t.Fatal(err)
	}
	defer push.Close()
	if err := push.Connect(b.Endpoint()); err != nil {
		t.Fatal(err)
	}
	wait, err := b.Expect("42", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer wait.Close()
	const report = "SLUICE1 recv ok - - 1 2 0/0/1 d0 chatcmpl-r"
	for _, frame := range []string{report, "nonsense", "\x82\xa4type\xaaProxyNotif\xa6req_id\xa242"} {
		push.Send(frame, 0)
	}
	for _, want := range []string{report, "nonsense"} {
		select {
		case got := <-lines:
			if got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("no report came")
		}
	}
	select {
	case <-wait.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("LMCache's notification was lost beside them")
	}
	if s := b.Stats(); s.Malformed != 1 || s.Received != 1 {
		t.Errorf("%+v", s)
	}
}
