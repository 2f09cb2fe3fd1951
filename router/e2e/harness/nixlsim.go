package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"sluice/bench/sim"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/worker"
)

// NixlEngine completes a simulated prefill engine so that the router can use it like vLLM
// without a connector: it adds a real NIXL agent, and the ZeroMQ side channel that serves the
// agent's metadata. It forwards the agent's notifications to the simulated side channel.
type NixlEngine struct {
	t        *testing.T
	agent    *nixl.Agent
	metadata []byte
	socket   *zmq.Socket
	stop     chan struct{}
	wg       sync.WaitGroup
	received chan string
	engine   string // host:port of the simulated side channel
	id       string // engine id
}

// WithRealNIXL completes a row of the matrix: it gives the prefill engines real NIXL agents, and
// the router an agent with which it releases abandoned blocks.
func WithRealNIXL(t *testing.T, fam *MatrixFamily) {
	wheel := NixlWheel(t)
	var last *NixlEngine
	var zmqPort string
	engine := fam.Engine
	fam.Engine = func(o *sim.Options) {
		if engine != nil {
			engine(o)
		}
		if o.Role == worker.Prefill.String() {
			last, zmqPort = startNIXLEngine(t, wheel)
			o.SideZMQ = "127.0.0.1:" + zmqPort
		}
	}
	fam.Worker = func(w *config.Worker, e *sim.Engine) {
		if w.Role == worker.Prefill {
			last.address(e)
		}
	}
	fam.Config = func(c *config.Config) {
		c.Transfers.NIXL, c.Transfers.NIXLLibrary, c.Transfers.SideChannel = "on", wheel, "release"
	}
}

// startNIXLEngine starts the agent and the socket. The simulated engine is added later, by
// address.
func startNIXLEngine(t *testing.T, wheel string) (*NixlEngine, string) {
	t.Helper()
	n := &NixlEngine{t: t, stop: make(chan struct{}), received: make(chan string, 1<<16)}
	var err error
	n.agent, err = nixl.Open(t.Context(), nixl.Config{Name: "prefill-" + fmt.Sprint(time.Now().UnixNano()), Search: nixl.Search{Path: wheel}, OnNotification: func(m nixl.Notification) {
		select {
		case n.received <- string(m.Message):
		default:
			t.Error("a simulated engine got more notifications than it handles")
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if n.metadata, err = n.agent.Metadata(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	s, err := ctx.NewSocket(zmq.ROUTER)
	if err == nil {
		err = errors.Join(s.SetLinger(0), s.SetRcvtimeo(20*time.Millisecond), s.Bind("tcp://127.0.0.1:*"))
	}
	if err != nil {
		t.Fatal(err)
	}
	n.socket = s
	at, _ := s.GetLastEndpoint()
	t.Cleanup(func() { close(n.stop); n.wg.Wait(); s.Close(); ctx.Term(); n.agent.Close() })
	return n, at[strings.LastIndexByte(at, ':')+1:]
}

// answer serves requests for the agent's metadata.
func (n *NixlEngine) answer() {
	for {
		select {
		case <-n.stop:
			return
		default:
		}
		m, err := n.socket.RecvMessageBytes(0)
		if err != nil {
			continue
		}
		if len(m) != 3 || !bytes.Equal(m[2], []byte("\x93\xc4\x0cget_meta_msg\x00\x00")) {
			n.t.Errorf("the side channel was asked %q", m)
			continue
		}
		n.socket.SendMessage(m[0], "", n.payload(), msgp.AppendFloat64(nil, 1))
	}
}

// payload returns the NixlHandshakePayload in the encoding of vLLM 0.32.
func (n *NixlEngine) payload() []byte {
	inner := msgp.AppendMapHeader(nil, 2)
	inner = msgp.AppendString(msgp.AppendString(inner, "engine_id"), n.id)
	inner = msgp.AppendBytes(msgp.AppendString(inner, "agent_metadata"), n.metadata)
	b := msgp.AppendMapHeader(nil, 2)
	b = msgp.AppendString(msgp.AppendString(b, "compatibility_hash"), strings.Repeat("ab", 32))
	return msgp.AppendBytes(msgp.AppendString(b, "agent_metadata_bytes"), inner)
}

// address starts to serve metadata for e and to forward the agent's notifications to it.
func (n *NixlEngine) address(e *sim.Engine) {
	n.engine, n.id = fmt.Sprint("127.0.0.1:", e.SidePort()), e.EngineID()
	n.wg.Go(n.answer)
	n.wg.Go(func() {
		for {
			select {
			case m := <-n.received:
				n.forward(m)
			case <-n.stop:
				return
			}
		}
	})
}

func (n *NixlEngine) forward(m string) {
	path, ids := "/done", []string{}
	if list, ok := strings.CutPrefix(m, "HB:"); ok {
		path, ids = "/heartbeat", strings.Split(list, ",")
	} else if id, count, ok := cutLast(m, ":"); ok && count == "1" {
		ids = append(ids, id)
	} else {
		n.t.Errorf("an agent got the notification %q", m)
		return
	}
	body, _ := json.Marshal(map[string]any{"engine_id": n.id, "request_ids": ids})
	resp, err := http.Post("http://"+n.engine+path, "application/json", bytes.NewReader(body))
	if err != nil {
		n.t.Errorf("a simulated engine was not notified: %v", err)
		return
	}
	resp.Body.Close()
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
