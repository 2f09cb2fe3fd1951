package rawsocket

import "golang.org/x/sys/unix"

// SetReceiveLowWater has pollers told of the socket's bytes only once n lie in it unread, or its end
// (socket(7), SO_RCVLOWAT): 1 is what every socket begins with. A read that does not wait
// gives what is there as ever.
func SetReceiveLowWater(fd, n int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, n) }
