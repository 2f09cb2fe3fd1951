package relay

import (
	"net"
	"sluice/dataplane/sse"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// An event in too many reads flows. Where its end comes together with the beginning of the
// last chunk, that is held all the same, so that there is room for an error event.
func TestLastChunkAfterLargeEvent(t *testing.T) {
	const token = `data: {"choices":[{"delta":{"content":"a long one, in very many reads"}}]}` + "\n\n"
	framed := chunksOf(token)
	res, dst, _ := relayOnce(t, Options{Protocol: sse.OpenAI}, func(nc *net.TCPConn) {
		send(nc, streamHead)
		at := len(framed) - 3
		for i := range at {
			send(nc, framed[i:i+1])
			testwait.Pace(time.Millisecond) // a read each
		}
		send(nc, framed[at:]+"0")
		testwait.Pace(10 * time.Millisecond)
		send(nc, "\r\n\r\n")
		waitClosed(nc)
	})
	if got := string(dechunk(t, dst.got)); res.Cause != EngineIncomplete || !res.Reusable || !strings.HasPrefix(got, token) || !strings.Contains(got, errIncomplete.Error()) {
		t.Errorf("%+v, got %q", res, got)
	}
}
