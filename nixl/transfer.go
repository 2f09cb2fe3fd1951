package nixl

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"
)

// Op is the direction of a transfer.
type Op uint8

// The directions, as NIXL names them.
const (
	Read  Op = 0 // from the peer's memory into local memory
	Write Op = 1 // from local memory into the peer's
)

// String returns "read" or "write".
func (o Op) String() string {
	if o == Write {
		return "write"
	}
	return "read"
}

// Transfer is one read or write in flight.
type Transfer struct {
	agent     *Agent
	peer      *Peer
	token     uint64
	operation string
	wait      *waiter
	status    atomic.Int32
	done      chan struct{}
	result    callResult
	began     time.Time
	elapsed   time.Duration
}

// Telemetry describes a successful transfer. Post and Duration are measured by NIXL if
// the agent was opened with Telemetry; Seen is measured here, from Start to the answer.
type Telemetry struct {
	Post, Duration, Observed time.Duration
	Bytes                    uint64
	Measured                 bool // Post and Duration are NIXL's
}

const maxSpans = 1 << 16

// Start begins to move local spans to (Write) or from (Read) parts of the peer's
// memory, pairwise of equal length. With a notification (not nil), the peer receives it
// when the data has arrived. The spans' memory must be registered until the transfer
// has ended.
func (a *Agent) Start(ctx context.Context, op Op, local []Span, p *Peer, remote []Remote, notification []byte) (*Transfer, error) {
	operation := fmt.Sprintf("%s %d spans at %q", op, len(local), p.name)
	refuse := func(s Status, format string, args ...any) (*Transfer, error) {
		return nil, &Error{Operation: operation, Status: s, Hint: fmt.Sprintf(format, args...)}
	}
	if a.closing.Load() {
		return refuse(Closed, "")
	}
	if p.Down() {
		return refuse(PeerDead, "")
	}
	if len(local) == 0 || len(local) != len(remote) || len(local) > maxSpans {
		return refuse(InvalidParam, "%d local and %d remote spans; want as many of each, 1 to %d", len(local), len(remote), maxSpans)
	}
	b := make([]byte, 0, 16+48*len(local)+len(notification))
	has := byte(0)
	if notification != nil {
		has = 1
	}
	if len(notification) > maxMessage {
		return refuse(InvalidParam, "a notification of %d bytes; want at most %d", len(notification), maxMessage)
	}
	b = append(b, byte(op), byte(local[0].Memory.kind), byte(remote[0].Kind), has)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(local)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(remote)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(notification)))
	for i, s := range local {
		m := s.Memory
		m.mu.Lock()
		ours := m.agent == a
		m.mu.Unlock()
		switch {
		case !ours:
			return refuse(InvalidParam, "span %d: its memory is not registered with agent %q", i, a.cfg.Name)
		case s.Offset < 0 || s.Bytes <= 0 || s.Offset > m.size-s.Bytes:
			return refuse(InvalidParam, "span %d: %d bytes at %d of a memory of %d", i, s.Bytes, s.Offset, m.size)
		case m.kind != local[0].Memory.kind || remote[i].Kind != remote[0].Kind:
			return refuse(InvalidParam, "span %d: kinds of memory are mixed; want one kind per side", i)
		case uint64(s.Bytes) != remote[i].Bytes:
			return refuse(InvalidParam, "span %d: %d bytes here, %d there", i, s.Bytes, remote[i].Bytes)
		}
		b = appendDesc(b, m.address+uint64(s.Offset), uint64(s.Bytes), uint64(m.device))
	}
	for _, r := range remote {
		b = appendDesc(b, r.Address, r.Bytes, r.Device)
	}
	b = append(b, notification...)

	c := command{op: opTransfer, handle: p.handle, data: b}
	t := &Transfer{agent: a, peer: p, operation: operation, wait: a.addWaiter(&c), token: c.token, done: make(chan struct{}), began: time.Now()}
	t.status.Store(int32(InProgress))
	if err := a.submit(ctx, &c); err != nil {
		a.removeWaiter(c.token)
		return refuse(statusOf(err), "%s", a.stuckHint())
	}
	go t.watch()
	return t, nil
}

func appendDesc(b []byte, address, n, device uint64) []byte {
	b = binary.LittleEndian.AppendUint64(b, address)
	b = binary.LittleEndian.AppendUint64(b, n)
	return binary.LittleEndian.AppendUint64(b, device)
}

// watch receives the one answer of the transfer; Close answers too.
func (t *Transfer) watch() {
	t.result = <-t.wait.result
	t.elapsed = time.Since(t.began)
	t.status.Store(int32(t.result.status))
	close(t.done)
}

// Status returns InProgress, or how the transfer ended.
func (t *Transfer) Status() Status { return Status(t.status.Load()) }

// Done returns a channel that is closed when the transfer has ended.
func (t *Transfer) Done() <-chan struct{} { return t.done }

// Wait waits for the end, until the context ends or the agent's CallTimeout has passed.
// The transfer then continues unless Cancel is called.
func (t *Transfer) Wait(ctx context.Context) (Telemetry, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, t.agent.cfg.CallTimeout)
		defer cancel()
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		return Telemetry{}, &Error{Operation: t.operation, Status: statusOf(ctx.Err()), Hint: t.agent.stuckHint()}
	}
	if t.result.status != Success {
		return Telemetry{}, t.peer.explain(&Error{Operation: t.operation, Status: t.result.status}, t.agent.library)
	}
	return Telemetry{
		Post:     time.Duration(t.result.arg[0]) * time.Microsecond,
		Duration: time.Duration(t.result.arg[1]) * time.Microsecond,
		Bytes:    t.result.arg[2],
		Observed: t.elapsed,
		Measured: t.result.aux == 1,
	}, nil
}

// Cancel ends the transfer with Canceled, unless it has ended. Bytes may still move for
// a while, so its memory must stay registered.
func (t *Transfer) Cancel(ctx context.Context) error {
	if err := t.agent.submit(ctx, &command{op: opCancel, handle: t.token}); err != nil {
		return &Error{Operation: "cancel: " + t.operation, Status: statusOf(err)}
	}
	return nil
}
