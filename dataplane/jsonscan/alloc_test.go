package jsonscan

import (
	"strings"
	"testing"
)

// A scan, a look-up and a splice must not allocate: they run once or more for
// every request.
func TestNoAllocations(t *testing.T) {
	body := chatBody(32 << 10)
	resp := []byte(`{"count":3,"tokens":[1,2,3],"usage":null}`)
	prompt := []byte(`{"prompt":[1,2,3]}`)
	long := []byte(`{"prompt":[` + strings.Repeat("12345,", 20_000) + `1]}`)
	exact := make([]uint32, 0, 200)
	many := []byte("[" + strings.Repeat("12345,", 199) + "1]")
	var d Doc
	dst := make([]byte, 0, len(body)+1024)
	segs := make([][]byte, 0, 64)
	ids := make([]uint32, 0, 16)
	one, handle := []byte("1"), []byte(`{"do_remote_decode":true}`)
	for name, f := range map[string]func(){
		"Scan": func() {
			if d.Scan(body, Limits{}) != nil {
				t.Fatal("scan failed")
			}
		},
		"Edited": func() {
			dst = d.Edited(dst[:0], Edit{KeyMaxTokens, Set, one}, Edit{Key: KeyStream, Op: Remove}, Edit{KeyKVTransferParams, Set, handle})
		},
		"Segments": func() {
			segs = d.Segments(segs[:0], Edit{KeyMaxTokens, Set, one}, Edit{Key: KeyStream, Op: Remove}, Edit{KeyKVTransferParams, Set, handle})
		},
		"Find and TokenIDs": func() {
			v, _, _ := Find(resp, "tokens")
			ids, _ = TokenIDs(ids[:0], resp[v.Start:v.End])
		},
		"Scan and TakeIDs": func() {
			if d.Scan(prompt, Limits{}) != nil {
				t.Fatal("scan failed")
			}
			var ok bool
			if ids, ok = d.ScannedIDs(KeyPrompt, ids); !ok || len(ids) != 3 {
				t.Fatal("no ids")
			}
		},
		"Scan and TakeIDs of a long prompt": func() {
			if d.Scan(long, Limits{}) != nil {
				t.Fatal("scan failed")
			}
			var ok bool
			if ids, ok = d.ScannedIDs(KeyPrompt, ids); !ok || len(ids) != 20_001 {
				t.Fatal("no ids")
			}
		},
		"TokenIDs of a room that is just large enough": func() {
			if got, err := TokenIDs(exact, many); err != nil || len(got) != cap(exact) {
				t.Fatal(len(got), err)
			}
		},
		"AppendTokenIDs": func() { dst = AppendTokenIDs(dst[:0], ids) },
		"accessors": func() {
			_, _ = d.Int(KeyMaxTokens)
			_ = d.Bool(KeyStream)
			_ = d.String(KeyModel)
			for it := Walk(d.Raw(KeyMessages)); it.Next(); {
				for m := Walk(it.Raw()); m.Next(); {
					_ = m.IsKey("content")
				}
			}
		},
	} {
		if err := d.Scan(body, Limits{}); err != nil {
			t.Fatal(err)
		}
		f() // two rooms for ids change hands
		if n := testing.AllocsPerRun(50, f); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}
