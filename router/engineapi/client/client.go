package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/wire"
)

// Options configures a Client; see wire.DialOptions.
type Options = wire.DialOptions

// Client is one connection to a router. It is safe for concurrent use. When the connection is
// lost, requests in progress fail with the error of Err and no further request can be sent;
// callers that want to continue dial a new Client.
type Client struct{ conn *wire.Client }

// Dial connects to unix:///PATH or tcp://HOST:PORT.
func Dial(ctx context.Context, addr string, opt Options) (*Client, error) {
	conn, err := wire.Dial(ctx, addr, opt)
	if err != nil {
		return nil, err
	}
	return &Client{conn}, nil
}

// Close closes the connection and kills the requests in progress.
func (c *Client) Close() error { return c.conn.Close() }

// Done is closed when the connection is closed; Err gives the reason.
func (c *Client) Done() <-chan struct{} { return c.conn.Done() }

// Err returns why the connection is closed, nil while it is open.
func (c *Client) Err() error { return c.conn.Err() }

// Generate sends a request and returns its answer as a stream.
func (c *Client) Generate(r *Request) (*Stream, error) {
	payload, err := r.AppendMsgpack(nil)
	if err != nil {
		return nil, err
	}
	return c.GenerateRaw(payload)
}

// GenerateRaw is Generate for a request that is already encoded as msgpack.
func (c *Client) GenerateRaw(payload []byte) (*Stream, error) {
	s, err := c.conn.Open(payload)
	if err != nil {
		return nil, err
	}
	return &Stream{s: s}, nil
}

// Stream is the answer to one request. Next is for one goroutine.
type Stream struct {
	s    *wire.ClientStream
	item Item
	data Output
}

// Next returns the next item, which is valid until the next call, or nil at the end of the
// answer. An item may be an error: see Item.Err. When ctx ends, Next kills the request.
func (s *Stream) Next(ctx context.Context) (*Item, error) {
	payload, ok, err := s.s.Recv(ctx)
	if !ok {
		return nil, err
	}
	s.item = Item{}
	if err := s.item.read(payload, &s.data); err != nil {
		s.Kill()
		return nil, fmt.Errorf("client: cannot parse an item: %w", err)
	}
	return &s.item, nil
}

// Stop asks the router to finish. The stream then delivers the tokens generated so far and a
// last item with the finish reason "cancelled".
func (s *Stream) Stop() { s.s.Stop() }

// Kill ends the request immediately.
func (s *Stream) Kill() { s.s.Kill() }

// Item is one element of an answer.
type Item struct {
	Data    *Output // nil: the item has no data
	Comment []string
	Failure *Failure // nil: the item is not an error
}

// Err returns the item's error, nil if it has none.
func (i *Item) Err() error {
	if i.Failure == nil {
		return nil
	}
	return i.Failure
}

// Failure is the error of a request.
type Failure struct {
	Message, Type, Param string
	Code                 int // an HTTP status code
}

// Error implements error.
func (f *Failure) Error() string { return fmt.Sprintf("%s (%s, %d)", f.Message, f.Type, f.Code) }

// Output is an LLMEngineOutput. The next item reuses its slices.
type Output struct {
	TokenIDs     []uint32 // the new tokens
	LogProbs     []float64
	TopLogprobs  [][]TopLogprob
	FinishReason string // "" while the choice continues
	Index        int    // of the choice
	StopReason   any
	ExtraArgs    any
	Usage        *Usage // with the last item
}

// TopLogprob is an alternative token.
type TopLogprob struct {
	Rank    int
	TokenID int64 // -1: only the text is known
	Token   string
	Logprob float64
}

// Usage contains the request's token counts; Cached is -1 if the engine does not report it.
type Usage struct{ Prompt, Completion, Total, Cached int }

// members calls f for each member of a map.
func members(b []byte, f func(key string, b []byte) ([]byte, error)) ([]byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return b, err
		}
		if msgp.IsNil(b) {
			b, err = msgp.Skip(b)
			continue
		}
		b, err = f(string(key), b)
	}
	return b, err
}

// read decodes an item. It decodes the members that every item has without a callback, which
// would allocate.
func (i *Item) read(b []byte, data *Output) error {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			break
		}
		if msgp.IsNil(b) {
			b, err = msgp.Skip(b)
			continue
		}
		switch string(key) {
		case "data":
			i.Data = data
			b, err = data.read(b)
		case "comment":
			i.Comment, b, err = comments(b)
		case "error":
			i.Failure, b, err = failure(b)
		default:
			b, err = msgp.Skip(b)
		}
	}
	return err
}

func comments(b []byte) (list []string, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var s string
		s, b, err = msgp.ReadStringBytes(b)
		list = append(list, s)
	}
	return list, b, err
}

