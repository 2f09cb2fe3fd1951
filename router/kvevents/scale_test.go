package kvevents

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// TestFeedsOfAFleet measures what the feeds of a large fleet cost. The engines are sockets
// of libzmq in a process of their own, so that all that is counted here is the router's.
// SLUICE_SOAK=1 takes the fleet at its full size and compares the rates; else it is a small
// one, whose threads and descriptors are bounded alike.
func TestFeedsOfAFleet(t *testing.T) {
	if testing.Short() {
		t.Skip("measures for a quarter of a minute")
	}
	loads := []fleetLoad{{feeds: 100, rate: 5}, {feeds: 100, rate: 20}, {feeds: 10, rate: 200}}
	lasts, windows := time.Second, 3
	if os.Getenv("SLUICE_SOAK") == "1" {
		loads = []fleetLoad{{feeds: 1000, rate: 5}, {feeds: 1000, rate: 20}, {feeds: 50, rate: 200}}
		lasts, windows = 4*time.Second, 5
	}
	var costs []time.Duration
	for _, l := range loads {
		t.Run(fmt.Sprintf("%d feeds at %d a second", l.feeds, l.rate), func(t *testing.T) {
			costs = append(costs, l.measure(t, lasts, windows))
		})
	}
	if t.Failed() || len(costs) < len(loads) {
		return
	}
	spread := float64(slices.Max(costs))/float64(slices.Min(costs)) - 1
	// A message that is read alone costs a system call of its own, and finds its rank's part of
	// the index out of the caches. Both are shared where a feed has several in one look.
	t.Logf("CPU per message differs by %.0f %% between the rates", 100*spread)
	if spread > maxSpread {
		t.Errorf("CPU per message %v; want %g times the least at most", costs, 1+maxSpread)
	}
	if os.Getenv("SLUICE_SOAK") == "1" && slices.Max(costs) > mostCPU {
		t.Errorf("CPU per message %v; want %v at most at each rate", costs, mostCPU)
	}
}

// Limits of a fleet's feeds, in addition to the process before them.
const (
	maxThreads       = 8
	maxPerFeed       = 2  // descriptors, between replays
	fixedDescriptors = 12 // descriptors that do not grow with the fleet: the poller's, this test's
	replayingTop     = 3  // descriptors of a feed whose replay is in progress
	// mostCPU is of one message, and leaves a machine that is busy otherwise its slack.
	mostCPU = 15 * time.Microsecond
	// maxSpread is by how much the CPU per message may differ between the rates, as a share of the
	// least. A cost per feed and time, such as a timer of its own, exceeds it at the lowest rate.
	maxSpread = 3.0
	// mostSwitches are voluntary changes of context per message, from manyMessages a second
	// on. A thread that wakes up for each message makes one or two.
	mostSwitches, manyMessages = 0.5, 2000
)

type fleetLoad struct{ feeds, rate int }

func (l fleetLoad) measure(t *testing.T, lasts time.Duration, windows int) time.Duration {
	p := launchPublishers(t, l.feeds)
	before := usage(t)
	fleet := p.subscribe(t)
	fleet.await(t, "every feed has its replay", func(r *worker.Rank) bool { return worker.FeedState(r.Feed.Load()) == worker.FeedLive })
	p.send("rate %d 1", l.rate) // the connections are warm, and so are caches
	p.receive(t, "sent")
	fleet.waitSettled(t)
	var costs []time.Duration
	var switched []float64
	var used used
	for range windows {
		at, applied := usage(t), fleet.get("batches")
		p.send("rate %d %d", l.rate, lasts/time.Second)
		sent, _ := strconv.Atoi(p.receive(t, "sent"))
		testwait.Until(t, "all messages", func() bool { return fleet.get("batches")-applied >= sent })
		used = usage(t)
		costs = append(costs, (used.cpu-at.cpu)/time.Duration(sent))
		switched = append(switched, float64(used.switches-at.switches)/float64(sent))
	}
	cost, switches := testwait.Median(costs...), testwait.Median(switched...)
	threads, files := used.threads-before.threads, used.files-before.files
	t.Logf("feeds %d, %d messages/s each: %d threads, %d descriptors, %d MiB more; %v of CPU and %.2f context switches per message, %.1f %% of a core",
		l.feeds, l.rate, threads, files, (used.rss-before.rss)>>20, cost.Round(10*time.Nanosecond), switches, 100*cost.Seconds()*float64(l.feeds*l.rate))
	// On a machine whose processors are all busy the runtime starts threads for whatever
	// sits in a system call, the test's own included, and never ends one. So the short form
	// tells feeds that take a thread each from feeds that share them.
	most := maxThreads
	if os.Getenv("SLUICE_SOAK") == "" {
		most = max(most, l.feeds/2)
	}
	if threads > most {
		t.Errorf("%d threads for %d feeds; want %d at most", threads, l.feeds, most)
	}
	if files > maxPerFeed*l.feeds+fixedDescriptors {
		t.Errorf("%d descriptors for %d feeds; want %d a feed at most", files, l.feeds, maxPerFeed)
	}
	if l.feeds*l.rate >= manyMessages && switches > mostSwitches {
		t.Errorf("%.2f context switches per message; want %g at most", switches, mostSwitches)
	}
	if n := fleet.get("gaps") + fleet.get("resets") + fleet.get("restarts"); n != 0 {
		t.Errorf("%d gaps, resets and restarts", n)
	}
	return cost
}

