package front

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestAPIDocument compares the tables of docs/api.md with the route table: every route is there with its
// methods, and nothing else.
func TestAPIDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string]string)
	for _, row := range regexp.MustCompile("(?m)^\\| (`/.+?`) \\| ([A-Z, ]+) \\|").FindAllStringSubmatch(string(text), -1) {
		for path := range strings.SplitSeq(row[1], ", ") {
			documented[strings.Trim(path, "`")] = row[2]
		}
	}

	table := newRoutes(true)
	// What the message of a 404 lists, and former paths, which it leaves out.
	served := slices.Collect(maps.Keys(table.byPath))
	for entry := range strings.SplitSeq(table.known, ", ") {
		served = append(served, entry[strings.LastIndexByte(entry, ' ')+1:])
	}
	for _, path := range served {
		if _, ok := documented[path]; !ok {
			t.Errorf("docs/api.md lacks %s", path)
		}
	}
	for path, methods := range documented {
		found, ok := table.find([]byte(strings.ReplaceAll(path, "{id}", "resp_1")))
		if want := strings.TrimSuffix(found.methods, ", HEAD"); !ok || methods != want {
			t.Errorf("docs/api.md has %s %s; the router serves %q", methods, path, want)
		}
	}
}
