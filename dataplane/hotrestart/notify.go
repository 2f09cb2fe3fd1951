package hotrestart

import (
	"net"
	"os"
	"strings"
)

// States for Notify, of sd_notify(3).
const (
	NotifyReady    = "READY=1"
	NotifyStopping = "STOPPING=1"
)

// Notify reports states of the service to systemd. Without $NOTIFY_SOCKET it does nothing. It
// ignores errors: a problem of the service manager must not make the service fail.
func Notify(states ...string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" || len(states) == 0 {
		return
	}
	if path[0] != '/' && path[0] != '@' {
		return // not a Unix socket
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = c.Write([]byte(strings.Join(states, "\n")))
}
