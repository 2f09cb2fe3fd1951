package kvtransfer

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

	"sluice/dataplane/objpool"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
	"sluice/router/sweeper"
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
	Bound       net.Listener
	Slots       int          // of the completion board, a multiple of 64 [16384]
	NIXLSetting string       // the setting that has no effect without NIXL, which a warning names; "" none
	Log         *slog.Logger // [none]

	retry time.Duration // the first pause before ZMQ is bound again [1s]; for tests
}

// UCX is how active messages are taken.
type UCX struct {
	Library  string            // libucp's file or folder, and then nothing else is tried
	Devices  []string          // network devices to listen on; nil: those with an address in Networks
	Settings map[string]string // of UCX, without its prefix: "TCP_PORT_RANGE"
}

// Watcher takes in what is told of transfers. All methods may be called from any
// goroutine; those of a nil Watch answer that there is nothing.
type Watcher struct {
	log         *slog.Logger
	nixlSetting string // Options.NIXLFor
	registry    *completion.Registry
	rates       completion.TransferTimes

	agent  *agentTier // nil: off
	ucx    *ucxTier   // nil: off
	zmq    *zmqTier   // nil: off
	ladder nixl.Tiers
	up     atomic.Int32 // tiers that are up: waits are worth opening

	messageBoard  *nixl.CompletionBoard // filled by messages alone; while no agent has one
	board         atomic.Pointer[nixl.CompletionBoard]
	previousBoard atomic.Pointer[nixl.CompletionBoard] // the one before: its tickets are still out

	epoch         string // random, of this Watch
	generation    atomic.Uint64
	refused       atomic.Int64 // records that fitted no ticket
	forged        atomic.Int64 // messages over UCX without the document's secret
	outcomeCounts [numOutcomes]atomic.Int64

	transfers objpool.Pool[Transfer]
	sweeper   *sweeper.Sweeper[Transfer]

	lingering atomic.Int64 // waits whose requests have ended
	closing   atomic.Bool
	stop      context.CancelFunc
	sweepDone chan struct{}
	closed    sync.Once
}

// Start opens the tiers and returns at once; which of them work shows in Status.
// It is nil when none is wanted.
func Start(opt Options) (*Watcher, error) {
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
	w := &Watcher{log: opt.Log, nixlSetting: opt.NIXLSetting, registry: completion.NewRegistry(), epoch: hex.EncodeToString(start[:]), sweepDone: make(chan struct{}),
		sweeper: sweeper.New(stallCheckInterval, (*Transfer).check)}
	w.transfers.New = func() *Transfer {
		t := &Transfer{watcher: w}
		t.onFailed = t.failed
		w.sweeper.Add(t)
		return t
	}
	var err error
	if w.messageBoard, err = nixl.NewCompletionBoard(context.Background(), nil, opt.Slots, w.recordCompletion); err != nil {
		return nil, err
	}
	w.board.Store(w.messageBoard)
	if opt.NIXL {
		w.agent = w.startAgent(&opt)
		w.ladder = append(w.ladder, w.agent)
	}
	if opt.UCX != nil {
		var provider nixl.TierService
		if w.agent != nil && len(opt.Isolate) == 0 { // processes of their own need not agree
			provider = w.agent
		}
		w.ucx = w.startUCX(&opt, provider)
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
func (w *Watcher) Close() {
	if w == nil {
		return
	}
	w.closed.Do(func() {
		w.closing.Store(true)
		w.stop()
		<-w.sweepDone
		for _, m := range w.ladder {
			m.Close()
		}
	})
}

// Listener is that of the ZMQ socket, to be passed to the process that takes this one's place;
// nil: there is none now.
func (w *Watcher) Listener() net.Listener {
	if w == nil || w.zmq == nil {
		return nil
	}
	return w.zmq.listener()
}

// PassOn leaves the ZMQ socket to the process that has its listener. This one accepts nothing
// more; it closes the connections, whose peers then connect to the other process, once no
// hand-over is watched, or after passTime. It waits for that.
func (w *Watcher) PassOn() {
	if w == nil || w.zmq == nil {
		return
	}
	w.zmq.leave()
	quiet := 0
	for end := time.Now().Add(passTime); quiet < 5 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if quiet++; w.Watched() > 0 {
			quiet = 0
		}
	}
	w.zmq.Close()
}

// passTime is how long PassOn waits for reports of hand-overs under way.
const passTime = 5 * time.Second

const (
	sweepInterval = time.Second
	// rateTTL is how long what was measured between two ranks is believed, as long
	// as a worker is judged by its own rates; it is looked through every rateExpiryInterval.
	rateTTL, rateExpiryInterval = 2 * time.Minute, 10 * time.Second
	sweepSlots                  = 4096
)

// sweep takes back slots whose time is over: of requests that ended without Close,
// which is a bug, but must not eat the board.
func (w *Watcher) sweep(ctx context.Context) {
	defer close(w.sweepDone)
	tick, expiry := time.NewTicker(sweepInterval), time.NewTicker(rateExpiryInterval)
	defer tick.Stop()
	defer expiry.Stop()
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
		case now := <-expiry.C:
			w.rates.Expire(now.Add(-rateTTL))
		}
	}
}

