package front

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// slowAt makes the test's binary the attackers of the address it names, as slowPlan says;
// sinkOf a server that accepts and reads nothing, which they may attack instead, and cuts
// each connection after so long.
const (
	slowAt   = "SLUICE_TEST_SLOW_AT"
	slowPlan = "SLUICE_TEST_SLOW"
	sinkOf   = "SLUICE_TEST_SINK"
	awakeOn  = "SLUICE_TEST_AWAKE"
)

// attack is what slow clients do.
type attack struct {
	heads  int           // that come byte by byte,
	every  time.Duration // a byte so often
	bodies int           // that stop early of 60 MB announced
	spread time.Duration // until all have connected; 0: as fast as they can
	again  bool          // who is cut comes back
}

func (a attack) String() string {
	return fmt.Sprint(a.heads, int64(a.every), a.bodies, int64(a.spread), a.again)
}

// slowClient sends a head byte by byte, or a body that stops.
type slowClient struct {
	fd    int // -1: none now
	body  bool
	sent  int
	began time.Time
}

type attackers struct {
	attack
	to      unix.SockaddrInet4
	poll    int
	all     []slowClient
	by      map[int32]*slowClient
	events  []unix.EpollEvent
	request []byte
	dialled int
	lost    [2]int // heads, bodies
	longest [2]time.Duration
}

// runAttackers attacks until the test ends. It says "open" when all have connected, "cut"
// when the first head was, and "heads" and "bodies" when the last was, with the time and
// how long the most patient wait for one was.
//
// Once all have connected they leave their core to whoever else wants it.
func runAttackers(addr string) error {
	a := attackers{by: make(map[int32]*slowClient), events: make([]unix.EpollEvent, 256)}
	if _, err := fmt.Sscan(os.Getenv(slowPlan), &a.heads, &a.every, &a.bodies, &a.spread, &a.again); err != nil {
		return err
	}
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return err
	}
	a.to = unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	a.request = []byte(requestLine + "Host: a\r\nContent-Type: application/json\r\nContent-Length: 60000000\r\n\r\n" + doc(9<<10))
	if a.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	a.all = make([]slowClient, a.heads+a.bodies)
	for i := range a.all {
		a.all[i] = slowClient{fd: -1, body: i >= a.heads}
	}
	fmt.Println("ready")
	endWithTest()
	return a.run()
}

func (a *attackers) run() error {
	began, sent, opened := time.Now(), 0, 0
	for {
		now := time.Now()
		most := len(a.all)
		if a.spread > 0 {
			most = min(most, int(float64(len(a.all))*now.Sub(began).Seconds()/a.spread.Seconds()))
		}
		for ; opened < most; opened++ {
			if err := a.open(&a.all[opened]); err != nil {
				return err
			}
			if opened+1 == len(a.all) {
				schedule(schedIdle, 0)
				fmt.Println("open", time.Now().UnixNano(), 0)
			}
		}
		for due := int(float64(a.heads) * now.Sub(began).Seconds() / a.every.Seconds()); sent < due; sent++ {
			a.send(&a.all[sent%a.heads])
		}
		if err := a.look(); err != nil {
			return err
		}
	}
}

func (a *attackers) open(one *slowClient) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	// Of several addresses: one alone has not enough ports for all that come again.
	a.dialled++
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, byte(2 + a.dialled%16)}}); err != nil {
		return err
	}
	for err = unix.EINTR; err == unix.EINTR; {
		err = unix.Connect(fd, &a.to)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err == nil {
		ends := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(fd)}
		err = unix.EpollCtl(a.poll, unix.EPOLL_CTL_ADD, fd, &ends)
	}
	if err != nil {
		return fmt.Errorf("slow client %d: %w", a.dialled, err)
	}
	one.fd, one.sent, one.began = fd, 0, time.Now()
	a.by[int32(fd)] = one
	a.send(one)
	return nil
}

// send sends the next byte of a head, or all that will come of a body.
func (a *attackers) send(one *slowClient) {
	const head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	switch {
	case one.fd < 0:
	case one.body:
		_, _ = unix.Write(one.fd, a.request)
	case one.sent < len(head):
		_, _ = unix.Write(one.fd, []byte{head[one.sent]}) // what is wrong with it, the read will say
		one.sent++
	}
}

