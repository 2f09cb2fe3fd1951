package transfers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"sluice/nixl"
	"sluice/nixl/completion"
)

// A connector that has the document, and uses it against the others: lines for
// requests of theirs, records for their slots, noise, at full speed. Each message is
// counted, none is believed, and what is true comes through behind it.
func TestRealFloodOfReports(t *testing.T) {
	search := nixl.Search{Path: wheel(t, python(t, "zmq, nixl._api"))}
	w := start(t, Options{NIXL: true, Search: search, Slots: 64, Log: slog.New(slog.DiscardHandler)})
	eventually(t, "NIXL is up", func() bool { return w.Up(nixl.TierNIXL) })
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
	var waits []*Wait
	for i := range 8 {
		wait := w.Open(fmt.Sprintf("r%d", i), time.Now())
		wait.Lend(time.Minute)
		waits = append(waits, wait)
	}
	post := func(m []byte) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Microsecond) {
			if err := hostile.Post(p, m); err == nil {
				return
			} else if !errors.Is(err, nixl.ErrFull) || time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	record := func(k nixl.Ticket) []byte {
		rec := k.Record(nixl.Completion{Request: k.Request, Status: -1})
		return append(binary.LittleEndian.AppendUint32([]byte(nixl.MessagePrefix), k.Slot), rec[:]...)
	}
	const rounds = 2000
	long := make([]byte, 60<<10)
	for i := range rounds {
		k := waits[i%len(waits)].ticket
		k.Nonce = rand.Uint64()
		post(fmt.Appendf(nil, "SLUICE1 recv failed - - 1 1 0/0/1 d0 cmpl-r%d-0-0badcafe", i%8))             // refused
		post(fmt.Appendf(nil, "SLUICE1 expired ok 1 %016x 1 1 0/0/1 d0 cmpl-r%d-0-0badcafe", k.Nonce, i%8)) // refused
		post(fmt.Appendf(nil, "SLUICE1 recv failed - - 1 1 0/0/1 d0 cmpl-other%d-0-0badcafe", i))           // unknown
		post(record(k))                                                                                     // refused
		post(long[:i%len(long)])                                                                            // malformed
	}
	count := func() (refused, unknown, malformed, unread int64) {
		r := w.Reports()
		return r["refused"], r["unknown"], r["malformed"], r["unread"]
	}
	eventually(t, "every message is counted", func() bool {
		refused, unknown, malformed, unread := count()
		return refused == 3*rounds && unknown == rounds && malformed+unread == rounds
	})
	for i, wait := range waits {
		if r := wait.told.Result(); r.State != completion.Pending || r.Lost || r.Freed || wait.Lost() != "" {
			t.Errorf("r%d was told %+v", i, r)
		}
		good := wait.ticket.Record(nixl.Completion{Request: wait.ticket.Request, Bytes: uint64(i) + 1})
		post(append(binary.LittleEndian.AppendUint32([]byte(nixl.MessagePrefix), wait.ticket.Slot), good[:]...))
		eventually(t, "its own record", func() bool { return wait.told.Result().State == completion.Done })
		if r := wait.Close(); r.Bytes != int64(i)+1 {
			t.Errorf("r%d: %+v", i, r)
		}
	}
}