// TestAllEnginesRestart: all engines of a fleet restart together, and each has published
// much before any feed has subscribed again. The feeds catch up, and requests are served
// meanwhile.
func TestAllEnginesRestart(t *testing.T) {
	feeds, kept := 100, 100
	if os.Getenv("SLUICE_SOAK") == "1" {
		feeds, kept = 1000, 300
	}
	p := launchPublishers(t, feeds)
	fleet := p.subscribe(t)
	live := func(r *worker.Rank) bool { return worker.FeedState(r.Feed.Load()) == worker.FeedLive }
	fleet.await(t, "every feed has its replay", live)
	p.send("rate 5 1")
	p.receive(t, "sent")
	fleet.waitSettled(t)

	url := serveHTTP(t)
	calm := requestTimes(t, url, time.Second)
	before := usage(t)
	most := watchUsage(t)
	p.send("restart %d", kept)
	p.receive(t, "restarted")
	began := time.Now()
	busy := []time.Duration{}
	var asking sync.WaitGroup
	over := make(chan struct{})
	asking.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
				busy = append(busy, requestTimes(t, url, 100*time.Millisecond)...)
			}
		}
	})
	end := sync.OnceFunc(func() { close(over); asking.Wait() })
	defer end()
	fleet.await(t, "every feed has the new life", func(r *worker.Rank) bool { return live(r) && fleet.replayed(r.ID) >= kept })
	took := time.Since(began)
	end()
	threads, files, rss := most()
	t.Logf("restart of %d engines: all feeds live after %v; requests meanwhile p99 %v, before %v; at most %d threads, %d descriptors, %d MiB more",
		feeds, took.Round(time.Millisecond), quantile(busy, 0.99), quantile(calm, 0.99), threads-before.threads, files-before.files, (rss-before.rss)>>20)
	if n := threads - before.threads; n > maxThreads {
		t.Errorf("%d threads more; want %d at most", n, maxThreads)
	}
	if n := files - before.files; n > (replayingTop-maxPerFeed+1)*feeds {
		t.Errorf("%d descriptors more for %d feeds", n, feeds)
	}
	if limit := 50 * time.Millisecond; quantile(busy, 0.5) > limit {
		t.Errorf("a request takes %v while the feeds catch up; want %v at most", quantile(busy, 0.5), limit)
	}
}

// fleetFeeds are the feeds of publishers.
type fleetFeeds struct {
	feeds *Feeds
	ranks []*worker.Rank
	counterMap
	mu2 sync.Mutex
	by  map[worker.ID]int // batches that came by replay
}

func (f *fleetFeeds) AddFeedCount(id worker.ID, counter string, n int) {
	f.counterMap.AddFeedCount(id, counter, n)
	f.mu2.Lock()
	defer f.mu2.Unlock()
	if counter == "replayed_batches" {
		f.by[id] += n
	}
}

func (f *fleetFeeds) replayed(id worker.ID) int {
	f.mu2.Lock()
	defer f.mu2.Unlock()
	return f.by[id]
}

func (f *fleetFeeds) await(t *testing.T, what string, ok func(*worker.Rank) bool) {
	t.Helper()
	left := slices.Clone(f.ranks)
	if !testwait.Poll(2*time.Minute, func() bool { left = slices.DeleteFunc(left, ok); return len(left) == 0 }) {
		t.Fatalf("%s: not so for %d of %d after 2 minutes; counted %v", what, len(left), len(f.ranks), f.n)
	}
}

// waitSettled waits until nothing more is applied.
func (f *fleetFeeds) waitSettled(t *testing.T) {
	t.Helper()
	testwait.Settled(t, 500*time.Millisecond, "the count of batches", func() int { return f.get("batches") })
}

type used struct {
	cpu                 time.Duration
	threads, files, rss int
	switches            int64
}

