package families

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestPrefillUnexpectedStatus: a 2xx response of a prefill engine other than 200 is not sent to the
// client, which requested more than one token.
func TestPrefillUnexpectedStatus(t *testing.T) {
	t.Parallel()
	for _, status := range []int{201, 202, 203, 204, 205, 206} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(status, stream), func(t *testing.T) {
				odd := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
					if status == 204 || status == 205 {
						w.WriteHeader(status)
						return
					}
					harness.ReplyJSON(w, status, harness.PrefillReply(""))
				})
				good, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
				r := harness.StartRouter(t, nil, odd.Worker(worker.Prefill, "p0"), harness.SimWorker(good, worker.Prefill, "p1"), harness.SimWorker(d, worker.Decode, "d0"))
				want := harness.Post(t, d.URL()+"/v1/chat/completions", harness.Chat(""))
				for range 8 { // some requests try p0 first
					a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"stream":%v`, stream)))
					if a.Status != 200 || a.Text(t) != want.Text(t) || stream && !strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
						t.Fatalf("%d %v %s", a.Status, a.Header, a.Body)
					}
				}
			})
		}
	}
}
