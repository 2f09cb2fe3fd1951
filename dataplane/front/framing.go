package front

import "errors"

// framing bounds what comes around a chunked body's bytes. fasthttp reads extensions of any
// length, and none of them is counted in limits.max_body.
type framing struct {
	bound int64 // of taken; 0: none
	taken int64 // bytes read from the connection since the body was opened
}

// A body may have so much around it: framingBase, as much as the body, and framingStep for
// each read of it, which is for each chunk at least: its size and two line ends.
const (
	framingBase = 16 << 10
	framingStep = 8
)

var errFraming = errors.New("the framing of its chunks (extensions, trailers) is larger than 16 KiB and the body itself")

// expect moves the bound on: read bytes of the body have come, in so many steps, and ahead
// bytes may have been read beyond them.
func (f *framing) expect(read, steps, ahead int64) {
	f.bound = framingBase + 2*read + framingStep*steps + ahead
}

func (f *framing) reached() bool { return f.bound > 0 && f.taken >= f.bound }