func usage(t *testing.T) (u used) {
	t.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	u.cpu = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	u.switches = r.Nvcsw
	u.files = len(must(os.ReadDir("/proc/self/fd")))
	for line := range strings.Lines(string(must(os.ReadFile("/proc/self/status")))) {
		name, value, _ := strings.Cut(line, ":")
		n, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		switch name {
		case "Threads":
			u.threads = n
		case "VmRSS":
			u.rss = n << 10
		}
	}
	return u
}

// watchUsage looks often; the function that it gives ends that and says what was seen at most.
func watchUsage(t *testing.T) func() (threads, files, rss int) {
	stop, done := make(chan struct{}), make(chan used)
	go func() {
		var most used
		for {
			u := usage(t)
			most = used{threads: max(most.threads, u.threads), files: max(most.files, u.files), rss: max(most.rss, u.rss)}
			select {
			case <-stop:
				done <- most
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return func() (int, int, int) {
		close(stop)
		m := <-done
		return m.threads, m.files, m.rss
	}
}

func serveHTTP(t *testing.T) string {
	ln := must(net.Listen("tcp", "127.0.0.1:0"))
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })}
	go srv.Serve(ln)
	t.Cleanup(func() { srv.Close() })
	return "http://" + ln.Addr().String()
}

// requestTimes are those of requests one after another, 5 ms apart.
func requestTimes(t *testing.T, url string, lasts time.Duration) (took []time.Duration) {
	for end := time.Now().Add(lasts); time.Now().Before(end); testwait.Pace(5 * time.Millisecond) {
		at := time.Now()
		resp, err := http.Get(url)
		if err != nil {
			t.Error(err)
			return took
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		took = append(took, time.Since(at))
	}
	return took
}

func quantile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[int(q*float64(len(all)-1))].Round(10 * time.Microsecond)
}

// publishers are many engines in a process of their own.
type publishers struct {
	in        io.WriteCloser
	out       *bufio.Scanner
	endpoints [][2]string // where each publishes, and answers replays
}

func launchPublishers(t *testing.T, n int) *publishers {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestPublishersOfAFleet$")
	cmd.Env = append(os.Environ(), "KVEVENTS_FLEET="+strconv.Itoa(n))
	cmd.Stderr = os.Stderr
	p := &publishers{in: must(cmd.StdinPipe()), out: bufio.NewScanner(must(cmd.StdoutPipe()))}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.in.Close(); cmd.Wait() })
	for range n {
		pub, replay, _ := strings.Cut(p.receive(t, "engine"), " ")
		p.endpoints = append(p.endpoints, [2]string{pub, replay})
	}
	return p
}

func (p *publishers) send(format string, args ...any) { fmt.Fprintf(p.in, format+"\n", args...) }

func (p *publishers) receive(t *testing.T, word string) string {
	t.Helper()
	for p.out.Scan() {
		if rest, ok := strings.CutPrefix(p.out.Text(), word); ok {
			return strings.TrimSpace(rest)
		}
	}
	t.Fatal("the publishers have ended")
	return ""
}

func (p *publishers) subscribe(t *testing.T) *fleetFeeds {
	t.Helper()
	f := &fleetFeeds{by: map[worker.ID]int{}}
	f.feeds = NewFeeds(Options{Index: kvindex.New(kvindex.Options{}), Counters: f, TailCheck: time.Hour})
	t.Cleanup(f.feeds.Close)
	for i, at := range p.endpoints {
		w := worker.New(worker.Spec{ID: fmt.Sprint("w", i), URL: "http://127.0.0.1:1"})
		r := w.Ranks[0]
		r.Slot = worker.Slot(i)
		f.ranks = append(f.ranks, r)
		if err := f.feeds.Start(Source{Rank: r, Model: "m", Engine: "vllm", Endpoint: at[0], ReplayEndpoint: at[1]}); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// TestPublishersOfAFleet is the other process of the two above.
func TestPublishersOfAFleet(t *testing.T) {
	n, err := strconv.Atoi(os.Getenv("KVEVENTS_FLEET"))
	if err != nil {
		t.Skip("others run this")
	}
	runtime.LockOSThread()
	s := &publisherFleet{incarnation: 1, payloads: recordPayloads(1)}
	ctx := must(zmq.NewContext())
	// A restart opens 2n sockets while libzmq's reaper may still hold the 2n closed ones.
	ctx.SetMaxSockets(4*n + 16)
	for range n {
		s.open(ctx, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
		e := s.engines[len(s.engines)-1]
		fmt.Println("engine", e.at[0], e.at[1])
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			lines <- in.Text()
		}
	}()
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				return
			}
			var a, b int
			switch word, rest, _ := strings.Cut(line, " "); word {
			case "rate":
				fmt.Sscan(rest, &a, &b)
				fmt.Println("sent", s.publish(a, b))
			case "restart":
				fmt.Sscan(rest, &a)
				s.restart(ctx, a)
				fmt.Println("restarted")
			}
		default:
			s.answer(time.Millisecond)
		}
	}
}

