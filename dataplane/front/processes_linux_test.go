package front

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/fdlimit"
	"sluice/dataplane/membudget"
	"sluice/dataplane/memtuner"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// The environment variable routerRole makes the test binary a router for the engine that it names,
// so that the router's memory and CPU can be measured alone. engineRole makes it an engine that
// sends events at the given interval.
const (
	routerRole     = "SLUICE_TEST_ROUTER_FOR"
	routerPriority = "SLUICE_TEST_ROUTER_FIRST" // it has priority over other processes on its core
	engineRole     = "SLUICE_TEST_ENGINE_EVERY"
)

func TestMain(m *testing.M) {
	var err error
	switch engine, every := os.Getenv(routerRole), os.Getenv(engineRole); {
	case os.Getenv(slowClientsRole) != "":
		raiseFDLimit()
		err = runSlowClients(os.Getenv(slowClientsRole))
	case os.Getenv(sinkRole) != "":
		raiseFDLimit()
		err = runNonReadingServer(os.Getenv(sinkRole))
	case os.Getenv(awakeRole) != "":
		runSpinner()
	case os.Getenv(fastClientRole) != "":
		err = runFastClient(os.Getenv(fastClientRole))
	case engine != "":
		raiseFDLimit()
		err = runRouter(engine)
	case every != "":
		raiseFDLimit()
		err = runEngine(every)
	default:
		os.Exit(m.Run())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func runRouter(engine string) error {
	if os.Getenv(routerPriority) != "" {
		setScheduler(schedRoundRobin, 1)
	}
	ep, err := upstream.NewEndpoint("http://"+engine, upstream.Options{MaxConns: 1 << 20, MaxIdle: 1 << 20})
	if err != nil {
		return err
	}
	head, _ := time.ParseDuration(os.Getenv("SLUICE_TEST_HEAD"))
	s, err := New(Options{
		RelayMode: RelayMode(os.Getenv("SLUICE_TEST_RELAY")), WriteTimeout: stalledAfter(), HeadTimeout: head, MaxBodyBytes: 64 << 20, Pages: testPages{},
		Handler: handlerFunc(func(x Exchange) {
			call := new(upstream.Call)
			resp, err := ep.Do(&upstream.Request{Method: "POST", Path: x.Request().Endpoint.Path, Body: [][]byte{x.Request().Doc.Body}}, call)
			if err != nil {
				x.Error(UpstreamFailed, "", err.Error(), 0)
				return
			}
			x.Relay(resp, call, RelayHooks{Handler: streamHooks{end: func(r relay.Result) {
				fmt.Println(r.Cause, r.Err)
			}}})
		}),
	})
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	exitWithParent()
	fdlimit.GrowTable() // as `sluice serve` does both
	go memtuner.Run(context.Background(), memtuner.Options{Idle: membudget.Default.TrimIdle})
	return s.Serve(ln)
}

// exitWithParent ends this process when the test process that has started it ends.
func exitWithParent() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
}

// stalledAfter is the time after which the router cuts a client that reads nothing.
func stalledAfter() time.Duration {
	if os.Getenv("SLUICE_SOAK") != "" {
		return 30 * time.Second // the default
	}
	return 3 * time.Second
}

// process is a process of this binary in another role.
type process struct {
	addr  string // where it listens
	pid   int
	in    io.Writer
	stop  func()
	lines lines
}

// lines counts a process's lines by their first word.
type lines struct {
	mu sync.Mutex
	n  map[string]int
}

func (l *lines) count(word string) int { l.mu.Lock(); defer l.mu.Unlock(); return l.n[word] }

// startRole starts this binary in the role that env selects. The process ends with the test.
func startRole(t *testing.T, env string) *process {
	t.Helper()
	p, br := startProcess(t, anyCore, env)
	p.lines.n = make(map[string]int)
	go func() {
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			word, _, _ := strings.Cut(line, " ")
			p.lines.mu.Lock()
			p.lines.n[word]++
			p.lines.mu.Unlock()
		}
	}()
	return p
}

// anyCore stands for all cores.
const anyCore = -1

// startProcess starts this binary in the role that env selects, on one core, and reads the first
// line of its output. The process ends with the test at the latest.
func startProcess(t *testing.T, core int, env ...string) (*process, *bufio.Reader) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := startOnCores(core, cmd); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	t.Cleanup(end)
	br := bufio.NewReader(stdout)
	first, err := br.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return &process{addr: strings.TrimSpace(first), pid: cmd.Process.Pid, in: stdin, stop: end}, br
}

// availableCores returns the cores that this process may use.
func availableCores(t *testing.T) (cores []int) {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	for core := range len(set) * 64 {
		if set.IsSet(core) {
			cores = append(cores, core)
		}
	}
	return cores
}

// startOnCores starts cmd on a core. A process inherits the cores of the thread that starts it.
func startOnCores(core int, cmd *exec.Cmd) error {
	if core == anyCore {
		return cmd.Start()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, only unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	only.Set(core)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		return err
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	return cmd.Start()
}

// rss returns the resident memory of the process, in KiB.
func (p *process) rss() int {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(p.pid) + "/status")
	_, after, _ := strings.Cut(string(b), "VmRSS:")
	f := strings.Fields(after)
	if len(f) == 0 {
		return 0
	}
	kib, _ := strconv.Atoi(f[0])
	return kib
}

// cpu returns the CPU time that the process has used.
func (p *process) cpu() time.Duration {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(p.pid) + "/stat")
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	sys, _ := strconv.Atoi(f[12])
	return time.Duration(user+sys) * 10 * time.Millisecond
}
