package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/fleet"
	"sluice/router/worker"
)

var (
	_ Sink   = (*fleet.Fleet)(nil)
	_ Source = Static(nil)
)

// recorder is a Sink that records its calls and refuses the ids that a test sets.
type recorder struct {
	mu     sync.Mutex
	in     map[string]worker.Spec
	calls  []string
	refuse map[string]bool
}

func newRecorder() *recorder {
	return &recorder{in: map[string]worker.Spec{}, refuse: map[string]bool{}}
}

func (r *recorder) Add(s worker.Spec) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.in[s.ID]; there || r.refuse[s.ID] {
		return fmt.Errorf("cannot add %q", s.ID)
	}
	r.in[s.ID] = s
	r.calls = append(r.calls, "+"+s.ID)
	return nil
}

func (r *recorder) Remove(id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.in[id]; !there {
		return errors.New("not there")
	}
	delete(r.in, id)
	r.calls = append(r.calls, "-"+id)
	return nil
}

func (r *recorder) ids() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(r.in)), " ")
}

func (r *recorder) takeCalls() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := strings.Join(r.calls, " ")
	r.calls = nil
	return s
}

func spec(id, url string) worker.Spec { return worker.Spec{ID: id, URL: url} }

func TestReplaceIsADiff(t *testing.T) {
	r := newRecorder()
	s := NewSet("test", r, nil)
	d := s.Replace([]worker.Spec{spec("a", "http://h:1"), spec("b", "http://h:2"), spec("c", "http://h:3")})
	if got := r.takeCalls(); got != "+a +b +c" || d.Err != nil || len(d.Added) != 3 {
		t.Fatalf("%s: %+v", got, d)
	}
	d = s.Replace([]worker.Spec{spec("a", "http://h:1"), spec("b", "http://h:9"), spec("d", "http://h:4")})
	if got := r.takeCalls(); got != "-c -b +b +d" || d.Unchanged != 1 || fmt.Sprint(d.Added, d.Changed, d.Removed) != "[d] [b] [c]" {
		t.Errorf("%s: %+v; want a untouched", got, d)
	}
	if d = s.Replace([]worker.Spec{spec("a", "http://h:1"), spec("b", "http://h:9"), spec("d", "http://h:4")}); !d.Empty() || r.takeCalls() != "" || d.Unchanged != 3 {
		t.Errorf("the same again: %+v", d)
	}
	d = s.Replace([]worker.Spec{spec("a", "http://h:1"), spec("a", "http://h:2")})
	if d.Err == nil || !strings.Contains(d.Err.Error(), `"a"`) || r.ids() != "a" {
		t.Errorf("an id twice: %v, in: %s", d.Err, r.ids())
	}
	if st := s.State(); st.Workers != 1 || st.Error == "" || st.Since.IsZero() {
		t.Errorf("%+v", st)
	}
}

// TestRefusedWorkersAreRetried checks that a refused worker is offered again, and that the error
// ends when the fleet accepts it.
func TestRefusedWorkersAreRetried(t *testing.T) {
	r := newRecorder()
	r.refuse["b"] = true
	s := NewSet("test", r, nil)
	d := s.Replace([]worker.Spec{spec("a", "http://h:1"), spec("b", "http://h:2")})
	if d.Err == nil || r.ids() != "a" {
		t.Fatalf("%v, in: %s", d.Err, r.ids())
	}
	s.Retry()
	if s.State().Error == "" {
		t.Error("the fault is gone before the worker is in")
	}
	r.mu.Lock()
	r.refuse = map[string]bool{}
	r.mu.Unlock()
	s.Retry()
	if st := s.State(); r.ids() != "a b" || st.Error != "" || st.Workers != 2 {
		t.Errorf("in: %s, %+v", r.ids(), st)
	}
}

// TestPartialErrorStays checks that State has the error about workers that a source could not
// describe until the source reports again, whatever happens to its other workers.
func TestPartialErrorStays(t *testing.T) {
	r := newRecorder()
	r.refuse["b"] = true
	s := NewSet("test", r, nil)
	d := s.ReplaceExcept([]worker.Spec{spec("a", "http://h:1"), spec("b", "http://h:2")}, errors.New("c has no port"))
	if err := s.State().Error; !strings.Contains(err, "c has no port") || !strings.Contains(err, `"b"`) || d.Err == nil || strings.Contains(d.Err.Error(), "port") {
		t.Errorf("%q, %v", err, d.Err)
	}
	r.mu.Lock()
	r.refuse = map[string]bool{}
	r.mu.Unlock()
	s.Retry()
	if st := s.State(); r.ids() != "a b" || st.Workers != 2 || st.Error != "c has no port" {
		t.Errorf("in: %s, %+v", r.ids(), st)
	}
	s.Failed(errors.New("the source is down"))
	s.ReplaceExcept([]worker.Spec{spec("a", "http://h:1")}, errors.New("c has no port"))
	if st := s.State(); r.ids() != "a" || st.Error != "c has no port" {
		t.Errorf("in: %s, %+v", r.ids(), st)
	}
	if s.Replace([]worker.Spec{spec("a", "http://h:1")}); s.State().Error != "" {
		t.Errorf("%+v", s.State())
	}
}

