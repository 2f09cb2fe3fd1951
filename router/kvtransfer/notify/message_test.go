//go:build cgo

package notify

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReleasedMessages parses messages encoded by the definitions of LMCache's releases
// (scripts/fixtures/lmcache.sh). Only notifications count, although other messages have a
// req_id, too.
func TestReleasedMessages(t *testing.T) {
	files, _ := filepath.Glob("testdata/lmcache_*.bin")
	if len(files) < 10 {
		t.Fatalf("%d fixtures; want those of all releases", len(files))
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want, wantID := otherType, ""
		if strings.HasSuffix(file, "ProxyNotif.bin") {
			want, wantID = ready, "42"
		}
		id, what := parse(b)
		if what != want || string(id) != wantID {
			t.Errorf("%s: %v of %q, want %v of %q", file, what, id, want, wantID)
		}
	}
}

func TestUnknownMembersAreIgnored(t *testing.T) {
	b := append([]byte{0x84}, frame("ProxyNotif", "r")[1:]...)
	b = append(b, 0xa1, 'x', 0x92, 0x01, 0x81, 0xa1, 'y', 0xc0)
	b = append(b, 0xa1, 'z', 0xc4, 0x02, 0xff, 0x00)
	if id, what := parse(b); what != ready || string(id) != "r" {
		t.Errorf("%v %q", what, id)
	}
}

func TestNotificationDoesNotAllocate(t *testing.T) {
	b := &Listener{}
	for i := range b.table {
		b.table[i].entries = map[string]*entry{"r": {expectation: &Expectation{need: 1 << 30, done: make(chan struct{})}}}
	}
	f := frame("ProxyNotif", "r")
	b.seed = listen(t, Options{}).seed
	if n := testing.AllocsPerRun(1000, func() {
		id, _ := parse(f)
		b.addNotification(id)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/lmcache_*.bin")
	for _, file := range files {
		if b, err := os.ReadFile(file); err == nil {
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if id, what := parse(b); what == ready && (len(id) == 0 || len(id) > maxID) {
			t.Errorf("ready with an id of %d bytes", len(id))
		}
	})
}
