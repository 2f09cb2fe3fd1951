package fieldrules

import (
	"bufio"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/jsonscan"
)

// TestEngineFieldsAreReviewed checks that every member of every request model of the engine
// releases in testdata/engine_fields.tsv is in the table or was reviewed as data. A release with
// a new member fails this test until a reviewer has determined what engines do with it.
func TestEngineFieldsAreReviewed(t *testing.T) {
	known, in := map[string]string{}, map[string]bool{}
	for _, f := range engineFields {
		if known[f.name] != "" {
			t.Errorf("%s is in the table twice", f.name)
		}
		known[f.name] = "the table"
		if nested := f.rule != routerOnly && f.key == noKey; nested != jsonscan.IsSensitive([]byte(f.name)) {
			t.Errorf("%s: jsonscan.IsSensitive says %v", f.name, !nested)
		}
		if f.key != noKey && f.key.Name() != f.name {
			t.Errorf("%s has the key of %s", f.name, f.key.Name())
		}
	}
	for line := range dataLines(t, "testdata/engine_fields_reviewed.txt") {
		for _, name := range strings.Fields(line) {
			if known[name] != "" {
				t.Errorf("%s is reviewed as data and in %s", name, known[name])
			}
			known[name] = "the reviewed"
		}
	}
	for line := range dataLines(t, "testdata/engine_fields.tsv") {
		row := strings.Split(line, "\t")
		if len(row) != 5 {
			t.Fatalf("not five columns: %q", line)
		}
		in[row[1]] = true
		if known[row[1]] == "" {
			t.Errorf("%s reads %q (%s, %s, %s): determine what it does with it, then add it to engineFields or to engine_fields_reviewed.txt",
				row[0], row[1], row[2], row[3], row[4])
		}
	}
	if len(in) < 200 {
		t.Errorf("only %d members are listed", len(in))
	}
	for name, where := range known {
		if where == "the reviewed" && !in[name] {
			t.Errorf("%s is reviewed, and no engine reads it any more", name)
		}
	}
}

// dataLines returns the lines of a file that are not comments.
func dataLines(t *testing.T, path string) func(yield func(string) bool) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return func(yield func(string) bool) {
		for s := bufio.NewScanner(f); s.Scan(); {
			if text := s.Text(); text != "" && text[0] != '#' && !yield(text) {
				return
			}
		}
	}
}

// TestCheckDoesNotWrite: the text of one URL was once written over the URL before it, so that an
// engine received a body that had not been checked.
func TestCheckDoesNotWrite(t *testing.T) {
	const part = `{"type":"image_url","image_url":{"url":"http://media.example/`
	body := `{"model":"m","messages":[{"role":"user","content":[` + part + `a"}},` + part + `longer\",\"kv_transfer_params\":{\"x\":1}"}},` + part + `third"}}]}]}`
	var d jsonscan.Doc
	if err := d.Scan([]byte(body), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	Check(&d, MediaHosts{"*"})
	if string(d.Body) != body {
		t.Errorf("the check has changed the body to %s", d.Body)
	}
}

func BenchmarkCheckFields(b *testing.B) {
	turn := `{"role":"user","content":[{"type":"text","text":"` + strings.Repeat("words and ", 400) + `"}]},{"role":"assistant","content":"` + strings.Repeat("and words ", 400) + `"},`
	text := `{"model":"m","messages":[` + strings.Repeat(turn, 16) + `{"role":"user","content":"go"}]}`
	image := strings.Replace(text, `"go"`, `[{"type":"image_url","image_url":{"url":"data:image/png;base64,`+strings.Repeat("A", 100_000)+`"}}]`, 1)
	for name, body := range map[string]string{"text": text, "image": image} {
		b.Run(name, func(b *testing.B) {
			var d jsonscan.Doc
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := d.Scan([]byte(body), jsonscan.Limits{}); err != nil {
					b.Fatal(err)
				}
				if d.MayBeSensitive {
					if bad := checkMembers(d.Body, nil); bad != nil {
						b.Fatal(bad.Field())
					}
				}
			}
		})
	}
}

// A scan once read the inner part of each of these shapes once for every level around it, or
// copied its names.
func TestFieldCheckIsLinear(t *testing.T) {
	pad := func(n int) string { return `[` + strings.Repeat(`[],`, n/3) + `[]]` }
	nest := func(open, inner, end string, levels int) string {
		return strings.Repeat(open, levels) + inner + strings.Repeat(end, levels)
	}
	const size = 1 << 20
	plain := `{"model":"m","image":` + pad(size) + `}`
	cost := func(body string) time.Duration {
		var d jsonscan.Doc
		if err := d.Scan([]byte(body), jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		if !d.MayBeSensitive {
			t.Fatalf("the check skips %.60s", body)
		}
		var tries []time.Duration
		for range 5 {
			began := time.Now()
			if bad := Check(&d, nil); bad != nil {
				t.Fatalf("%.60s: %s %s", body, bad.Field(), bad.Message)
			}
			tries = append(tries, time.Since(began))
		}
		slices.Sort(tries)
		return tries[len(tries)/2]
	}
	base := cost(plain)
	for name, body := range map[string]string{
		"media":         `{"model":"m","image_url":` + nest(`{"type":"image","url":`, `{"type":"image","pad":`+pad(size)+`}`, `}`, 12) + `}`,
		"media, deeper": `{"model":"m","image_url":` + nest(`{"type":"image","url":`, `{"type":"image","pad":`+pad(size)+`}`, `}`, 60) + `}`,
		"media in chat": `{"model":"m","messages":[{"role":"user","content":[` + nest(`{"type":"image_url","image_url":`, `{"url":"data:a","pad":`+pad(size)+`}`, `}`, 40) + `]}]}`,
		"arrays":        `{"model":"m","image_url":` + nest(`[`, pad(size), `]`, 60) + `}`,
		"objects":       `{"model":"m","rid":"a","x":` + nest(`{"a":`, pad(size), `}`, 60) + `}`,
		"types":         `{"model":"m","image":[` + strings.Repeat(`{"type":"image"},`, size/17) + `{}]}`,
		"a long name":   `{"model":"m","rid":"a","` + strings.Repeat("n", size) + `":1}`,
	} {
		if took := cost(body); took > 20*base {
			t.Errorf("%s: %v, %.1f times what a plain body of that size takes (%v)", name, took, float64(took)/float64(base), base)
		}
	}
	var d jsonscan.Doc
	long := `{"model":"m","rid":"a","` + strings.Repeat("n", size) + `":1}`
	if err := d.Scan([]byte(long), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	Check(&d, nil)
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 64<<10 {
		t.Errorf("a name of %d bytes takes %d bytes of memory that nothing counts", size, after.TotalAlloc-before.TotalAlloc)
	}
	rid := `{"model":"m","rid":` + nest(`[`, pad(size), `]`, 60) + `}`
	if err := d.Scan([]byte(rid), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if bad := Check(&d, nil); bad == nil || bad.Field() != "rid.0" {
		t.Errorf("nested arrays of ids are not refused: %+v", bad)
	}
	if took := time.Since(began); took > 20*base {
		t.Errorf("nested arrays of ids: %v, a plain body %v", took, base)
	}
}
