package nixl

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const loadLimit = 30 * time.Second

// agentNetwork opens agents that reach each other: in the fake, or with the real NIXL on
// loopback. Every test of behaviour runs on both.
type agentNetwork struct {
	name string
	open func(t testing.TB, cfg Config) *Agent
	fake *Fake
}

var agentNumber atomic.Int64

func fakeNetwork() agentNetwork {
	fake := NewFake()
	return agentNetwork{name: "fake", fake: fake, open: func(t testing.TB, cfg Config) *Agent {
		return opened(t, cfg, fake.Open)
	}}
}

func realNetwork() agentNetwork {
	return agentNetwork{name: "real", open: func(t testing.TB, cfg Config) *Agent {
		cfg.Search = realNIXL(t)
		return opened(t, cfg, Open)
	}}
}

func opened(t testing.TB, cfg Config, open func(context.Context, Config) (*Agent, error)) *Agent {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = fmt.Sprintf("agent-%d", agentNumber.Add(1))
	}
	a, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil && !strings.Contains(err.Error(), "hang") {
			t.Errorf("closing %s: %v", a.Name(), err)
		}
	})
	return a
}

// inbox collects notifications.
type inbox struct {
	mu  sync.Mutex
	got []string
}

func (i *inbox) handler() func(Notification) {
	return func(n Notification) {
		i.mu.Lock()
		i.got = append(i.got, n.From+":"+string(n.Message))
		i.mu.Unlock()
	}
}

func (i *inbox) list() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return append([]string(nil), i.got...)
}

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// connectAgents loads b's metadata into a.
func connectAgents(t testing.TB, a, b *Agent) *Peer {
	t.Helper()
	p := must[*Peer](t)(a.LoadPeer(t.Context(), must[[]byte](t)(b.Metadata(t.Context())), ""))
	if p.Name() != b.Name() {
		t.Fatalf("the peer calls itself %q, want %q", p.Name(), b.Name())
	}
	return p
}

func hostMemory(t testing.TB, a *Agent, size int) *Memory {
	t.Helper()
	m := must[*Memory](t)(NewHostMemory(size))
	if err := a.Register(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	return m
}
