package front

import (
	"errors"
	"strconv"

	"sluice/dataplane/coding"
	"sluice/dataplane/membudget"
)

// decode takes a coding off the body; when it cannot, it answers and gives false.
func (x *Exchange) decode(c coding.Coding) bool {
	if c == coding.Identity {
		return true
	}
	limit := x.srv.opt.MaxBodyBytes
	var room membudget.Lease
	decoded, err := c.Decode(x.Doc.Body, &room, x.srv.budget, limit)
	x.body.lease.Release()
	x.body.lease, x.Doc.Body = room, decoded
	switch {
	case err == nil:
		return true
	case errors.Is(err, coding.ErrTooLarge):
		x.Error(BodyTooLarge, "", "the request body is larger than "+strconv.FormatInt(limit, 10)+" bytes when its "+c.String()+" is decoded", 0)
	case errors.Is(err, coding.ErrBudget):
		return x.budgetSpent()
	default:
		x.Error(BadHTTP, "", "cannot decode the request body: "+err.Error(), 0)
	}
	return false
}

// setBody makes a copy of body the answer's, in a coding that the client accepts
// where that makes it shorter.
func (x *Exchange) setBody(body []byte) {
	resp, least := &x.ctx.Response, x.srv.opt.CompressMin
	if least == 0 || len(body) < least {
		resp.SetBody(body)
		return
	}
	resp.Header.Set("Vary", "Accept-Encoding")
	c := coding.Accepted(x.head.findAll("Accept-Encoding"))
	if c == coding.Identity {
		resp.SetBody(body)
		return
	}
	room := membudget.Default.Get(len(body))
	defer membudget.Default.Put(room)
	encoded := c.Append(room.B[:0], body)
	if len(encoded) >= len(body) {
		resp.SetBody(body)
		return
	}
	resp.Header.Set("Content-Encoding", c.String())
	resp.SetBody(encoded)
}