func failure(b []byte) (*Failure, []byte, error) {
	f := &Failure{}
	b, err := members(b, func(key string, b []byte) (_ []byte, err error) {
		switch key {
		case "message":
			f.Message, b, err = msgp.ReadStringBytes(b)
		case "type":
			f.Type, b, err = msgp.ReadStringBytes(b)
		case "param":
			f.Param, b, err = msgp.ReadStringBytes(b)
		case "code":
			f.Code, b, err = msgp.ReadIntBytes(b)
		default:
			b, err = msgp.Skip(b)
		}
		return b, err
	})
	return f, b, err
}

func (o *Output) read(b []byte) ([]byte, error) {
	*o = Output{TokenIDs: o.TokenIDs[:0], LogProbs: o.LogProbs[:0]}
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			break
		}
		if msgp.IsNil(b) {
			b, err = msgp.Skip(b)
			continue
		}
		switch string(key) { // the conversion does not allocate
		case "token_ids":
			var k uint32
			k, b, err = msgp.ReadArrayHeaderBytes(b)
			for ; k > 0 && err == nil; k-- {
				var id uint32
				id, b, err = msgp.ReadUint32Bytes(b)
				o.TokenIDs = append(o.TokenIDs, id)
			}
		case "finish_reason":
			o.FinishReason, b, err = msgp.ReadStringBytes(b)
		case "index":
			o.Index, b, err = msgp.ReadIntBytes(b)
		case "log_probs":
			var k uint32
			k, b, err = msgp.ReadArrayHeaderBytes(b)
			for ; k > 0 && err == nil; k-- {
				var v float64
				v, b, err = number(b)
				o.LogProbs = append(o.LogProbs, v)
			}
		case "top_logprobs":
			b, err = o.tops(b)
		case "stop_reason":
			o.StopReason, b, err = msgp.ReadIntfBytes(b)
		case "extra_args":
			o.ExtraArgs, b, err = msgp.ReadIntfBytes(b)
		case "completion_usage":
			o.Usage, b, err = usage(b)
		default:
			b, err = msgp.Skip(b)
		}
	}
	return b, err
}

func usage(b []byte) (*Usage, []byte, error) {
	u := &Usage{Cached: -1}
	b, err := members(b, func(key string, b []byte) (_ []byte, err error) {
		switch key {
		case "prompt_tokens":
			u.Prompt, b, err = msgp.ReadIntBytes(b)
		case "completion_tokens":
			u.Completion, b, err = msgp.ReadIntBytes(b)
		case "total_tokens":
			u.Total, b, err = msgp.ReadIntBytes(b)
		case "prompt_tokens_details":
			return members(b, func(key string, b []byte) (_ []byte, err error) {
				if key == "cached_tokens" {
					u.Cached, b, err = msgp.ReadIntBytes(b)
					return b, err
				}
				return msgp.Skip(b)
			})
		default:
			b, err = msgp.Skip(b)
		}
		return b, err
	})
	return u, b, err
}

// number decodes a float or an integer; nil is 0.
func number(b []byte) (v float64, rest []byte, err error) {
	switch msgp.NextType(b) {
	case msgp.IntType, msgp.UintType:
		n, rest, err := msgp.ReadInt64Bytes(b)
		return float64(n), rest, err
	case msgp.NilType:
		rest, err = msgp.ReadNilBytes(b)
		return 0, rest, err
	}
	return msgp.ReadFloat64Bytes(b)
}

func (o *Output) tops(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var k uint32
		var list []TopLogprob
		for k, b, err = msgp.ReadArrayHeaderBytes(b); k > 0 && err == nil; k-- {
			t := TopLogprob{TokenID: -1}
			b, err = members(b, func(key string, b []byte) (_ []byte, err error) {
				switch key {
				case "rank":
					t.Rank, b, err = msgp.ReadIntBytes(b)
				case "token_id":
					t.TokenID, b, err = msgp.ReadInt64Bytes(b)
				case "token":
					t.Token, b, err = msgp.ReadStringBytes(b)
				case "logprob":
					t.Logprob, b, err = number(b)
				default:
					b, err = msgp.Skip(b)
				}
				return b, err
			})
			list = append(list, t)
		}
		o.TopLogprobs = append(o.TopLogprobs, list)
	}
	return b, err
}

// TimedOut returns whether err is the end of a request whose Context.TimeoutMS passed while the
// router could not send an error item of code 504, because the caller had not read the earlier
// items.
func TimedOut(err error) bool {
	var e *wire.Error
	return errors.As(err, &e) && e.Code == wire.CodeDeadline
}

// Killed returns whether err is the end of a request that the caller killed.
func Killed(err error) bool { return errors.Is(err, wire.ErrKilled) }
