package rawsocket

import "golang.org/x/sys/unix"

// SetReceiveLowWater makes pollers report fd readable only when n bytes are unread, or at its end
// (socket(7), SO_RCVLOWAT). The default of sockets is 1. Non-blocking reads are not affected.
func SetReceiveLowWater(fd, n int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, n) }
