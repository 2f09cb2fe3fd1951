package front

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"
)

// maxRefusalLines is how many refusals a second get a line in the log; what is left out is
// told by the next line.
const maxRefusalLines = 10

// reportRefused counts and logs that this request is refused.
func (x *Exchange) reportRefused(reason Reason, param string) {
	endpoint, key := "", ""
	if x.Endpoint != nil {
		endpoint = x.Endpoint.Path
	}
	if x.principal != nil {
		key = x.principal.Name()
	}
	x.srv.reportRefused(endpoint, reason, refusal{id: x.RequestID, client: x.ip, key: key, param: param})
}

// refusal is what is known of one for the log: nothing that a client wrote but its
// request's id, which is checked, and the path of a route there is.
type refusal struct {
	id     string
	client netip.Addr
	key    string // its holder's name
	param  string // the field at fault
}

// reportRefused counts and logs a refusal; likewise a client that left before its answer began, and
// was told nothing: its stream would have had a line.
func (s *Server) reportRefused(endpoint string, reason Reason, r refusal) {
	if o := s.initial.Observer; o != nil {
		o.Refused(endpoint, reason)
	}
	s.refusalLog.log(s.initial.Log, endpoint, reason, r)
}

// rateLimitedLog is a bound of so many lines a second. Safe for concurrent use.
type rateLimitedLog struct {
	second     atomic.Int64 // the Unix second, and how many lines it had: second<<16 | lines
	suppressed atomic.Int64
}

// allow says whether a line may be written now, and how many were not since the last.
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
	args = append(args, "reason", string(reason), "status", reason.Status(), "request_id", r.id)
	if r.client.IsValid() {
		args = append(args, "client", r.client)
	}
	for _, a := range [...]struct{ name, value string }{{"endpoint", endpoint}, {"key", r.key}, {"param", r.param}} {
		if a.value != "" {
			args = append(args, a.name, a.value)
		}
	}
	if suppressed > 0 {
		args = append(args, "not_logged", suppressed)
	}
	logger.Info("request refused", args...)
}
