package pd

import (
	"testing"
	"time"

	"sluice/router/admission"
	"sluice/router/config"
)

func TestClassOfPriority(t *testing.T) {
	s, err := newAdmissionSettings(&config.Admission{Mode: "fair", Classes: []config.AdmissionClass{{Name: "high", Priorities: []string{"-9..-1"}}, {Name: "low", Priorities: []string{"1", "3..5"}}}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	for number, want := range map[string]string{"-9": "high", "1": "low", "4": "low", "2": "", "0": "", "-10": "", "99999999999999999999": "", "1.0": "", "true": "", "": ""} {
		got := ""
		if c := s.classOf([]byte(number)); c != nil {
			got = c.Name
		}
		if got != want {
			t.Errorf("priority %q: class %q; want %q", number, got, want)
		}
	}
}

// The error of a full queue names the bound that is reached, and its value.
func TestDescribeFull(t *testing.T) {
	a := config.Admission{Mode: "fair", MaxRequests: 7, MaxBytes: 8, Classes: []config.AdmissionClass{{Name: "high", MaxRequests: 5, MaxBytes: 6}}}
	s, err := newAdmissionSettings(&a, 8)
	if err != nil {
		t.Fatal(err)
	}
	q := &request{}
	q.settings = &settings{admission: s}
	q.class = &s.classes[0]
	for bound, want := range map[admission.Bound]string{
		admission.ClassRequests: "at most 5 requests of class high may wait (its max_requests)",
		admission.ClassBytes:    "at most 6 bytes of class high may wait (its max_bytes)",
		admission.AllRequests:   "at most 7 requests may wait (admission.max_requests)",
		admission.AllBytes:      "at most 8 bytes may wait (admission.max_bytes)",
	} {
		if got := q.describeFull(bound); got != want {
			t.Errorf("bound %d: %q; want %q", bound, got, want)
		}
	}
	a.MaxBytes = 0
	if got, want := q.describeFull(admission.AllBytes), "at most 8 bytes may wait (half of limits.memory_budget, as admission.max_bytes is 0)"; got != want {
		t.Errorf("a derived bound: %q; want %q", got, want)
	}
}

// A refused request may come again after the forecast, but the forecast of a queue that stands still does not
// keep it away for hours.
func TestRetryAfter(t *testing.T) {
	c := admissionClass{wait: 30 * time.Second}
	for forecast, want := range map[time.Duration]time.Duration{-1: time.Second, time.Millisecond: time.Second, 5 * time.Second: 5 * time.Second, 24 * time.Hour: 30 * time.Second} {
		if got := c.retryAfter(forecast); got != want {
			t.Errorf("after a forecast of %v a client may retry after %v; want %v", forecast, got, want)
		}
	}
}
