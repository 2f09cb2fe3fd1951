package monotime

import (
	"testing"
	"testing/synctest"
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

func TestSince(t *testing.T) {
	at := Of(time.Now().Add(-time.Minute))
	if d := at.Since(); d < time.Minute || d > time.Minute+10*time.Second {
		t.Errorf("a minute ago is %v ago", d)
	}
}

func TestClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		c := StartClock()
		time.Sleep(time.Minute)
		if now := c.Now(); now != time.Minute {
			t.Errorf("a minute after its start the clock shows %v", now)
		}
		if at := c.At(time.Second); !at.Equal(began.Add(time.Second)) {
			t.Errorf("one second on the clock was at %v; want a second after %v", at, began)
		}
	})
}