// publisherFleet has the engines of a fleet, all on one thread.
type publisherFleet struct {
	incarnation uint64
	payloads    [][]byte
	engines     []*fleetPublisher
	poll        *zmq.Poller
}

type fleetPublisher struct {
	pub, router *zmq.Socket
	at          [2]string
	next        uint64
}

// recordPayloads is what each of them publishes, over and over: a chain of blocks that grows, and
// its end.
func recordPayloads(incarnation uint64) (all [][]byte) {
	const steps, perStep, size = 32, 2, 16
	gone := wireEvent{kind: "BlockRemoved", medium: "GPU"}
	for i := range steps {
		e := wireEvent{blockSize: size, medium: "GPU"}
		if i > 0 {
			e.parent = incarnation<<32 | uint64(perStep*i-1)
		}
		for b := range perStep {
			h := incarnation<<32 | uint64(perStep*i+b)
			e.hashes, gone.hashes = append(e.hashes, h), append(gone.hashes, h)
			for k := range size {
				e.tokens = append(e.tokens, 1000*i+100*b+k)
			}
		}
		all = append(all, wireBatch(nil, e.asMap()))
	}
	return append(all, wireBatch(nil, gone.asMap()))
}

func (s *publisherFleet) open(ctx *zmq.Context, pub, replay string) {
	e := &fleetPublisher{pub: must(ctx.NewSocket(zmq.PUB)), router: must(ctx.NewSocket(zmq.ROUTER))}
	e.pub.SetLinger(0)
	e.router.SetLinger(0)
	e.router.SetSndhwm(0)
	for i, b := range []struct {
		s  *zmq.Socket
		at string
	}{{e.pub, pub}, {e.router, replay}} {
		var err error
		if !testwait.Poll(10*time.Second, func() bool { err = b.s.Bind(b.at); return err == nil }) {
			panic(err)
		}
		e.at[i] = must(b.s.GetLastEndpoint())
	}
	s.engines = append(s.engines, e)
	if s.poll == nil {
		s.poll = zmq.NewPoller()
	}
	s.poll.Add(e.router, zmq.POLLIN)
}

// publish sends for some seconds, each engine rate messages a second, evenly spread.
func (s *publisherFleet) publish(rate, seconds int) (sent int) {
	total := rate * seconds * len(s.engines)
	every := time.Second / time.Duration(rate*len(s.engines))
	for began := time.Now(); sent < total; sent++ {
		if ahead := time.Until(began.Add(time.Duration(sent) * every)); ahead > 0 {
			testwait.Pace(ahead)
		}
		e := s.engines[sent%len(s.engines)]
		if _, err := e.pub.SendMessage("", binary.BigEndian.AppendUint64(nil, e.next), s.payload(e.next)); err != nil {
			panic(err)
		}
		e.next++
	}
	return sent
}

func (s *publisherFleet) payload(seq uint64) []byte { return s.payloads[seq%uint64(len(s.payloads))] }

// restart closes everything and opens it again at the same places: lives that have
// published kept messages each, to nobody.
func (s *publisherFleet) restart(ctx *zmq.Context, kept int) {
	s.incarnation++
	s.payloads = recordPayloads(s.incarnation)
	old := s.engines
	s.engines, s.poll = nil, nil
	for _, e := range old {
		e.pub.Close()
		e.router.Close()
	}
	for _, e := range old {
		s.open(ctx, e.at[0], e.at[1])
	}
	for _, e := range s.engines {
		e.next = uint64(kept)
	}
}

// answer serves replays that are asked for.
func (s *publisherFleet) answer(wait time.Duration) {
	ready, _ := s.poll.Poll(wait)
	for _, p := range ready {
		m, err := p.Socket.RecvMessageBytes(zmq.DONTWAIT)
		if err != nil || len(m) != 3 || len(m[2]) != 8 {
			continue
		}
		e := s.engines[slices.IndexFunc(s.engines, func(e *fleetPublisher) bool { return e.router == p.Socket })]
		for seq := binary.BigEndian.Uint64(m[2]); seq < e.next; seq++ {
			e.router.SendMessage(m[0], "", binary.BigEndian.AppendUint64(nil, seq), s.payload(seq))
		}
		e.router.SendMessage(m[0], "", binary.BigEndian.AppendUint64(nil, replayEnd), "")
	}
}
