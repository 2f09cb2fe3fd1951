package nixl

import (
	"bytes"
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"
)

// Fake is NIXL in memory: agents opened from one Fake reach only each other. Metadata,
// registration, transfers, notifications, boards and the death of peers behave as with
// NIXL; the tests of this package run on both. It serves machines without NIXL and
// tests of code that uses Agent; no router runs on it.
type Fake struct {
	mu     sync.Mutex
	agents map[string]*fakeAgent
}

// NewFake returns a Fake without agents.
func NewFake() *Fake { return &Fake{agents: map[string]*fakeAgent{}} }

// Open is nixl.Open in this Fake. It ignores the library and backend of the
// configuration.
func (f *Fake) Open(ctx context.Context, cfg Config) (*Agent, error) {
	if err := cfg.defaults(); err != nil {
		return nil, err
	}
	a := newAgent(cfg)
	d := &fakeAgent{
		fake: f, name: cfg.Name, sink: a.receive, regions: map[uint64]*Memory{}, peers: map[uint64]*fakePeer{},
		commands: make(chan command, cfg.Commands), kick: make(chan struct{}, 1), quit: make(chan struct{}), ended: make(chan struct{}),
	}
	f.mu.Lock()
	f.agents[cfg.Name] = d
	f.mu.Unlock()
	a.driver = d
	go d.run()
	return a, a.start(ctx)
}

// Kill ends an agent as a crash does: peers notice when they next send.
func (f *Fake) Kill(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.agents, name)
}

// Hang makes an agent hang in its next call, as a library can.
func (f *Fake) Hang(name string) {
	if d := f.find(name); d != nil {
		d.hang.Store(true)
	}
}

func (f *Fake) find(name string) *fakeAgent {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.agents[name]
}

type fakePeer struct {
	name    string
	regions [][2]uint64 // address and size, from its metadata
	dead    bool
}

// fakeAgent is the driver; one goroutine plays the C thread.
type fakeAgent struct {
	fake     *Fake
	name     string
	sink     func(*event)
	commands chan command
	kick     chan struct{} // signals that the inbox is not empty or a board was written
	quit     chan struct{}
	ended    chan struct{}
	hang     atomic.Bool
	stuck    atomic.Int64 // Unix ns; 0 unless a call hangs
	stuckOp  atomic.Uint32

	mu      sync.Mutex
	inbox   []event
	regions map[uint64]*Memory
	boards  []*CompletionBoard

	peers map[uint64]*fakePeer // owned by the goroutine
	next  uint64
}

func (d *fakeAgent) push(c *command) error {
	own := *c
	own.data = bytes.Clone(c.data)
	select {
	case <-d.ended:
		return ErrClosed
	default:
	}
	select {
	case d.commands <- own:
		return nil
	default:
		return ErrFull
	}
}

func (d *fakeAgent) post(peer uint64, message []byte) error {
	return d.push(&command{op: opNotify, handle: peer, data: message})
}

func (d *fakeAgent) expect(int64)       {}
func (d *fakeAgent) counters() Counters { return Counters{} }

func (d *fakeAgent) busy() (uint32, time.Duration) {
	if since := d.stuck.Load(); since != 0 {
		return d.stuckOp.Load(), time.Since(time.Unix(0, since))
	}
	return 0, 0
}

func (d *fakeAgent) stop(by time.Time) bool {
	defer close(d.quit) // ends a call that hangs
	select {
	case <-d.ended:
		return true
	case <-time.After(time.Until(by)):
		return false
	}
}

func (d *fakeAgent) run() {
	defer close(d.ended)
	for {
		select {
		case c := <-d.commands:
			if d.hang.Load() {
				d.stuckOp.Store(c.op)
				d.stuck.Store(time.Now().UnixNano())
				<-d.quit
				return
			}
			d.execute(&c)
			if c.op == opStop {
				return
			}
		case <-d.kick:
			d.mu.Lock()
			in, boards := d.inbox, d.boards
			d.inbox = nil
			d.mu.Unlock()
			for i := range in {
				d.sink(&in[i])
			}
			for _, b := range boards {
				b.scan()
			}
		case <-d.quit:
			return
		}
	}
}

// arrive puts an event into another agent's inbox.
func (d *fakeAgent) arrive(e event) {
	d.mu.Lock()
	d.inbox = append(d.inbox, e)
	d.mu.Unlock()
	d.wake()
}

func (d *fakeAgent) wake() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

