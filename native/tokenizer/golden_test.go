package tokenizer

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestGolden: the texts of testdata/templates are those of transformers, as
// `scripts/tokenizer_golden.py rewrite` has recorded them.
func TestGolden(t *testing.T) {
	m := load1(t, "testdata/golden")
	f, err := os.Open("testdata/golden.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	texts := 0
	for n := 1; lines.Scan(); n++ {
		var c struct {
			Template, Text string
			Request        json.RawMessage
			Error          *string // "" if it is not the template's own
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		template, err := os.ReadFile(filepath.Join("testdata/templates", c.Template))
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.Render(nil, string(template), c.Request)
		var e *Error
		switch {
		case c.Error == nil && (err != nil || string(got) != c.Text):
			t.Errorf("line %d: %s gives %#v and\n%s\nwant\n%s", n, c.Template, err, got, c.Text)
		case c.Error != nil && (!errors.As(err, &e) || *c.Error != "" && e.Reason != *c.Error):
			t.Errorf("line %d: %s gives %#v, want the error %q", n, c.Template, err, *c.Error)
		case c.Error == nil:
			texts++
		}
	}
	if err := lines.Err(); err != nil || texts < 50 {
		t.Errorf("%d texts compared, %v", texts, err)
	}
}
