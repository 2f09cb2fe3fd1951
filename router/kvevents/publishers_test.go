package kvevents

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// releasedPublisher is one release's own publisher in a process of its own.
type releasedPublisher struct {
	t    *testing.T
	args []string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
}

func (p *releasedPublisher) launch() {
	p.t.Helper()
	p.cmd = exec.Command(p.args[0], p.args[1:]...)
	p.in, p.out = must(p.cmd.StdinPipe()), bufio.NewScanner(must(p.cmd.StdoutPipe()))
	p.cmd.Stderr = os.Stderr
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	if !p.out.Scan() {
		p.t.Fatal("the publisher does not begin")
	}
}

func (p *releasedPublisher) publish(n int) {
	p.t.Helper()
	fmt.Fprintln(p.in, n)
	if !p.out.Scan() {
		p.t.Fatal("the publisher has ended")
	}
}

func (p *releasedPublisher) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// TestReleasedPublishers is run by scripts/fixtures/publishers.sh.
func TestReleasedPublishers(t *testing.T) {
	dir := os.Getenv("KVEVENTS_PUBLISHERS")
	if dir == "" {
		t.Skip("scripts/fixtures/publishers.sh runs this")
	}
	sources := must(filepath.Glob(filepath.Join(dir, "*.py")))
	if len(sources) == 0 {
		t.Fatalf("no publishers in %s", dir)
	}
	for _, source := range sources {
		name := strings.TrimSuffix(filepath.Base(source), ".py")
		t.Run(name, func(t *testing.T) { tryReleased(t, name, source) })
	}
}

func tryReleased(t *testing.T, name, source string) {
	var ports []int
	for range 2 {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		l.Close()
	}
	engineName, _, _ := strings.Cut(name, "_")
	p := &releasedPublisher{t: t, args: []string{os.Getenv("KVEVENTS_PYTHON"), os.Getenv("KVEVENTS_PUBLISHER"), engineName, source,
		fmt.Sprint(ports[0]), fmt.Sprint(ports[1])}}
	r := newFeedHarness(t, &engine{Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", ports[0]), Replay: fmt.Sprintf("tcp://127.0.0.1:%d", ports[1])}, nil)
	r.src.Engine = engineName

	var tokens []uint32
	for i := range uint32(400) {
		tokens = append(tokens, i)
	}
	seqs := blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), tokens, 4)
	depth := func(want int) {
		t.Helper()
		var o kvindex.Overlap
		testwait.Until(t, fmt.Sprintf("depth %d", want), func() bool { r.index.Find(seqs, &o); return o.Depth(r.rank.Slot) == want })
	}

	p.launch()
	defer func() { p.kill() }()
	p.publish(20)
	r.start()
	depth(20)
	r.awaitState(worker.FeedLive)
	p.publish(10)
	depth(30)

	p.kill() // a new life that numbers and fills its blocks as the old one did
	p.launch()
	p.publish(30)
	r.await("restarts", 1)
	depth(30)
	p.publish(5)
	depth(35)

	p.kill() // one whose beginning is no longer kept: what follows has no root
	p.launch()
	p.publish(60)
	r.await("restarts", 2)
	r.await("orphans", 50)
	depth(0)
	r.awaitState(worker.FeedLive)
}
