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
	s.add("y", "1", b, now) // another client's id is not taken over
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
