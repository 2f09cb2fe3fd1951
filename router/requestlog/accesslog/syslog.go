package accesslog

import (
	"fmt"
	"log/syslog"
	"time"
)

// redialInterval is the shortest time between two attempts to reach a syslog server.
const redialInterval = time.Second

// syslogOutput writes to a syslog server, which it reaches with the first line and, where that fails, with a later
// one: a router must start while the server of its log is down. Its methods are called by one goroutine.
type syslogOutput struct {
	network, address string // "" for the local daemon
	w                *syslog.Writer
	dialled          time.Time
	err              error // of the last attempt
}

// Write implements io.Writer. A syslog.Writer that has lost its connection dials again by itself.
func (s *syslogOutput) Write(line []byte) (int, error) {
	if s.w == nil {
		if now := time.Now(); now.Sub(s.dialled) >= redialInterval {
			s.dialled = now
			s.w, s.err = syslog.Dial(s.network, s.address, syslog.LOG_INFO|syslog.LOG_DAEMON, "sluice")
		}
		if s.err != nil {
			s.w = nil
			return 0, fmt.Errorf("cannot reach syslog: %w", s.err)
		}
	}
	return s.w.Write(line)
}

// Close implements io.Closer.
func (s *syslogOutput) Close() error {
	if s.w == nil {
		return nil
	}
	return s.w.Close()
}