func (d *fakeAgent) execute(c *command) {
	ans := event{op: evDone, token: c.token}
	switch c.op {
	case opCreate:
	case opStop:
		d.fake.mu.Lock()
		if d.fake.agents[d.name] == d {
			delete(d.fake.agents, d.name)
		}
		d.fake.mu.Unlock()
	case opBackend:
		ans.data = []byte("kind=fake\n")
	case opPlugins:
		ans.data = []byte("FAKE\n")
	case opRegister:
		d.next++
		ans.handle = d.next
		d.mu.Lock()
		d.regions[d.next] = c.memory
		d.mu.Unlock()
	case opDeregister:
		d.mu.Lock()
		if d.regions[c.handle] == nil {
			ans.status = BadHandle
		}
		delete(d.regions, c.handle)
		d.mu.Unlock()
	case opMetadata:
		ans.data = d.metadata()
	case opLoad:
		ans.status, ans.handle, ans.data = d.load(c.data)
	case opInvalidate:
		if d.peers[c.handle] == nil {
			ans.status = BadHandle
		}
		delete(d.peers, c.handle)
	case opCheck, opConnect:
		if d.peers[c.handle] == nil {
			ans.status = BadHandle
		}
	case opNotify:
		ans.status = d.notify(c.handle, c.data)
	case opTransfer:
		ans.status, ans.arg[2] = d.transfer(c)
		ans.aux = 1
	case opCancel:
		return // all transfers have ended
	case opBoard:
		d.mu.Lock()
		d.boards = append(d.boards, c.board)
		ans.handle = uint64(len(d.boards) - 1)
		d.mu.Unlock()
	default:
		ans.status = BadPayload
	}
	if c.token != 0 {
		d.sink(&ans)
	}
}

const fakeMagic = "sluice-fake-metadata\x00"

func (d *fakeAgent) metadata() []byte {
	b := append([]byte(fakeMagic), byte(len(d.name)))
	b = append(b, d.name...)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.regions {
		b = binary.LittleEndian.AppendUint64(b, m.address)
		b = binary.LittleEndian.AppendUint64(b, uint64(m.size))
	}
	return b
}

func (d *fakeAgent) load(b []byte) (Status, uint64, []byte) {
	rest, ok := bytes.CutPrefix(b, []byte(fakeMagic))
	if !ok || len(rest) < 1 || len(rest) < 1+int(rest[0]) || (len(rest)-1-int(rest[0]))%16 != 0 {
		return BackendError, 0, nil
	}
	p := &fakePeer{name: string(rest[1 : 1+rest[0]])}
	for r := rest[1+rest[0]:]; len(r) > 0; r = r[16:] {
		p.regions = append(p.regions, [2]uint64{binary.LittleEndian.Uint64(r), binary.LittleEndian.Uint64(r[8:])})
	}
	for h, old := range d.peers {
		if old.name == p.name {
			d.peers[h] = p
			return Success, h, []byte(p.name)
		}
	}
	d.next++
	d.peers[d.next] = p
	return Success, d.next, []byte(p.name)
}

// findPeer returns the other agent, or the status of a send to it.
func (d *fakeAgent) findPeer(handle uint64) (*fakeAgent, *fakePeer, Status) {
	p := d.peers[handle]
	switch {
	case p == nil:
		return nil, nil, BadHandle
	case p.dead:
		return nil, nil, PeerDead
	}
	other := d.fake.find(p.name)
	if other == nil {
		p.dead = true
		d.sink(&event{op: evPeerDown, handle: handle})
		return nil, nil, BackendError
	}
	return other, p, Success
}

func (d *fakeAgent) notify(handle uint64, message []byte) Status {
	other, _, s := d.findPeer(handle)
	if s == Success {
		other.arrive(event{op: evNotif, aux: uint32(len(d.name)), data: append([]byte(d.name), message...)})
	}
	return s
}

// transfer copies at once.
func (d *fakeAgent) transfer(c *command) (Status, uint64) {
	other, p, s := d.findPeer(c.handle)
	if s != Success {
		return s, 0
	}
	write, n := c.data[0] == 1, int(binary.LittleEndian.Uint32(c.data[4:]))
	descs, message := c.data[16:16+48*n], c.data[16+48*n:]
	var moved uint64
	for i := range n {
		word := func(at int) uint64 { return binary.LittleEndian.Uint64(descs[24*i+at:]) }
		remoteWord := func(at int) uint64 { return binary.LittleEndian.Uint64(descs[24*(n+i)+at:]) }
		local, lo := d.locate(word(0), word(8))
		remote, ro := other.locate(remoteWord(0), remoteWord(8))
		if local == nil || remote == nil || !p.knows(remote) {
			return BackendError, 0 // NIXL's status for memory that the peer's metadata does not contain
		}
		buf := make([]byte, word(8))
		var err error
		if write {
			if err = local.Read(lo, buf); err == nil {
				err = remote.Write(ro, buf)
			}
		} else if err = remote.Read(ro, buf); err == nil {
			err = local.Write(lo, buf)
		}
		if err != nil {
			return BackendError, 0
		}
		moved += word(8)
	}
	if c.data[3] == 1 {
		d.notify(c.handle, message)
	}
	other.wake()
	return Success, moved
}

func (p *fakePeer) knows(m *Memory) bool {
	for _, r := range p.regions {
		if r == [2]uint64{m.address, uint64(m.size)} {
			return true
		}
	}
	return false
}

// locate finds the registered memory that contains a range.
func (d *fakeAgent) locate(address, n uint64) (*Memory, int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.regions {
		if address >= m.address && n <= uint64(m.size) && address-m.address <= uint64(m.size)-n {
			return m, int(address - m.address)
		}
	}
	return nil, 0
}
