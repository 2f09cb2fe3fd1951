package kvtransfer

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Document tells a connector how to reach the router. It is the answer to GET /v1/connector,
// which nixl/connector/sluice_connector/endpoint.py parses.
//
// A Document is confidential: NIXL's metadata allows its bearer to write to the completion
// board, and UCX's secret allows it to report. The router sends it only to clients in the
// allowed networks that present the token, and never logs it.
type Document struct {
	Version int           `json:"version"`
	Epoch   string        `json:"epoch"` // changes at every start of the router and at every change of a tier's state
	ZMQ     *DocumentZMQ  `json:"zmq"`   // null: the tier is not up; likewise the next two
	UCX     *DocumentUCX  `json:"ucx"`
	NIXL    *DocumentNIXL `json:"nixl"`
}

// DocumentZMQ is the PULL socket that receives reports.
type DocumentZMQ struct {
	Endpoint string `json:"endpoint"` // tcp://HOST:PORT
}

// DocumentUCX is the UCX worker that receives active messages. A message's header is Secret and
// its payload is a report.
type DocumentUCX struct {
	Address []byte `json:"address"` // the worker's address as UCP packs it; base64 in JSON
	Version string `json:"version"` // UCX's release in the router, such as 1.23
	Secret  string `json:"secret"`
}

// DocumentNIXL is the router's agent.
type DocumentNIXL struct {
	Agent    string        `json:"agent"`
	Metadata []byte        `json:"metadata"` // base64 in JSON
	Version  string        `json:"version"`  // NIXL's release in the router
	Board    DocumentBoard `json:"board"`
}

// DocumentBoard locates the completion board in the agent's memory.
type DocumentBoard struct {
	ID        uint32 `json:"id"` // a connector reports a slot of any other board by a message
	Address   uint64 `json:"address"`
	Slots     int    `json:"slots"`
	SlotBytes int    `json:"slot_bytes"`
	Device    int    `json:"device"`
}

// String omits keys and secrets, so that printing a Document does not disclose them.
func (d *Document) String() string { return fmt.Sprintf("connector document, epoch %s", d.Epoch) }

// ErrNoTier means that no tier is configured, so there is nothing a connector could report to.
var ErrNoTier = errors.New("this router receives no reports of transfers: transfers.nixl, transfers.ucx and transfers.zmq are off, or no model hands over by NIXL")

// Document returns the endpoints of the tiers that are up. reached is the local address of the
// connector's request; it replaces the wildcard address of a socket that is bound to all
// addresses.
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

// replaceWildcard replaces a wildcard host in endpoint by the address reached.
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
