//go:build !linux

package upstream

import (
	"errors"
	"net"
	"syscall"
	"time"
)

func (c *conn) takeOut() (int, error) { return 0, errors.ErrUnsupported }
func (c *conn) takeBack() bool        { return c.fd < 0 }
func closeDescriptor(int)             {}

// Without a second descriptor a connection is closed at once, whatever Request.Grace says.
func (c *conn) duplicate() (int, error) { return 0, errors.ErrUnsupported }

func writeVector(syscall.RawConn, *net.Buffers) error { return errors.ErrUnsupported }

// directly is an address that a connection may be made to by hand: none here.
type directly struct{ ok bool }

func directlyTo(string) directly { return directly{} }

func (e *Endpoint) connectDirectly(time.Time, *Call) (*conn, error) {
	return nil, errors.ErrUnsupported
}
