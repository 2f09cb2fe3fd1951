//go:build !linux

package eventloop

import (
	"errors"
	"time"
)

// epoll exists on Linux only.
type epoll struct{}

func openEpoll(*Loop) (*epoll, error) {
	return nil, errors.New("eventloop: cannot start: event loops are available on Linux only")
}

func (*epoll) watch(*Task) error          { return errors.ErrUnsupported }
func (*epoll) watchOut(*Task, bool) error { return errors.ErrUnsupported }
func (*epoll) wait(pollMode) error        { return errors.ErrUnsupported }
func (*epoll) remove(*Task)               {}
func (*epoll) ready() bool                { return false }
func (*epoll) pause(time.Duration)        {}
func (*epoll) next() bool                 { return false }
func (*epoll) releaseBuffer()             {}
func (*epoll) wake()                      {}
func (*epoll) close()                     {}
