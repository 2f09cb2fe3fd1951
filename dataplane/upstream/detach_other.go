//go:build !linux

package upstream

import (
	"errors"
	"net"
	"syscall"
	"time"
)

func (c *conn) dupDescriptor() (int, error) { return 0, errors.ErrUnsupported }
func (c *conn) reattach() bool              { return c.fd < 0 }
func closeDescriptor(int)                   {}

// Without a second descriptor a connection is closed at once, regardless of Request.Grace.
func (c *conn) duplicate() (int, error) { return 0, errors.ErrUnsupported }

func writeVector(syscall.RawConn, *net.Buffers) error { return errors.ErrUnsupported }

// directAddress is not supported on this system.
type directAddress struct{ ok bool }

func directAddressOf(string) directAddress { return directAddress{} }

func (e *Endpoint) dialRaw(time.Time, *Call) (*conn, error) {
	return nil, errors.ErrUnsupported
}
