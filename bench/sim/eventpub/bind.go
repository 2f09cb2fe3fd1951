package eventpub

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/portreserve"
)

// Bind binds n sockets, that of rank r at the base's port + r, and returns them and their
// endpoints. Without a base it finds a run of free ports on host. It first looks below
// the range of ephemeral ports: no connections of other processes are there, and no
// process takes such a port between two incarnations.
func Bind(ctx *zmq.Context, base, host string, n int, kind zmq.Type) ([]*zmq.Socket, []string, error) {
	if base != "" {
		u, err := url.Parse(strings.Replace(base, "*", "0.0.0.0", 1))
		port := 0
		if err == nil {
			port, err = strconv.Atoi(u.Port())
		}
		if err != nil || u.Scheme != "tcp" || port < 1 {
			return nil, nil, fmt.Errorf("sim: cannot bind KV events on %q: want tcp://host:port with a port above 0, off, or nothing for free ports", base)
		}
		return bindRun(ctx, u.Hostname(), port, n, kind)
	}
	var err error
	for try := range 100 {
		port := 20_000 + rand.IntN(12_000)
		if try >= 50 {
			h, err := portreserve.Reserve(net.JoinHostPort(host, "0"))
			if err != nil {
				return nil, nil, err
			}
			port = h.Addr.Port
			h.Close()
		}
		var list []*zmq.Socket
		var endpoints []string
		if list, endpoints, err = bindRun(ctx, host, port, n, kind); err == nil {
			return list, endpoints, nil
		}
	}
	return nil, nil, err
}

// BindAgain binds sockets at the endpoints that Bind returned to an earlier incarnation.
func BindAgain(ctx *zmq.Context, endpoints []string, kind zmq.Type) ([]*zmq.Socket, error) {
	return bindList(ctx, endpoints, kind, 200)
}

func bindRun(ctx *zmq.Context, host string, port, n int, kind zmq.Type) ([]*zmq.Socket, []string, error) {
	var endpoints []string
	for i := range n {
		endpoints = append(endpoints, "tcp://"+net.JoinHostPort(host, strconv.Itoa(port+i)))
	}
	list, err := bindList(ctx, endpoints, kind, 0)
	return list, endpoints, err
}

// bindList binds one socket for each endpoint, or none.
func bindList(ctx *zmq.Context, endpoints []string, kind zmq.Type, retries int) ([]*zmq.Socket, error) {
	var list []*zmq.Socket
	for _, endpoint := range endpoints {
		s, err := bindOne(ctx, endpoint, kind, retries)
		if err != nil {
			for _, s := range list {
				s.Close()
			}
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

// bindOne binds a socket. It retries while the address is in use, because libzmq closes
// the sockets of an earlier incarnation in the background.
func bindOne(ctx *zmq.Context, endpoint string, kind zmq.Type, retries int) (*zmq.Socket, error) {
	s, err := ctx.NewSocket(kind)
	if err == nil {
		s.SetLinger(0)
		s.SetSndhwm(100000)
		if strings.HasPrefix(endpoint, "tcp://[") {
			s.SetIpv6(true)
		}
		err = s.Bind(endpoint)
		for try := 0; zmq.AsErrno(err) == zmq.Errno(syscall.EADDRINUSE) && try < retries; try++ {
			time.Sleep(10 * time.Millisecond)
			err = s.Bind(endpoint)
		}
	}
	if err != nil {
		if s != nil {
			s.Close()
		}
		return nil, fmt.Errorf("sim: cannot bind KV events on %q: %w", endpoint, err)
	}
	return s, nil
}
