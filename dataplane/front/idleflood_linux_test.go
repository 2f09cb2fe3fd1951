package front

import (
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// A connection without input stays in the kernel for a second (TCP_DEFER_ACCEPT). When the kernel's
// queue of these is full, it uses SYN cookies, so that clients that send a request are still
// served. With 2,000 silent connections a second the queue of 1,024 to 4,096 is soon full.
func TestIdleFlood(t *testing.T) {
	raiseFDLimit()
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = nc.Write([]byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"))
		return true
	})
	router := startRole(t, routerRole+"="+e.addr)
	serve := func() time.Duration {
		began := time.Now()
		nc, err := net.DialTimeout("tcp", router.addr, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		_ = nc.SetDeadline(began.Add(5 * time.Second))
		c := newClient(t, nc)
		c.send(chatPost(`{"model":"m","messages":[]}`))
		if resp, body := c.readResponse(); resp.StatusCode != 200 {
			t.Fatal(resp.StatusCode, body)
		}
		return time.Since(began)
	}

	stop, ended := make(chan struct{}), make(chan int)
	go func() {
		silent := flood(router.addr, 2000, stop)
		ended <- len(silent)
		for _, fd := range silent {
			_ = syscall.Close(fd)
		}
		close(ended)
	}()
	var worst time.Duration
	n := 0
	for began := time.Now(); time.Since(began) < 2*time.Second; n++ {
		worst = max(worst, serve())
		testwait.Pace(10 * time.Millisecond)
	}
	close(stop)
	silent := <-ended
	<-ended
	t.Logf("%d requests on connections of their own beside %d silent ones, the slowest took %v", n, silent, worst)
	if silent < 1000 || worst > 2*time.Second {
		t.Error("a client waited for the silent, or there were too few")
	}
}

// flood opens connections to addr at a fixed rate until it is stopped, from 200 addresses, and
// returns their descriptors. The connections send nothing, and flood does not wait for them.
func flood(addr string, rate int, stop <-chan struct{}) (fds []int) {
	a, _ := net.ResolveTCPAddr("tcp", addr)
	to := &syscall.SockaddrInet4{Port: a.Port, Addr: [4]byte(a.IP.To4())}
	for began := time.Now(); ; testwait.Pace(2 * time.Millisecond) {
		for want := int(time.Since(began).Seconds() * float64(rate)); len(fds) < want && len(fds) < 5000; {
			fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
			if err != nil {
				return fds
			}
			fds = append(fds, fd)
			_ = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 1, byte(1 + len(fds)%200)}})
			_ = syscall.Connect(fd, to)
		}
		select {
		case <-stop:
			return fds
		default:
		}
	}
}
