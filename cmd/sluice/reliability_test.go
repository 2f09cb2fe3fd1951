package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestReliabilityNamesTests checks that the tests listed in scripts/reliability.py, and in the page that
// it has written, exist.
func TestReliabilityNamesTests(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(repositoryRoot, "RELIABILITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| `([^`]+)` `(Test[A-Za-z0-9]+)` \\| ").FindAllStringSubmatch(string(page), -1)
	if points := strings.Count(string(page), "\n## "); points < 18 || len(rows) < 40 {
		t.Errorf("%d points with %d tests; want 18 points and 40 tests at least", points, len(rows))
	}
	for _, row := range rows {
		files, _ := filepath.Glob(filepath.Join(repositoryRoot, row[1], "*_test.go"))
		found := false
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			found = found || strings.Contains(string(text), "\nfunc "+row[2]+"(t *testing.T)")
		}
		if !found {
			t.Errorf("%s has no %s: make reliability updates the page", row[1], row[2])
		}
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 to read the list with")
	}
	out, err := exec.Command(python, "-c", `import sys; sys.path.insert(0, sys.argv[1]); sys.dont_write_bytecode = True
import reliability
for _, _, tests in reliability.POINTS:
    for t in tests: print(t[0][2:], t[1])`, filepath.Join(repositoryRoot, "scripts")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	listed := strings.Fields(string(out))
	if len(listed) != 2*len(rows) {
		t.Errorf("the list has %d tests, the page %d: make reliability", len(listed)/2, len(rows))
	}
}
