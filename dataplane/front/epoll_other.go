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
func (p *poller) addInput(int) error                { return nil }
func (p *poller) remove(int)                        {}
func (p *poller) setDeadline(time.Time)             {}
func (p *poller) wait(func(fd int32)) error         { return nil }
func (p *poller) close()                            {}

type pollYielder struct{}

func (b *pollYielder) open()  {}
func (b *pollYielder) yield() {}
func (b *pollYielder) close() {}

func isClientGone(syscall.RawConn) bool { return false }
func peerClosed(int) bool               { return false }
