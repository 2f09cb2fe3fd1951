package monotime

import (
	"testing"
	"time"
)

func TestTime(t *testing.T) {
	var never Time
	if !never.IsZero() || !never.Time().IsZero() {
		t.Errorf("the zero Time is %v", never.Time())
	}
	now := time.Now()
	at := Of(now)
	if at.IsZero() || !at.Time().Equal(now) {
		t.Errorf("%v became %v", now, at.Time())
	}
	if later := Of(now.Add(time.Second)); time.Duration(later-at) != time.Second {
		t.Errorf("a second later is %v later", time.Duration(later-at))
	}
}

func TestUptime(t *testing.T) {
	before := Of(time.Now())
	up := Uptime()
	after := Of(time.Now())
	if up < time.Duration(before) || up > time.Duration(after) {
		t.Errorf("Uptime is %v between the times %v and %v", up, time.Duration(before), time.Duration(after))
	}
}