func TestStatic(t *testing.T) {
	f := fleet.New(fleet.Options{})
	defer f.Close()
	run := NewRunner(f, nil)
	list := Static{{ID: "a", URL: "http://127.0.0.1:1"}, {ID: "b", URL: "http://127.0.0.1:2", Role: worker.Decode}}
	if err := run.Start(list, list...); err != nil {
		t.Fatal(err)
	}
	if n := len(f.View().Workers); n != 2 {
		t.Errorf("%d workers when Start returned; want 2", n)
	}
	run.Close()
	if n := len(f.View().Workers); n != 2 {
		t.Errorf("%d workers left after the source ended; want 2", n)
	}
}

func TestStartReportsEveryError(t *testing.T) {
	f := fleet.New(fleet.Options{})
	defer f.Close()
	run := NewRunner(f, nil)
	defer run.Close()
	list := Static{spec("a", "http://h:1"), spec("a", "http://h:2"), spec("b", "nonsense"), spec("c", "http://h:3")}
	err := run.Start(list, list...)
	if err == nil || !strings.Contains(err.Error(), `"a"`) || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("%v", err)
	}
	if n := len(f.View().Workers); n != 2 {
		t.Errorf("%d workers; want the 2 good ones", n)
	}
}

// workerLines returns a worker for each line "id url". The tests of package config cover the
// errors of the real parser.
func workerLines(text []byte) (out []worker.Spec, err error) {
	for i, l := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		id, url, ok := strings.Cut(l, " ")
		if !ok {
			return nil, fmt.Errorf("f:%d:1: no worker", i+1)
		}
		out = append(out, spec(id, url))
	}
	return out, nil
}

func startFile(t *testing.T, path string) (*recorder, *Runner) {
	t.Helper()
	r := newRecorder()
	run := NewRunner(r, nil)
	t.Cleanup(run.Close)
	if err := run.Start(&File{Path: path, Parse: workerLines, Interval: 10 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	return r, run
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestFileChangesAreApplied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "workers")
	r, run := startFile(t, path)
	fault := func(word string) func() bool {
		return func() bool { return strings.Contains(run.States()[0].Error, word) }
	}
	testwait.Until(t, "a missing file is a fault", fault("no such file"))
	write(t, path, "a http://h:1\nb http://h:2\n")
	testwait.Until(t, "both are in", func() bool { return r.ids() == "a b" && run.States()[0].Error == "" })
	r.takeCalls()

	write(t, path, "a http://h:1\nnonsense\n")
	testwait.Until(t, "the fault and its place are shown", fault("f:2:1"))
	if r.ids() != "a b" || r.takeCalls() != "" {
		t.Error("a broken edit touched the workers")
	}
	write(t, path, "a http://h:1\nb http://h:2\n")
	testwait.Until(t, "the fault is gone", func() bool { return run.States()[0].Error == "" })
	if got := r.takeCalls(); got != "" {
		t.Errorf("the old text again changed workers: %s", got)
	}

	// Editors and ConfigMaps replace the file by a rename.
	other := path + ".new"
	write(t, other, "b http://h:7\nc http://h:3\n")
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the diff is done", func() bool { return r.ids() == "b c" })
	if got := r.takeCalls(); got != "-a -b +b +c" {
		t.Errorf("calls %s", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "a removed file is a fault", fault("no such file"))
	if r.ids() != "b c" {
		t.Error("a removed file took the workers along")
	}
	run.Close()
	write(t, path, "z http://h:1\n")
	testwait.Holds(t, 30*time.Millisecond, "nothing is read after Close", func() bool { return r.ids() == "b c" })
}

// TestFileIsReadWhenStable checks that a file is not applied while it is being written.
func TestFileIsReadWhenStable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "workers")
	write(t, path, "a http://h:1\nb http://h:2\n")
	r, run := startFile(t, path)
	testwait.Until(t, "both are in", func() bool { return r.ids() == "a b" })
	r.takeCalls()
	whole := "a http://h:1\nb http://h:2\nc http://h:3\n"
	for end := time.Now().Add(20 * time.Second); ; {
		pause, last := time.Duration(0), time.Now()
		for i := range whole { // each prefix is a different text and stays for less than stableTime
			write(t, path, whole[:i+1])
			testwait.Pace(time.Millisecond)
			pause, last = max(pause, time.Since(last)), time.Now()
		}
		testwait.Until(t, "the third is in", func() bool { return r.ids() == "a b c" && run.States()[0].Error == "" })
		got := r.takeCalls()
		if got == "+c" {
			return
		}
		if pause < stableTime/2 || time.Now().After(end) {
			t.Fatalf("calls %s; want one addition; no text stood for longer than %v", got, pause)
		}
		write(t, path, whole[:2*len("a http://h:1\n")]) // the machine stood still, and so did half a text
		testwait.Until(t, "both are in", func() bool { return r.ids() == "a b" })
		r.takeCalls()
	}
}

func TestUnusableFile(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"folder": func(p string) error { return os.Mkdir(p, 0o755) },
		"large":  func(p string) error { return os.WriteFile(p, make([]byte, maxFile+1), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "workers")
			if err := make(path); err != nil {
				t.Fatal(err)
			}
			_, run := startFile(t, path)
			testwait.Until(t, "it is a fault", func() bool { return strings.Contains(run.States()[0].Error, "cannot read") })
		})
	}
}

type failingSource struct{}

func (failingSource) Name() string                        { return "gone" }
func (failingSource) Run(_ context.Context, _ *Set) error { return errors.New("cannot work") }

func TestFailedSourceReportsError(t *testing.T) {
	run := NewRunner(newRecorder(), nil)
	defer run.Close()
	if err := run.Start(failingSource{}); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "its state says why", func() bool { return run.States()[0].Error == "cannot work" })
}
