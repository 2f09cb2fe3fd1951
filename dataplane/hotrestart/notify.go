package hotrestart

import (
	"net"
	"os"
	"strings"
)

// What Notify may say, of sd_notify(3); several are parted by new lines.
const (
	NotifyReady    = "READY=1"
	NotifyStopping = "STOPPING=1"
)

// Notify tells systemd how the service is doing. Without $NOTIFY_SOCKET it does
// nothing. A word that does not get through is lost: whoever runs the service must
// not be the reason that it fails.
func Notify(states ...string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" || len(states) == 0 {
		return
	}
	if path[0] != '/' && path[0] != '@' {
		return // of a kind that is not a Unix socket's
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = c.Write([]byte(strings.Join(states, "\n")))
}
