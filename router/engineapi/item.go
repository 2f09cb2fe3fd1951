package engineapi

import (
	"strconv"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/jsonscan"
)

// item is one element of an answer: an Annotated<LLMEngineOutput>. Raw fields are JSON from the
// engine and are borrowed while the item is written.
type item struct {
	data     bool // the item has data
	index    int
	tokens   []uint32
	finish   string // "" while the choice continues
	stop     []byte // stop_reason, raw
	logprobs []tokenLogprob
	usage    usage
	extra    []byte // extra_args, raw: members that have no field here
	comment  []string
	failure  *failure
}

// usage is the engine's token counts; prompt is -1 while they are unknown.
type usage struct{ prompt, completion, cached int }

var noUsage = usage{-1, -1, -1}

// tokenLogprob is the log-probability of one token, with those of its alternatives. Numbers are
// raw JSON, so that they keep the engine's exact digits.
type tokenLogprob struct {
	prob []byte
	top  []topLogprob
}

// topLogprob is an alternative token; id is -1 if only its text is known.
type topLogprob struct {
	id    int64
	token []byte // raw JSON string; nil: unknown
	prob  []byte
}

// failure is an error item.
type failure struct {
	message, kind, param string
	code                 int
}

// jsonItems writes items as server-sent events.
type jsonItems struct{}

func (jsonItems) append(dst []byte, it *item) []byte {
	dst = append(dst, "data: "...)
	o := object{dst: append(dst, '{')}
	if it.data {
		o.key("data")
		o.dst = it.appendDataJSON(o.dst)
	}
	if f := it.failure; f != nil {
		o.text("event", "error")
		o.key("error")
		o.dst = f.appendJSON(o.dst)
		o.key("comment")
		o.dst = append(jsonscan.AppendQuoted(append(o.dst, '['), f.message), ']')
	} else if len(it.comment) > 0 {
		o.key("comment")
		o.dst = append(o.dst, '[')
		for i, c := range it.comment {
			if i > 0 {
				o.dst = append(o.dst, ',')
			}
			o.dst = jsonscan.AppendQuoted(o.dst, c)
		}
		o.dst = append(o.dst, ']')
	}
	return append(o.dst, "}\n\n"...)
}

func (f *failure) appendJSON(dst []byte) []byte {
	dst = jsonscan.AppendQuoted(append(dst, `{"message":`...), f.message)
	dst = jsonscan.AppendQuoted(append(dst, `,"type":`...), f.kind)
	dst = append(dst, `,"param":`...)
	if f.param == "" {
		dst = append(dst, "null"...)
	} else {
		dst = jsonscan.AppendQuoted(dst, f.param)
	}
	dst = strconv.AppendInt(append(dst, `,"code":`...), int64(f.code), 10)
	return append(dst, '}')
}

