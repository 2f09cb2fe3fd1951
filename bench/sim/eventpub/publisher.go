package eventpub

import (
	"encoding/binary"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/eventcodec"
)

// Config is what the publishers of one life of an engine have in common.
type Config struct {
	Topic       string
	BufferSteps int             // batches available for replay
	LoseBatch   func() bool     // reports whether a fault loses the next batch
	Stopping    <-chan struct{} // closed when the engine ends
}

// Publisher owns the event sockets of one rank. Only the goroutine of Run uses them. The
// scheduler sends batches through a bounded queue, which blocks when it is full, as
// vLLM's does.
type Publisher struct {
	enc    eventcodec.Encoder
	config *Config
	queue  chan []eventcodec.Event
	pub    *zmq.Socket
	rep    *zmq.Socket // nil if replay is off

	kept  [][]byte // payloads of seq first..first+len-1
	first uint64
	sent  atomic.Uint64 // batches numbered so far
	bytes atomic.Int64
}

const replayTick = 20 * time.Millisecond // delay until a replay request is noticed; vLLM: 100 ms

// New returns a publisher without sockets.
func New(enc eventcodec.Encoder, config *Config) *Publisher {
	return &Publisher{enc: enc, config: config, queue: make(chan []eventcodec.Event, 1024)}
}

// SetPub gives the publisher its PUB socket, before Run.
func (p *Publisher) SetPub(s *zmq.Socket) { p.pub = s }

// SetReplay gives the publisher the ROUTER socket for replay, before Run.
func (p *Publisher) SetReplay(s *zmq.Socket) { p.rep = s }

// Publish queues a batch. It waits while the queue is full, until the engine ends.
func (p *Publisher) Publish(events []eventcodec.Event) {
	select {
	case p.queue <- events:
	case <-p.config.Stopping:
	}
}

// Idle reports whether the queue is empty.
func (p *Publisher) Idle() bool { return len(p.queue) == 0 }

// Sent returns how many batches are numbered so far, and the bytes sent live.
func (p *Publisher) Sent() (batches, bytes int) { return int(p.sent.Load()), int(p.bytes.Load()) }

// Run publishes until the engine ends, then closes the sockets.
func (p *Publisher) Run() {
	tick := time.NewTicker(replayTick)
	defer tick.Stop()
	defer p.Close()
	if p.rep == nil {
		tick.Stop()
	}
	for {
		select {
		case events := <-p.queue:
			p.publish(events)
		case <-tick.C:
			p.serveReplay()
		case <-p.config.Stopping:
			return
		}
	}
}

// Close closes the sockets of a publisher that does not run.
func (p *Publisher) Close() {
	for _, s := range []*zmq.Socket{p.pub, p.rep} {
		if s != nil {
			s.SetLinger(0)
			s.Close()
		}
	}
	p.pub, p.rep = nil, nil
}

func (p *Publisher) publish(events []eventcodec.Event) {
	payload := p.enc.Batch(nil, float64(time.Now().UnixMicro())/1e6, events)
	seq := p.sent.Add(1) - 1
	if len(p.kept) == p.config.BufferSteps {
		p.kept[0] = nil
		p.kept = p.kept[1:]
		p.first++
	}
	p.kept = append(p.kept, payload)
	if p.config.LoseBatch() {
		return
	}
	p.bytes.Add(int64(len(payload)))
	// PUB drops beyond its high-water mark and never blocks.
	p.pub.SendMessageDontwait(p.config.Topic, binary.BigEndian.AppendUint64(nil, seq), payload)
}

// serveReplay serves the waiting replay requests: [identity, "", start].
func (p *Publisher) serveReplay() {
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
				reply(p.config.Topic, seq, payload)
			}
		}
		reply("", ^uint64(0), nil)
	}
}
