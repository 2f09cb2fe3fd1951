package sim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/bootstrap"
	"sluice/bench/sim/core"
	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/eventpub"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/portreserve"
)

// incarnation is an engine from a start to its end: one id, one cache, one sequence of
// events. A crash ends an incarnation; Restart starts another.
type incarnation struct {
	core.Process
	e         *Engine
	startedAt time.Time
	kill      context.CancelFunc
	stopc     <-chan struct{} // Done channel of Context
	conf      *httpconn.Config
	wg        sync.WaitGroup
	family    core.Family

	zctx        *zmq.Context
	loadSockets []*zmq.Socket // by rank; each is owned by publishLoads. None if loads are off.
	side        net.Listener  // the side channel, on which other simulated engines call this one

	mu        sync.Mutex // guards listeners and conns
	listeners []net.Listener
	conns     map[*conn]struct{}
	stopping  bool
	stopped   chan struct{}

	next         atomic.Uint32 // round robin over ranks for requests that name none
	slowReaders  atomic.Int64
	abortedEarly atomic.Int64 // clients that disconnected before the engine scheduled their request
	rejected     atomic.Int64

	bootstrap         *bootstrap.Server // for a prefill whose family has a bootstrap server
	bootstrapListener net.Listener      // nil if there is none
}

func (e *Engine) newIncarnation() (l *incarnation, err error) {
	l = &incarnation{e: e, startedAt: time.Now(), conns: make(map[*conn]struct{}), stopped: make(chan struct{})}
	ctx, kill := context.WithCancel(context.Background())
	l.kill, l.stopc = kill, ctx.Done()
	l.Options, l.ID, l.Context, l.Go, l.Blocks = &e.o, uuid(), ctx, l.wg.Go, e.blockLog
	l.Crash = func() { e.crash(l, false) }
	l.Match = func(r *httpconn.Request, leg string) *faults.Fault { return e.matchFault(r, leg, false) }
	l.conf = &httpconn.Config{BodyLimit: e.o.BodyLimit, StreamBuffer: e.o.StreamBuffer, Stopping: l.stopc, Background: l.wg.Go, SlowReader: func() { l.slowReaders.Add(1) }}
	l.Client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second}}
	defer func() {
		if err != nil {
			l.stop(true)
		}
	}()
	if len(e.addrs) == 0 {
		if err := e.reserveAddrs(); err != nil {
			return l, err
		}
	}
	_, port, _ := net.SplitHostPort(e.addrs[0])
	n, _ := strconv.Atoi(port)
	l.bootstrap = bootstrap.New(n, e.o.Balance != "round_robin")
	enc, err := eventcodec.ByName(e.o.Encoding)
	if err != nil {
		return l, err
	}
	events := &eventpub.Config{Topic: e.o.Topic, BufferSteps: e.o.BufferSteps, LoseBatch: e.faults.LoseBatch, Stopping: l.stopc}
	for i := range e.o.Ranks {
		r := core.NewRank(&l.Process, i)
		if e.o.KVEvents != "off" {
			r.Publisher = eventpub.New(eventcodec.Encoder{Encoding: enc, BlockSize: e.o.BlockSize, Rank: i, Bytes: e.o.BytesHashes}, events)
		}
		l.Ranks = append(l.Ranks, r)
	}
	l.family = pdFamilies[e.o.PD](l)
	if e.o.KVEvents != "off" {
		if l.zctx, err = zmq.NewContext(); err != nil {
			return l, fmt.Errorf("sim: cannot make a zmq context: %w", err)
		}
		if err = l.bindEvents(); err != nil {
			return l, err
		}
	}
	host, _, _ := net.SplitHostPort(e.addrs[0])
	if l.side, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(e.o.SidePort))); err != nil {
		return l, fmt.Errorf("sim: cannot listen for transfers on %q: %w", host, err)
	}
	l.Side = l.side.Addr()
	l.listeners = append(l.listeners, l.side)
	l.wg.Add(1)
	go l.accept(l.side, -1, serveSideChannel)
	for _, r := range l.Ranks {
		r.Start()
		if r.Publisher != nil {
			l.wg.Go(r.Publisher.Run)
		}
		if l.loadSockets != nil {
			l.wg.Go(func() { l.publishLoads(r, l.loadSockets[r.Index]) })
		}
	}
	if err = l.startBootstrap(); err != nil {
		return l, err
	}
	if !e.refusing {
		if err = l.listen(); err != nil {
			return l, err
		}
	}
	e.incarnations.Add(1)
	return l, nil
}

