//go:build !linux

// Package epoll waits for events of many sockets outside Go's own poller.
package epoll

import (
	"syscall"
	"time"
)

// Poller does nothing here: the router runs on Linux, elsewhere it only builds.
type Poller struct{}

// New returns nil and no error, which callers take as "no epoll".
func New() (*Poller, error)                         { return nil, nil }
func (p *Poller) Run(func(id uint64))               {}
func (p *Poller) Add(syscall.RawConn, uint64) error { return nil }
func (p *Poller) AddInput(int) error                { return nil }
func (p *Poller) Remove(int)                        {}
func (p *Poller) SetDeadline(time.Time)             {}
func (p *Poller) Wait(func(fd int32)) error         { return nil }
func (p *Poller) Close()                            {}

// Yielder does nothing here.
type Yielder struct{}

func (b *Yielder) Open()  {}
func (b *Yielder) Yield() {}
func (b *Yielder) Close() {}
