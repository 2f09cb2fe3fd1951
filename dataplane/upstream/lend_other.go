//go:build !linux

package upstream

import (
	"errors"
	"net"
	"syscall"
)

func (c *conn) takeOut() (int, error) { return 0, errors.ErrUnsupported }
func (c *conn) takeBack() bool        { return c.fd < 0 }
func closeDescriptor(int)             {}

// Without a second descriptor a connection is closed at once, whatever Request.Grace says.
func (c *conn) duplicate() (int, error) { return 0, errors.ErrUnsupported }

func writeVector(syscall.RawConn, *net.Buffers) error { return errors.ErrUnsupported }
