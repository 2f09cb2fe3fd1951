package apikey

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/front"
)

func newTestKeyring(t *testing.T, specs ...Spec) *Keyring {
	t.Helper()
	r, err := NewKeyring(specs)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestLookupKey(t *testing.T) {
	mine, other := New(), New()
	if mine == other || !strings.HasPrefix(mine, prefix) || len(mine) != len(prefix)+43 {
		t.Fatalf("keys %q and %q", mine, other)
	}
	r := newTestKeyring(t, Spec{Name: "mine", Hash: HashOf(mine), Models: []string{"m"}}, Spec{Name: "theirs", Hash: HashOf(other)})
	for _, c := range []struct {
		key    string
		reason front.Reason
		name   string
	}{
		{mine, "", "mine"},
		{other, "", "theirs"},
		{"", front.MissingKey, ""},
		{mine[:len(mine)-1], front.UnknownKey, ""},
		{mine + "x", front.UnknownKey, ""},
		{HashOf(mine).String(), front.UnknownKey, ""}, // the hash in a stolen configuration is not a key
	} {
		pass, denied := r.Authenticate([]byte(c.key), true)
		switch {
		case c.reason == "" && (denied != nil || pass.Name() != c.name):
			t.Errorf("%s: %v, %v", c.name, pass, denied)
		case c.reason != "" && (denied == nil || denied.Reason != c.reason || pass != nil):
			t.Errorf("%q: %v, %v; want %s", c.key, pass, denied, c.reason)
		case denied != nil && c.key != "" && strings.Contains(denied.Message, c.key):
			t.Errorf("the refusal tells the key: %s", denied.Message)
		}
	}
	pass, _ := r.Authenticate([]byte(mine), true)
	if !pass.Allows("m") || pass.Allows("n") || pass.Allows("") {
		t.Error("the key is good for other models than m")
	}
	if pass, _ = r.Authenticate([]byte(other), true); !pass.Allows("n") {
		t.Error("a key without models is not good for all")
	}
}

func TestDuplicateKeys(t *testing.T) {
	for _, specs := range [][]Spec{
		{{Name: "a", Hash: HashOf("x")}, {Name: "a", Hash: HashOf("y")}},
		{{Name: "a", Hash: HashOf("x")}, {Name: "b", Hash: HashOf("x")}},
	} {
		if _, err := NewKeyring(specs); err == nil {
			t.Errorf("%v was taken", specs)
		}
	}
}

func TestParseHash(t *testing.T) {
	h := HashOf("k")
	for _, s := range []string{h.String(), strings.ToUpper(h.String())} {
		if got, err := ParseHash(s); err != nil || got != h {
			t.Errorf("ParseHash(%q) = %v, %v", s, got, err)
		}
	}
	secret := New()
	for _, s := range []string{"", "zz", h.String()[1:], h.String() + "00", secret} {
		if _, err := ParseHash(s); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("ParseHash(%q): %v", s, err)
		}
	}
}

func TestRequestsAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), RequestsPerMinute: 60}, Spec{Name: "b", Hash: HashOf("b"), RequestsPerMinute: 60})
		enter := func() *front.Rejection {
			_, denied := r.Authenticate([]byte("a"), true)
			return denied
		}
		for i := range 60 {
			if d := enter(); d != nil {
				t.Fatalf("request %d of the minute's 60: %v", i, d)
			}
		}
		pass, _ := r.Authenticate([]byte("b"), false)
		if d := pass.CheckLimits(); d != nil {
			t.Errorf("nothing was taken of b: %+v", d)
		}
		pass, _ = r.Authenticate([]byte("a"), false)
		for range 3 { // CheckLimits consumes nothing
			if d := pass.CheckLimits(); d == nil || d.Reason != front.KeyLimitReached || d.RetryAfter != time.Second {
				t.Errorf("asked before the 61st: %+v", d)
			}
		}
		d := enter()
		if d == nil || d.Reason != front.KeyLimitReached || d.RetryAfter != time.Second {
			t.Fatalf("the 61st: %+v", d)
		}
		if _, d := r.Authenticate([]byte("a"), false); d != nil {
			t.Errorf("a page is refused for a limit of requests: %+v", d)
		}
		if _, d := r.Authenticate([]byte("b"), true); d != nil {
			t.Errorf("one key's limit is another's: %+v", d)
		}
		time.Sleep(d.RetryAfter)
		if d := enter(); d != nil {
			t.Errorf("after the reported wait: %+v", d)
		}
		if d := enter(); d == nil {
			t.Error("two requests for one second's wait")
		}
		if c := r.Keys()[0].Counts(); c.Admitted != 61 || c.Limited != 5 {
			t.Errorf("%+v", c)
		}
	})
}

func TestTokensAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), TokensPerMinute: 6000})
		pass, denied := r.Authenticate([]byte("a"), true)
		if denied != nil {
			t.Fatal(denied)
		}
		pass.Commit(0, 5000)
		if _, denied = r.Authenticate([]byte("a"), true); denied != nil {
			t.Fatalf("with 1,000 of 6,000 left: %+v", denied)
		}
		pass.Commit(0, 2500) // 1,500 over the limit: later requests wait for them
		_, denied = r.Authenticate([]byte("a"), true)
		if denied == nil || denied.Reason != front.KeyLimitReached || denied.RetryAfter < 15*time.Second || denied.RetryAfter > 16*time.Second {
			t.Fatalf("1,500 over at 100 a second: %+v", denied)
		}
		shown := map[string]string{}
		pass.VisitLimitHeaders(func(name, value string) { shown[name] = value })
		if shown["x-ratelimit-limit-tokens"] != "6000" || shown["x-ratelimit-remaining-tokens"] != "0" || shown["x-ratelimit-reset-tokens"] != "1m15s" || len(shown) != 3 {
			t.Errorf("%v", shown)
		}
		if d := pass.CheckLimits(); d == nil || d.RetryAfter != denied.RetryAfter {
			t.Errorf("asked: %+v, want %+v", d, denied)
		}
		time.Sleep(denied.RetryAfter)
		if _, denied = r.Authenticate([]byte("a"), true); denied != nil {
			t.Errorf("after the reported wait: %+v", denied)
		}
		pass.Commit(0, 1<<62)
		if _, denied = r.Authenticate([]byte("a"), true); denied == nil || denied.RetryAfter > maxBacklog {
			t.Errorf("%+v", denied)
		}
		pass.Commit(0, -1)
	})
}

func TestReplaceKeepsUsage(t *testing.T) {
	spec := Spec{Name: "a", Hash: HashOf("a"), RequestsPerMinute: 2}
	r := newTestKeyring(t, spec)
	pass, _ := r.Authenticate([]byte("a"), true)
	spec.Name, spec.TokensPerMinute = "renamed", 100
	if err := r.Replace([]Spec{spec, {Name: "b", Hash: HashOf("b")}}); err != nil {
		t.Fatal(err)
	}
	pass.Commit(0, 10) // from a request in flight during the change
	if c := r.Keys()[0].Counts(); c.Admitted != 1 || c.Tokens != 10 {
		t.Errorf("%+v", c)
	}
	if _, denied := r.Authenticate([]byte("a"), true); denied != nil {
		t.Error(denied)
	}
	if _, denied := r.Authenticate([]byte("a"), true); denied == nil {
		t.Error("a third request of two was let in by the change")
	}
	if err := r.Replace([]Spec{{Name: "b", Hash: HashOf("b")}}); err != nil {
		t.Fatal(err)
	}
	if _, denied := r.Authenticate([]byte("a"), true); denied == nil || denied.Reason != front.UnknownKey {
		t.Errorf("a key that was taken out: %+v", denied)
	}
}

// TestConcurrentUse checks that concurrent requests cannot exceed the limit.
func TestConcurrentUse(t *testing.T) {
	r := newTestKeyring(t, Spec{Name: "a", Hash: HashOf("a"), RequestsPerMinute: 100})
	var wg sync.WaitGroup
	began := time.Now()
	for range 8 {
		wg.Go(func() {
			for range 100 {
				r.Authenticate([]byte("a"), true)
			}
		})
	}
	wg.Wait()
	more := uint64(time.Since(began)/(600*time.Millisecond)) + 1 // one more is replenished every 600 ms
	if n := r.Keys()[0].Counts().Admitted; n < 100 || n > 100+more {
		t.Errorf("%d of 100 were let in", n)
	}
}

func BenchmarkAuthenticate(b *testing.B) {
	key := []byte(New())
	specs := make([]Spec, 1000)
	for i := range specs {
		specs[i] = Spec{Name: New(), Hash: HashOf(New())}
	}
	specs[500].Hash = HashOf(key)
	specs[500].RequestsPerMinute = 1 << 40
	r, err := NewKeyring(specs)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, denied := r.Authenticate(key, true); denied != nil {
			b.Fatal(denied)
		}
	}
}
