package front

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"
)

// maxRefusalLines is how many refusals are logged in a second. The next line has the number of
// those that were not logged.
const maxRefusalLines = 10

// Refusal is what is reported about a request that the router answered with an error of its own. The
// only input of the client in it is the request id, which is validated.
type Refusal struct {
	Endpoint  string // the route's path; "" if the request has no route
	Reason    Reason
	RequestID string
	Client    netip.Addr // invalid if unknown
	Key       string     // the name of the API key's holder
	Param     string     // the field at fault
	Received  time.Time  // when the head had been read; zero if it was not read completely
	Bytes     int        // of the body, as far as it was read
}

// reportRefused reports the refusal of this request.
func (x *httpExchange) reportRefused(reason Reason, param string) {
	r := Refusal{Reason: reason, RequestID: x.RequestID, Client: x.ClientIP, Param: param, Received: x.Received, Bytes: len(x.Doc.Body)}
	if x.Endpoint != nil {
		r.Endpoint = x.Endpoint.Path
	}
	if x.Principal != nil {
		r.Key = x.Principal.Name()
	}
	x.srv.countRefused(&r)
	if f := x.srv.initial.OnRefused; f != nil && !x.Reported {
		f(r)
	}
}

// reportRefused reports a refusal for which there is no exchange, also of a client that has
// disconnected before its response began, because no stream logs that request.
func (s *Server) reportRefused(r Refusal) {
	s.countRefused(&r)
	if f := s.initial.OnRefused; f != nil {
		f(r)
	}
}

// countRefused reports a refusal to the Observer and logs it.
func (s *Server) countRefused(r *Refusal) {
	if o := s.initial.Observer; o != nil {
		o.Refused(r.Endpoint, r.Reason)
	}
	s.refusalLog.log(s.initial.Log, r)
}

// rateLimitedLog logs at most maxRefusalLines lines a second. It is safe for concurrent use.
type rateLimitedLog struct {
	second     atomic.Int64 // Unix second << 16 | lines logged in it
	suppressed atomic.Int64 // lines not logged since the last logged one
}

// allow reports whether a line may be logged now, and how many were suppressed since the last
// one.
func (b *rateLimitedLog) allow(now time.Time) (suppressed int64, ok bool) {
	for {
		last := b.second.Load()
		next := now.Unix() << 16
		if last>>16 == now.Unix() {
			next = last
		}
		if next&0xffff >= maxRefusalLines {
			b.suppressed.Add(1)
			return 0, false
		}
		if b.second.CompareAndSwap(last, next+1) {
			return b.suppressed.Swap(0), true
		}
	}
}

func (b *rateLimitedLog) log(logger *slog.Logger, r *Refusal) {
	if !logger.Enabled(context.Background(), slog.LevelInfo) {
		return
	}
	suppressed, ok := b.allow(time.Now())
	if !ok {
		return
	}
	args := make([]any, 0, 16)
	args = append(args, "reason", string(r.Reason), "status", r.Reason.Status(), "request", r.RequestID)
	if r.Client.IsValid() {
		args = append(args, "client", r.Client)
	}
	for _, a := range [...]struct{ name, value string }{{"endpoint", r.Endpoint}, {"key", r.Key}, {"param", r.Param}} {
		if a.value != "" {
			args = append(args, a.name, a.value)
		}
	}
	if suppressed > 0 {
		args = append(args, "suppressed", suppressed)
	}
	logger.Info("request refused", args...)
}
