package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// runPython runs a program that may import the modules of scripts/, and returns what it prints and
// whether it succeeded.
func runPython(t *testing.T, program string) (string, bool) {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	cmd := exec.Command(python, "-B", "-c", program)
	cmd.Dir = filepath.Join(repositoryRoot, "scripts")
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err == nil
}

// TestAcceptanceSaysWhatWasSkipped: a check that leaves a part out has not simply passed.
func TestAcceptanceSaysWhatWasSkipped(t *testing.T) {
	for output, want := range map[string]string{
		`0, "ok    a\n\nall checks passed\n"`:                                 "passed | all checks passed",
		`0, "ok    a\nskip  b: no c\nskip  d: no e\nall checks passed\n"`:     "passed, in part | 2 skipped: b: no c; d: no e; all checks passed",
		`0, "=== RUN   TestA\n    --- SKIP: TestA/b (0.00s)\nok  \tsluice\n"`: "passed, in part | 1 skipped: TestA/b (0.00s); ok  \tsluice",
		`1, "skip  b: no c\nsome checks failed\n"`:                            "FAILED | some checks failed",
		`0, ""`: "passed |",
	} {
		if got, ok := runPython(t, "import acceptance; print(' | '.join(acceptance.judge("+output+")))"); !ok || got != want {
			t.Errorf("%s is judged as %q, want %q", output, got, want)
		}
	}
}

// TestBenchClientsFail: bench_clients_test.py fails if a client that can run fails, although the others
// cannot run here, and its last line names those.
func TestBenchClientsFail(t *testing.T) {
	for succeeds, want := range map[string]string{
		"False": "bench_clients_test: some checks failed",
		"True":  "bench_clients_test: all checks passed but 3 skipped: vllm, sglang, aiperf",
	} {
		out, ok := runPython(t, `
import sys
import bench_clients_test as b
class Router:
    url = "http://127.0.0.1:1"
    def __init__(self, work): pass
    def stop(self): pass
b.VLLM, b.Router = "/absent", Router
b.measured = lambda router, what, *_: b.check(what, `+succeeds+`)
sys.argv = ["bench_clients_test.py"]
b.main()`)
		if ok != (succeeds == "True") || !strings.HasSuffix(out, want) {
			t.Errorf("with a result of %s it succeeds: %v, and prints %q; want %q at the end", succeeds, ok, out, want)
		}
	}
}
