package app

import (
	"net"

	"sluice/dataplane/front"
	"sluice/dataplane/wire"
	"sluice/router/admin"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/discovery/header"
	"sluice/router/discovery/registration"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/obs"
	"sluice/router/pd"
	"sluice/router/schedule"
	"sluice/router/tokenize"
)

// Components are the parts of an assembled router, for tests and tools that inspect it.
// The router owns them: Router.Close closes them, and the caller must not.
type Components struct {
	Config       *config.Config // as at the start; see LiveConfig
	Fleet        *fleet.Fleet
	Index        kvindex.Index
	Approx       *kvindex.Approx
	Scheduler    *schedule.Scheduler
	Tokenizer    *tokenize.Tokenizer
	Metrics      *obs.Metrics
	Runner       *pd.Runner
	Front        *front.Server
	Pages        front.Pages
	Wire         *wire.Server         // nil: no engine API socket
	Admin        *admin.Server        // nil: off
	Registration *registration.Server // nil: off
	Keyring      *apikey.Keyring      // nil: clients need no API key
	Transfers    *kvtransfer.Watcher  // nil: no tier is configured
	SideChannel  *sidechannel.Manager // nil: off
	Selector     *header.Selector     // nil: not a sidecar
}

// Components returns the router's parts.
func (r *Router) Components() Components {
	c := Components{
		Config: r.cfg, Fleet: r.fleet, Index: r.index, Approx: r.approx, Scheduler: r.scheduler, Tokenizer: r.tokenizer,
		Metrics: r.metrics, Runner: r.runner, Front: r.front, Pages: r.pages, Wire: r.wire, Admin: r.admin, Registration: r.register,
		Keyring: r.keyring, Transfers: r.transfers, SideChannel: r.sidechannel,
	}
	if r.sidecar != nil {
		c.Selector = r.sidecar.selector
	}
	return c
}

// LiveConfig returns the configuration in effect: Config with the changes of all reloads since.
func (r *Router) LiveConfig() *config.Config { return r.live.Load() }

// NotReady returns the conditions that /readyz waits for; nil if the router is ready.
func (r *Router) NotReady() []string { return r.pages.notReadyReasons(true) }

// EngineAPIAddrs returns the addresses of the engine API socket's open listeners.
func (r *Router) EngineAPIAddrs() []net.Addr {
	r.wireSockets.mu.Lock()
	defer r.wireSockets.mu.Unlock()
	return append([]net.Addr(nil), r.wireSockets.addrs...)
}