// reserveAddrs chooses the addresses, once for all incarnations.
func (e *Engine) reserveAddrs() error {
	fail := func(err error) error {
		for _, h := range e.placeholders {
			h.Close()
		}
		e.placeholders, e.addrs = nil, nil
		return err
	}
	main, err := portreserve.Reserve(e.o.Listen)
	if err != nil {
		return err
	}
	e.placeholders = append(e.placeholders, main)
	e.addrs = append(e.addrs, main.Addr.String())
	if !e.o.RankPorts {
		return nil
	}
	_, port, _ := net.SplitHostPort(e.o.Listen)
	for i := range e.o.Ranks {
		a := net.TCPAddr{IP: main.Addr.IP}
		if port != "0" {
			a.Port = main.Addr.Port + 1 + i
		}
		h, err := portreserve.Reserve(a.String())
		if err != nil {
			return fail(err)
		}
		e.placeholders = append(e.placeholders, h)
		e.addrs = append(e.addrs, h.Addr.String())
	}
	return nil
}

// listen opens the client ports.
func (l *incarnation) listen() error {
	for i, addr := range l.e.addrs {
		ln, err := portreserve.Listen(addr)
		if err != nil {
			return err
		}
		l.mu.Lock()
		if l.stopping {
			l.mu.Unlock()
			ln.Close()
			return net.ErrClosed
		}
		l.listeners = append(l.listeners, ln)
		l.wg.Add(1)
		l.mu.Unlock()
		go l.accept(ln, i-1, serveAPI)
	}
	return nil
}

// closeListeners makes the client ports refuse connections and ends their connections.
func (l *incarnation) closeListeners() {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep := l.listeners[:0]
	for _, ln := range l.listeners {
		if ln == l.side || ln == l.bootstrapListener {
			keep = append(keep, ln)
			continue
		}
		ln.Close()
	}
	l.listeners = keep
	for c := range l.conns {
		if !c.sideChannel {
			c.Close()
		}
	}
}

func (l *incarnation) accept(ln net.Listener, rank int, handle func(*conn, *httpconn.Request) *core.Job) {
	defer l.wg.Done()
	for {
		nc, err := ln.Accept()
		if err != nil {
			select {
			case <-l.stopc:
				return
			default:
			}
			if ne, ok := err.(net.Error); ok && ne.Timeout() || isTooMany(err) {
				time.Sleep(5 * time.Millisecond)
				continue
			}
			return
		}
		hc, err := httpconn.New(nc.(*net.TCPConn), l.conf)
		if err != nil {
			nc.Close()
			continue
		}
		c := &conn{Conn: hc, incarnation: l, rank: rank, sideChannel: ln == l.side || ln == l.bootstrapListener}
		l.mu.Lock()
		if l.stopping {
			l.mu.Unlock()
			nc.Close()
			return
		}
		l.conns[c] = struct{}{}
		l.wg.Add(1)
		l.mu.Unlock()
		go func() {
			defer l.wg.Done()
			c.serve(handle)
			l.mu.Lock()
			delete(l.conns, c)
			l.mu.Unlock()
		}()
	}
}

// stop ends the incarnation and waits until nothing of it runs. An abrupt stop resets
// the connections; otherwise requests in flight first fail as with a dead engine core.
// It must not be called from a goroutine of the incarnation.
func (l *incarnation) stop(abrupt bool) {
	l.mu.Lock()
	if l.stopping {
		l.mu.Unlock()
		<-l.stopped
		return
	}
	l.stopping = true
	for _, ln := range l.listeners {
		ln.Close()
	}
	if abrupt {
		for c := range l.conns {
			c.Reset()
		}
	}
	l.mu.Unlock()
	l.kill()
	for _, r := range l.Ranks {
		if r.Wait() || r.Publisher == nil {
			continue
		}
		if l.loadSockets != nil && l.loadSockets[r.Index] != nil {
			l.loadSockets[r.Index].Close()
		}
		r.Publisher.Close()
	}
	l.mu.Lock()
	for c := range l.conns {
		c.InterruptRead()
	}
	l.mu.Unlock()
	l.wg.Wait()
	l.Client.CloseIdleConnections()
	if l.family != nil {
		l.family.Close()
	}
	if l.zctx != nil {
		l.zctx.Term()
	}
	close(l.stopped)
}

// isStopping reports whether stop has begun.
func (l *incarnation) isStopping() bool {
	select {
	case <-l.stopc:
		return true
	default:
		return false
	}
}

// serveSideChannel serves other simulated engines.
func serveSideChannel(c *conn, r *httpconn.Request) *core.Job {
	c.incarnation.family.ServeSide(c.Conn, r)
	return nil
}

func uuid() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}

func isTooMany(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED)
}