// look waits a moment for those who are cut.
func (a *attackers) look() error {
	n, err := unix.EpollWait(a.poll, a.events, 1)
	if err != nil && err != unix.EINTR {
		return err
	}
	var buf [4 << 10]byte
	for i := range max(n, 0) {
		one := a.by[a.events[i].Fd]
		if one == nil {
			continue
		}
		if n, err := unix.Read(one.fd, buf[:]); n > 0 || err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		delete(a.by, int32(one.fd))
		_ = unix.Close(one.fd)
		one.fd = -1
		a.count(one)
		if a.again {
			if err := a.open(one); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *attackers) count(one *slowClient) {
	kind, of, word := 0, a.heads, "heads"
	if one.body {
		kind, of, word = 1, a.bodies, "bodies"
	}
	a.lost[kind]++
	a.longest[kind] = max(a.longest[kind], time.Since(one.began))
	if kind == 0 && a.lost[0] == 1 {
		fmt.Println("cut", time.Now().UnixNano(), 0)
	}
	if a.lost[kind] == of {
		fmt.Println(word, time.Now().UnixNano(), int64(a.longest[kind]))
	}
}

// The kernel's policies for who gets a core (sched(7)).
const (
	schedRoundRobin = 2 // before all that have none of their own
	schedIdle       = 5 // behind everybody
)

// schedule has this process, with all threads that it will have, get its core by policy,
// where it may.
func schedule(policy, priority uint32) {
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, task := range tasks {
		tid, _ := strconv.Atoi(task.Name())
		_ = unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: policy, Priority: priority}, 0)
	}
}

// runSink accepts, reads nothing, and cuts after so long.
func runSink(after string) error {
	patience, err := time.ParseDuration(after)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return err
	}
	if err = unix.Listen(fd, 4096); err != nil {
		return err
	}
	// An accept waits 2 ms at the most.
	if err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 2000}); err != nil {
		return err
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return err
	}
	v4, _ := at.(*unix.SockaddrInet4)
	fmt.Println(netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), uint16(v4.Port)))
	endWithTest()
	type guest struct {
		fd    int
		until time.Time
	}
	var held []guest // the oldest first
	for {
		switch one, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC); err {
		case nil:
			held = append(held, guest{one, time.Now().Add(patience)})
		case unix.EAGAIN, unix.EINTR, unix.ECONNABORTED:
		default:
			return err
		}
		for len(held) > 0 && time.Now().After(held[0].until) {
			_ = unix.Close(held[0].fd)
			held = held[1:]
		}
	}
}

// runAwake keeps a core from sleeping, behind all that has something to do there. What a
// virtual machine takes to wake a core is 20 µs or more in some seconds, and nothing in
// others, which hides what is to be measured.
func runAwake() {
	schedule(schedIdle, 0)
	fmt.Println("ready")
	endWithTest()
	for turns := 0; ; turns++ {
		spun = turns
	}
}

var spun int // what runAwake does

// told is what a process says with a time.
type told struct {
	word string
	at   int64
	took time.Duration
}

// attacking is a process of attackers.
type attacking struct {
	t    *testing.T
	end  func()
	says chan told
}

// startAttack has the address attacked until end.
func startAttack(t *testing.T, core int, addr string, plan attack) *attacking {
	t.Helper()
	p, br := launch(t, core, slowAt+"="+addr, slowPlan+"="+plan.String())
	a := &attacking{t: t, end: p.end, says: make(chan told, 8)}
	go func() {
		defer close(a.says)
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			var s told
			if _, err := fmt.Sscan(line, &s.word, &s.at, &s.took); err == nil {
				a.says <- s
			}
		}
	}()
	return a
}

// await waits until the attackers say word.
func (a *attacking) await(word string, limit time.Duration) told {
	a.t.Helper()
	timeout := time.After(limit)
	for {
		select {
		case s, ok := <-a.says:
			if !ok {
				a.t.Fatalf("the attackers ended before %q", word)
			}
			if s.word == word {
				return s
			}
		case <-timeout:
			a.t.Fatalf("the attackers did not say %q within %v", word, limit)
		}
	}
}
