package kvtransfer

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"sluice/nixl"
)

// ucxTier is the tier of active messages and the endpoint that connectors use to reach it. UCX
// cannot restrict which peers connect. Therefore the worker listens only on the network devices
// that have an address in the allowed networks, and the tier accepts only messages that carry
// the secret of the document.
type ucxTier struct {
	*nixl.AgentTier
	watcher *Watcher
	secret  string // the From of every connector's message

	mu        sync.Mutex
	lastState nixl.TierState
	pending   *ucxEndpoint
	endpoint  atomic.Pointer[ucxEndpoint]
}

// ucxEndpoint is what a connector needs to reach the worker.
type ucxEndpoint struct {
	address []byte
	version string
}

// startUCX starts to open the tier. after is the NIXL tier that loads the UCX library first,
// nil for none.
func (w *Watcher) startUCX(opt *Options, after nixl.TierService) *ucxTier {
	var secret [16]byte
	rand.Read(secret[:])
	u := &ucxTier{watcher: w, secret: hex.EncodeToString(secret[:]), lastState: nixl.TierStarting}
	settings := maps.Clone(opt.UCX.Settings)
	if settings == nil {
		settings = map[string]string{}
	}
	if os.Getenv("UCX_TLS") == "" { // reports are small: they need no shared memory, GPU or RDMA
		settings["TLS"] = "tcp"
	}
	if devices := opt.UCX.Devices; len(devices) > 0 {
		settings["NET_DEVICES"] = strings.Join(devices, ",")
	}
	var refused error
	if _, chosen := settings["NET_DEVICES"]; !chosen && len(opt.Networks) > 0 {
		devices, err := devicesIn(opt.Networks)
		if err != nil {
			refused = err
		}
		settings["NET_DEVICES"] = strings.Join(devices, ",")
	}
	u.AgentTier = nixl.StartUCXTier(nixl.UCXTierConfig{
		UCX: nixl.UCXConfig{
			Agent: nixl.Config{Name: "sluice-" + w.epoch, Search: opt.Search, Parameters: settings, OnNotification: u.handleMessage},
			Path:  opt.UCX.Library,
		},
		Isolate: opt.Isolate, After: after, DisabledReason: refused, Ready: u.ready, OnState: u.setState,
	})
	return u
}

// devicesIn returns the machine's network devices that have an address in networks.
func devicesIn(networks []netip.Prefix) ([]string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("kvtransfer: cannot list network devices: %w", err)
	}
	var found []string
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			ip, ok := netip.AddrFromSlice(n.IP)
			if ok && slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(ip.Unmap()) }) && !slices.Contains(found, i.Name) {
				found = append(found, i.Name)
			}
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("kvtransfer: no network device here has an address in registration.networks (%s); name some in transfers.ucx_devices", networks)
	}
	return found, nil
}

// handleMessage processes a message if its sender knows the secret, and counts it as unauthenticated
// otherwise.
func (u *ucxTier) handleMessage(n nixl.Notification) {
	if subtle.ConstantTimeCompare([]byte(n.From), []byte(u.secret)) != 1 {
		u.watcher.forged.Add(1)
		return
	}
	u.watcher.handleMessage(n.Message)
}

// ready records the address of a new worker.
func (u *ucxTier) ready(ctx context.Context, agent *nixl.Agent) error {
	metadata, err := agent.Metadata(ctx)
	if err != nil {
		return err
	}
	o := &ucxEndpoint{}
	if o.address, o.version, err = nixl.UCXAddress(metadata); err != nil {
		return err
	}
	u.mu.Lock()
	u.pending = o
	u.mu.Unlock()
	return nil
}

func (u *ucxTier) setState(s nixl.TierState, reason string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s == nixl.TierUp {
		u.endpoint.Store(u.pending)
	} else {
		u.endpoint.Store(nil)
	}
	u.pending = nil
	previous := u.lastState
	u.lastState = s
	u.watcher.tierChanged(nixl.TierUCX, previous, s, reason)
}

// document returns the tier's part of the document; nil while the tier is not up.
func (u *ucxTier) document() *DocumentUCX {
	if u == nil {
		return nil
	}
	o := u.endpoint.Load()
	if o == nil {
		return nil
	}
	return &DocumentUCX{Address: o.address, Version: o.version, Secret: u.secret}
}
