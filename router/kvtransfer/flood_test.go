package kvtransfer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
)

// TestRealFloodOfReports: a hostile connector that has the document sends lines for other
// requests, records for their slots, and garbage, at full speed. The Watcher counts and ignores
// every message, and still accepts the genuine reports that follow.
func TestRealFloodOfReports(t *testing.T) {
	search := nixl.Search{Path: wheel(t, python(t, "zmq, nixl._api"))}
	w := start(t, Options{NIXL: true, Search: search, Slots: 64, Log: slog.New(slog.DiscardHandler)})
	testwait.Until(t, "NIXL is up", func() bool { return w.Up(nixl.TierNIXL) })
	d, err := w.Document(netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	hostile, err := nixl.Open(t.Context(), nixl.Config{Name: "hostile", Search: search})
	if err != nil {
		t.Fatal(err)
	}
	defer hostile.Close()
	p, err := hostile.LoadPeer(t.Context(), d.NIXL.Metadata, "NIXL "+d.NIXL.Version)
	if err != nil {
		t.Fatal(err)
	}
	var waits []*Transfer
	for i := range 8 {
		wait := w.Open(fmt.Sprintf("r%d", i), time.Now())
		wait.AcquireSlot(time.Minute)
		waits = append(waits, wait)
	}
	post := func(m []byte) {
		t.Helper()
		var err error
		testwait.Until(t, "the agent has room", func() bool {
			err = hostile.Post(p, m)
			return !errors.Is(err, nixl.ErrFull)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	record := func(k nixl.CompletionSlot) []byte {
		rec := k.Record(nixl.Completion{Request: k.Request, Status: -1})
		return append(binary.LittleEndian.AppendUint32([]byte(nixl.MessagePrefix), k.Index), rec[:]...)
	}
	const rounds = 2000
	long := make([]byte, 60<<10)
	for i := range rounds {
		k := waits[i%len(waits)].slot
		k.Nonce = rand.Uint64()
		post(fmt.Appendf(nil, "SLUICE1 recv failed - - 1 1 0/0/1 d0 cmpl-r%d-0-0badcafe", i%8))             // refused
		post(fmt.Appendf(nil, "SLUICE1 expired ok 1 %016x 1 1 0/0/1 d0 cmpl-r%d-0-0badcafe", k.Nonce, i%8)) // refused
		post(fmt.Appendf(nil, "SLUICE1 recv failed - - 1 1 0/0/1 d0 cmpl-other%d-0-0badcafe", i))           // unknown
		post(record(k))                                                                                     // refused
		post(long[:i%len(long)])                                                                            // malformed
	}
	count := func() (refused, unknown, malformed, unread int64) {
		r := w.Reports()
		return r["refused"], r["unknown"], r["malformed"], r["not_a_report"]
	}
	testwait.Until(t, "every message is counted", func() bool {
		refused, unknown, malformed, unread := count()
		return refused == 3*rounds && unknown == rounds && malformed+unread == rounds
	})
	for i, wait := range waits {
		if r := wait.expected.Result(); r.State != completion.Pending || r.LeaseExpired || r.PrefillReleased || wait.LostReason() != "" {
			t.Errorf("r%d got %+v", i, r)
		}
		good := wait.slot.Record(nixl.Completion{Request: wait.slot.Request, Bytes: uint64(i) + 1})
		post(append(binary.LittleEndian.AppendUint32([]byte(nixl.MessagePrefix), wait.slot.Index), good[:]...))
		testwait.Until(t, "its own record", func() bool { return wait.expected.Result().State == completion.Done })
		if r := wait.Close(); r.Bytes != int64(i)+1 {
			t.Errorf("r%d: %+v", i, r)
		}
	}
}
