package completion

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func line(event, status, part, request string) string {
	return fmt.Sprintf("SLUICE1 %s %s - - 4096 250 %s d0 %s", event, status, part, request)
}

func TestParse(t *testing.T) {
	r, err := Parse([]byte("SLUICE1 recv failed 17 0000000000c0ffee 1048576 8123 1/0/2 d0 chatcmpl-r1-0f0f0f0f"))
	if err != nil {
		t.Fatal(err)
	}
	if r.Event != Received || !r.Failed || r.Bytes != 1<<20 || r.Duration != 8123*time.Microsecond || r.DPRank != 1 || r.TPRank != 0 || r.TPSize != 2 ||
		string(r.Worker) != "d0" || string(r.Request) != "chatcmpl-r1-0f0f0f0f" {
		t.Errorf("%+v", r)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, s := range []string{
		"", "SLUICE1", "SLUICE2 recv ok - - 0 0 0/0/1 d r", "SLUICE1 recv ok - - 0 0 0/0/1 d", "SLUICE1 recv ok - - 0 0 0/0/1 d r x",
		"SLUICE1  recv ok - - 0 0 0/0/1 d r", "SLUICE1 lost ok - - 0 0 0/0/1 d r", "SLUICE1 recv fine - - 0 0 0/0/1 d r",
		"SLUICE1 recv ok - - -1 0 0/0/1 d r", "SLUICE1 recv ok - - 0 x 0/0/1 d r", "SLUICE1 recv ok - - 99999999999999999999 0 0/0/1 d r",
		"SLUICE1 recv ok - - 0 0 0/1/1 d r", "SLUICE1 recv ok - - 0 0 0/0/65 d r", "SLUICE1 recv ok - - 0 0 0/0 d r", "SLUICE1 recv ok - - 0 0 0/0/0 d r",
		"SLUICE1 recv ok - - 0 0 0/0/1 d " + strings.Repeat("r", MaxReport),
	} {
		if _, err := Parse([]byte(s)); !errors.Is(err, ErrReport) {
			t.Errorf("%q: %v; want ErrReport", s, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(line("recv", "ok", "0/0/1", "r")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := Parse(b); err == nil && (r.TPRank >= r.TPSize || r.Event >= events || len(r.Request) == 0 || r.Bytes < 0 || r.Duration < 0) {
			t.Errorf("%q gives %+v", b, r)
		}
	})
}

// TestRequestIDs covers the forms in which vLLM's releases write a request id.
func TestRequestIDs(t *testing.T) {
	for _, engine := range []string{"r-1-2", "chatcmpl-r-1-2", "chatcmpl-r-1-2-0f3a9c11", "cmpl-r-1-2-0", "cmpl-r-1-2-0-0f3a9c11", "generate-tokens-r-1-2-0f3a9c11"} {
		b := NewRegistry()
		var w Wait
		b.Open(&w, "r-1-2", time.Now(), nil)
		b.HandleReport([]byte(line("recv", "ok", "0/0/1", engine)))
		if res := w.Close(); res.State != Done {
			t.Errorf("%s: %v; want done", engine, res.State)
		}
	}
	b := NewRegistry()
	var w Wait
	b.Open(&w, "r", time.Now(), nil)
	b.HandleReport([]byte(line("recv", "ok", "0/0/1", "chatcmpl-other-r")))
	if w.Result().State != Pending || b.Unknown() != 1 {
		t.Errorf("another's report was believed: %+v, unknown %d", w.Result(), b.Unknown())
	}
}

// TestLongerIDsDoNotMatch: an id that extends another id belongs to a different request, and
// its late reports do not count for the other.
func TestLongerIDsDoNotMatch(t *testing.T) {
	for _, engine := range []string{"r-2", "chatcmpl-r-2", "chatcmpl-r-2-0f3a9c11", "chatcmpl-r-a-b", "cmpl-r-2-0", "cmpl-r-2-0-0f3a9c11", "generate-tokens-r-2-0f3a9c11", "resp_r-2-0f3a9c11", "cmpl-r"} {
		b := NewRegistry()
		var w Wait
		b.Open(&w, "r", time.Now(), func() { t.Errorf("%s: cut", engine) })
		b.HandleReport([]byte(line("recv", "failed", "0/0/1", engine)))
		if w.Result().State != Pending || b.Unknown() != 1 {
			t.Errorf("%s was taken for r: %+v, unknown %d", engine, w.Result(), b.Unknown())
		}
		w.Close()
	}
}

// TestNonceOfALine: a line that names a nonce counts only for the request with that nonce.
func TestNonceOfALine(t *testing.T) {
	reports := func(nonce string) []byte {
		return []byte("SLUICE1 recv failed 3 " + nonce + " 0 0 0/0/2 d0 chatcmpl-r-0f3a9c11")
	}
	b := NewRegistry()
	var w Wait
	b.Open(&w, "r", time.Now(), nil)
	b.HandleReport(reports("00000000000000aa"))
	if w.Result().State != Pending || b.Refused() != 1 {
		t.Errorf("no completion slot is out: %+v, refused %d", w.Result(), b.Refused())
	}
	w.SetNonce(0xc0ffee)
	b.HandleReport(reports("0000000000c0ffef"))
	if w.Result().State != Pending || b.Refused() != 2 || b.Unknown() != 0 {
		t.Errorf("another's nonce: %+v, refused %d", w.Result(), b.Refused())
	}
	b.HandleReport(reports("0000000000c0ffee"))
	if w.Close().State != Failed {
		t.Error("its own nonce was not believed")
	}
	b.Open(&w, "r", time.Now(), nil)
	b.HandleReport(reports("0000000000c0ffee")) // of an earlier request with the same id
	if w.Close().State != Pending || b.Refused() != 3 {
		t.Errorf("an earlier request's report was booked: refused %d", b.Refused())
	}
	if b.HandleReport(reports("xyz")) || b.Malformed() != 1 {
		t.Error("a nonce of other letters was taken")
	}
}

// TestLineWithoutANonce: a line without a nonce is accepted for requests without a slot and
// from prefill engines, which receive no slot, but not from a decode engine that received one.
func TestLineWithoutANonce(t *testing.T) {
	var b *Registry
	var w Wait
	open := func() {
		b, w = NewRegistry(), Wait{}
		b.Open(&w, "r", time.Now(), nil)
	}
	open()
	b.HandleReport([]byte(line("recv", "ok", "0/0/1", "r")))
	if w.Result().State != Done || b.Refused() != 0 {
		t.Errorf("no completion slot is out: %+v, refused %d", w.Result(), b.Refused())
	}
	w.SetNonce(0xc0ffee) // discards reports of a read that had not begun
	if got := w.Result(); got != (Result{}) {
		t.Errorf("reported before the slot was sent: %+v", got)
	}
	for _, status := range []string{"failed", "ok"} {
		open()
		w.SetNonce(0xc0ffee)
		b.HandleReport([]byte(line("recv", status, "0/0/1", "r")))
		b.HandleReport([]byte("SLUICE1 recv " + status + " 3 0000000000000000 0 0 0/0/1 d0 r"))
		if w.Result().State != Pending || b.Refused() != 2 {
			t.Errorf("%s: %+v, refused %d", status, w.Result(), b.Refused())
		}
	}
	for _, event := range []string{"sent", "expired"} {
		open()
		w.SetNonce(0xc0ffee)
		b.HandleReport([]byte(line(event, "ok", "0/0/1", "r")))
		if got := w.Result(); !got.PrefillReleased || got.LeaseExpired != (event == "expired") || b.Refused() != 0 {
			t.Errorf("%s: %+v, refused %d", event, got, b.Refused())
		}
		b.HandleReport([]byte("SLUICE1 " + event + " ok 3 0000000000c0ffef 0 0 0/0/1 p0 r"))
		if b.Refused() != 1 {
			t.Errorf("%s with another's nonce: refused %d", event, b.Refused())
		}
	}
}

func TestEveryPartCounts(t *testing.T) {
	b := NewRegistry()
	var w Wait
	b.Open(&w, "r", time.Now(), nil)
	defer w.Close()
	b.HandleReport([]byte(line("recv", "ok", "0/0/2", "r")))
	b.HandleReport([]byte(line("recv", "ok", "0/0/2", "r"))) // twice the same is once
	if got := w.Result(); got.State != Pending || got.Bytes != 4096 {
		t.Errorf("half of it: %+v", got)
	}
	b.HandleReport([]byte(line("recv", "ok", "0/1/2", "r")))
	if got := w.Result(); got.State != Done || got.Bytes != 8192 || got.Duration != 250*time.Microsecond || got.Elapsed <= 0 {
		t.Errorf("all of it: %+v", got)
	}
	b.HandleReport([]byte(line("sent", "ok", "0/0/1", "r")))
	if got := w.Result(); !got.PrefillReleased || got.LeaseExpired {
		t.Errorf("freed by its reader: %+v", got)
	}
}

func TestFailureIsReportedOnce(t *testing.T) {
	b := NewRegistry()
	var w Wait
	reports := 0
	b.Open(&w, "r", time.Now(), func() { reports++ })
	b.HandleReport([]byte(line("recv", "failed", "0/1/2", "r")))
	b.HandleReport([]byte(line("recv", "failed", "0/0/2", "r")))
	if reports != 1 || w.Result().State != Failed {
		t.Errorf("reported %d times, %+v", reports, w.Result())
	}
	w.Close()
	b.HandleReport([]byte(line("recv", "failed", "0/0/1", "r")))
	if reports != 1 {
		t.Error("reported after Close")
	}
	if b.Count(Received, true) != 3 || b.Unknown() != 1 || b.Len() != 0 {
		t.Errorf("counts: %d failed, %d unknown, %d open", b.Count(Received, true), b.Unknown(), b.Len())
	}
}

func TestExpiryBeforeTransferIsLost(t *testing.T) {
	b := NewRegistry()
	var w Wait
	b.Open(&w, "r", time.Now(), nil)
	b.HandleReport([]byte(line("expired", "ok", "0/0/1", "chatcmpl-r-0f3a9c11")))
	if got := w.Close(); !got.LeaseExpired || !got.PrefillReleased {
		t.Errorf("%+v", got)
	}
}

func TestLaterWaitReusesIndex(t *testing.T) {
	b := NewRegistry()
	var first, second Wait
	b.Open(&first, "r", time.Now(), nil)
	b.Open(&second, "r", time.Now(), nil)
	first.Close() // must not clear the second wait's place
	b.HandleReport([]byte(line("recv", "ok", "0/0/1", "r")))
	if second.Close().State != Done || b.Len() != 0 {
		t.Error("the second wait was lost")
	}
	if (&Wait{}).Close().State != Pending {
		t.Error("a wait that was never opened")
	}
}

func TestBoardRecords(t *testing.T) {
	b := NewRegistry()
	var w, other Wait
	b.Open(&w, "r", time.Now(), nil)
	b.Open(&other, "s", time.Now(), nil)
	n := w.Number()
	if n == 0 || w.Number() != n || other.Number() == n {
		t.Error("a wait has one number, and no other has it")
	}
	if !b.Complete(n, false, 4096, time.Millisecond) || b.Complete(n^2, false, 1, 1) || b.Complete(n|locked, false, 1, 1) || b.Complete(0, false, 1, 1) {
		t.Error("a record finds its wait, and no other")
	}
	if got := w.Close(); got.State != Done || got.Bytes != 4096 {
		t.Errorf("%+v", got)
	}
	if b.Complete(n, true, 0, 0) {
		t.Error("a number outlived its wait")
	}
	other.Close()
	b.Open(&w, "r", time.Now(), nil) // most likely in the same place
	if b.Complete(n, false, 1, 1) || w.Close().State != Pending {
		t.Error("a number found a later opening")
	}
}

// TestTableFull: Open on a full table fails and is counted. The table is usable again when
// waits have ended.
func TestTableFull(t *testing.T) {
	if testing.Short() {
		t.Skip("a full table, and one goroutine: slow under the race detector, which finds nothing in it")
	}
	b := NewRegistry()
	waits := make([]Wait, MaxWaits+100)
	for i := range waits {
		b.Open(&waits[i], fmt.Sprint("r", i), time.Now(), nil)
	}
	n := b.Len()
	if n < MaxWaits*9/10 || int(b.AtCapacity()) != len(waits)-n {
		t.Errorf("%d of %d places are taken, %d waits have none", n, MaxWaits, b.AtCapacity())
	}
	for i := range waits {
		id, had := fmt.Sprint("r", i), waits[i].Number() != 0
		b.HandleReport([]byte(line("recv", "ok", "0/0/1", id)))
		if got := waits[i].Close(); (got.State == Done) != had {
			t.Fatalf("%s: %v, a place: %v", id, got.State, had)
		}
	}
	if b.Len() != 0 {
		t.Errorf("%d places are still taken", b.Len())
	}
}

// TestSameIDAtOnce opens and closes waits of one id while reports arrive. Each report counts
// for at most one wait.
func TestSameIDAtOnce(t *testing.T) {
	b := NewRegistry()
	var booked atomic.Int64
	var opens, tells sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		opens.Go(func() {
			var w Wait
			for range 5000 {
				b.Open(&w, "r", time.Now(), nil)
				if w.Close().State == Done {
					booked.Add(1)
				}
			}
		})
	}
	for range 2 {
		tells.Go(func() {
			l := []byte(line("recv", "ok", "0/0/1", "r"))
			for {
				select {
				case <-stop:
					return
				default:
					b.HandleReport(l)
				}
			}
		})
	}
	opens.Wait()
	close(stop)
	tells.Wait()
	if booked.Load() > b.Count(Received, false)-b.Unknown() || b.Len() != 0 {
		t.Errorf("%d waits ended by %d reports, %d unknown; %d open", booked.Load(), b.Count(Received, false), b.Unknown(), b.Len())
	}
}

func TestConcurrentUse(t *testing.T) {
	b := NewRegistry()
	var failed atomic.Int64
	var all sync.WaitGroup
	for g := range 8 {
		all.Add(1)
		go func() {
			defer all.Done()
			for i := range 500 {
				id := fmt.Sprintf("%d-%d", g, i)
				var w Wait
				b.Open(&w, id, time.Now(), func() { failed.Add(1) })
				done := make(chan struct{})
				go func() {
					status := "ok"
					if i%2 == 1 {
						status = "failed"
					}
					b.HandleReport([]byte(line("recv", status, "0/0/1", "cmpl-"+id+"-0")))
					close(done)
				}()
				<-done
				want := Done
				if i%2 == 1 {
					want = Failed
				}
				if got := w.Close().State; got != want {
					t.Errorf("%s: %v, want %v", id, got, want)
				}
			}
		}()
	}
	all.Wait()
	if failed.Load() != 8*250 || b.Len() != 0 {
		t.Errorf("%d failures reported, %d waits left", failed.Load(), b.Len())
	}
}

func TestNoAllocation(t *testing.T) {
	b := NewRegistry()
	l := []byte(line("recv", "ok", "0/0/1", "chatcmpl-r-0f3a9c11"))
	var w Wait
	if n := testing.AllocsPerRun(1000, func() {
		b.Open(&w, "r", time.Now(), nil)
		b.HandleReport(l)
		w.Close()
	}); n != 0 {
		t.Errorf("%v allocations for a hand-over", n)
	}
}

// TestExpiredIsReported: a lease that ends before the read is reported once like a failure, and
// Close waits for the callback.
func TestExpiredIsReported(t *testing.T) {
	b := NewRegistry()
	var w Wait
	reports, go_on := make(chan struct{}), make(chan struct{})
	b.Open(&w, "r1", time.Now(), func() { close(reports); <-go_on })
	line := func(event string) []byte {
		return []byte("SLUICE1 " + event + " ok - - 0 0 0/0/1 p0 cmpl-r1-0-0badcafe")
	}
	go b.HandleReport(line("expired"))
	<-reports
	closed := make(chan Result)
	go func() { closed <- w.Close() }()
	select {
	case <-closed:
		t.Error("Close did not wait for what was in progress")
	case <-time.After(20 * time.Millisecond):
	}
	b.HandleReport(line("expired")) // a second report calls nothing; it would panic on the closed channel
	close(go_on)
	if r := <-closed; !r.LeaseExpired || !r.PrefillReleased {
		t.Errorf("%+v", r)
	}
	// After a successful read the end of the lease is not a loss.
	w = Wait{}
	b.Open(&w, "r1", time.Now(), func() { t.Error("notified of a lease that did not matter") })
	b.HandleReport(line("recv"))
	b.HandleReport(line("expired"))
	if r := w.Close(); r.LeaseExpired || r.State != Done {
		t.Errorf("%+v", r)
	}
}

func TestTransferTimes(t *testing.T) {
	var p TransferTimes
	if p.From(1).NSPerToken(2) != 0 {
		t.Error("a rate from nothing")
	}
	for range 50 {
		p.Observe(1, 2, 100<<20, 1000, 10*time.Millisecond)
	}
	p.Observe(1, 2, 100, 0, time.Second) // too small to measure bandwidth
	p.Observe(1, 2, 1, 1, 0)
	p.Observe(-1, 2, 1, 1, time.Second)
	p.Observe(1, MaxRanks, 1, 1, time.Second)
	got := p.List()
	if len(got) != 1 || got[0].From != 1 || got[0].To != 2 || got[0].Transfers != 51 || got[0].BytesPerSecond < 10e9 || got[0].BytesPerSecond > 11e9 {
		t.Errorf("%+v", got)
	}
	for _, to := range []int{2, 3} { // 3 uses the average of the others
		if ns := p.From(1).NSPerToken(to); ns < 9900 || ns > 10100 {
			t.Errorf("to %d: %v ns a token, want 10,000", to, ns)
		}
	}
	if n := testing.AllocsPerRun(100, func() { p.Observe(1, 2, 1<<20, 100, time.Millisecond); p.From(1).NSPerToken(2) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	p.Remove(2)
	if len(p.List()) != 0 {
		t.Error("a rank that left is remembered")
	}
	before := p.From(1)
	p.Remove(1)
	if p.From(1) == before {
		t.Error("a row that is kept")
	}
}

// TestTransferTimesSurviveStall: one transfer that stalls for seconds does not make a pair look
// slow forever.
func TestTransferTimesSurviveStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const usual, stood = time.Millisecond, 8 * time.Second // per 1,000 tokens
		var p TransferTimes
		p.Observe(1, 2, 1<<20, 1000, stood)
		p.Observe(3, 2, 1<<20, 1000, usual)
		if a, b := p.From(1).NSPerToken(2), p.From(3).NSPerToken(2); a != b || a != 1000 {
			t.Errorf("after one transfer each %v and %v ns a token, want both to be the better", a, b)
		}
		for range 10 {
			p.Observe(1, 2, 1<<20, 1000, usual)
		}
		if got := p.From(1).NSPerToken(2); got > 1100 {
			t.Errorf("the first stood, ten did not: %v ns a token", got)
		}
		p.Observe(1, 2, 1<<20, 1000, stood)
		if got := p.From(1).NSPerToken(2); got > 1700 {
			t.Errorf("one of twelve stood: %v ns a token", got)
		}
		// A pair that is consistently slow is recognised.
		for range 30 {
			p.Observe(1, 2, 1<<20, 1000, 20*usual)
		}
		if got := p.From(1).NSPerToken(2); got < 19_000 {
			t.Errorf("thirty took 20 times as long: %v ns a token", got)
		}
		time.Sleep(time.Minute)
		p.Observe(3, 2, 1<<20, 1000, usual)
		for range 3 {
			p.Observe(3, 2, 1<<20, 1000, usual)
		}
		p.Expire(time.Now().Add(-30 * time.Second))
		if a, b := p.From(1).NSPerToken(2), p.From(3).NSPerToken(2); a != p.all.load() || b != 1000 {
			t.Errorf("a minute later %v and %v ns a token, want what all took, and 1,000", a, b)
		}
		for _, s := range p.List() {
			if s.Transfers == 0 || s.BytesPerSecond == 0 || (s.NSPerToken == 0) != (s.From == 1) {
				t.Errorf("listed as %+v", s)
			}
		}
	})
}

func BenchmarkHandOver(b *testing.B) {
	book := NewRegistry()
	var next atomic.Int64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		id := fmt.Sprintf("%016x", next.Add(1))
		l := []byte(line("recv", "ok", "0/0/1", "chatcmpl-"+id+"-0f3a9c11"))
		var w Wait
		for pb.Next() {
			book.Open(&w, id, time.Now(), nil)
			book.HandleReport(l)
			w.Close()
		}
	})
}
