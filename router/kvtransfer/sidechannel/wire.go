package sidechannel

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"
)

// The formats are those of vLLM 0.22 to 0.33, distributed/kv_transfer/kv_connector/v1/nixl. The
// request is a msgpack array of a keyword and the ranks. The first frame of the answer is a
// NixlHandshakePayload, a map whose agent_metadata_bytes is an encoded map.

const (
	queryTimeout = 5 * time.Second
	askPoll      = 50 * time.Millisecond // interval at which a pending query checks its context
	maxAnswer    = 64 << 20
	metaMessage  = "get_meta_msg"
)

// appendQuery builds the request for one rank's metadata. The router never sends anything else:
// vLLM's listener thread dies on any message that it does not know, including one that names a
// missing rank.
func appendQuery(ppRank, tpRank int, withPP bool) []byte {
	n := uint32(2)
	if withPP {
		n = 3
	}
	b := msgp.AppendArrayHeader(nil, n)
	b = msgp.AppendBytes(b, []byte(metaMessage))
	if withPP {
		b = msgp.AppendInt(b, ppRank)
	}
	return msgp.AppendInt(b, tpRank)
}

var errAnswer = errors.New("sidechannel: unexpected answer; want that of the side channel of a vLLM engine")

// readAnswer extracts the engine id and the agent metadata from the first frame of an answer.
func readAnswer(frame []byte) (engine string, metadata []byte, err error) {
	inner, err := member(frame, "agent_metadata_bytes")
	if err != nil {
		return "", nil, err
	}
	body, _, err := msgp.ReadBytesZC(inner)
	if err != nil {
		return "", nil, fmt.Errorf("%w: agent_metadata_bytes: %w", errAnswer, err)
	}
	id, err := member(body, "engine_id")
	if err != nil {
		return "", nil, err
	}
	if engine, _, err = msgp.ReadStringBytes(id); err != nil {
		return "", nil, fmt.Errorf("%w: engine_id: %w", errAnswer, err)
	}
	md, err := member(body, "agent_metadata")
	if err != nil {
		return "", nil, err
	}
	if metadata, _, err = msgp.ReadBytesZC(md); err != nil || len(metadata) == 0 {
		return "", nil, fmt.Errorf("%w: agent_metadata is not a byte string", errAnswer)
	}
	return engine, metadata, nil
}

// member returns the part of b that begins with the value of a map's member.
func member(b []byte, name string) ([]byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAnswer, err)
	}
	for range n {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return nil, fmt.Errorf("%w: %w", errAnswer, err)
		}
		if string(key) == name {
			return b, nil
		}
		if b, err = msgp.Skip(b); err != nil {
			return nil, fmt.Errorf("%w: %w", errAnswer, err)
		}
	}
	return nil, fmt.Errorf("%w: no member %s", errAnswer, name)
}

// fetch queries one rank's metadata at tcp://HOST:PORT. It returns within askPoll of the end of
// ctx.
func fetch(ctx context.Context, zctx *zmq.Context, endpoint string, request []byte) (engine string, metadata []byte, err error) {
	s, err := zctx.NewSocket(zmq.REQ)
	if err != nil {
		return "", nil, err
	}
	defer s.Close()
	err = errors.Join(s.SetLinger(0), s.SetRcvtimeo(askPoll), s.SetSndtimeo(askPoll), s.SetMaxmsgsize(maxAnswer), s.Connect(endpoint))
	if err == nil {
		_, err = s.SendBytes(request, 0)
	}
	var frames [][]byte
	for began := time.Now(); err == nil; {
		frames, err = s.RecvMessageBytes(0)
		if err == nil {
			return readAnswer(frames[0])
		}
		if zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) && ctx.Err() == nil && time.Since(began) < queryTimeout {
			err = nil
		}
	}
	return "", nil, fmt.Errorf("sidechannel: cannot query %q: %w", endpoint, err)
}
