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

// Options configures a Watcher.
type Options struct {
	NIXL        bool              // open a NIXL agent
	Search      nixl.Search       // where to look for the NIXL library
	Parameters  map[string]string // for NIXL's backend; nil: the backend's defaults
	UCX         *UCX              // receive reports as UCX active messages; nil: do not
	Isolate     []string          // command of the process that hosts each agent (nixl.ServeHost); nil: agents run in this process
	Endpoint    string            // of the ZMQ PULL socket; "": no socket
	Networks    []netip.Prefix    // networks whose ZMQ reports are accepted and on whose devices UCX listens; nil: any
	ZMQNetworks []netip.Prefix    // networks whose ZMQ reports are accepted; nil: Networks
	// Bound is the ZMQ socket's listener when the previous process passed it in a hot restart;
	// nil: the Watcher binds Endpoint. If Bound has a method Opened, the Watcher calls it and
	// waits for its result before it accepts.
	Bound       net.Listener
	Slots       int          // of the completion board, a multiple of 64 [16384]
	NIXLSetting string       // the setting without effect while NIXL is unusable, named in a warning; "": no warning
	Log         *slog.Logger // [none]

	retry time.Duration // first pause before binding ZMQ again [1s]; for tests
}

// UCX configures the reception of active messages.
type UCX struct {
	Library  string            // file or folder of libucp; when set, no other place is searched
	Devices  []string          // network devices to listen on; nil: those with an address in Networks
	Settings map[string]string // of UCX, without the prefix UCX_, such as "TCP_PORT_RANGE"
}

// Watcher receives the reports of transfers. All methods may be called from any goroutine. The
// methods of a nil Watcher behave as if no tier were configured.
type Watcher struct {
	log         *slog.Logger
	nixlSetting string // Options.NIXLSetting
	registry    *completion.Registry
	rates       completion.TransferTimes

	agent  *agentTier // nil: off
	ucx    *ucxTier   // nil: off
	zmq    *zmqTier   // nil: off
	ladder nixl.Tiers
	up     atomic.Int32 // number of tiers that are up; Open returns nil at 0

	messageBoard  *nixl.CompletionBoard // has no registered memory, messages alone complete its slots; used while no agent has a board
	board         atomic.Pointer[nixl.CompletionBoard]
	previousBoard atomic.Pointer[nixl.CompletionBoard] // the board before; its slots may still be in use

	epoch         string // random, one per Watcher
	generation    atomic.Uint64
	refused       atomic.Int64 // records that matched no slot
	forged        atomic.Int64 // UCX messages without the document's secret
	outcomeCounts [numOutcomes]atomic.Int64

	transfers objpool.Pool[Transfer]
	sweeper   *sweeper.Sweeper[Transfer]

	lingering atomic.Int64 // transfers that wait for a late report after their request has ended
	closing   atomic.Bool
	stop      context.CancelFunc
	sweepDone chan struct{}
	closed    sync.Once
}

// Start starts the tiers and returns at once; Status shows which of them are up. It returns a
// nil Watcher when no tier is configured.
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
		if w.agent != nil && len(opt.Isolate) == 0 { // in processes of their own NIXL and UCX need not share a library
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

// Close closes the tiers. Open transfers receive no further reports and must still be closed.
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

// Listener returns the ZMQ socket's listener, for the child process of a hot restart; nil while
// no socket is bound.
func (w *Watcher) Listener() net.Listener {
	if w == nil || w.zmq == nil {
		return nil
	}
	return w.zmq.listener()
}

// PassOn leaves the ZMQ socket to the child process that has its listener. This process accepts
// no further connections. It closes the existing ones, whose peers then connect to the child,
// once no transfer has been watched for 50 ms, or after passTime. PassOn blocks until then.
func (w *Watcher) PassOn() {
	if w == nil || w.zmq == nil {
		return
	}
	w.zmq.stopAccepting()
	quiet := 0
	for end := time.Now().Add(passTime); quiet < 5 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if quiet++; w.Pending() > 0 {
			quiet = 0
		}
	}
	w.zmq.Close()
}

// passTime bounds how long PassOn waits for reports of transfers in progress.
const passTime = 5 * time.Second

const (
	sweepInterval = time.Second
	// rateTTL is how long a time measured between two ranks is used, the same as for a worker's
	// own rates. Expired times are removed every rateExpiryInterval.
	rateTTL, rateExpiryInterval = 2 * time.Minute, 10 * time.Second
	sweepSlots                  = 4096
)

// sweep reclaims slots whose time is over. They belong to requests that ended without Close,
// which is a bug but must not exhaust the board.
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

// tierChanged records and logs a change of a tier's state.
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
			"hint", "install the NIXL that the engines run (pip install nixl), or name its library in transfers.nixl_library; `sluice doctor --require nixl` tries it")
	}
}

// setBoard makes b the board from which slots are acquired.
func (w *Watcher) setBoard(b *nixl.CompletionBoard) {
	if previous := w.board.Swap(b); previous != b {
		w.previousBoard.Store(previous)
	}
}

// boards returns the boards that may have slots in use: the current one, the one before and the
// message board. A board that appears twice is nil the second time.
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

// handleMessage processes a connector's message from any tier. It returns false when m is not a
// message of the connector.
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

// HandleMessage is handleMessage for a socket that another package owns: LMCache's
// notifications and the connector's reports can arrive at the same socket.
func (w *Watcher) HandleMessage(m []byte) bool { return w != nil && w.handleMessage(m) }

// recordCompletion is the callback for a record on a completion board.
func (w *Watcher) recordCompletion(t nixl.CompletionSlot, c nixl.Completion) {
	w.registry.Complete(t.Request, c.Status != 0, int64(min(c.Bytes, 1<<62)), c.Duration)
}

// RatesFrom returns the measured times of transfers from a prefill rank, for the scheduler; nil
// when nothing is known.
func (w *Watcher) RatesFrom(r *worker.Rank) *completion.Row {
	if w == nil || r == nil {
		return nil
	}
	return w.rates.From(int(r.Slot))
}

// ForgetRank removes the measurements of a rank that was removed.
func (w *Watcher) ForgetRank(r *worker.Rank) {
	if w != nil {
		w.rates.Remove(int(r.Slot))
	}
}

// Agent returns the router's NIXL agent while its tier is up, else nil.
func (w *Watcher) Agent() *nixl.Agent {
	if w == nil || w.agent == nil || w.agent.endpoint.Load() == nil {
		return nil
	}
	return w.agent.Agent()
}