func (it *item) appendDataJSON(dst []byte) []byte {
	dst = jsonscan.AppendTokenIDs(append(dst, `{"token_ids":`...), it.tokens)
	if len(it.logprobs) > 0 {
		dst = append(dst, `,"log_probs":[`...)
		tops := false
		for i := range it.logprobs {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, orNull(it.logprobs[i].prob)...)
			tops = tops || len(it.logprobs[i].top) > 0
		}
		dst = append(dst, ']')
		if tops {
			dst = append(dst, `,"top_logprobs":[`...)
			for i := range it.logprobs {
				if i > 0 {
					dst = append(dst, ',')
				}
				dst = append(dst, '[')
				for rank := range it.logprobs[i].top {
					t := &it.logprobs[i].top[rank]
					if rank > 0 {
						dst = append(dst, ',')
					}
					dst = strconv.AppendInt(append(dst, `{"rank":`...), int64(rank+1), 10)
					if t.id >= 0 {
						dst = strconv.AppendInt(append(dst, `,"token_id":`...), t.id, 10)
					}
					if t.token != nil {
						dst = append(append(dst, `,"token":`...), t.token...)
					}
					dst = append(append(dst, `,"logprob":`...), orNull(t.prob)...)
					dst = append(dst, '}')
				}
				dst = append(dst, ']')
			}
			dst = append(dst, ']')
		}
	}
	dst = append(dst, `,"finish_reason":`...)
	if it.finish == "" {
		dst = append(dst, "null"...)
	} else {
		dst = jsonscan.AppendQuoted(dst, it.finish)
	}
	dst = strconv.AppendInt(append(dst, `,"index":`...), int64(it.index), 10)
	if it.stop != nil {
		dst = append(append(dst, `,"stop_reason":`...), it.stop...)
	}
	if it.extra != nil {
		dst = append(append(dst, `,"extra_args":`...), it.extra...)
	}
	if u := &it.usage; u.prompt >= 0 {
		dst = strconv.AppendInt(append(dst, `,"completion_usage":{"prompt_tokens":`...), int64(u.prompt), 10)
		dst = strconv.AppendInt(append(dst, `,"completion_tokens":`...), int64(max(u.completion, 0)), 10)
		dst = strconv.AppendInt(append(dst, `,"total_tokens":`...), int64(u.prompt+max(u.completion, 0)), 10)
		if u.cached >= 0 {
			dst = strconv.AppendInt(append(dst, `,"prompt_tokens_details":{"cached_tokens":`...), int64(u.cached), 10)
			dst = append(dst, '}')
		}
		dst = append(dst, '}')
	}
	return append(dst, '}')
}

func orNull(raw []byte) []byte {
	if len(raw) == 0 {
		return jsonNull
	}
	return raw
}

var jsonNull = []byte("null")

// msgpackItems writes items as frame payloads.
type msgpackItems struct{}

func (msgpackItems) append(dst []byte, it *item) []byte {
	members := uint32(0)
	if it.data {
		members++
	}
	switch {
	case it.failure != nil:
		members += 3
	case len(it.comment) > 0:
		members++
	}
	dst = msgp.AppendMapHeader(dst, members)
	if it.data {
		dst = it.appendData(msgp.AppendString(dst, "data"))
	}
	if f := it.failure; f != nil {
		dst = msgp.AppendString(msgp.AppendString(dst, "event"), "error")
		dst = msgp.AppendString(dst, "error")
		dst = msgp.AppendMapHeader(dst, 4)
		dst = msgp.AppendString(msgp.AppendString(dst, "message"), f.message)
		dst = msgp.AppendString(msgp.AppendString(dst, "type"), f.kind)
		dst = msgp.AppendString(dst, "param")
		if f.param == "" {
			dst = msgp.AppendNil(dst)
		} else {
			dst = msgp.AppendString(dst, f.param)
		}
		dst = msgp.AppendInt(msgp.AppendString(dst, "code"), f.code)
		dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "comment"), 1)
		return msgp.AppendString(dst, f.message)
	}
	if len(it.comment) > 0 {
		dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "comment"), uint32(len(it.comment)))
		for _, c := range it.comment {
			dst = msgp.AppendString(dst, c)
		}
	}
	return dst
}

// appendIDs appends an item of the first choice that has these ids and nothing else.
func (msgpackItems) appendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, "\x81\xa4data\x83\xa9token_ids"...)
	dst = msgp.AppendArrayHeader(dst, uint32(len(ids)))
	for _, id := range ids {
		dst = msgp.AppendUint32(dst, id)
	}
	return append(dst, "\xadfinish_reason\xc0\xa5index\x00"...)
}

