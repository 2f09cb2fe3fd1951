package relay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"reflect"
	"sluice/dataplane/apiformat"
	"sluice/dataplane/sse"
	"strings"
	"sync"
	"testing"
)

// trials is n, or 20 times as many with SLUICE_SOAK=1.
func trials(n int) int {
	if os.Getenv("SLUICE_SOAK") != "" {
		return 20 * n
	}
	return n
}

type object = map[string]any

// parsed is one JSON object whose numbers stay as they are written.
func parsed(t *testing.T, text []byte) object {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v object
	if err := d.Decode(&v); err != nil {
		t.Errorf("%v in %.300q", err, text)
	}
	return v
}

// checkJSON is v as JSON reads it again.
func checkJSON(t *testing.T, v any) object {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return parsed(t, text)
}

// token is one of a completion, as the engine rates it.
type token struct {
	text    string
	id      int
	logprob float64
}

func randomTokens(rng *rand.Rand, tag string, n int) (tokens []token) {
	for range n {
		text := fmt.Sprintf(" %s-%x", tag, rng.Uint32())
		switch rng.IntN(8) {
		case 0:
			text = "漢😀\"\\\n\t\u0001/<é>"
		case 1:
			text += strings.Repeat("again ", rng.IntN(1<<rng.IntN(10)))
		case 2:
			text = ""
		}
		tokens = append(tokens, token{text, rng.IntN(200_000), -rng.Float64() * 9})
	}
	return tokens
}

