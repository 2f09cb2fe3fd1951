package sim

import (
	"errors"
	"os"

	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
)

// conn is one connection of an incarnation: of a client, or of another simulated engine.
type conn struct {
	*httpconn.Conn
	incarnation *incarnation
	rank        int  // rank of the port that accepted it, -1 for the main port
	sideChannel bool // accepted on the side channel
}

// serve runs the connection until it ends.
func (c *conn) serve(handle func(*conn, *httpconn.Request) *core.Job) {
	defer func() {
		c.Drain()
		c.Close()
	}()
	if c.sideChannel && c.forwardZMQ() {
		return
	}
	for {
		r, err := c.ReadRequest()
		if err != nil {
			var pe *httpconn.ProtocolError
			if errors.As(err, &pe) {
				c.Respond(nil, pe.Status, "application/json", c.incarnation.e.errorBody(pe.Status, pe.Msg, ""))
			}
			return
		}
		if j := handle(c, r); j != nil && !c.awaitJob(j) {
			return
		}
		if r.Close {
			return
		}
	}
}

// awaitJob waits until j is served; it returns false if the connection must end. The
// read notices at once when the client disconnects.
func (c *conn) awaitJob(j *core.Job) bool {
	_, err := c.Peek()
	select {
	case <-j.Done():
		return err == nil || errors.Is(err, os.ErrDeadlineExceeded)
	default:
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		j.Abort()
		return false
	}
	<-j.Done() // a pipelined request, or the last bytes of this one are being written
	return true
}
