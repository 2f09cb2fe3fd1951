package front

import (
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// A reload also changes the timeouts that fasthttp got at the start, for open connections and for
// new ones.
func TestReloadTimeouts(t *testing.T) {
	t.Parallel()
	open := Options{HeadTimeout: time.Hour, IdleTimeout: time.Hour}
	r := start(t, open, echo)
	served, fresh := r.dial(), r.dial()
	served.send(chatPost(hello))
	served.readResponse()
	testwait.Until(t, "both are accepted", func() bool { r.observed.mu.Lock(); defer r.observed.mu.Unlock(); return r.observed.open == 2 })
	open.HeadTimeout, open.IdleTimeout, open.Handler = 2*time.Second, time.Hour, handlerFunc(echo)
	if err := r.server.Change(open); err != nil {
		t.Fatal(err)
	}
	all := []*client{served, fresh, r.dial()}
	for _, c := range all {
		c.send(requestLine + "Host:")
	}
	for _, c := range all {
		if resp, body := c.readResponse(); resp.StatusCode != 408 {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
		c.expectClosed()
	}
	open.HeadTimeout, open.IdleTimeout = time.Hour, 300*time.Millisecond
	if err := r.server.Change(open); err != nil {
		t.Fatal(err)
	}
	idle := r.dial()
	idle.send(chatPost(hello))
	idle.readResponse()
	idle.expectClosed()
}

// A reload can reduce the memory budget.
func TestReloadBudget(t *testing.T) {
	opt := Options{Handler: handlerFunc(echo)}
	r := start(t, Options{}, echo)
	c := r.dial()
	large := chatPost(`{"prompt":"` + strings.Repeat("m", 8<<10) + `"}`)
	c.send(large)
	if resp, body := c.readResponse(); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	opt.MaxBodyBytes, opt.BodyBudgetBytes = 1<<10, 4<<10
	if err := r.server.Change(opt); err != nil {
		t.Fatal(err)
	}
	if got := r.server.budget.Limit(); got != opt.BodyBudgetBytes {
		t.Errorf("the budget is %d, want %d", got, opt.BodyBudgetBytes)
	}
	c.send(large)
	if resp, body := c.readResponse(); resp.StatusCode != 413 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}
