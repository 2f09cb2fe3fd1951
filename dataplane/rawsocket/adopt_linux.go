package rawsocket

// Adopt makes a Conn of the descriptor of a TCP connection that another process has accepted and
// passed to this one. It makes no system call that can fail. The Conn owns the descriptor and
// closes it.
func Adopt(fd int) (c *Conn, ok bool) {
	setAcceptedOptions(fd)
	SetReceiveLowWater(fd, 1)
	return &Conn{fd: int32(fd)}, true
}
