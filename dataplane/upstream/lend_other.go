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

func writeVector(syscall.RawConn, *net.Buffers) error { return errors.ErrUnsupported }
