package abort

import (
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/upstream"
)

func TestAnswerDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		deadlines := NewDeadlines()
		kept, stopped := new(Deadline), new(Deadline)
		deadlines.Add(kept)
		deadlines.Add(stopped)
		var late, done upstream.Call
		kept.Start(&late, time.Now().Add(3*time.Second))
		stopped.Start(&done, time.Now().Add(3*time.Second))
		deadlines.Wake()
		time.Sleep(3*time.Second - deadlineInterval)
		if late.Cancelled() {
			t.Error("the call was cancelled before its deadline")
		}
		stopped.Stop()
		time.Sleep(3 * deadlineInterval)
		if !late.Cancelled() {
			t.Error("the call was not cancelled after its deadline")
		}
		if done.Cancelled() {
			t.Error("a call was cancelled after its deadline was removed")
		}
	})
}