// tierChanged is told of every change of a tier's state.
func (w *Watcher) tierChanged(tier nixl.Tier, before, after nixl.TierState, reason string) {
	if before == nixl.TierUp {
		w.up.Add(-1)
	}
	if after == nixl.TierUp {
		w.up.Add(1)
	}
	w.generation.Add(1)
	level := slog.LevelInfo
	if after == nixl.TierDown {
		level = slog.LevelWarn
	}
	w.log.Log(context.Background(), level, "KV transfers: a tier changed", "tier", string(tier), "state", string(after), "reason", reason)
	if lost := after == nixl.TierOff || after == nixl.TierDown; lost && tier == nixl.TierNIXL && w.nixlSetting != "" && !w.closing.Load() {
		w.log.Warn(w.nixlSetting+" has no effect: the router has no usable NIXL", "state", string(after), "reason", reason,
			"help", "install the NIXL that the engines run (pip install nixl), or name its library in transfers.nixl_library; `sluice doctor --want nixl` tries it")
	}
}

// setBoard makes b the board that tickets are lent from.
func (w *Watcher) setBoard(b *nixl.CompletionBoard) {
	if previous := w.board.Swap(b); previous != b {
		w.previousBoard.Store(previous)
	}
}

// boards are those that tickets may be out of, nil where it would be one again: the
// one that they are lent from, the one before, and the one of messages alone.
func (w *Watcher) boards() [3]*nixl.CompletionBoard {
	all := [3]*nixl.CompletionBoard{w.board.Load(), w.previousBoard.Load(), w.messageBoard}
	if all[1] == all[0] {
		all[1] = nil
	}
	if all[2] == all[0] || all[2] == all[1] {
		all[2] = nil
	}
	return all
}

// handleMessage takes a message of the connector, from whichever tier; false when it is none.
func (w *Watcher) handleMessage(m []byte) bool {
	if !bytes.HasPrefix(m, []byte(nixl.MessagePrefix)) {
		return w.registry.HandleReport(m)
	}
	for _, b := range w.boards() {
		if b != nil && b.CompleteMessage(m) == nil {
			return true
		}
	}
	w.refused.Add(1)
	return true
}

// HandleMessage is frame for a socket that others keep: LMCache's notifications and the
// connector's reports may come to one.
func (w *Watcher) HandleMessage(m []byte) bool { return w != nil && w.handleMessage(m) }

// recordCompletion is told of a record on a board.
func (w *Watcher) recordCompletion(t nixl.CompletionSlot, c nixl.Completion) {
	w.registry.Complete(t.Request, c.Status != 0, int64(min(c.Bytes, 1<<62)), c.Duration)
}

// RatesFrom is what is known of transfers from a prefill rank, for the scheduler; nil:
// nothing.
func (w *Watcher) RatesFrom(r *worker.Rank) *completion.Row {
	if w == nil || r == nil {
		return nil
	}
	return w.rates.From(int(r.Slot))
}

// ForgetRank forgets what was measured of a rank that has left.
func (w *Watcher) ForgetRank(r *worker.Rank) {
	if w != nil {
		w.rates.Remove(int(r.Slot))
	}
}

// Agent is the router's NIXL agent while its tier is up, else nil.
func (w *Watcher) Agent() *nixl.Agent {
	if w == nil || w.agent == nil || w.agent.endpoint.Load() == nil {
		return nil
	}
	return w.agent.Agent()
}
