//go:build !linux

package rawsocket

import (
	"errors"
	"net"
	"net/netip"
)

// Listener accepts by hand; nothing does here.
type Listener struct{}

// NewListener gives none.
func NewListener(net.Listener) (*Listener, bool) { return nil, false }

// Accept is not called.
func (*Listener) Accept() (net.Conn, netip.Addr, error) {
	return nil, netip.Addr{}, errors.ErrUnsupported
}

// Close is not called.
func (*Listener) Close() error { return nil }
