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

// Without a second descriptor a connection is closed at once, whatever Request.Grace says.
func (c *conn) duplicate() (int, error) { return 0, errors.ErrUnsupported }

func writeVector(syscall.RawConn, *net.Buffers) error { return errors.ErrUnsupported }

// directAddress is an address that a connection may be made to by hand: none here.
type directAddress struct{ ok bool }

func directAddressOf(string) directAddress { return directAddress{} }

func (e *Endpoint) dialRaw(time.Time, *Call) (*conn, error) {
	return nil, errors.ErrUnsupported
}