// quoted is text as a JSON string: as encoding/json writes it, or in ASCII as Python does.
func quoted(rng *rand.Rand, v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	if rng.IntN(2) == 0 {
		return text
	}
	var ascii strings.Builder
	for _, r := range string(text) {
		switch {
		case r < 0x80:
			ascii.WriteRune(r)
		case r >= 0x10000:
			fmt.Fprintf(&ascii, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
		default:
			fmt.Fprintf(&ascii, `\u%04x`, r)
		}
	}
	return json.RawMessage(ascii.String())
}

// completionLogprobs is a completions logprobs object of some tokens.
func completionLogprobs(tokens []token, offset int) object {
	texts, values, tops, offsets := []any{}, []any{}, []any{}, []any{}
	for _, k := range tokens {
		texts, values, offsets = append(texts, k.text), append(values, k.logprob), append(offsets, offset)
		tops = append(tops, object{k.text: k.logprob})
		offset += len([]rune(k.text))
	}
	return object{"text_offset": offsets, "tokens": texts, "token_logprobs": values, "top_logprobs": tops}
}

// chatLogprobs is what chat says in the place of rated.
func chatLogprobs(tokens []token) object {
	items := []any{}
	for _, k := range tokens {
		numbers := []int{}
		for _, c := range []byte(k.text) {
			numbers = append(numbers, int(c))
		}
		one := object{"token": k.text, "logprob": k.logprob, "bytes": numbers}
		items = append(items, object{"token": k.text, "logprob": k.logprob, "bytes": numbers, "top_logprobs": []any{one}})
	}
	return object{"content": items}
}

// completion is an answer of a completions engine to be converted to chat.
type completion struct {
	tag            string
	first          *token  // made by prefill
	steps          []token // one to an event
	logprobs, ids  bool
	prompt, cached int
	private        bool
}

func randomCompletion(rng *rand.Rand, tag string) completion {
	c := completion{tag: tag, steps: randomTokens(rng, tag, 1+rng.IntN(40)), logprobs: rng.IntN(2) == 0, ids: rng.IntN(2) == 0,
		prompt: 2 + rng.IntN(1000), private: rng.IntN(2) == 0}
	c.cached = rng.IntN(c.prompt)
	if rng.IntN(2) == 0 {
		c.first = &token{"The " + tag, 7, -0.25}
	}
	return c
}

func (c *completion) conversion(rng *rand.Rand) *apiformat.Conversion {
	conv := &apiformat.Conversion{Chat: true, Cached: c.cached, TopLogprobs: 1}
	if f := c.first; f != nil {
		text := quoted(rng, f.text)
		conv.First = &apiformat.FirstToken{ID: uint32(f.id), Text: text[1 : len(text)-1], IDs: c.ids}
		if c.logprobs {
			conv.First.Logprobs, _ = json.Marshal(completionLogprobs([]token{*f}, 0))
		}
	}
	return conv
}

func (c *completion) head(object_ string) object {
	return object{"id": "cmpl-" + c.tag, "object": object_, "created": 1763690000, "model": "m \"" + c.tag}
}

func (c *completion) headChat(object_ string) object {
	v := c.head(object_)
	v["id"] = "chatcmpl-" + c.tag
	return v
}

// priorTokens is how many tokens that prefill made the engine counts as prompt.
func (c *completion) priorTokens() int {
	if c.first == nil {
		return 0
	}
	return 1
}

func usageOf(prompt, output, cached int) object {
	return object{"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
		"prompt_tokens_details": object{"cached_tokens": cached}}
}

// stream is what the engine says, and what the client is to read.
func (c *completion) stream(t *testing.T, rng *rand.Rand) (sent []string, want []object) {
	event := func(v object) { sent = append(sent, "data: "+string(quoted(rng, v))+"\n\n") }
	chat := func(choice, more object) {
		v := c.headChat("chat.completion.chunk")
		v["choices"] = []any{choice}
		for key, x := range more {
			v[key] = x
		}
		want = append(want, checkJSON(t, v))
	}
	chat(object{"index": 0, "delta": object{"role": "assistant", "content": ""}, "logprobs": nil, "finish_reason": nil}, nil)
	chunk := func(k token, finish any) object {
		v := object{"index": 0, "delta": object{"content": k.text}, "logprobs": nil, "finish_reason": finish, "token_ids": nil}
		if k.text == "" && finish != nil {
			v["delta"] = object{}
		}
		if finish != nil {
			v["stop_reason"] = nil
		}
		if c.logprobs {
			v["logprobs"] = chatLogprobs([]token{k})
		}
		if c.ids {
			v["token_ids"] = []int{k.id}
		}
		return v
	}
	if c.first != nil {
		chat(chunk(*c.first, nil), nil)
	}
	for i, k := range c.steps {
		choice := object{"index": 0, "text": k.text, "logprobs": nil, "finish_reason": nil, "stop_reason": nil, "token_ids": nil}
		var finish any
		if i == len(c.steps)-1 {
			finish = "stop"
		}
		choice["finish_reason"] = finish
		if c.logprobs {
			choice["logprobs"] = completionLogprobs([]token{k}, i)
		}
		if c.ids {
			choice["token_ids"] = []int{k.id}
		}
		v := c.head("text_completion")
		v["choices"], v["system_fingerprint"] = []any{choice}, c.tag
		if c.private {
			v["kv_transfer_params"] = object{"remote_host": "secret"}
		}
		event(v)
		if k.text != "" || finish != nil || c.logprobs || c.ids {
			chat(chunk(k, finish), object{"system_fingerprint": c.tag})
		}
	}
	v := c.head("text_completion")
	v["choices"], v["usage"] = []any{}, usageOf(c.prompt+c.priorTokens(), len(c.steps), c.prompt)
	event(v)
	v = c.headChat("chat.completion.chunk")
	v["choices"], v["usage"] = []any{}, usageOf(c.prompt, len(c.steps)+c.priorTokens(), c.cached)
	return append(sent, "data: [DONE]\n\n"), append(want, checkJSON(t, v))
}

// whole is stream for an answer in one piece.
func (c *completion) whole(t *testing.T, rng *rand.Rand) (sent []byte, want object) {
	all, texts, ids := c.steps, "", []int{}
	for _, k := range c.steps {
		texts, ids = texts+k.text, append(ids, k.id)
	}
	choice := object{"index": 0, "text": texts, "logprobs": nil, "finish_reason": "stop", "stop_reason": nil, "token_ids": nil, "x": c.tag}
	if c.logprobs {
		choice["logprobs"] = completionLogprobs(c.steps, 0)
	}
	if c.ids {
		choice["token_ids"] = ids
	}
	v := c.head("text_completion")
	v["choices"], v["usage"], v["system_fingerprint"] = []any{choice}, usageOf(c.prompt+c.priorTokens(), len(c.steps), c.prompt), c.tag
	if c.private {
		v["kv_transfer_params"] = object{"remote_host": "secret"}
	}
	sent = quoted(rng, v)
	if c.first != nil {
		all, texts, ids = append([]token{*c.first}, all...), c.first.text+texts, append([]int{c.first.id}, ids...)
	}
	choice = object{"index": 0, "message": object{"role": "assistant", "content": texts, "refusal": nil}, "logprobs": nil,
		"finish_reason": "stop", "stop_reason": nil, "token_ids": nil, "x": c.tag}
	if c.logprobs {
		choice["logprobs"] = chatLogprobs(all)
	}
	if c.ids {
		choice["token_ids"] = ids
	}
	v = c.headChat("chat.completion")
	v["choices"], v["usage"], v["system_fingerprint"] = []any{choice}, usageOf(c.prompt, len(all), c.cached), c.tag
	v["prompt_logprobs"], v["prompt_token_ids"] = nil, nil
	return sent, checkJSON(t, v)
}

// TestConversionByReference converts random completions answers, streams in random chunks and
// pieces, and compares every member with what encoding/json makes of the same tokens.
func TestConversionByReference(t *testing.T) {
	var wg sync.WaitGroup
	for worker := range 3 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(31, uint64(worker)))
			for i := range trials(60) {
				tag := fmt.Sprintf("w%di%d", worker, i)
				t.Run(tag, func(t *testing.T) { testConversion(t, rng, randomCompletion(rng, tag)) })
			}
		}()
	}
	wg.Wait()
}

