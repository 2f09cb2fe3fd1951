package pd

import (
	"fmt"
	"testing"
	"time"

	"sluice/router/worker"
)

func TestStoredResponsesTable(t *testing.T) {
	now := time.Now()
	a, b := &worker.Rank{}, &worker.Rank{}
	s := storedResponses{max: 3}
	s.add("x", "1", a, now)
	s.add("y", "1", b, now) // another client's id stays that client's
	if s.find("x", "1", now) != a || s.find("y", "1", now) != nil || s.find("", "1", now) != nil {
		t.Error("a response is given to another client")
	}
	s.forget("y", "1")
	if s.find("x", "1", now) != a {
		t.Error("another client's response is forgotten")
	}
	s.add("x", "1", b, now)
	if s.find("x", "1", now) != b {
		t.Error("the newest answer of an id does not count")
	}
	for i := 2; i <= 4; i++ {
		s.add("x", fmt.Sprint(i), a, now)
	}
	if s.find("x", "1", now) != nil || s.find("x", "2", now) != a || s.ages.Len() != 3 || len(s.byID) != 3 {
		t.Errorf("%d and %d are kept, want 3 without the oldest", s.ages.Len(), len(s.byID))
	}
	later := now.Add(storedFor)
	if s.find("x", "2", later.Add(-1)) != a || s.find("x", "2", later) != nil || len(s.byID) != 0 {
		t.Error("the time of a response is not kept to")
	}
	s.add("x", "", a, now)
	s.add("x", "5", nil, now)
	if len(s.byID) != 0 {
		t.Error("what has no id or rank is kept")
	}
}

// TestStoredResponsesAreSharedFairly fills the table with one client's responses. Earlier they
// displaced those of every other client.
func TestStoredResponsesAreSharedFairly(t *testing.T) {
	now, rank := time.Now(), &worker.Rank{}
	s := storedResponses{max: 8}
	count := func(owner string) (n int) {
		for i := range 100 {
			if s.find(owner, owner+fmt.Sprint(i), now) != nil {
				n++
			}
		}
		return n
	}
	add := func(owner string, from, to int) {
		for i := from; i < to; i++ {
			s.add(owner, owner+fmt.Sprint(i), rank, now)
		}
	}
	add("a", 0, 3)
	add("b", 0, 100)
	if a, b := count("a"), count("b"); a != 3 || b != 5 {
		t.Errorf("%d of 3 responses of a are left beside %d of b, want all and 5", a, b)
	}
	if s.find("b", "b99", now) == nil || s.find("b", "b94", now) != nil {
		t.Error("not the oldest of b went")
	}
	add("a", 3, 100)
	if a, b := count("a"), count("b"); a != 4 || b != 4 {
		t.Errorf("%d of a and %d of b, want 4 each", a, b)
	}
	add("c", 0, 1) // c stores its first response in a full table
	if a, b, c := count("a"), count("b"), count("c"); a+b != 7 || c != 1 {
		t.Errorf("%d of a, %d of b, %d of c; want 7 and 1", a, b, c)
	}
	for owner := range s.owners {
		for i := range 100 {
			s.forget(owner, owner+fmt.Sprint(i))
		}
	}
	if len(s.byID)+len(s.owners)+s.ages.Len() != 0 {
		t.Errorf("%d ids and %d clients are left of none", len(s.byID), len(s.owners))
	}
}

func TestResponseID(t *testing.T) {
	for body, want := range map[string]string{
		`{"id":"resp_1","x":1}`:        "resp_1",
		`{"id":"resp_1","instru`:       "resp_1",
		"1f4\r\n" + `{"id":"resp_1","`: "resp_1",
		`{"x":{"id":"a"},"id":"b"}`:    "b",
		`{ "id" : "\u0062" }`:          "b",
		`{"id":"resp_`:                 "",
		`{"x":{"id":"a"}`:              "",
		`{"id":7}`:                     "",
		``:                             "",
	} {
		if got := responseID([]byte(body)); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}
