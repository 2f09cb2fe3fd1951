package client

import (
	"fmt"
	"maps"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Request is a PreprocessedRequest. Zero values are omitted. Extra contains members that have
// no field here, or that must be sent although they are zero. Maps may contain the types of
// msgpack: nil, booleans, numbers, strings, []byte, []any, map[string]any.
type Request struct {
	Model           string
	TokenIDs        []uint32
	StopConditions  map[string]any // max_tokens, stop, stop_token_ids, min_tokens, ignore_eos, …
	SamplingOptions map[string]any // n, temperature, top_p, seed, …
	OutputOptions   map[string]any // logprobs, prompt_logprobs, skip_special_tokens, …
	EOSTokenIDs     []uint32
	Annotations     []string // "decision": comments of the first item describe the choice
	Routing         map[string]any
	Context         Context
	Extra           map[string]any
}

// Context contains properties of the call, not of the generation.
type Context struct {
	ID          string // X-Request-Id of the legs
	Traceparent string
	Tracestate  string
	TimeoutMS   int // of the whole request; 0: none
}

// AppendMsgpack appends the payload of a REQUEST frame.
func (r *Request) AppendMsgpack(dst []byte) ([]byte, error) {
	at, n := len(dst), 0
	dst = append(dst, 0xde, 0, 0) // a map, whose members are counted below
	var err error
	value := func(key string, v any, there bool) {
		if !there || err != nil {
			return
		}
		n++
		if dst, err = msgp.AppendIntf(msgp.AppendString(dst, key), v); err != nil {
			err = fmt.Errorf("client: cannot write %s: %w", key, err)
		}
	}
	ids := func(key string, list []uint32) {
		if len(list) == 0 {
			return
		}
		n++
		dst = msgp.AppendArrayHeader(msgp.AppendString(dst, key), uint32(len(list)))
		for _, id := range list {
			dst = msgp.AppendUint32(dst, id)
		}
	}
	value("model", r.Model, r.Model != "")
	ids("token_ids", r.TokenIDs)
	ids("eos_token_ids", r.EOSTokenIDs)
	value("stop_conditions", r.StopConditions, len(r.StopConditions) > 0)
	value("sampling_options", r.SamplingOptions, len(r.SamplingOptions) > 0)
	value("output_options", r.OutputOptions, len(r.OutputOptions) > 0)
	value("routing", r.Routing, len(r.Routing) > 0)
	if len(r.Annotations) > 0 {
		n++
		dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "annotations"), uint32(len(r.Annotations)))
		for _, a := range r.Annotations {
			dst = msgp.AppendString(dst, a)
		}
	}
	context := map[string]any{}
	for key, v := range map[string]string{"id": r.Context.ID, "traceparent": r.Context.Traceparent, "tracestate": r.Context.Tracestate} {
		if v != "" {
			context[key] = v
		}
	}
	if r.Context.TimeoutMS > 0 {
		context["timeout_ms"] = r.Context.TimeoutMS
	}
	value("context", context, len(context) > 0)
	for _, key := range slices.Sorted(maps.Keys(r.Extra)) {
		value(key, r.Extra[key], true)
	}
	dst[at+1], dst[at+2] = byte(n>>8), byte(n)
	return dst, err
}