func testConversion(t *testing.T, rng *rand.Rand, c completion) {
	body, whole := c.whole(t, rng)
	if got := parsed(t, c.conversion(rng).Body(nil, body)); !reflect.DeepEqual(got, whole) {
		t.Errorf("%s became\n%v\nwant\n%v", body, got, whole)
	}
	events, want := c.stream(t, rng)
	text := strings.Join(events, "")
	framed := ""
	for rest, most := text, 1+rng.IntN(1<<(6+rng.IntN(9))); rest != ""; {
		n := min(len(rest), 1+rng.IntN(most))
		framed += chunksOf(rest[:n])
		rest = rest[n:]
	}
	framed += sse.LastChunk
	pieces, seed := rng.IntN(30), rng.Uint64()
	res, dst, _ := relayOnce(t, Options{Protocol: sse.OpenAI, Rewrite: c.conversion(rng)}, func(nc *net.TCPConn) {
		cuts := rand.New(rand.NewPCG(seed, 0))
		send(nc, streamHead)
		rest := framed
		for ; pieces > 0 && len(rest) > 1; pieces-- {
			n := 1 + cuts.IntN(min(len(rest)-1, 1+2*len(rest)/pieces))
			send(nc, rest[:n])
			rest = rest[n:]
		}
		send(nc, rest)
		waitClosed(nc)
	})
	got := strings.Split(strings.TrimSuffix(string(dechunk(t, dst.got)), "\n\n"), "\n\n")
	if res.Err != nil || len(got) != len(want)+1 || got[len(got)-1] != "data: [DONE]" {
		t.Errorf("%s: %+v: %d events, want %d and [DONE]\n%.2000q", c.tag, res, len(got), len(want), got)
		return
	}
	for n, w := range want {
		if have := parsed(t, []byte(strings.TrimPrefix(got[n], "data: "))); !reflect.DeepEqual(have, w) {
			t.Errorf("%s: event %d is\n%v\nwant\n%v", c.tag, n, have, w)
			return
		}
	}
}
