package harness

import (
	"slices"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// PostAsync sends a request in a new goroutine and returns a channel for the response.
func PostAsync(t *testing.T, url, body string) <-chan *Answer {
	t.Helper()
	got := make(chan *Answer, 1)
	go func() {
		a, err := TryPost(t.Context(), url, body)
		if err != nil {
			t.Error(err)
			a = &Answer{}
		}
		got <- a
	}()
	return got
}

// AwaitState waits at most 10 s until requests see a worker in a state (see State).
func (r *Router) AwaitState(t *testing.T, id string, want worker.State) {
	t.Helper()
	testwait.UntilWithin(t, 10*time.Second, id+" becomes "+want.String(), func() bool { return r.State(id) == want })
}

// MatrixFamilyNamed returns the first row of a family. The row is shared: see MatrixFamilies.
func MatrixFamilyNamed(t *testing.T, name string) *MatrixFamily {
	t.Helper()
	i := slices.IndexFunc(MatrixFamilies, func(f MatrixFamily) bool { return f.Name == name })
	if i < 0 {
		t.Fatalf("no family %q", name)
	}
	return &MatrixFamilies[i]
}
