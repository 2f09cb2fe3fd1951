package transfers

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/reuse"
	"sluice/nixl"
	"sluice/nixl/completion"
	"sluice/router/patrol"
	"sluice/router/worker"
)

// Options of a Watch.
type Options struct {
	NIXL        bool              // open an agent
	Search      nixl.Search       // where NIXL may be
	Parameters  map[string]string // of NIXL's backend; nil for its own
	UCX         *UCX              // UCX's active messages; nil: none
	Isolate     []string          // the command of a process that each agent lives in (nixl.ServeHost); nil: this one
	Endpoint    string            // of the ZMQ PULL socket; "" none
	Networks    []netip.Prefix    // whose reports are taken over ZMQ, and on whose devices UCX listens; nil: any
	ZMQNetworks []netip.Prefix    // whose reports are taken over ZMQ; nil: those of Networks
	// Bound is the socket's listener where a process before has passed it; nil: Endpoint is
	// bound. Where it has a method Opened, that is waited for.
	Bound   net.Listener
	Slots   int          // of the completion board, a multiple of 64 [16384]
	NIXLFor string       // the setting that has no effect without NIXL, which a warning names; "" none
	Log     *slog.Logger // [none]

	retry time.Duration // the first pause before ZMQ is bound again [1s]; for tests
}

// UCX is how active messages are taken.
type UCX struct {
	Library  string            // libucp's file or folder, and then nothing else is tried
	Devices  []string          // network devices to listen on; nil: those with an address in Networks
	Settings map[string]string // of UCX, without its prefix: "TCP_PORT_RANGE"
}

// Watch takes in what is told of transfers. All methods may be called from any
// goroutine; those of a nil Watch answer that there is nothing.
type Watch struct {
	log   *slog.Logger
	needs string // Options.NIXLFor
	book  *completion.Book
	pairs completion.Pairs

	agent  *agentTier // nil: off
	ucx    *ucxTier   // nil: off
	zmq    *zmqTier   // nil: off
	ladder nixl.Ladder
	up     atomic.Int32 // tiers that are up: waits are worth opening

	plain *nixl.Board // filled by messages alone; while no agent has one
	board atomic.Pointer[nixl.Board]
	older atomic.Pointer[nixl.Board] // the one before: its tickets are still out

	start      string // random, of this Watch
	generation atomic.Uint64
	refused    atomic.Int64 // records that fitted no ticket
	forged     atomic.Int64 // messages over UCX without the document's secret
	outcomes   [outcomes]atomic.Int64

	waits  reuse.Pool[Wait]
	stalls *patrol.Patrol[Wait]

	lingering atomic.Int64 // waits whose requests have ended
	closing   atomic.Bool
	stop      context.CancelFunc
	swept     chan struct{}
	closed    sync.Once
}

// Start opens the tiers and returns at once; which of them work shows in Status.
// It is nil when none is wanted.
func Start(opt Options) (*Watch, error) {
	if !opt.NIXL && opt.UCX == nil && opt.Endpoint == "" {
		return nil, nil
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Slots <= 0 {
		opt.Slots = 16384
	}
	var start [8]byte
	rand.Read(start[:])
	w := &Watch{log: opt.Log, needs: opt.NIXLFor, book: completion.NewBook(), start: hex.EncodeToString(start[:]), swept: make(chan struct{}),
		stalls: patrol.New(stallCheck, (*Wait).look)}
	w.waits.New = func() *Wait {
		t := &Wait{watch: w}
		t.tell = t.failed
		w.stalls.Join(t)
		return t
	}
	var err error
	if w.plain, err = nixl.NewBoard(context.Background(), nil, opt.Slots, w.landed); err != nil {
		return nil, err
	}
	w.board.Store(w.plain)
	if opt.NIXL {
		w.agent = w.startAgent(&opt)
		w.ladder = append(w.ladder, w.agent)
	}
	if opt.UCX != nil {
		var brings nixl.Means
		if w.agent != nil && len(opt.Isolate) == 0 { // processes of their own need not agree
			brings = w.agent
		}
		w.ucx = w.startUCX(&opt, brings)
		w.ladder = append(w.ladder, w.ucx)
	}
	if opt.Endpoint != "" {
		w.zmq = w.startZMQ(&opt)
		w.ladder = append(w.ladder, w.zmq)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.stop = cancel
	go w.sweep(ctx)
	return w, nil
}

// Close ends the tiers. Waits that are open hear nothing more; close them all the same.
func (w *Watch) Close() {
	if w == nil {
		return
	}
	w.closed.Do(func() {
		w.closing.Store(true)
		w.stop()
		<-w.swept
		for _, m := range w.ladder {
			m.Close()
		}
	})
}

// Listener is that of the ZMQ socket, to be passed to the process that takes this one's place;
// nil: there is none now.
func (w *Watch) Listener() net.Listener {
	if w == nil || w.zmq == nil {
		return nil
	}
	return w.zmq.listener()
}

// PassOn leaves the ZMQ socket to the process that has its listener. This one accepts nothing
// more; it closes the connections, whose peers then connect to the other process, once no
// hand-over is watched, or after passTime. It waits for that.
func (w *Watch) PassOn() {
	if w == nil || w.zmq == nil {
		return
	}
	w.zmq.leave()
	quiet := 0
	for end := time.Now().Add(passTime); quiet < 5 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if quiet++; w.Waiting() > 0 {
			quiet = 0
		}
	}
	w.zmq.Close()
}

// passTime is how long PassOn waits for reports of hand-overs under way.
const passTime = 5 * time.Second

const (
	sweepEvery = time.Second
	// pairsFor is how long what was measured between two ranks is believed, as long
	// as a worker is judged by its own rates; it is looked through every fadeEvery.
	pairsFor, fadeEvery = 2 * time.Minute, 10 * time.Second
	sweepSlots          = 4096
)

// sweep takes back slots whose time is over: of requests that ended without Close,
// which is a bug, but must not eat the board.
func (w *Watch) sweep(ctx context.Context) {
	defer close(w.swept)
	tick, fade := time.NewTicker(sweepEvery), time.NewTicker(fadeEvery)
	defer tick.Stop()
	defer fade.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, b := range w.boards() {
				if b != nil {
					b.Expire(now, sweepSlots)
				}
			}
		case now := <-fade.C:
			w.pairs.Fade(now.Add(-pairsFor))
		}
	}
}

