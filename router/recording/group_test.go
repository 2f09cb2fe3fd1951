package recording

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestFilesAreGroupedByRecording: files of several recordings in one directory are grouped by
// recording, in order. A file too short to identify its recording forms its own group.
func TestFilesAreGroupedByRecording(t *testing.T) {
	dir := t.TempDir()
	place := func(name, from string, keep int) string { // keep > 0: only so many bytes; otherwise drop so many from the end
		raw, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if keep <= 0 {
			keep += len(raw)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, raw[:keep], 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	before := time.Now()
	one, two := record(t, 2), record(t, 2)
	a, b, c := place("1", one, 0), place("2", two, 0), place("3", one, -frameHeadSize) // c lacks its end
	d := place("4", two, headerSize+frameHeadSize+5)                                   // contains a part of its first frame
	got, err := GroupByRecording([]string{d, c, a, b, a})
	if err != nil {
		t.Fatal(err)
	}
	want := [][]string{{a, c}, {b}, {d}}
	if len(got) != len(want) {
		t.Fatalf("%v, want %v", got, want)
	}
	for i := range got {
		if !slices.Equal(got[i].Files, want[i]) {
			t.Errorf("group %d: %v, want %v", i, got[i].Files, want[i])
		}
		if old := got[i].Began.Before(before.Truncate(time.Microsecond)); old != (i == 2) {
			t.Errorf("group %d began at %v", i, got[i].Began)
		}
	}
	if err := os.WriteFile(d, []byte("something else"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := GroupByRecording([]string{a, d}); err == nil {
		t.Error("a file that is not a recording was taken for one")
	}
}
