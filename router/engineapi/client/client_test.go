package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/wire"
)

// testTimeout bounds the wait for events that must happen; tests that pass never wait that
// long.
const testTimeout = 30 * time.Second

// fakeEngine is a fake router with real frames on a real socket and hand-written items. A
// request's model selects its behaviour, and its first token id the number of items.
type fakeEngine struct{ killed, stopped chan struct{} }

func (a *fakeEngine) ServeStream(s *wire.Stream) {
	model, n := testRequest(s.Payload)
	gone, stop := make(chan struct{}), make(chan struct{})
	s.Watch(sync.OnceFunc(func() { close(stop) }), sync.OnceFunc(func() { close(gone) }))
	for i := range n {
		if s.Send(testItem(i, i == n-1 && model == "count")) != nil {
			a.killed <- struct{}{}
			return
		}
	}
	switch model {
	case "failure":
		_ = s.Send(testFailure())
	case "forever":
		select {
		case <-gone:
			a.killed <- struct{}{}
		case <-stop:
			a.stopped <- struct{}{}
			_ = s.Send(lastItem("cancelled"))
		}
	case "damaged":
		_ = s.Send([]byte{0x81, 0xa4, 'd', 'a', 't', 'a', 0xc1})
		<-gone
		a.killed <- struct{}{}
	}
}

// testRequest parses a request's model and first token id.
func testRequest(b []byte) (model string, n int) {
	members, b, _ := msgp.ReadMapHeaderBytes(b)
	for ; members > 0; members-- {
		var key string
		key, b, _ = msgp.ReadStringBytes(b)
		switch key {
		case "model":
			model, b, _ = msgp.ReadStringBytes(b)
		case "token_ids":
			_, b, _ = msgp.ReadArrayHeaderBytes(b)
			n, b, _ = msgp.ReadIntBytes(b)
		default:
			b, _ = msgp.Skip(b)
		}
	}
	return model, n
}

// testItem returns an item with the single token i, as the router writes it.
func testItem(i int, last bool) []byte {
	b := msgp.AppendMapHeader(nil, 1)
	b = msgp.AppendString(b, "data")
	b = msgp.AppendMapHeader(b, 3)
	b = msgp.AppendUint32(msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), 1), uint32(i))
	b = msgp.AppendString(b, "finish_reason")
	if last {
		b = msgp.AppendString(b, "length")
	} else {
		b = msgp.AppendNil(b)
	}
	return msgp.AppendInt(msgp.AppendString(b, "index"), 0)
}

