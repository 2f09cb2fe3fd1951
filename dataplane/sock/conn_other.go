//go:build !linux

package sock

import (
	"errors"
	"net"
	"net/netip"
)

// Listener accepts by hand; nothing does here.
type Listener struct{}

// ListenerOf gives none.
func ListenerOf(net.Listener) (*Listener, bool) { return nil, false }

// Accept is not called.
func (*Listener) Accept() (net.Conn, netip.Addr, error) {
	return nil, netip.Addr{}, errors.ErrUnsupported
}

// Close is not called.
func (*Listener) Close() error { return nil }
