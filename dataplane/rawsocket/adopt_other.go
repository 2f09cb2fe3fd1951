//go:build !linux

package rawsocket

import "net"

// Adopt is not supported on this system.
func Adopt(int) (net.Conn, bool) { return nil, false }
