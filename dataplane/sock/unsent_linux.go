package sock

import "golang.org/x/sys/unix"

// Unsent is how many bytes written to the socket the other side has not acknowledged.
func Unsent(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0 // what is wrong with it, the next write will say
	}
	return n
}
