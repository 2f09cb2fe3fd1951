package transcript

import (
	"bytes"
	"strconv"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// generateStream is vLLM's /inference/v1/generate (vLLM 0.32): {"request_id","choices":[{"index",
// "token_ids",…}],…}, with new ids in each event. The client sees all of them.
type generateStream struct {
	t  *Transcript
	id []byte // request_id, raw

	shape jsonscan.EventShape // of the events that carry only ids
	index int                 // the gap of the choice's index; -1: none
}

func (g *generateStream) event(dst, event []byte) []byte {
	t := g.t
	if had := len(t.Out); t.resumed() == nil && g.matchShape(event) {
		return t.appendShown(dst, event, t.Out[had:])
	}
	data := sse.EventData(event)
	if bytes.Equal(data, sse.DoneData) {
		t.doneSent = true
		return append(dst, event...)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	n, ok := t.readEvent(event, data)
	switch {
	case !ok:
		t.blockOnce("unreadable")
		return append(dst, event...)
	case n.failed:
		return t.engineFailed(dst, event, n.failedCode)
	case t.resumed() != nil:
		return t.resumed().Event(dst, event)
	}
	if g.id == nil {
		g.id = bytes.Clone(jsonscan.MemberOf(data, "request_id"))
	}
	if t.NoText && !n.hasOther && n.choices == 1 && n.ids > 0 {
		ids := jsonscan.Value{Start: n.idsAt, End: n.idsTo, Kind: jsonscan.Array}
		if g.shape.Learn(event, jsonscan.Value{}, ids) {
			g.index = g.shape.Gap(n.indexAt)
		}
	}
	return append(dst, event...)
}

// matchShape reads an event with the same shape as the last one walked.
func (g *generateStream) matchShape(event []byte) bool {
	t := g.t
	out, _, ok := g.shape.Match(t.Out, event)
	if !ok || len(out) == len(t.Out) {
		return false
	}
	if g.index >= 0 {
		if w := (jsonscan.Cursor{Data: event, Pos: g.shape.Start(g.index)}); w.Number() > 0 {
			return false
		}
	}
	t.Out = out
	t.addIDs(&t.ChoiceState, nil, len(out))
	return true
}

func (g *generateStream) nextEngine() sse.Rewriter {
	return &generateResumed{id: g.id, splice: *g.t.splicePoint()}
}

func (g *generateStream) appendEnd(dst []byte, usage bool) []byte {
	if usage && g.id != nil {
		dst = append(append(dst, `data: {"request_id":`...), g.id...)
		dst = g.t.appendUsage(append(dst, `,"usage":`...))
		dst = append(dst, ",\"choices\":[]}\n\n"...)
	}
	return append(dst, "data: [DONE]\n\n"...)
}

// generateResumed turns the events of a second engine into those of the stream.
type generateResumed struct {
	id     []byte // nil: nothing has been sent
	splice apiformat.SplicePoint
}

// Event appends the client's form of an event of the second engine.
func (g *generateResumed) Event(dst, event []byte) []byte {
	w := jsonscan.Cursor{Data: sse.EventData(event)}
	if !w.Enter('{') {
		return append(dst, event...)
	}
	mark := len(dst)
	dst = append(dst, "data: "...)
	from := len(dst)
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "request_id":
			id := w.Raw()
			if g.id != nil {
				id = g.id
			}
			dst = append(apiformat.AppendKey(dst, from, key), id...)
		case "usage":
			dst = apiformat.AppendKey(dst, from, key)
			c := apiformat.Conversion{Cached: -1, Splice: &g.splice}
			dst = c.Usage(dst, &w)
		case "prompt_token_ids", "mm_placeholders":
			if raw := w.Raw(); g.splice.PriorTokens == 0 {
				dst = append(apiformat.AppendKey(dst, from, key), raw...)
			} // else the client has it already, and this engine's differs
		case "choices":
			dst = apiformat.AppendKey(dst, from, key)
			dst = g.choices(dst, &w)
		default:
			dst = apiformat.AppendKey(dst, from, key)
			dst = append(dst, w.Raw()...)
		}
	}
	if w.Bad || len(dst) == from {
		return append(dst[:mark], event...)
	}
	return append(dst, "}\n\n"...)
}

// choices appends the choices at w. The spans of weight versions count the whole output.
func (g *generateResumed) choices(dst []byte, w *jsonscan.Cursor) []byte {
	if w.Peek() != '[' {
		return append(dst, w.Raw()...)
	}
	w.Enter('[')
	dst = append(dst, '[')
	for i := 0; w.Element(); i++ {
		if i > 0 {
			dst = append(dst, ',')
		}
		if w.Peek() != '{' {
			dst = append(dst, w.Raw()...)
			continue
		}
		w.Enter('{')
		from := len(dst)
		for key, more := w.Member(); more; key, more = w.Member() {
			dst = apiformat.AppendKey(dst, from, key)
			if string(key) == "weight_versions" && w.Peek() == '[' {
				dst = g.spans(dst, w)
				continue
			}
			dst = append(dst, w.Raw()...)
		}
		dst = apiformat.CloseObject(dst, from)
	}
	return append(dst, ']')
}

func (g *generateResumed) spans(dst []byte, w *jsonscan.Cursor) []byte {
	w.Enter('[')
	dst = append(dst, '[')
	for i := 0; w.Element(); i++ {
		if i > 0 {
			dst = append(dst, ',')
		}
		from := len(dst)
		if w.Peek() != '{' {
			dst = append(dst, w.Raw()...)
			continue
		}
		w.Enter('{')
		for key, more := w.Member(); more; key, more = w.Member() {
			dst = apiformat.AppendKey(dst, from, key)
			switch string(key) {
			case "start", "end":
				dst = apiformat.AppendShifted(dst, w, g.splice.PriorTokens)
			default:
				dst = append(dst, w.Raw()...)
			}
		}
		dst = apiformat.CloseObject(dst, from)
	}
	return append(dst, ']')
}

// appendUsage appends OpenAI's usage object by the number of ids.
func (t *Transcript) appendUsage(dst []byte) []byte {
	output := t.totalTokens()
	dst = strconv.AppendInt(append(dst, `{"prompt_tokens":`...), int64(t.Prompt.Len()), 10)
	dst = strconv.AppendInt(append(dst, `,"total_tokens":`...), int64(t.Prompt.Len()+output), 10)
	dst = strconv.AppendInt(append(dst, `,"completion_tokens":`...), int64(output), 10)
	return append(dst, '}')
}
