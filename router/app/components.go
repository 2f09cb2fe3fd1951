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
	"sluice/router/schedule"
	"sluice/router/tokenize"
)

// Components are the parts of an assembled router, for tests and tools that look into it.
// They belong to the router: they end with Close, and none may be closed by the caller.
type Components struct {
	Config       *config.Config // with which the router was started
	Fleet        *fleet.Fleet
	Index        kvindex.Index
	Approx       *kvindex.Approx
	Scheduler    *schedule.Scheduler
	Tokenizer    *tokenize.Tokenizer
	Metrics      *obs.Metrics
	Front        *front.Server
	Pages        front.Pages
	Wire         *wire.Server         // nil: no framed socket
	Admin        *admin.Server        // nil: off
	Registration *registration.Server // nil: off
	Keyring      *apikey.Keyring      // nil: clients need no key
	Transfers    *kvtransfer.Watcher  // nil: no tier is wanted
	SideChannel  *sidechannel.Manager // nil: off
	Selector     *header.Selector     // nil: not a sidecar
}

// Components returns the router's parts.
func (r *Router) Components() Components {
	c := Components{
		Config: r.cfg, Fleet: r.fleet, Index: r.index, Approx: r.approx, Scheduler: r.scheduler, Tokenizer: r.tokenizer,
		Metrics: r.metrics, Front: r.front, Pages: r.pages, Wire: r.wire, Admin: r.admin, Registration: r.register,
		Keyring: r.keyring, Transfers: r.transfers, SideChannel: r.sidechannel,
	}
	if r.sidecar != nil {
		c.Selector = r.sidecar.selector
	}
	return c
}

// LiveConfig returns the configuration in effect: Config with what was reloaded since.
func (r *Router) LiveConfig() *config.Config { return r.live.Load() }

// NotReady returns what /readyz waits for; nil when the router is ready.
func (r *Router) NotReady() []string { return r.pages.notReadyReasons(true) }

// EngineAPIAddrs returns the addresses of the framed socket's open listeners.
func (r *Router) EngineAPIAddrs() []net.Addr {
	r.wireSockets.mu.Lock()
	defer r.wireSockets.mu.Unlock()
	return append([]net.Addr(nil), r.wireSockets.addrs...)
}
