package app

import (
	"cmp"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"sluice/dataplane/hotrestart"
	"sluice/dataplane/zmtp"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/obs"
	"sluice/router/worker"
)

// newTransfers starts the tiers over which engines report KV transfers to the router. It
// returns nil if no tier is configured.
func newTransfers(cfg *config.Config, given *hotrestart.InheritedListeners, log *slog.Logger) (*kvtransfer.Watcher, error) {
	opt := kvtransfer.Options{
		NIXL: cfg.WantsNIXL(), Search: nixl.Search{Path: cfg.Transfers.NIXLLibrary, Python: cfg.Transfers.Python},
		Endpoint: cfg.ReportEndpoint(), Slots: cfg.Transfers.CompletionSlots, Log: log,
	}
	if mode := cfg.Transfers.SideChannel; cfg.UsesSideChannel() {
		opt.NIXLSetting = "transfers.side_channel: " + mode
	}
	if t := &cfg.Transfers; cfg.WantsUCX() {
		opt.UCX = &kvtransfer.UCX{Library: t.UCXLibrary, Devices: t.UCXDevices}
		if t.UCXPorts != "" {
			opt.UCX.Settings = map[string]string{"TCP_PORT_RANGE": t.UCXPorts}
		}
	}
	if cfg.Transfers.Isolate {
		opt.Isolate = []string{"/proc/self/exe", AgentHost} // works even after the binary's file was replaced
	}
	if cfg.Registration.On() {
		opt.Networks = cfg.Registration.Prefixes()
	}
	opt.ZMQNetworks = config.Prefixes(cfg.Transfers.ZMQNetworks)
	if opt.Endpoint != "" {
		var err error
		if opt.Bound, _, err = given.Listener(socketReports, opt.Endpoint); err != nil {
			return nil, err
		}
	}
	return kvtransfer.Start(opt)
}

// newSideChannel creates the client for the NIXL side channel of vLLM prefill engines that
// run without a Sluice connector; nil if it is off.
func newSideChannel(cfg *config.Config, w *kvtransfer.Watcher, f *fleet.Fleet, log *slog.Logger) (*sidechannel.Manager, error) {
	mode := cfg.Transfers.SideChannel
	if !cfg.UsesSideChannel() {
		return nil, nil
	}
	if why := cfg.SideChannelUnused(); why != "" {
		log.Warn(why)
	}
	if w == nil {
		return nil, nil
	}
	return sidechannel.New(sidechannel.Options{Agent: w.Agent, Release: mode == "release", Log: log,
		OnEngineID: func(rank *worker.Rank, engine string, options time.Time) {
			f.ReportEngineID(rank, []byte(engine), options)
		}})
}

// exposeSocketMetrics registers the connection and refusal counters of a ZMQ listener.
func exposeSocketMetrics(m *obs.Metrics, socket string, stats func() zmtp.Stats) {
	m.GaugeFunc(func() float64 { return float64(stats().Conns) }, "sluice_zmq_connections", "socket", socket)
	for why, of := range map[string]func(zmtp.Stats) int64{
		"network":        func(s zmtp.Stats) int64 { return s.NotAllowed },
		"at_capacity":    func(s zmtp.Stats) int64 { return s.AtCapacity },
		"protocol_error": func(s zmtp.Stats) int64 { return s.PeerErrors },
	} {
		m.GaugeFunc(func() float64 { return float64(of(stats())) }, "sluice_zmq_refused_total", "socket", socket, "reason", why)
	}
}

