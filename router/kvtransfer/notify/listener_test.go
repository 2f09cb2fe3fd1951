//go:build cgo

package notify

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
)

func listen(t *testing.T, opt Options) *Listener {
	t.Helper()
	opt.Endpoint = "tcp://127.0.0.1:*"
	b, err := Listen(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// pusher returns the socket of a prefill worker.
func pusher(t *testing.T, b *Listener) *zmq.Socket {
	t.Helper()
	s, err := zmq.NewSocket(zmq.PUSH)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.SetLinger(0), s.Connect(b.Endpoint())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func frame(tag, id string) []byte {
	out := append([]byte{0x82, 0xa4}, "type"...)
	out = append(append(out, 0xa0|byte(len(tag))), tag...)
	out = append(append(out, 0xa6), "req_id"...)
	return append(append(out, 0xd9, byte(len(id))), id...)
}

func push(t *testing.T, s *zmq.Socket, frames ...[]byte) {
	t.Helper()
	for _, f := range frames {
		if _, err := s.SendBytes(f, 0); err != nil {
			t.Fatal(err)
		}
	}
}

func within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	_ = cancel // it ends by itself
	return ctx
}

func expect(t *testing.T, b *Listener, id string, n int) *Expectation {
	t.Helper()
	k, err := b.Expect(id, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	return k
}

func TestAllRanksAreAwaited(t *testing.T) {
	b := listen(t, Options{})
	s := pusher(t, b)
	k := expect(t, b, "r1", 2)
	push(t, s, frame("ProxyNotif", "r1"), frame("ProxyNotif", "other"))
	testwait.Until(t, "one of two has come", func() bool { return k.Received() == 1 })
	err := k.Wait(within(20 * time.Millisecond))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), `1 of 2 notifications arrived for request "r1"`) {
		t.Fatalf("with one of two: %v", err)
	}
	push(t, s, frame("NixlProxyNotif", "r1")) // the older tag counts as well
	if err := k.Wait(within(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
}

func TestArrivalBeforeTheWaitIsKept(t *testing.T) {
	b := listen(t, Options{})
	push(t, pusher(t, b), frame("ProxyNotif", "soon"), frame("ProxyNotif", "soon"))
	testwait.Until(t, "both are in", func() bool { return b.Stats().Received == 2 })
	if st := b.Stats(); st.Early != 2 || st.Unmatched != 1 {
		t.Fatalf("%+v", st)
	}
	k := expect(t, b, "soon", 2)
	select {
	case <-k.Done():
	default:
		t.Fatal("what came before does not count")
	}
	if n := b.Stats().Unmatched; n != 0 {
		t.Errorf("%d unmatched after the wait began", n)
	}
}

func TestExtraNotificationsAreIgnored(t *testing.T) {
	b := listen(t, Options{})
	s := pusher(t, b)
	k := expect(t, b, "r", 1)
	push(t, s, frame("ProxyNotif", "r"), frame("ProxyNotif", "r"), frame("ProxyNotif", "r"))
	testwait.Until(t, "three are in", func() bool { return b.Stats().Received == 3 })
	if err := k.Wait(within(time.Second)); err != nil || k.Received() != 1 {
		t.Fatalf("%v, %d came", err, k.Received())
	}
	k.Close()
	k.Close()
	push(t, s, frame("ProxyNotif", "r")) // late: its Expectation is closed
	testwait.Until(t, "the late one is kept as unmatched", func() bool { return b.Stats().Unmatched == 1 })
	if _, err := b.Expect("r", 1); err != nil {
		t.Errorf("the id cannot be waited for again: %v", err)
	}
}

func TestExpectRefuses(t *testing.T) {
	b := listen(t, Options{})
	expect(t, b, "r", 1)
	if _, err := b.Expect("r", 1); !errors.Is(err, ErrDuplicate) {
		t.Errorf("a second wait for the id: %v", err)
	}
	if _, err := b.Expect("q", 0); err == nil {
		t.Error("0 notifications were agreed to")
	}
	b.Close()
	if _, err := b.Expect("q", 1); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestCloseEndsWaits(t *testing.T) {
	b := listen(t, Options{})
	k := expect(t, b, "r", 1)
	got := make(chan error)
	go func() { got <- k.Wait(context.Background()) }()
	b.Close()
	select {
	case err := <-got:
		if !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Wait goes on after Close")
	}
}

func TestUnmatchedExpires(t *testing.T) {
	b := listen(t, Options{TTL: 50 * time.Millisecond, Sweep: 20 * time.Millisecond})
	s := pusher(t, b)
	held := expect(t, b, "held", 2)
	push(t, s, frame("ProxyNotif", "held"))
	for i := range 100 {
		push(t, s, frame("ProxyNotif", fmt.Sprint(i)))
	}
	testwait.Until(t, "all unmatched ids are dropped", func() bool { st := b.Stats(); return st.Expired == 100 && st.Unmatched == 0 })
	push(t, s, frame("ProxyNotif", "held"))
	if err := held.Wait(within(10 * time.Second)); err != nil {
		t.Errorf("the sweep took what is waited for: %v", err)
	}
}

func TestUnmatchedIsBounded(t *testing.T) {
	b := listen(t, Options{Capacity: 10})
	k := expect(t, b, "mine", 1)
	s := pusher(t, b)
	for i := range 50 {
		push(t, s, frame("ProxyNotif", fmt.Sprint(i)))
	}
	push(t, s, frame("ProxyNotif", "mine"))
	if err := k.Wait(within(10 * time.Second)); err != nil {
		t.Fatalf("a full board loses what is waited for: %v", err)
	}
	if st := b.Stats(); st.Unmatched != 10 || st.Dropped != 40 {
		t.Errorf("%+v; want 10 kept, 40 dropped", st)
	}
}

func TestHostileFrames(t *testing.T) {
	b := listen(t, Options{})
	s := pusher(t, b)
	k := expect(t, b, "r", 1)
	bad := [][]byte{
		{}, {0xc0}, {0xc1}, []byte("GET / HTTP/1.1\r\n\r\n"), {0xdf, 0xff, 0xff, 0xff, 0xff},
		frame("ProxyNotif", ""), frame("", "r"), frame("ProxyNotif", "r")[:20],
		{0x81, 0xa4, 't', 'y', 'p', 'e', 0x01},
	}
	push(t, s, bad...)
	deep := append([]byte{0x81, 0xa1, 'x'}, []byte(strings.Repeat("\x91", 4000))...)
	push(t, s, deep)
	if _, err := s.SendMessage("two", frame("ProxyNotif", "r")); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "all are counted", func() bool { return b.Stats().Malformed == int64(len(bad)+2) })
	if k.Received() != 0 {
		t.Fatal("one of them counted as a notification")
	}
	big := pusher(t, b) // over the limit: the listener closes this peer's connection only
	push(t, big, make([]byte, maxFrame+1))
	push(t, s, frame("ProxyNotif", "r"))
	if err := k.Wait(within(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	t.Logf("reliability 15: %d foreign and damaged messages counted and dropped; the good one behind them and behind a frame of more than %d bytes came", len(bad)+2, maxFrame)
}

func TestListenNamesTheEndpoint(t *testing.T) {
	for _, endpoint := range []string{"", "tcp://nowhere.invalid:1", "8500"} {
		if _, err := Listen(Options{Endpoint: endpoint}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", endpoint)) {
			t.Errorf("Listen(%q): %v; want an error that quotes it", endpoint, err)
		}
	}
}

// TestIdleListenerSleeps: waiting uses no CPU, neither in ZMQ nor in Wait.
func TestIdleListenerSleeps(t *testing.T) {
	b := listen(t, Options{})
	k := expect(t, b, "r", 1)
	before := cpu(t)
	k.Wait(within(400 * time.Millisecond))
	if used := cpu(t) - before; used > 100*time.Millisecond {
		t.Errorf("%s of CPU in 400ms of waiting", used)
	}
}

func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
