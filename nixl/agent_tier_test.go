package nixl

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"sluice/bench/testwait"
)

func wantTier(t *testing.T, tier *AgentTier, want TierState) string {
	t.Helper()
	var reason string
	testwait.Until(t, "the tier to be "+string(want), func() bool {
		var s TierState
		s, reason = tier.Status()
		return s == want
	})
	return reason
}

func TestRealTier(t *testing.T) {
	tier := StartAgentTier(AgentTierConfig{Agent: Config{Name: "router", Search: realNIXL(t)}})
	defer tier.Close()
	reason := wantTier(t, tier, TierUp)
	if !strings.Contains(reason, "NIXL 1.5.1, UCX 1.23") {
		t.Errorf("the reason names no versions: %s", reason)
	}
	if active, why := (Tiers{tier}).Active(); active != TierNIXL || !strings.Contains(why, "self-test") {
		t.Errorf("active %s: %s", active, why)
	}
	if ucx := ResidentUCX(); len(ucx) != 1 || !strings.Contains(ucx[0], "nixl-1.5.1") {
		t.Errorf("libucp in this process: %v; want the wheel's alone", ucx)
	}
	a := tier.Agent()
	if a == nil {
		t.Fatal("no agent although the tier is up")
	}
	if err := a.Close(); err != nil { // as a failure would
		t.Fatal(err)
	}
	testwait.Until(t, "the closed agent to be noticed", func() bool { s, _ := tier.Status(); return s == TierDown })
}

func TestTierWithoutLibrary(t *testing.T) {
	for name, content := range map[string]string{"absent": "", "garbage": "not a library"} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "libnixl_capi.so")
			if content != "" {
				if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			tier := StartAgentTier(AgentTierConfig{Agent: Config{Name: "router", Search: Search{Path: path}}})
			defer tier.Close()
			reason := wantTier(t, tier, TierOff)
			if !strings.Contains(reason, path) {
				t.Errorf("the reason does not name the file: %s", reason)
			}
			if active, why := (Tiers{tier}).Active(); active != TierHTTP || !strings.Contains(why, path) {
				t.Errorf("active %s: %s", active, why)
			}
		})
	}
}

// A tier that dies comes back by itself, with an agent that was made ready.
func TestTierReopens(t *testing.T) {
	fake := NewFake()
	var opened, ready atomic.Int32
	var states []TierState
	tier := StartAgentTier(AgentTierConfig{
		Agent:         Config{Name: "router", CallTimeout: 100 * time.Millisecond},
		CheckInterval: time.Millisecond, MaxRetryPause: time.Millisecond,
		Ready:   func(context.Context, *Agent) error { ready.Add(1); return nil },
		OnState: func(s TierState, _ string) { states = append(states, s) },
		open: func(ctx context.Context, cfg Config) (*Agent, error) {
			if opened.Add(1) == 3 { // the first try after the death
				return nil, errors.New("no memory")
			}
			return fake.Open(ctx, cfg)
		},
	})
	wantTier(t, tier, TierUp)
	first := tier.Agent()
	first.pollStatus.Store(int32(BackendError)) // the look for notifications fails
	testwait.Until(t, "another agent", func() bool { a := tier.Agent(); return a != nil && a != first })
	tier.Close()
	want := "up down up off"
	var got []string
	for _, s := range states {
		got = append(got, string(s))
	}
	if strings.Join(got, " ") != want || ready.Load() != 2 {
		t.Errorf("states %v, ready %d times; want %s, twice", got, ready.Load(), want)
	}
}

// Agents that hang are left behind, but not without end.
func TestTierGivesUpOnHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := NewFake()
		tier := StartAgentTier(AgentTierConfig{
			Agent: Config{Name: "router"},
			open: func(ctx context.Context, cfg Config) (*Agent, error) {
				a, err := fake.Open(ctx, cfg)
				if err == nil && cfg.Name == "router" {
					fake.Hang("router")
				}
				return a, err
			},
		})
		time.Sleep(10 * time.Minute)
		state, reason := tier.Status()
		if state != TierOff || !strings.Contains(reason, "abandoned") {
			t.Errorf("after ten minutes of hangs: %s, %s", state, reason)
		}
		tier.Close()
	})
}
