package family

import (
	"bytes"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// An SGLang decode server returns empty lists for the log-probabilities of the prompt, because the
// prefill server computed them. The router therefore inserts prefill's lists at the front of
// decode's, in non-streaming responses and in every event of a stream. SGLang's own router does
// this for the first list only (0.4.6 … 0.5.23). Completions with echo have both parts in one list.
// They run on an aggregated worker if there is one; otherwise the prompt's part is missing.

// logprobLists are the members of meta_info with log-probabilities of the prompt.
var logprobLists = [...]string{"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}

// sequenceLogprobs holds the elements of each list of one sequence. An entry is nil if the list is
// missing or empty.
type sequenceLogprobs [len(logprobLists)][]byte

// MergesAnswers implements AnswerMerger: /generate requests for log-probabilities.
func (sglang) MergesAnswers(p *Handover) bool {
	return p.Kind == front.NativeGenerate && wantsLogprobs(p.Doc.Raw(jsonscan.KeyReturnLogprob))
}

// wantsLogprobs reports whether raw is true or, for a batch, a list that contains true.
func wantsLogprobs(raw []byte) bool { return bytes.Contains(raw, jsonTrue) }

// Body implements AnswerRewriter.
func (sglang) Body(dst []byte, p *Handover, body []byte) []byte {
	merger := logprobMerger{bySequence: parseLogprobs(p.Answer)}
	if at := bytes.TrimLeft(body, " \t\r\n"); len(at) == 0 || at[0] != '[' {
		return merger.sequence(dst, body, 0)
	}
	from := 0
	it := jsonscan.Walk(body)
	for i := 0; it.Next(); i++ {
		dst = append(dst, body[from:it.Value.Start]...)
		dst = merger.sequence(dst, it.Raw(), i)
		from = it.Value.End
	}
	return append(dst, body[from:]...)
}

// Events implements AnswerRewriter.
func (sglang) Events(p *Handover) sse.Rewriter {
	return &logprobMerger{bySequence: parseLogprobs(p.Answer)}
}

// parseLogprobs reads a prefill response: an object, or a list of objects for a batch. The result
// borrows from answer.
func parseLogprobs(answer []byte) (list []sequenceLogprobs) {
	answer = bytes.TrimLeft(answer, " \t\r\n")
	if len(answer) == 0 || answer[0] != '[' {
		return append(list, parseSequence(answer))
	}
	for it := jsonscan.Walk(answer); it.Next(); {
		list = append(list, parseSequence(it.Raw()))
	}
	return list
}

func parseSequence(sequence []byte) (s sequenceLogprobs) {
	meta, ok, _ := jsonscan.Find(sequence, "meta_info")
	if !ok || meta.Kind != jsonscan.Object {
		return s
	}
	var vals [len(logprobLists)]jsonscan.Value
	info := sequence[meta.Start:meta.End]
	jsonscan.Members(info, vals[:], logprobLists[:]...)
	for i, v := range vals {
		if v.Kind != jsonscan.Array {
			continue
		}
		if inside := bytes.TrimSpace(info[v.Start+1 : v.End-1]); len(inside) > 0 {
			s[i] = inside
		}
	}
	return s
}

// logprobMerger inserts prefill's log-probabilities into decode's responses.
type logprobMerger struct {
	bySequence []sequenceLogprobs // indexed by sequence
}

// maxLogprobEvent allows for events that repeat the log-probabilities of all tokens so far, in
// bytes.
const maxLogprobEvent = 16 << 20

// MaxEvent implements sse.LargeEventRewriter.
func (*logprobMerger) MaxEvent() int { return maxLogprobEvent }

// Event implements sse.Rewriter. In a batch each event contains the index of its sequence.
func (j *logprobMerger) Event(dst, event []byte) []byte {
	data := sse.EventData(event)
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	index := 0
	if v, ok, _ := jsonscan.Find(data, "index"); ok {
		index = atoi(string(data[v.Start:v.End]))
	}
	at := bytes.Index(event, data)
	dst = append(dst, event[:at]...)
	dst = j.sequence(dst, data, index)
	return append(dst, event[at+len(data):]...)
}

// sequence appends decode's object of one sequence with prefill's log-probabilities. It appends an
// object without such lists, such as an error, unchanged.
func (j *logprobMerger) sequence(dst, object []byte, index int) []byte {
	meta, ok, _ := jsonscan.Find(object, "meta_info")
	if !ok || meta.Kind != jsonscan.Object || index >= len(j.bySequence) {
		return append(dst, object...)
	}
	var vals [len(logprobLists)]jsonscan.Value
	info := object[meta.Start:meta.End]
	jsonscan.Members(info, vals[:], logprobLists[:]...)
	from := 0 // offset in info up to which the output is written
	dst = append(dst, object[:meta.Start]...)
	for {
		next := -1 // the next list in the order of the text
		for i, v := range vals {
			if v.Kind == jsonscan.Array && v.Start >= from && j.bySequence[index][i] != nil && (next < 0 || v.Start < vals[next].Start) {
				next = i
			}
		}
		if next < 0 {
			break
		}
		v := vals[next]
		dst = append(append(dst, info[from:v.Start+1]...), j.bySequence[index][next]...)
		from = v.Start + 1
		if len(bytes.TrimSpace(info[from:v.End-1])) > 0 {
			dst = append(dst, ',')
		}
	}
	return append(append(dst, info[from:]...), object[meta.End:]...)
}
