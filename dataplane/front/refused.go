package front

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"
)

// refusalLines is how many refusals a second get a line in the log; what is left out is
// told by the next line.
const refusalLines = 10

// refused counts and logs that this request is refused.
func (x *Exchange) refused(reason Reason, param string) {
	endpoint, key := "", ""
	if x.Endpoint != nil {
		endpoint = x.Endpoint.Path
	}
	if x.holder != nil {
		key = x.holder.Name()
	}
	x.srv.refused(endpoint, reason, refusal{id: x.RequestID, client: x.ip, key: key, param: param})
}

// refusal is what is known of one for the log: nothing that a client wrote but its
// request's id, which is checked, and the path of a route there is.
type refusal struct {
	id     string
	client netip.Addr
	key    string // its holder's name
	param  string // the field at fault
}

// refused counts and logs a refusal; likewise a client that left before its answer began, and
// was told nothing: its stream would have had a line.
func (s *Server) refused(endpoint string, reason Reason, r refusal) {
	if o := s.opt.Observer; o != nil {
		o.Refused(endpoint, reason)
	}
	s.refusals.say(s.opt.Log, endpoint, reason, r)
}

// brisk is a bound of so many lines a second. Safe for concurrent use.
type brisk struct {
	second atomic.Int64 // the Unix second, and how many lines it had: second<<16 | lines
	unsaid atomic.Int64
}

// may says whether a line may be written now, and how many were not since the last.
func (b *brisk) may(now time.Time) (unsaid int64, ok bool) {
	for {
		last := b.second.Load()
		next := now.Unix() << 16
		if last>>16 == now.Unix() {
			next = last
		}
		if next&0xffff >= refusalLines {
			b.unsaid.Add(1)
			return 0, false
		}
		if b.second.CompareAndSwap(last, next+1) {
			return b.unsaid.Swap(0), true
		}
	}
}

func (b *brisk) say(log *slog.Logger, endpoint string, reason Reason, r refusal) {
	if !log.Enabled(context.Background(), slog.LevelInfo) {
		return
	}
	unsaid, ok := b.may(time.Now())
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
	if unsaid > 0 {
		args = append(args, "not_logged", unsaid)
	}
	log.Info("request refused", args...)
}
