package sim

import (
	"net"
	"strconv"

	"sluice/bench/sim/bootstrap"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/portreserve"
)

// registerRanks registers the ranks of this incarnation after Options.RegisterDelay.
func (l *incarnation) registerRanks() {
	if !core.Sleep(l.Context, l.e.o.RegisterDelay) {
		return
	}
	host, n := l.SideHostPort()
	for i := range l.Ranks {
		l.bootstrap.Register(bootstrap.Rank{TPSize: 1, CPSize: 1, DPSize: len(l.Ranks), DPRank: i, PPSize: 1, IP: host, Port: n, Page: l.e.o.BlockSize, DType: "auto"})
		l.bootstrap.RegisterWorker(bootstrap.Worker{EngineID: l.RankID(i), DPRank: i, Addr: l.Side.String()})
	}
}

// serveBootstrap serves one request of the bootstrap port.
func serveBootstrap(c *conn, r *httpconn.Request) *core.Job {
	l := c.incarnation
	l.e.log.add(r, -1)
	if f := l.e.matchFault(r, "bootstrap", false); f != nil && c.faultBeforeHead(r, f, nil) {
		return nil
	}
	if l.e.o.PD == "mooncake" {
		l.bootstrap.ServeMooncake(c.Conn, r)
	} else {
		l.bootstrap.ServeSGLang(c.Conn, r)
	}
	return nil
}

// startBootstrap opens the bootstrap port of a prefill engine whose family has one.
func (l *incarnation) startBootstrap() error {
	e := l.e
	if e.o.Role != "prefill" || e.o.PD != "sglang" && e.o.PD != "mooncake" {
		return nil
	}
	if e.bootstrapAddr == "" {
		h, err := portreserve.Reserve(e.o.Bootstrap)
		if err != nil {
			return err
		}
		e.placeholders = append(e.placeholders, h)
		e.bootstrapAddr = h.Addr.String()
	}
	ln, err := portreserve.Listen(e.bootstrapAddr)
	if err != nil {
		return err
	}
	l.bootstrapListener = ln
	l.listeners = append(l.listeners, ln)
	l.wg.Add(1)
	go l.accept(ln, -1, serveBootstrap)
	if e.o.RegisterDelay <= 0 {
		l.registerRanks()
	} else {
		l.wg.Go(l.registerRanks)
	}
	return nil
}

// Bootstrap returns the host and port of the bootstrap server, or "" and 0 if there is
// none.
func (e *Engine) Bootstrap() (host string, port int) {
	host, p, err := net.SplitHostPort(e.bootstrapAddr)
	if err != nil {
		return "", 0
	}
	port, _ = strconv.Atoi(p)
	return host, port
}

// SidePort returns the port of the side channel in the current incarnation; it stands for LMCache's init
// and alloc ports.
func (e *Engine) SidePort() int {
	if l := e.incarnation(); l != nil {
		_, port := l.SideHostPort()
		return port
	}
	return 0
}
