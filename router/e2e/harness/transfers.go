package harness

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/config"
)

// GoodHandle is a valid kv_transfer_params of a prefill leg's response in vLLM's format. Nothing
// listens on its port, so only scripted engines accept it.
const GoodHandle = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`

// TransferReporter is a router that receives transfer reports over ZMQ, and a socket that sends them.
type TransferReporter struct {
	*Router
	push *zmq.Socket
	mu   sync.Mutex
}

// StartTransferReporter starts the router and connects the socket.
func StartTransferReporter(t *testing.T, mod func(*config.Config), workers ...config.Worker) *TransferReporter {
	t.Helper()
	r := &TransferReporter{Router: StartRouter(t, func(c *config.Config) {
		c.Transfers.ZMQListen = "tcp://127.0.0.1:*"
		if mod != nil {
			mod(c)
		}
	}, workers...)}
	testwait.UntilWithin(t, 10*time.Second, "the ZMQ tier is up", func() bool { return r.Transfers.Up(nixl.TierZMQ) })
	d, err := r.Transfers.Document(netip.IPv6Loopback())
	if err != nil {
		t.Fatal(err)
	}
	var doc struct{ ZMQ struct{ Endpoint string } }
	js, _ := json.Marshal(d)
	if err := json.Unmarshal(js, &doc); err != nil {
		t.Fatal(err)
	}
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	if r.push, err = ctx.NewSocket(zmq.PUSH); err == nil {
		r.push.SetLinger(0)
		err = r.push.Connect(doc.ZMQ.Endpoint)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.push.Close(); ctx.Term() })
	return r
}

// Report sends a report about a request like an engine's connector. A decode engine includes the
// completion slot from its request body, if there was one.
func (r *TransferReporter) Report(event, status, id, body string) {
	var sent struct {
		Handle struct {
			Completion *struct {
				Slot  int
				Nonce string
			} `json:"sluice"`
		} `json:"kv_transfer_params"`
	}
	slot := "- -"
	if json.Unmarshal([]byte(body), &sent) == nil && sent.Handle.Completion != nil && event == "recv" {
		slot = fmt.Sprintf("%d %s", sent.Handle.Completion.Slot, sent.Handle.Completion.Nonce)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.push.SendBytes(fmt.Appendf(nil, "SLUICE1 %s %s %s 1048576 2500 0/0/1 d0 chatcmpl-%s-0badcafe", event, status, slot, id), 0)
}

// WithReportingConnector makes a worker one whose engine runs the connector that reports transfers.
func WithReportingConnector(w config.Worker) config.Worker {
	w.Options = map[string][]string{"connector": {"true"}}
	return w
}

// ChatReply returns the answer of a chat with this text.
func ChatReply(text string) string {
	return `{"id":"chatcmpl-x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
}
