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

// reportRefused reports the refusal of this request to the Observer and logs it.
func (x *httpExchange) reportRefused(reason Reason, param string) {
	endpoint, key := "", ""
	if x.Endpoint != nil {
		endpoint = x.Endpoint.Path
	}
	if x.Principal != nil {
		key = x.Principal.Name()
	}
	x.srv.reportRefused(endpoint, reason, refusal{id: x.RequestID, client: x.ClientIP, key: key, param: param})
}

// refusal is what the log says about a refused request. The only input of the client in it is
// the request id, which is validated.
type refusal struct {
	id     string
	client netip.Addr
	key    string // the name of the API key's holder
	param  string // the field at fault
}

// reportRefused reports a refusal to the Observer and logs it. It is also used for a client that
// has disconnected before its response began, because no stream logs that request.
func (s *Server) reportRefused(endpoint string, reason Reason, r refusal) {
	if o := s.initial.Observer; o != nil {
		o.Refused(endpoint, reason)
	}
	s.refusalLog.log(s.initial.Log, endpoint, reason, r)
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

func (b *rateLimitedLog) log(logger *slog.Logger, endpoint string, reason Reason, r refusal) {
	if !logger.Enabled(context.Background(), slog.LevelInfo) {
		return
	}
	suppressed, ok := b.allow(time.Now())
	if !ok {
		return
	}
	args := make([]any, 0, 16)
	args = append(args, "reason", string(reason), "status", reason.Status(), "request", r.id)
	if r.client.IsValid() {
		args = append(args, "client", r.client)
	}
	for _, a := range [...]struct{ name, value string }{{"endpoint", endpoint}, {"key", r.key}, {"param", r.param}} {
		if a.value != "" {
			args = append(args, a.name, a.value)
		}
	}
	if suppressed > 0 {
		args = append(args, "suppressed", suppressed)
	}
	logger.Info("request refused", args...)
}
