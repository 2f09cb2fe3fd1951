package nixl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// hostProcess is a process in which agents run, so that a crash inside NIXL or UCX ends
// it and not this process. The two share each agent's rings and the memory for its
// boards; what the other process writes there is not trusted.
type hostProcess struct {
	cmd        *exec.Cmd
	conn       *net.UnixConn
	done       chan struct{} // closed when the process has ended
	exitReason string        // valid after done

	mu         sync.Mutex // one order at a time; guards agents
	agents     []*Agent
	killReason string // reason for killing it
}

// A ring shared with another process is smaller, and has spill bytes for long payloads.
// They use memory only once they have been used.
const (
	isolatedCommands = 256
	isolatedEvents   = 1024
	isolatedSpill    = 512 << 10
	isolatedMemory   = 128 << 20 // the largest board takes 98 MiB
)

// startHost starts the process. command is its argument vector, which must call
// ServeHost.
func startHost(command []string) (*hostProcess, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nixl: cannot create a socket to the agent's process: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "agent"), os.NewFile(uintptr(pair[1]), "router")
	defer theirs.Close()
	c, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		return nil, fmt.Errorf("nixl: cannot use the socket to the agent's process: %w", err)
	}
	h := &hostProcess{cmd: exec.Command(command[0], command[1:]...), conn: c.(*net.UnixConn), done: make(chan struct{})}
	h.cmd.ExtraFiles = []*os.File{theirs}
	h.cmd.Stdout, h.cmd.Stderr = os.Stderr, os.Stderr
	h.cmd.Env = hostEnviron(os.Environ())
	if err := h.cmd.Start(); err != nil {
		c.Close()
		return nil, fmt.Errorf("nixl: cannot start the agent's process: %w", err)
	}
	go h.wait()
	return h, nil
}

// hostEnviron returns the environment of the process. Of Sluice's own variables, which
// can hold tokens and keys, it keeps only those that locate libraries.
func hostEnviron(environ []string) []string {
	kept := make([]string, 0, len(environ))
	for _, v := range environ {
		if !strings.HasPrefix(v, "SLUICE_") || strings.HasPrefix(v, "SLUICE_NIXL_") || strings.HasPrefix(v, "SLUICE_UCX_") {
			kept = append(kept, v)
		}
	}
	return kept
}

// wait notifies the agents when the process ends.
func (h *hostProcess) wait() {
	err := h.cmd.Wait()
	h.exitReason = "its process has ended"
	if err != nil {
		h.exitReason = fmt.Sprintf("its process %d has ended: %v", h.cmd.Process.Pid, err)
	}
	h.mu.Lock()
	if h.killReason != "" {
		h.exitReason = fmt.Sprintf("its process %d was killed: %s", h.cmd.Process.Pid, h.killReason)
	}
	agents := h.agents
	h.agents = nil
	close(h.done)
	h.mu.Unlock()
	for _, a := range agents {
		a.processDied(h.exitReason)
	}
}

// close ends the process by closing its socket, and kills it if it does not end.
func (h *hostProcess) close() {
	h.conn.Close()
	select {
	case <-h.done:
	case <-time.After(200 * time.Millisecond):
		h.cmd.Process.Kill()
		<-h.done
	}
}

// kill kills the process because of reason.
func (h *hostProcess) kill(fault string) {
	h.mu.Lock()
	h.killReason = fault
	h.mu.Unlock()
	h.cmd.Process.Kill()
}