// changed is told of every change of a tier's state.
func (w *Watch) changed(tier nixl.Tier, was, is nixl.TierState, reason string) {
	if was == nixl.TierUp {
		w.up.Add(-1)
	}
	if is == nixl.TierUp {
		w.up.Add(1)
	}
	w.generation.Add(1)
	level := slog.LevelInfo
	if is == nixl.TierDown {
		level = slog.LevelWarn
	}
	w.log.Log(context.Background(), level, "KV transfers: a tier changed", "tier", string(tier), "state", string(is), "reason", reason)
	if lost := is == nixl.TierOff || is == nixl.TierDown; lost && tier == nixl.TierNIXL && w.needs != "" && !w.closing.Load() {
		w.log.Warn(w.needs+" has no effect: the router has no usable NIXL", "state", string(is), "reason", reason,
			"help", "install the NIXL that the engines run (pip install nixl), or name its library in transfers.nixl_library; `sluice doctor --want nixl` tries it")
	}
}

// use makes b the board that tickets are lent from.
func (w *Watch) use(b *nixl.Board) {
	if was := w.board.Swap(b); was != b {
		w.older.Store(was)
	}
}

// boards are those that tickets may be out of, nil where it would be one again: the
// one that they are lent from, the one before, and the one of messages alone.
func (w *Watch) boards() [3]*nixl.Board {
	all := [3]*nixl.Board{w.board.Load(), w.older.Load(), w.plain}
	if all[1] == all[0] {
		all[1] = nil
	}
	if all[2] == all[0] || all[2] == all[1] {
		all[2] = nil
	}
	return all
}

// frame takes a message of the connector, from whichever tier; false when it is none.
func (w *Watch) frame(m []byte) bool {
	if !bytes.HasPrefix(m, []byte(nixl.MessagePrefix)) {
		return w.book.Line(m)
	}
	for _, b := range w.boards() {
		if b != nil && b.Message(m) == nil {
			return true
		}
	}
	w.refused.Add(1)
	return true
}

// Frame is frame for a socket that others keep: LMCache's notifications and the
// connector's reports may come to one.
func (w *Watch) Frame(m []byte) bool { return w != nil && w.frame(m) }

// landed is told of a record on a board.
func (w *Watch) landed(t nixl.Ticket, c nixl.Completion) {
	w.book.Landed(t.Request, c.Status != 0, int64(min(c.Bytes, 1<<62)), c.Took)
}

// From is what is known of transfers from a prefill rank, for the scheduler; nil:
// nothing.
func (w *Watch) From(r *worker.Rank) *completion.Row {
	if w == nil || r == nil {
		return nil
	}
	return w.pairs.From(int(r.Slot))
}

// Left forgets what was measured of a rank that has left.
func (w *Watch) Left(r *worker.Rank) {
	if w != nil {
		w.pairs.Forget(int(r.Slot))
	}
}

// Agent is the router's NIXL agent while its tier is up, else nil.
func (w *Watch) Agent() *nixl.Agent {
	if w == nil || w.agent == nil || w.agent.offer.Load() == nil {
		return nil
	}
	return w.agent.Agent()
}
