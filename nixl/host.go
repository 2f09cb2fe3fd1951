package nixl

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	nativenixl "sluice/native/nixl"
)

// Messages between a router and the process that runs its agents: one JSON object per
// packet, over the socket that the process inherits as descriptor 3. Each order carries
// the descriptors of the ring, of the memory for boards, and of the two eventfds.
type hostRequest struct {
	QueryUCX         bool // start no agent: only report which UCX is loaded
	UCX              bool
	Search           Search
	Path             string // of libucp
	Limit            time.Duration
	Ring, Memory     uint64 // addresses
	RingSize, Size   int
	Commands, Events int
	Spill            int
	Poll             PollIntervals
}

type hostResponse struct {
	Library *Library
	Missing *LoadError // no library could be loaded
	Error   string
}

const (
	hostSocket  = 3
	hostPacket  = 64 << 10
	hostHandles = 4
)

// ServeHost is the main function of the process that runs a router's agents, so that a
// crash of an agent does not end the router. It takes orders from its inherited socket,
// and returns when the router has closed it or died; the process must then end.
func ServeHost() error {
	// The router handles a terminal's signals and decides when this process ends.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	f := os.NewFile(hostSocket, "router")
	c, err := net.FileConn(f)
	if err != nil {
		return fmt.Errorf("nixl: this command must be started by a router, which passes a socket: %w", err)
	}
	f.Close()
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("nixl: this command must be started by a router, which passes a Unix socket")
	}
	defer conn.Close()
	buf, oob := make([]byte, hostPacket), make([]byte, unix.CmsgSpace(4*hostHandles))
	for {
		n, m, _, _, err := conn.ReadMsgUnix(buf, oob)
		if err != nil || n == 0 {
			return nil // the router is gone
		}
		answer := handleHostRequest(buf[:n], oob[:m])
		b, err := json.Marshal(answer)
		if err != nil || len(b) > hostPacket {
			b, _ = json.Marshal(hostResponse{Error: "an answer that is too long"})
		}
		if _, err := conn.Write(b); err != nil {
			return nil
		}
	}
}

func handleHostRequest(packet, oob []byte) (answer hostResponse) {
	var fds []int
	if all, err := unix.ParseSocketControlMessage(oob); err == nil && len(all) == 1 {
		fds, _ = unix.ParseUnixRights(&all[0])
	}
	var o hostRequest
	err := json.Unmarshal(packet, &o)
	if err == nil && o.QueryUCX && len(fds) == 0 {
		return hostResponse{Library: &Library{UCX: ucxVersion()}}
	}
	if err != nil || len(fds) != hostHandles {
		return hostResponse{Error: fmt.Sprintf("an order with %d descriptors: %v", len(fds), err)}
	}
	if o.UCX {
		answer.Library, err = LoadUCX(o.Path, o.Search, o.Limit)
	} else {
		answer.Library, err = Load(o.Search, o.Limit)
	}
	if err != nil {
		if !errors.As(err, &answer.Missing) {
			answer.Error = err.Error()
		}
		return answer
	}
	if err := startHostAgent(&o, fds); err != nil {
		answer.Error = err.Error()
	}
	return answer
}

// startHostAgent starts an agent over a ring. The mappings stay until the process ends.
func startHostAgent(o *hostRequest, fds []int) error {
	block, err := mapAt(fds[0], o.Ring, o.RingSize)
	if err != nil {
		return fmt.Errorf("cannot map the ring at %#x: %w", o.Ring, err)
	}
	if _, err := mapAt(fds[1], o.Memory, o.Size); err != nil {
		return fmt.Errorf("cannot map the memory for boards at %#x: %w", o.Memory, err)
	}
	r, err := placeRing(block, o.Commands, o.Events, o.Spill)
	if err != nil {
		return err
	}
	r.wakeFD, r.eventFD = fds[2], fds[3]
	if !o.UCX {
		return nativenixl.StartAgent(unsafe.Pointer(r.head), uint32(o.Commands), uint32(o.Events), uint32(o.Spill), r.wakeFD, r.eventFD, o.Poll)
	}
	s, err := newStepper(r, nil)
	if err == nil {
		go func() { s.run(); runtime.KeepAlive(r) }()
	}
	return err
}