// open starts an agent in the process.
func (h *hostProcess) open(ctx context.Context, cfg Config, ucx bool, path string) (*Agent, error) {
	cfg.Commands, cfg.Events = isolatedCommands, isolatedEvents
	if err := cfg.defaults(); err != nil {
		return nil, err
	}
	memory, err := newArena("sluice-board", isolatedMemory)
	if err != nil {
		return nil, err
	}
	r, err := newSharedRing(cfg.Commands, cfg.Events, isolatedSpill)
	if err != nil {
		return nil, err
	}
	rd, err := newReader(r)
	if err != nil {
		r.free()
		return nil, err
	}
	d := &isolated{guardedRing: guardedRing{ring: r}, reader: rd, host: h, memory: memory}
	order := hostRequest{
		UCX: ucx, Search: cfg.Search, Path: path, Limit: cfg.StartTimeout, Ring: r.shared.address(), RingSize: len(r.shared.bytes),
		Memory: memory.address(), Size: len(memory.bytes), Commands: cfg.Commands, Events: cfg.Events, Spill: r.spill, Poll: cfg.Poll,
	}
	a := newAgent(cfg)
	a.driver = d
	h.mu.Lock()
	answer, err := h.request(ctx, &order, cfg.StartTimeout+time.Second, []int{r.shared.fd, memory.fd, r.wakeFD, r.eventFD})
	if err == nil {
		h.agents = append(h.agents, a)
	}
	h.mu.Unlock()
	if err != nil {
		d.wait.Close()
		r.free()
		return nil, err
	}
	a.library = answer.Library
	rd.onCorrupt = func() { h.kill("it wrote nonsense into the ring of events") }
	go d.read(a.receive)
	select {
	case <-h.done: // the process ended before the agent was recorded
		a.processDied(h.exitReason)
	default:
	}
	if err := a.start(ctx); err != nil {
		return nil, err
	}
	// The UCX that NIXL has loaded is known now.
	h.mu.Lock()
	answer, err = h.request(ctx, &hostRequest{QueryUCX: true}, cfg.CallTimeout, nil)
	h.mu.Unlock()
	if err != nil {
		a.Close()
		return nil, err
	}
	a.library.UCX = answer.Library.UCX
	return a, nil
}

// request sends an order and waits for its answer.
func (h *hostProcess) request(ctx context.Context, o *hostRequest, limit time.Duration, fds []int) (hostResponse, error) {
	deadline := time.Now().Add(limit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	stop := context.AfterFunc(ctx, func() { h.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var answer hostResponse
	b, err := json.Marshal(o)
	if err != nil {
		return answer, err
	}
	h.conn.SetDeadline(deadline)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err = h.conn.WriteMsgUnix(b, rights, nil); err == nil {
		buf, n := make([]byte, hostPacket), 0
		if n, err = h.conn.Read(buf); err == nil {
			err = json.Unmarshal(buf[:n], &answer)
		}
	}
	switch {
	case err != nil:
		select {
		case <-h.done:
			err = errors.New(h.exitReason)
		default:
		}
		return answer, fmt.Errorf("nixl: the agent's process does not respond: %w", err)
	case answer.Missing != nil:
		return answer, answer.Missing
	case answer.Error != "":
		return answer, errors.New("nixl: in the agent's process: " + answer.Error)
	}
	return answer, nil
}

// isolated is the driver of an agent in another process.
type isolated struct {
	guardedRing
	*reader
	host   *hostProcess
	memory *arena
}

// stop waits for the agent's end, and kills the process if that takes too long.
func (t *isolated) stop(by time.Time) bool {
	for t.head.gone.Load() == 0 {
		select {
		case <-t.host.done:
		case <-time.After(200 * time.Microsecond):
			if time.Now().Before(by) {
				continue
			}
			t.host.close()
		}
		break
	}
	if !t.reader.stop(by) {
		return false
	}
	t.unmap()
	return true
}

// pingOwner checks that the owner of an isolated agent responds: its process may be
// stopped at any place, also outside calls of the library, which Health cannot see. It
// waits for CallTimeout in two halves, in case this process itself was stopped. An
// agent's own thread needs no check.
func (a *Agent) pingOwner(ctx context.Context) error {
	if _, own := a.driver.(*isolated); !own {
		return nil
	}
	var err error
	for range 2 {
		half, cancel := context.WithTimeout(ctx, a.cfg.CallTimeout/2)
		_, err = a.call(half, &command{op: opCheck, handle: noPeer}, "ask its process for a sign of life")
		cancel()
		// Any answer will do: no such peer, or a call that no longer hangs.
		if ctx.Err() != nil || !errors.Is(err, ErrHung) && !errors.Is(err, ErrFull) {
			return nil
		}
	}
	return err
}

// killHost kills the process of an isolated agent. It is unusable, and closing the
// agent would wait for it again.
func (a *Agent) killHost(why error) {
	if d, own := a.driver.(*isolated); own {
		d.host.kill(why.Error())
	}
}

// noPeer is a handle that no peer has.
const noPeer = 1<<64 - 1

// location names the process in which an isolated agent runs.
func (a *Agent) location() string {
	if d, ok := a.driver.(*isolated); ok {
		return fmt.Sprintf(", in process %d", d.host.cmd.Process.Pid)
	}
	return ""
}
