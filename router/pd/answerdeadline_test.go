package pd

import (
	"testing"
	"testing/synctest"
	"time"

	"sluice/dataplane/upstream"
)

func TestAnswerDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		deadlines := newAnswerDeadlines()
		kept, stopped := new(answerDeadline), new(answerDeadline)
		deadlines.Add(kept)
		deadlines.Add(stopped)
		var late, done upstream.Call
		kept.start(&late, time.Now().Add(prefillAnswerGrace))
		stopped.start(&done, time.Now().Add(prefillAnswerGrace))
		deadlines.Wake()
		time.Sleep(prefillAnswerGrace - answerDeadlineInterval)
		if late.Cancelled() {
			t.Error("the call was cancelled before its deadline")
		}
		stopped.stop()
		time.Sleep(3 * answerDeadlineInterval)
		if !late.Cancelled() {
			t.Error("the call was not cancelled after its deadline")
		}
		if done.Cancelled() {
			t.Error("a call was cancelled after its deadline was removed")
		}
	})
}
