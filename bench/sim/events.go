package sim

import (
	"net"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/core"
	"sluice/bench/sim/eventpub"
)

// bindEvents binds the sockets of all ranks; a later incarnation uses the endpoints of
// the first.
func (l *incarnation) bindEvents() error {
	e := l.e
	again := e.pubs != nil
	host, _, _ := net.SplitHostPort(e.addrs[0])
	bind := func(endpoints *[]string, base string, kind zmq.Type, take func(*core.Rank, *zmq.Socket)) error {
		var list []*zmq.Socket
		var err error
		if again {
			list, err = eventpub.BindAgain(l.zctx, *endpoints, kind)
		} else {
			list, *endpoints, err = eventpub.Bind(l.zctx, base, host, len(l.Ranks), kind)
		}
		for i, s := range list {
			take(l.Ranks[i], s)
		}
		return err
	}
	if err := bind(&e.pubs, e.o.KVEvents, zmq.PUB, func(r *core.Rank, s *zmq.Socket) { r.Publisher.SetPub(s) }); err != nil {
		return err
	}
	if e.o.Replay != "off" {
		if err := bind(&e.reps, e.o.Replay, zmq.ROUTER, func(r *core.Rank, s *zmq.Socket) { r.Publisher.SetReplay(s) }); err != nil {
			return err
		}
	}
	if at := e.o.Loads; at != "off" {
		if at == "auto" {
			at = ""
		}
		l.loadSockets = make([]*zmq.Socket, len(l.Ranks))
		return bind(&e.loads, at, zmq.PUB, func(r *core.Rank, s *zmq.Socket) { l.loadSockets[r.Index] = s })
	}
	return nil
}
