package front

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"strconv"

	"sluice/dataplane/upstream"
)

// hopHeader lists the routers that a request has passed, by their pseudonyms, the last one
// behind. It is a header of the router's own rather than Via, which proxies between two
// routers may rewrite or remove.
const hopHeader = "X-Sluice-Via"

// maxHops bounds the routers that a request may pass.
const maxHops = 8

// pseudonym names this process in hopHeader. It is random, so that it tells nothing about the
// machine and no two processes share one.
var pseudonym = newPseudonym()

func newPseudonym() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// HopField returns the header line of a request x by which a router recognizes a request that it has sent. Every
// client's request that is passed on to an engine must have it, on each of its legs: an engine may
// turn out to be a router, even this one. It allocates only if the request has passed another
// router.
//
// The router's own calls of /tokenize do not name this router. The answer for a prompt is shared by
// requests that have passed different routers, and no loop can arise: a router that receives the
// call passes it on as a client's request, with this line, and makes no such call for it.
func HopField(x Exchange) upstream.Field {
	passed := x.HeaderList(hopHeader)
	if passed == nil {
		return upstream.Field{Name: hopHeader, Value: pseudonym}
	}
	return upstream.Field{Name: hopHeader, Value: string(passed) + "," + pseudonym}
}

// AppendPassedHops appends the header line of the routers that the request of x passed before this one,
// if there are any. An in-process request that continues this one needs it, so that a loop is
// still counted to its end.
func AppendPassedHops(dst []upstream.Field, x Exchange) []upstream.Field {
	if passed := x.HeaderList(hopHeader); passed != nil {
		return append(dst, upstream.Field{Name: hopHeader, Value: unsafeString(passed)})
	}
	return dst
}

// checkHops refuses a request that has passed this process before or too many routers; when
// it refuses, it has answered and returns false.
func (x *httpExchange) checkHops() bool {
	passed := x.head.FindAll(hopHeader)
	if passed == nil {
		return true
	}
	hops := 0
	for hop := range bytes.SplitSeq(passed, []byte{','}) {
		if hops++; string(bytes.TrimSpace(hop)) == pseudonym {
			x.Error(LoopDetected, "", "routing loop: one of this router's workers is this router, or leads back to it", 0)
			return false
		}
		if hops > maxHops {
			x.Error(LoopDetected, "", "the request has passed more than "+strconv.Itoa(maxHops)+" routers (header "+hopHeader+")", 0)
			return false
		}
	}
	return true
}
