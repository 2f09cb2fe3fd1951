package zmtp

import (
	"errors"
	"net"
	"strings"
)

// address splits an endpoint for package net: tcp://HOST:PORT, where HOST is a name or an address
// (IPv6 in brackets), or ipc://PATH. HOST * is every address of this machine.
func address(endpoint string) (network, addr string, err error) {
	if path, ok := strings.CutPrefix(endpoint, "ipc://"); ok {
		if path == "" {
			return "", "", errors.New("want ipc://PATH")
		}
		return "unix", path, nil
	}
	addr, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", "", errors.New("want tcp://HOST:PORT or ipc://PATH")
	}
	host, port, err := net.SplitHostPort(addr)
	switch {
	case err != nil:
		return "", "", errors.New("want tcp://HOST:PORT")
	case host == "" || port == "":
		return "", "", errors.New("want a host and a port")
	case host == "*":
		host = ""
	}
	if port == "*" {
		port = "0"
	}
	if _, err := net.LookupPort("tcp", port); err != nil {
		return "", "", errors.New("want a port from 0 to 65535")
	}
	return "tcp", net.JoinHostPort(host, port), nil
}

// Check reports whether an endpoint can be connected to or, with bind, listened at.
func Check(endpoint string, bind bool) error {
	_, addr, err := address(endpoint)
	if err == nil && !bind && (strings.HasPrefix(addr, ":") || strings.HasSuffix(addr, ":0")) {
		return errors.New("want a host and a port to connect to")
	}
	return err
}
