package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"sluice/router/worker"
)

// TestPrefillUnexpectedStatus: what a prefill engine answers with a 2xx that is not 200 is
// no answer to the client, who asked for more than one token.
func TestPrefillUnexpectedStatus(t *testing.T) {
	for _, status := range []int{201, 202, 203, 204, 205, 206} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(status, stream), func(t *testing.T) {
				odd := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
					if status == 204 || status == 205 {
						w.WriteHeader(status)
						return
					}
					replyJSON(w, status, prefillReply(""))
				})
				good, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
				r := startRouter(t, nil, odd.worker(worker.Prefill, "p0"), simWorker(good, worker.Prefill, "p1"), simWorker(d, worker.Decode, "d0"))
				want := post(t, d.URL()+"/v1/chat/completions", chat(""))
				for range 8 { // some of them are tried on p0 first
					a := post(t, r.URL+"/v1/chat/completions", chat(fmt.Sprintf(`,"stream":%v`, stream)))
					if a.Status != 200 || a.text(t) != want.text(t) || stream && !strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
						t.Fatalf("%d %v %s", a.Status, a.Header, a.Body)
					}
				}
			})
		}
	}
}
