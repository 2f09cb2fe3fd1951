//go:build !linux

package front

import "syscall"

// poller is missing here: the router runs on Linux, elsewhere it only builds.
type poller struct{}

func newPoller() (*poller, error)                   { return nil, nil }
func (p *poller) run(func(id uint64))               {}
func (p *poller) add(syscall.RawConn, uint64) error { return nil }
func (p *poller) close()                            {}

func hasLeft(syscall.RawConn) bool { return false }