func (it *item) appendData(dst []byte) []byte {
	tops := false
	for i := range it.logprobs {
		tops = tops || len(it.logprobs[i].top) > 0
	}
	members := uint32(3)
	for _, there := range [...]bool{len(it.logprobs) > 0, tops, it.stop != nil, it.extra != nil, it.usage.prompt >= 0} {
		if there {
			members++
		}
	}
	dst = msgp.AppendMapHeader(dst, members)
	dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "token_ids"), uint32(len(it.tokens)))
	for _, id := range it.tokens {
		dst = msgp.AppendUint32(dst, id)
	}
	if len(it.logprobs) > 0 {
		dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "log_probs"), uint32(len(it.logprobs)))
		for i := range it.logprobs {
			dst = appendRaw(dst, it.logprobs[i].prob)
		}
	}
	if tops {
		dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "top_logprobs"), uint32(len(it.logprobs)))
		for i := range it.logprobs {
			dst = msgp.AppendArrayHeader(dst, uint32(len(it.logprobs[i].top)))
			for rank := range it.logprobs[i].top {
				t := &it.logprobs[i].top[rank]
				n := uint32(2)
				if t.id >= 0 {
					n++
				}
				if t.token != nil {
					n++
				}
				dst = msgp.AppendMapHeader(dst, n)
				dst = msgp.AppendInt(msgp.AppendString(dst, "rank"), rank+1)
				if t.id >= 0 {
					dst = msgp.AppendInt64(msgp.AppendString(dst, "token_id"), t.id)
				}
				if t.token != nil {
					dst = appendRaw(msgp.AppendString(dst, "token"), t.token)
				}
				dst = appendRaw(msgp.AppendString(dst, "logprob"), t.prob)
			}
		}
	}
	dst = msgp.AppendString(dst, "finish_reason")
	if it.finish == "" {
		dst = msgp.AppendNil(dst)
	} else {
		dst = msgp.AppendString(dst, it.finish)
	}
	dst = msgp.AppendInt(msgp.AppendString(dst, "index"), it.index)
	if it.stop != nil {
		dst = appendRaw(msgp.AppendString(dst, "stop_reason"), it.stop)
	}
	if it.extra != nil {
		dst = appendRaw(msgp.AppendString(dst, "extra_args"), it.extra)
	}
	if u := &it.usage; u.prompt >= 0 {
		n := uint32(3)
		if u.cached >= 0 {
			n++
		}
		dst = msgp.AppendMapHeader(msgp.AppendString(dst, "completion_usage"), n)
		dst = msgp.AppendInt(msgp.AppendString(dst, "prompt_tokens"), u.prompt)
		dst = msgp.AppendInt(msgp.AppendString(dst, "completion_tokens"), max(u.completion, 0))
		dst = msgp.AppendInt(msgp.AppendString(dst, "total_tokens"), u.prompt+max(u.completion, 0))
		if u.cached >= 0 {
			dst = msgp.AppendMapHeader(msgp.AppendString(dst, "prompt_tokens_details"), 1)
			dst = msgp.AppendInt(msgp.AppendString(dst, "cached_tokens"), u.cached)
		}
	}
	return dst
}

// appendRaw appends a JSON value from the engine as msgpack.
func appendRaw(dst, raw []byte) []byte {
	if len(raw) == 0 {
		return msgp.AppendNil(dst)
	}
	switch raw[0] {
	case '"':
		var room [128]byte
		return msgp.AppendStringFromBytes(dst, appendText(room[:0], raw))
	case 't', 'f':
		return msgp.AppendBool(dst, raw[0] == 't')
	case '{':
		n := uint32(0)
		for it := jsonscan.Walk(raw); it.Next(); {
			n++
		}
		dst = msgp.AppendMapHeader(dst, n)
		var room [64]byte
		for it := jsonscan.Walk(raw); it.Next(); {
			dst = appendRaw(msgp.AppendStringFromBytes(dst, it.Key(room[:0])), it.Raw())
		}
		return dst
	case '[':
		n := uint32(0)
		for it := jsonscan.Walk(raw); it.Next(); {
			n++
		}
		dst = msgp.AppendArrayHeader(dst, n)
		for it := jsonscan.Walk(raw); it.Next(); {
			dst = appendRaw(dst, it.Raw())
		}
		return dst
	case 'n':
		return msgp.AppendNil(dst)
	}
	if n, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
		return msgp.AppendInt64(dst, n)
	}
	v, err := strconv.ParseFloat(string(raw), 64)
	if err != nil {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendFloat64(dst, v)
}
