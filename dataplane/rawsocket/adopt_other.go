//go:build !linux

package rawsocket

import "net"

// Adopt is not to be had here.
func Adopt(int) (net.Conn, bool) { return nil, false }
