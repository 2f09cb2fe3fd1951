//go:build !linux

package loop

import "errors"

// epoll is Linux's.
type epoll struct{}

func openEpoll(*Loop) (*epoll, error) {
	return nil, errors.New("loop: cannot start: event loops are made for Linux only")
}

func (*epoll) watch(*Task) error          { return errors.ErrUnsupported }
func (*epoll) watchOut(*Task, bool) error { return errors.ErrUnsupported }
func (*epoll) wait(haste) error           { return errors.ErrUnsupported }
func (*epoll) forget(*Task)               {}
func (*epoll) next() bool                 { return false }
func (*epoll) flushed()                   {}
func (*epoll) wake()                      {}
func (*epoll) close()                     {}
