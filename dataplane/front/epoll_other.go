//go:build !linux

package front

import (
	"syscall"
	"time"
)

// poller is missing here: the router runs on Linux, elsewhere it only builds.
type poller struct{}

func newPoller() (*poller, error)                   { return nil, nil }
func (p *poller) run(func(id uint64))               {}
func (p *poller) add(syscall.RawConn, uint64) error { return nil }
func (p *poller) await(int) error                   { return nil }
func (p *poller) forget(int)                        {}
func (p *poller) until(time.Time)                   {}
func (p *poller) turn(func(fd int32)) error         { return nil }
func (p *poller) close()                            {}

type bell struct{}

func (b *bell) hang()  {}
func (b *bell) hear()  {}
func (b *bell) close() {}

func hasLeft(syscall.RawConn) bool { return false }
func ended(int) bool               { return false }