// connectorDocument returns the body of GET /v1/connector. reached is the address at which the
// caller reached the router.
func (r *Router) connectorDocument(reached netip.Addr) (any, error) {
	d, err := r.transfers.Document(reached)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// exposeTransferMetrics registers the metrics of tiers, reports, outcomes and rank pairs.
func (r *Router) exposeTransferMetrics() {
	m, w := r.metrics, r.transfers
	for _, tier := range [...]nixl.Tier{nixl.TierNIXL, nixl.TierUCX, nixl.TierZMQ, nixl.TierHTTP} {
		m.GaugeFunc(func() float64 {
			if w.Up(tier) {
				return 1
			}
			return 0
		}, "sluice_kv_tier_up", "tier", string(tier))
	}
	if w == nil {
		return
	}
	m.GaugeFunc(func() float64 { return float64(w.Pending()) }, "sluice_kv_transfers_pending")
	if _, ok := w.Socket(); ok {
		exposeSocketMetrics(m, "reports", func() zmtp.Stats { s, _ := w.Socket(); return s })
	}
	for name := range w.Reports() {
		m.GaugeFunc(func() float64 { return float64(w.Reports()[name]) }, "sluice_kv_reports_total", "report", name)
	}
	for name := range w.Outcomes() {
		m.GaugeFunc(func() float64 { return float64(w.Outcomes()[name]) }, "sluice_kv_transfers_total", "outcome", name)
	}
	for i, what := range [...]string{"renewed", "released", "failed"} {
		m.GaugeFunc(func() float64 {
			renewed, released, failed := r.sidechannel.Counts()
			return float64([...]int64{renewed, released, failed}[i])
		}, "sluice_kv_side_channel_total", "outcome", what)
	}
	m.ExposePairs(func() []obs.TransferPair {
		pairs := r.transferPairs()
		out := make([]obs.TransferPair, 0, len(pairs))
		for _, p := range pairs {
			out = append(out, obs.TransferPair{From: p.From, To: p.To, Transfers: p.Transfers, BytesPerSecond: p.BytesPerSecond, SecondsPerToken: p.MSPerToken / 1e3})
		}
		return out
	})
}

// transferPair is the measured transfer rate between two ranks, as the admin API returns it.
type transferPair struct {
	From           string  `json:"from"` // worker/rank
	To             string  `json:"to"`
	Transfers      int64   `json:"transfers"`
	BytesPerSecond float64 `json:"bytes_per_s"`  // 0 unknown
	MSPerToken     float64 `json:"ms_per_token"` // 0 unknown
}

func (r *Router) transferPairs() []transferPair {
	names := map[int]string{}
	for _, w := range r.fleet.View().Workers {
		for _, rank := range w.Ranks {
			names[int(rank.Slot)] = rank.ID.String()
		}
	}
	var out []transferPair
	for _, s := range r.transfers.TransferRates() {
		from, to := names[s.From], names[s.To]
		if from == "" || to == "" {
			continue // one of the ranks has been removed
		}
		out = append(out, transferPair{from, to, s.Transfers, s.BytesPerSecond, s.NSPerToken / 1e6})
	}
	slices.SortFunc(out, func(a, b transferPair) int {
		return cmp.Or(strings.Compare(a.From, b.From), strings.Compare(a.To, b.To))
	})
	return out
}

// transfersView returns the body of GET /admin/v1/transfers.
func (r *Router) transfersView() any {
	view := struct {
		kvtransfer.Status
		Pending  int              `json:"pending"`
		Watched  int              `json:"watched"` // the old name of Pending
		Reports  map[string]int64 `json:"reports,omitempty"`
		Outcomes map[string]int64 `json:"outcomes,omitempty"`
		Pairs    []transferPair   `json:"pairs"`
	}{Status: r.transfers.Status(), Pairs: []transferPair{}}
	if w := r.transfers; w != nil {
		view.Pending, view.Reports, view.Outcomes = w.Pending(), w.Reports(), w.Outcomes()
		view.Watched = view.Pending
	}
	view.Pairs = append(view.Pairs, r.transferPairs()...)
	return view
}

func (r *Router) dropTransferPairs(w *worker.Worker) {
	for _, rank := range w.Ranks {
		r.transfers.ForgetRank(rank)
	}
}
