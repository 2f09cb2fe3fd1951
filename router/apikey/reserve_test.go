package apikey

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/front"
)

func authenticate(t *testing.T, r *Keyring, key string) front.Principal {
	t.Helper()
	pass, denied := r.Authenticate([]byte(key), true)
	if denied != nil {
		t.Fatal(denied)
	}
	return pass
}

func TestTokensAreReserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), TokensPerMinute: 6000}, Spec{Name: "free", Hash: HashOf("free")})
		pass := authenticate(t, r, "a")
		for i := range 2 {
			if d := pass.Reserve(3000); d != nil {
				t.Fatalf("half the minute's, %d of 2: %+v", i+1, d)
			}
		}
		d := pass.Reserve(100)
		if d == nil || d.Reason != front.KeyLimitReached || d.RetryAfter != time.Second {
			t.Fatalf("with nothing left: %+v", d)
		}
		pass.Commit(3000, 2900) // 100 fewer than reserved
		if d := pass.Reserve(100); d != nil {
			t.Errorf("what was given back: %+v", d)
		}
		pass.Commit(100, 0) // the request was rejected or failed
		pass.Commit(3000, 3100)
		if d := pass.Reserve(1); d == nil || d.RetryAfter != 10*time.Millisecond {
			t.Errorf("spent as many as reserved: %+v", d)
		}
		if c := r.Keys()[0].Counts(); c.Tokens != 6000 || c.Limited != 2 {
			t.Errorf("%+v", c)
		}
		free := authenticate(t, r, "free")
		if d := free.Reserve(1 << 40); d != nil {
			t.Errorf("a key without a limit: %+v", d)
		}
		free.Commit(1<<40, 7)
		if c := r.Keys()[1].Counts(); c.Tokens != 7 {
			t.Errorf("%+v", c)
		}
	})
}

// TestLargePrompt checks that a prompt of more tokens than one minute's is admitted once all
// tokens are replenished; otherwise it could never be.
func TestLargePrompt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), TokensPerMinute: 60})
		pass := authenticate(t, r, "a")
		pass.Commit(0, 10)
		d := pass.Reserve(100)
		if d == nil || d.RetryAfter != 10*time.Second {
			t.Fatalf("with 10 owed: %+v", d)
		}
		time.Sleep(d.RetryAfter)
		if d := pass.Reserve(100); d != nil {
			t.Fatalf("with nothing owed: %+v", d)
		}
		pass.Commit(100, 100)
		if d := pass.Reserve(1); d == nil || d.RetryAfter != 41*time.Second {
			t.Errorf("40 over: %+v", d)
		}
	})
}

// TestLateRefund checks that a refund after the tokens have been replenished gives no credit
// beyond one minute's tokens.
func TestLateRefund(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), TokensPerMinute: 60})
		pass := authenticate(t, r, "a")
		if d := pass.Reserve(60); d != nil {
			t.Fatal(d)
		}
		time.Sleep(time.Hour)
		pass.Commit(60, 0)
		if d := pass.Reserve(60); d != nil {
			t.Fatal(d)
		}
		if d := pass.Reserve(1); d == nil {
			t.Error("more than a minute's at once")
		}
	})
}

func TestConcurrentReservations(t *testing.T) {
	r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), TokensPerMinute: 100})
	pass := authenticate(t, r, "a")
	var wg sync.WaitGroup
	var mu sync.Mutex
	in := 0
	for range 40 {
		wg.Go(func() {
			if pass.Reserve(30) == nil {
				mu.Lock()
				in++
				mu.Unlock()
			}
		})
	}
	if wg.Wait(); in != 3 {
		t.Errorf("%d times 30 tokens of 100 were had at once", in)
	}
}
