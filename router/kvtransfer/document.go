package kvtransfer

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Document is what a connector is told of how to reach the router: the answer to
// GET /v1/connector, as nixl/connector/sluice_connector/endpoint.py parses it.
// NIXL's metadata lets its holder write into the completion board, UCX's secret lets
// it report: a Document goes
// to bearers of the token in allowed networks, and into no log.
type Document struct {
	Version int           `json:"version"`
	Epoch   string        `json:"epoch"` // another after every start and every change of a tier
	ZMQ     *DocumentZMQ  `json:"zmq"`   // null: not offered
	UCX     *DocumentUCX  `json:"ucx"`
	NIXL    *DocumentNIXL `json:"nixl"`
}

// DocumentZMQ is the PULL socket for reports.
type DocumentZMQ struct {
	Endpoint string `json:"endpoint"` // tcp://HOST:PORT
}

// DocumentUCX is the worker that takes active messages. A message's header is Secret,
// its payload a report.
type DocumentUCX struct {
	Address []byte `json:"address"` // of the worker, as UCP packs it; base64 in JSON
	Version string `json:"version"` // of UCX here, as 1.23
	Secret  string `json:"secret"`
}

// DocumentNIXL is the router's agent.
type DocumentNIXL struct {
	Agent    string        `json:"agent"`
	Metadata []byte        `json:"metadata"` // base64 in JSON
	Version  string        `json:"version"`  // of NIXL here
	Board    DocumentBoard `json:"board"`
}

// DocumentBoard is where the completion board lies in the agent's memory.
type DocumentBoard struct {
	ID        uint32 `json:"id"` // a ticket of another board is told by a message
	Address   uint64 `json:"address"`
	Slots     int    `json:"slots"`
	SlotBytes int    `json:"slot_bytes"`
	Device    int    `json:"device"`
}

// String hides keys and secrets from whoever prints a Document.
func (d *Document) String() string { return fmt.Sprintf("connector document, epoch %s", d.Epoch) }

// ErrNoTier: there is nothing that a connector could report to.
var ErrNoTier = errors.New("this router takes no reports of transfers: transfers.nixl, transfers.ucx and transfers.zmq are off, or no model hands over by NIXL")

// Document tells where the tiers are. reached is the address that the asker has
// reached this machine at, which stands for a socket bound to all addresses.
func (w *Watcher) Document(reached netip.Addr) (*Document, error) {
	if w == nil {
		return nil, ErrNoTier
	}
	d := &Document{Version: 1, Epoch: fmt.Sprintf("%s-%d", w.epoch, w.generation.Load())}
	if at := w.zmq.at(); at != "" {
		d.ZMQ = &DocumentZMQ{Endpoint: replaceWildcard(at, reached)}
	}
	d.UCX = w.ucx.document()
	if w.agent != nil {
		if o := w.agent.endpoint.Load(); o != nil {
			d.NIXL = &DocumentNIXL{Agent: o.agent, Metadata: o.metadata, Version: o.version,
				Board: DocumentBoard{ID: o.board.ID(), Address: o.address, Slots: o.slots, SlotBytes: 64}}
		}
	}
	return d, nil
}

// replaceWildcard puts the address that was reached in the place of a wildcard.
func replaceWildcard(endpoint string, reached netip.Addr) string {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil || !reached.IsValid() {
		return endpoint
	}
	if a, err := netip.ParseAddr(host); err == nil && !a.IsUnspecified() || err != nil && host != "*" {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(reached.Unmap().WithZone("").String(), port)
}
