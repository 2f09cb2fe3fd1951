package pd

import (
	"bytes"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// A decode server of SGLang sends no log-probabilities of the prompt, which prefill
// computed: its lists of them are empty. So prefill's are put in front of them, in a whole
// answer and in every event of a stream, as SGLang's own router does with the first of them
// (0.4.6 … 0.5.23; it leaves out the two others). Completions with echo, whose lists hold both
// parts in one, go to an aggregated worker where there is one; a pair's lack the prompt's.

// logprobLists are the members of meta_info that score the prompt.
var logprobLists = [...]string{"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}

// sequenceLogprobs are what is inside the lists of one sequence; nil: no such list, or an empty one.
type sequenceLogprobs [len(logprobLists)][]byte

// MergesAnswers implements Joiner: /generate that was asked for log-probabilities.
func (sglang) MergesAnswers(p *Handover) bool {
	return p.Kind == front.NativeGenerate && wantsLogprobs(p.Doc.Raw(jsonscan.KeyReturnLogprob))
}

// wantsLogprobs reads true, or a list for a batch with true in it.
func wantsLogprobs(raw []byte) bool { return bytes.Contains(raw, jsonTrue) }

// Body implements Answerer.
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

// Events implements Answerer.
func (sglang) Events(p *Handover) relay.Rewriter {
	return &logprobMerger{bySequence: parseLogprobs(p.Answer)}
}

// parseLogprobs reads prefill's answer, an object or, of a batch, a list of them; it borrows.
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

// logprobMerger puts prefill's scores into decode's answers.
type logprobMerger struct {
	bySequence []sequenceLogprobs // by sequence
}

// maxLogprobEvent is ample for an event that repeats the scores of all tokens so far.
const maxLogprobEvent = 16 << 20

// MaxEvent implements relay.Roomy.
func (*logprobMerger) MaxEvent() int { return maxLogprobEvent }

// Event implements relay.Rewriter. An event of a batch names its sequence.
func (j *logprobMerger) Event(dst, event []byte) []byte {
	data := relay.EventData(event)
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

// sequence appends decode's object of one sequence with prefill's scores in it. What has
// no lists, as an error, stays as it is.
func (j *logprobMerger) sequence(dst, object []byte, index int) []byte {
	meta, ok, _ := jsonscan.Find(object, "meta_info")
	if !ok || meta.Kind != jsonscan.Object || index >= len(j.bySequence) {
		return append(dst, object...)
	}
	var vals [len(logprobLists)]jsonscan.Value
	info := object[meta.Start:meta.End]
	jsonscan.Members(info, vals[:], logprobLists[:]...)
	from := 0 // of info
	dst = append(dst, object[:meta.Start]...)
	for {
		next := -1 // in the order of the text
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
