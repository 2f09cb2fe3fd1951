package sim

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/portreserve"
)

// publisher owns the event sockets of one rank. Only its goroutine uses them. The
// scheduler sends batches through a bounded queue, which blocks when it is full, as
// vLLM's does.
type publisher struct {
	l     *incarnation
	enc   eventcodec.Encoder
	queue chan []eventcodec.Event
	pub   *zmq.Socket
	rep   *zmq.Socket // nil if replay is off
	load  *zmq.Socket // nil if loads are off; owned by publishLoads
	topic string

	kept  [][]byte // payloads of seq first..first+len-1
	first uint64
	sent  atomic.Uint64 // batches numbered so far
	bytes atomic.Int64
}

const replayTick = 20 * time.Millisecond // delay until a replay request is noticed; vLLM: 100 ms

func newPublisher(l *incarnation, enc eventcodec.Encoder) *publisher {
	return &publisher{l: l, enc: enc, queue: make(chan []eventcodec.Event, 1024), topic: l.e.o.Topic}
}

// loop publishes until the incarnation ends, then closes the sockets.
func (p *publisher) loop() {
	defer p.l.wg.Done()
	tick := time.NewTicker(replayTick)
	defer tick.Stop()
	defer p.close()
	if p.rep == nil {
		tick.Stop()
	}
	for {
		select {
		case events := <-p.queue:
			p.publish(events)
		case <-tick.C:
			p.serveReplay()
		case <-p.l.stopc:
			return
		}
	}
}

func (p *publisher) close() {
	for _, s := range []*zmq.Socket{p.pub, p.rep} {
		if s != nil {
			s.SetLinger(0)
			s.Close()
		}
	}
	p.pub, p.rep = nil, nil
}

func (p *publisher) publish(events []eventcodec.Event) {
	payload := p.enc.Batch(nil, float64(time.Now().UnixMicro())/1e6, events)
	seq := p.sent.Add(1) - 1
	if len(p.kept) == p.l.e.o.BufferSteps {
		p.kept[0] = nil
		p.kept = p.kept[1:]
		p.first++
	}
	p.kept = append(p.kept, payload)
	if p.l.e.faults.LoseBatch() {
		return
	}
	p.bytes.Add(int64(len(payload)))
	// PUB drops beyond its high-water mark and never blocks.
	p.pub.SendMessageDontwait(p.topic, binary.BigEndian.AppendUint64(nil, seq), payload)
}

// serveReplay serves the waiting replay requests: [identity, "", start].
func (p *publisher) serveReplay() {
	for range 16 {
		frames, err := p.rep.RecvMessageBytes(zmq.DONTWAIT)
		if err != nil {
			return
		}
		if len(frames) != 3 || len(frames[2]) != 8 {
			continue
		}
		start := binary.BigEndian.Uint64(frames[2])
		reply := func(topic string, seq uint64, payload []byte) {
			s := binary.BigEndian.AppendUint64(nil, seq)
			if p.enc.TopicRep {
				p.rep.SendMessageDontwait(frames[0], "", topic, s, payload)
			} else {
				p.rep.SendMessageDontwait(frames[0], "", s, payload)
			}
		}
		for i, payload := range p.kept {
			if seq := p.first + uint64(i); seq >= start {
				reply(p.topic, seq, payload)
			}
		}
		reply("", ^uint64(0), nil)
	}
}

// bindEvents binds the sockets of all ranks; a later incarnation uses the endpoints of
// the first.
func (l *incarnation) bindEvents() error {
	e := l.e
	replay := e.o.Replay != "off"
	if e.pubs != nil {
		if e.loads != nil {
			for i, r := range l.ranks {
				if err := r.pub.bind(e.loads[i], &r.pub.load, zmq.PUB); err != nil {
					return err
				}
			}
		}
		for i, r := range l.ranks {
			if err := r.pub.bind(e.pubs[i], &r.pub.pub, zmq.PUB); err != nil {
				return err
			}
			if replay {
				if err := r.pub.bind(e.reps[i], &r.pub.rep, zmq.ROUTER); err != nil {
					return err
				}
			}
		}
		return nil
	}
	pubs, err := l.bindAll(e.o.KVEvents, zmq.PUB, func(r *rank) **zmq.Socket { return &r.pub.pub })
	if err != nil {
		return err
	}
	var reps []string
	if replay {
		if reps, err = l.bindAll(e.o.Replay, zmq.ROUTER, func(r *rank) **zmq.Socket { return &r.pub.rep }); err != nil {
			return err
		}
	}
	if at := e.o.Loads; at != "off" {
		if at == "auto" {
			at = ""
		}
		if e.loads, err = l.bindAll(at, zmq.PUB, func(r *rank) **zmq.Socket { return &r.pub.load }); err != nil {
			return err
		}
	}
	e.pubs, e.reps = pubs, reps
	return nil
}

// bindAll binds rank r at the base's port + r. Without a base it finds a run of free
// ports on the engine's own host. It first looks below the range of ephemeral ports: no
// connections of other processes are there, and no process takes such a port between
// two incarnations.
func (l *incarnation) bindAll(base string, kind zmq.Type, at func(*rank) **zmq.Socket) ([]string, error) {
	if base != "" {
		u, err := url.Parse(strings.Replace(base, "*", "0.0.0.0", 1))
		port := 0
		if err == nil {
			port, err = strconv.Atoi(u.Port())
		}
		if err != nil || u.Scheme != "tcp" || port < 1 {
			return nil, fmt.Errorf("sim: cannot bind KV events on %q: want tcp://host:port with a port above 0, off, or nothing for free ports", base)
		}
		return l.bindRun(u.Hostname(), port, kind, at)
	}
	host, _, _ := net.SplitHostPort(l.e.addrs[0])
	var err error
	for try := range 100 {
		port := 20_000 + rand.IntN(12_000)
		if try >= 50 {
			h, err := portreserve.Reserve(net.JoinHostPort(host, "0"))
			if err != nil {
				return nil, err
			}
			port = h.Addr.Port
			h.Close()
		}
		var list []string
		if list, err = l.bindRun(host, port, kind, at); err == nil {
			return list, nil
		}
	}
	return nil, err
}

func (l *incarnation) bindRun(host string, port int, kind zmq.Type, at func(*rank) **zmq.Socket) ([]string, error) {
	var list []string
	for i, r := range l.ranks {
		endpoint := "tcp://" + net.JoinHostPort(host, strconv.Itoa(port+i))
		if err := r.pub.bind(endpoint, at(r), kind); err != nil {
			for _, r := range l.ranks[:i] {
				(*at(r)).Close()
				*at(r) = nil
			}
			return nil, err
		}
		list = append(list, endpoint)
	}
	return list, nil
}

func (p *publisher) bind(endpoint string, slot **zmq.Socket, kind zmq.Type) error {
	s, err := p.l.zctx.NewSocket(kind)
	if err == nil {
		s.SetLinger(0)
		s.SetSndhwm(100000)
		if strings.HasPrefix(endpoint, "tcp://[") {
			s.SetIpv6(true)
		}
		err = s.Bind(endpoint)
		// libzmq closes the sockets of the previous incarnation in the background.
		for try := 0; zmq.AsErrno(err) == zmq.Errno(syscall.EADDRINUSE) && p.l.e.pubs != nil && try < 200; try++ {
			time.Sleep(10 * time.Millisecond)
			err = s.Bind(endpoint)
		}
	}
	if err != nil {
		if s != nil {
			s.Close()
		}
		return fmt.Errorf("sim: cannot bind KV events on %q: %w", endpoint, err)
	}
	*slot = s
	return nil
}