// lastItem returns an item with every member that an item may have.
func lastItem(finish string) []byte {
	b, _ := msgp.AppendIntf(nil, map[string]any{
		"comment": []any{"worker_id: a", "plan: b"}, "unknown": []any{1, map[string]any{"x": nil}},
		"data": map[string]any{
			"token_ids": []any{uint32(4294967295)}, "finish_reason": finish, "index": 2, "stop_reason": "\n", "unknown": 1.5,
			"log_probs": []any{-0.5, -2, nil}, "top_logprobs": []any{[]any{map[string]any{"rank": 1, "token_id": 7, "logprob": -0.5}, map[string]any{"rank": 2, "token": "x", "logprob": -3}}},
			"extra_args":       map[string]any{"a": "b"},
			"completion_usage": map[string]any{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": map[string]any{"cached_tokens": 2}},
		},
	})
	return b
}

func testFailure() []byte {
	b, _ := msgp.AppendIntf(nil, map[string]any{"event": "error", "comment": []any{"no"},
		"error": map[string]any{"message": "no", "type": "upstream_error", "param": "model", "code": 502}})
	return b
}

// serve starts a fakeEngine on a Unix socket.
func serve(t *testing.T, path string) (*wire.Server, *fakeEngine) {
	t.Helper()
	a := &fakeEngine{killed: make(chan struct{}, 1024), stopped: make(chan struct{}, 1024)}
	srv, err := wire.New(wire.Options{Handler: a, StallTimeout: testTimeout, WriteTimeout: testTimeout})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	if _, err := srv.Listen("unix://" + path); err != nil {
		t.Fatal(err)
	}
	return srv, a
}

func socket(t *testing.T) string {
	dir, err := os.MkdirTemp("", "sl") // short: the path of a socket has a length limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "r.sock")
}

func dial(t *testing.T, path string, opt Options) *Client {
	t.Helper()
	c, err := Dial(within(t), "unix://"+path, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

func waitClosed(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(testTimeout):
		t.Fatalf("%s does not happen", what)
	}
}

func generate(t *testing.T, c *Client, model string, n int) *Stream {
	t.Helper()
	s, err := c.Generate(&Request{Model: model, TokenIDs: []uint32{uint32(n)}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// count reads a "count" answer and returns an error if it is wrong.
func count(ctx context.Context, s *Stream, n int) error {
	finish := ""
	for i := 0; ; i++ {
		it, err := s.Next(ctx)
		switch {
		case err != nil:
			return err
		case it == nil && (i != n || finish != "length"):
			return fmt.Errorf("%d items of %d, finish %q", i, n, finish)
		case it == nil:
			return nil
		case it.Err() != nil || !slices.Equal(it.Data.TokenIDs, []uint32{uint32(i)}):
			return fmt.Errorf("item %d: %v, %v", i, it.Data, it.Err())
		}
		finish = it.Data.FinishReason
	}
}

func TestItems(t *testing.T) {
	path := socket(t)
	_, a := serve(t, path)
	c := dial(t, path, Options{})
	if err := count(within(t), generate(t, c, "count", 100), 100); err != nil {
		t.Error(err)
	}
	s := generate(t, c, "failure", 0)
	it, err := s.Next(within(t))
	var f *Failure
	if err != nil || !errors.As(it.Err(), &f) || *f != (Failure{Message: "no", Type: "upstream_error", Param: "model", Code: 502}) || it.Data != nil {
		t.Errorf("%v, %v", it, err)
	}
	if it, err := s.Next(within(t)); it != nil || err != nil {
		t.Errorf("behind the last item %v, %v", it, err)
	}

	s = generate(t, c, "forever", 1)
	if it, err := s.Next(within(t)); err != nil || it.Data.TokenIDs[0] != 0 {
		t.Fatalf("%v, %v", it, err)
	}
	s.Stop()
	waitClosed(t, a.stopped, "the stop")
	it, err = s.Next(within(t))
	if err != nil {
		t.Fatal(err)
	}
	d := it.Data
	if !slices.Equal(it.Comment, []string{"worker_id: a", "plan: b"}) || d.TokenIDs[0] != 4294967295 || d.FinishReason != "cancelled" || d.Index != 2 || d.StopReason != "\n" ||
		!slices.Equal(d.LogProbs, []float64{-0.5, -2, 0}) || *d.Usage != (Usage{Prompt: 3, Completion: 1, Total: 4, Cached: 2}) || fmt.Sprint(d.ExtraArgs) != "map[a:b]" {
		t.Errorf("%+v %+v", it, d)
	}
	if top := d.TopLogprobs[0]; len(top) != 2 || top[0] != (TopLogprob{Rank: 1, TokenID: 7, Logprob: -0.5}) || top[1] != (TopLogprob{Rank: 2, TokenID: -1, Token: "x", Logprob: -3}) {
		t.Errorf("%+v", d.TopLogprobs)
	}

	s = generate(t, c, "damaged", 0)
	if it, err := s.Next(within(t)); it != nil || err == nil {
		t.Errorf("a damaged item: %v, %v", it, err)
	}
	waitClosed(t, a.killed, "the kill of a stream that cannot be read")
	if err := count(within(t), generate(t, c, "count", 3), 3); err != nil {
		t.Errorf("behind a damaged item: %v", err)
	}
}

// TestCancel: when a context ends, its request is killed and no other.
func TestCancel(t *testing.T) {
	path := socket(t)
	_, a := serve(t, path)
	c := dial(t, path, Options{})
	other := generate(t, c, "count", 50)
	s := generate(t, c, "forever", 1)
	if _, err := s.Next(within(t)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if it, err := s.Next(ctx); it != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", it, err)
	}
	waitClosed(t, a.killed, "the kill")
	if _, err := s.Next(within(t)); !Killed(err) {
		t.Errorf("after the kill: %v", err)
	}
	s.Kill() // a second Kill has no effect
	if err := count(within(t), other, 50); err != nil {
		t.Error(err)
	}
	if _, err := Dial(ctx, "unix://"+path, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("dialled under a context that has ended: %v", err)
	}
}

// TestSlowConsumer: a stream that is not read buffers at most its window, does not block other
// streams, and is complete when it is read.
func TestSlowConsumer(t *testing.T) {
	path := socket(t)
	serve(t, path)
	c := dial(t, path, Options{Window: 4 << 10})
	slow := generate(t, c, "count", 20_000)
	for range 3 {
		if err := count(within(t), generate(t, c, "count", 2000), 2000); err != nil {
			t.Fatal(err)
		}
	}
	if err := count(within(t), slow, 20_000); err != nil {
		t.Error(err)
	}
}

// TestServerGone: when the connection is lost, requests in progress fail and new ones fail at
// once. A new connection works as soon as a router is available again.
func TestServerGone(t *testing.T) {
	path := socket(t)
	srv, _ := serve(t, path)
	c := dial(t, path, Options{})
	s := generate(t, c, "forever", 1)
	if _, err := s.Next(within(t)); err != nil || c.Err() != nil {
		t.Fatal(err, c.Err())
	}
	srv.Close()
	if it, err := s.Next(within(t)); it != nil || err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a stream of a router that is gone: %v, %v", it, err)
	}
	waitClosed(t, c.Done(), "the connection's end")
	if _, err := c.Generate(&Request{TokenIDs: []uint32{1}}); err == nil || c.Err() == nil {
		t.Errorf("a request on a connection that is gone: %v, %v", err, c.Err())
	}
	if err := c.Close(); err != nil {
		t.Errorf("closing what is gone: %v", err)
	}
	if _, err := Dial(within(t), "unix://"+path, Options{}); err == nil {
		t.Error("dialled a router that is gone")
	}
	serve(t, path)
	again := dial(t, path, Options{})
	if err := count(within(t), generate(t, again, "count", 5), 5); err != nil {
		t.Error(err)
	}
}

// TestConcurrent: many goroutines use one client; some kill and some stop their requests.
func TestConcurrent(t *testing.T) {
	path := socket(t)
	serve(t, path)
	c := dial(t, path, Options{Window: 2 << 10})
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			for n := range 8 {
				switch (i + n) % 4 {
				case 0:
					s, err := c.Generate(&Request{Model: "forever", TokenIDs: []uint32{3}})
					if err != nil {
						t.Error(err)
						return
					}
					go s.Kill() // concurrent with Next
					it, err := s.Next(within(t))
					for it != nil {
						it, err = s.Next(within(t))
					}
					if !Killed(err) {
						t.Errorf("a stream that was killed ends with %v", err)
					}
				case 1:
					s, err := c.Generate(&Request{Model: "forever", TokenIDs: []uint32{3}})
					if err != nil {
						t.Error(err)
						return
					}
					go s.Stop()
					items := 0
					for it, err := s.Next(within(t)); it != nil || err != nil; it, err = s.Next(within(t)) {
						if items++; err != nil {
							t.Error(err)
							return
						}
					}
					if items != 4 {
						t.Errorf("%d items of a stream that was stopped", items)
					}
				default:
					s, err := c.Generate(&Request{Model: "count", TokenIDs: []uint32{300}})
					if err == nil {
						err = count(within(t), s, 300)
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

// TestReadDoesNotAllocate: decoding an item allocates nothing, because the item's memory is
// reused.
func TestReadDoesNotAllocate(t *testing.T) {
	var it Item
	var data Output
	payload := testItem(1234, false)
	if err := it.read(payload, &data); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() {
		it = Item{}
		if it.read(payload, &data) != nil || len(it.Data.TokenIDs) != 1 {
			t.Fatal(it)
		}
	}); n != 0 {
		t.Errorf("%v allocations an item", n)
	}
}

// FuzzItem: decoding any frame terminates with an item or an error.
func FuzzItem(f *testing.F) {
	for _, p := range [][]byte{testItem(1, true), lastItem("stop"), testFailure(), {0x81, 0xa4, 'd', 'a', 't', 'a', 0xc1}, {0xdf, 0xff, 0xff, 0xff, 0xff}} {
		f.Add(p)
	}
	f.Fuzz(func(_ *testing.T, p []byte) {
		var it Item
		var data Output
		_ = it.read(p, &data)
	})
}
