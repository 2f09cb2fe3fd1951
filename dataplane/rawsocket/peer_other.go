//go:build !linux

package rawsocket

import "syscall"

// PeerClosed reports false: this system has no such event.
func PeerClosed(int) bool { return false }

// PeerGone reports false: this system has no such event.
func PeerGone(syscall.RawConn) bool { return false }
