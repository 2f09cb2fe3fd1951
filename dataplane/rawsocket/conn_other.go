//go:build !linux

package rawsocket

import (
	"errors"
	"net"
	"net/netip"
)

// Listener is not supported on this system.
type Listener struct{}

// NewListener returns false.
func NewListener(net.Listener) (*Listener, bool) { return nil, false }

// Accept is never called.
func (*Listener) Accept() (net.Conn, netip.Addr, error) {
	return nil, netip.Addr{}, errors.ErrUnsupported
}

// Close is never called.
func (*Listener) Close() error { return nil }
