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

// The environment variable slowClientsRole makes the test binary the attackers of the address that
// it names, according to slowClientsPlan. sinkRole makes it a server that they can attack
// instead: it accepts, reads nothing, and closes each connection after the given time.
const (
	slowClientsRole = "SLUICE_TEST_SLOW_AT"
	slowClientsPlan = "SLUICE_TEST_SLOW"
	sinkRole        = "SLUICE_TEST_SINK"
	awakeRole       = "SLUICE_TEST_AWAKE"
)

// slowClientPlan describes the behaviour of the slow clients.
type slowClientPlan struct {
	heads     int           // clients that send a head byte by byte
	interval  time.Duration // between two bytes
	bodies    int           // clients that announce a body of 60 MB and stop early
	spread    time.Duration // until all have connected; 0: as fast as they can
	reconnect bool          // clients reconnect when they are cut
}

func (a slowClientPlan) String() string {
	return fmt.Sprint(a.heads, int64(a.interval), a.bodies, int64(a.spread), a.reconnect)
}

// slowClient sends a head byte by byte, or a body that stops.
type slowClient struct {
	fd    int // -1: none now
	body  bool
	sent  int
	began time.Time
}

type slowClients struct {
	slowClientPlan
	to      unix.SockaddrInet4
	poll    int
	all     []slowClient
	byFD    map[int32]*slowClient
	events  []unix.EpollEvent
	request []byte
	dialled int
	lost    [2]int // heads, bodies
	longest [2]time.Duration
}

// runSlowClients attacks until the test ends. It prints "open" when all clients have connected,
// "cut" when the first connection with a head has been closed, and "heads" and "bodies" when the
// last of these has, with the time and the longest wait for one.
//
// Once all clients have connected the process yields its core to any other process.
func runSlowClients(addr string) error {
	a := slowClients{byFD: make(map[int32]*slowClient), events: make([]unix.EpollEvent, 256)}
	if _, err := fmt.Sscan(os.Getenv(slowClientsPlan), &a.heads, &a.interval, &a.bodies, &a.spread, &a.reconnect); err != nil {
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
	exitWithParent()
	return a.run()
}

func (a *slowClients) run() error {
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
				setScheduler(schedIdle, 0)
				fmt.Println("open", time.Now().UnixNano(), 0)
			}
		}
		for due := int(float64(a.heads) * now.Sub(began).Seconds() / a.interval.Seconds()); sent < due; sent++ {
			a.send(&a.all[sent%a.heads])
		}
		if err := a.readResult(); err != nil {
			return err
		}
	}
}

func (a *slowClients) open(one *slowClient) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	// From several addresses: a single one has too few ports for all reconnects.
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
	a.byFD[int32(fd)] = one
	a.send(one)
	return nil
}

// send sends the next byte of a head, or the only part of a body.
func (a *slowClients) send(one *slowClient) {
	const head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	switch {
	case one.fd < 0:
	case one.body:
		_, _ = unix.Write(one.fd, a.request)
	case one.sent < len(head):
		_, _ = unix.Write(one.fd, []byte{head[one.sent]}) // the read reports an error
		one.sent++
	}
}

// readResult waits a moment for connections that the server closes.
func (a *slowClients) readResult() error {
	n, err := unix.EpollWait(a.poll, a.events, 1)
	if err != nil && err != unix.EINTR {
		return err
	}
	var buf [4 << 10]byte
	for i := range max(n, 0) {
		one := a.byFD[a.events[i].Fd]
		if one == nil {
			continue
		}
		if n, err := unix.Read(one.fd, buf[:]); n > 0 || err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		delete(a.byFD, int32(one.fd))
		_ = unix.Close(one.fd)
		one.fd = -1
		a.count(one)
		if a.reconnect {
			if err := a.open(one); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *slowClients) count(one *slowClient) {
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

// The kernel's scheduling policies (sched(7)).
const (
	schedRoundRobin = 2 // before all processes with the default policy
	schedIdle       = 5 // after all other processes
)

// setScheduler sets the scheduling policy of this process and all its later threads, if the process
// has the permission.
func setScheduler(policy, priority uint32) {
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, task := range tasks {
		tid, _ := strconv.Atoi(task.Name())
		_ = unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: policy, Priority: priority}, 0)
	}
}

// runNonReadingServer accepts connections, reads nothing, and closes each after the given time.
func runNonReadingServer(after string) error {
	limit, err := time.ParseDuration(after)
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
	// An accept waits at most 2 ms.
	if err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 2000}); err != nil {
		return err
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return err
	}
	v4, _ := at.(*unix.SockaddrInet4)
	fmt.Println(netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), uint16(v4.Port)))
	exitWithParent()
	type partialClient struct {
		fd       int
		deadline time.Time
	}
	var held []partialClient // the oldest first
	for {
		switch one, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC); err {
		case nil:
			held = append(held, partialClient{one, time.Now().Add(limit)})
		case unix.EAGAIN, unix.EINTR, unix.ECONNABORTED:
		default:
			return err
		}
		for len(held) > 0 && time.Now().After(held[0].deadline) {
			_ = unix.Close(held[0].fd)
			held = held[1:]
		}
	}
}

// runSpinner keeps a core from sleeping, at a lower priority than all other processes there. A
// virtual machine needs 20 µs or more to wake a core in some seconds and no time in others, which
// would hide the effect that the test measures.
func runSpinner() {
	setScheduler(schedIdle, 0)
	fmt.Println("ready")
	exitWithParent()
	for turns := 0; ; turns++ {
		spinResult = turns
	}
}

var spinResult int // what runSpinner does

// processReport is a line of a process's output with a time.
type processReport struct {
	name    string
	at      int64
	elapsed time.Duration
}

// slowClientProcess is a process in the slowClientsRole.
type slowClientProcess struct {
	t       *testing.T
	stop    func()
	reports chan processReport
}

// startSlowClients starts attackers of an address, which run until end is called.
func startSlowClients(t *testing.T, core int, addr string, plan slowClientPlan) *slowClientProcess {
	t.Helper()
	p, br := startProcess(t, core, slowClientsRole+"="+addr, slowClientsPlan+"="+plan.String())
	a := &slowClientProcess{t: t, stop: p.stop, reports: make(chan processReport, 8)}
	go func() {
		defer close(a.reports)
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			var s processReport
			if _, err := fmt.Sscan(line, &s.name, &s.at, &s.elapsed); err == nil {
				a.reports <- s
			}
		}
	}()
	return a
}

// await waits until the attackers print word.
func (a *slowClientProcess) await(word string, limit time.Duration) processReport {
	a.t.Helper()
	timeout := time.After(limit)
	for {
		select {
		case s, ok := <-a.reports:
			if !ok {
				a.t.Fatalf("the attackers ended before %q", word)
			}
			if s.name == word {
				return s
			}
		case <-timeout:
			a.t.Fatalf("the attackers did not say %q within %v", word, limit)
		}
	}
}
