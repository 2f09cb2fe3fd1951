package migration

import (
	"bytes"
	"slices"
	"unicode/utf8"

	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// CanRetokenize reports whether a rank's engine can tokenize text in a way that shows whether the
// ids are those it generated. vLLM returns each token's text beside the ids (return_token_strs),
// and SGLang tokenizes a list of texts one by one.
func CanRetokenize(r *worker.Rank) bool {
	switch r.Worker.Info().Engine {
	case "vllm", "sglang":
		return true
	}
	return false
}

// Retokenize asks the tokenizer of a rank's engine for the token ids of the text that the client has
// received, and stores them in c.Out. post sends a body to the engine's /tokenize and returns the
// response, or nil on failure. rank is nil if no rank can tokenize.
//
// It returns "" if the ids are exact, or if unconstrained allows other ids, and otherwise the reason:
// "no_tokenizer" or "retokenized". The ids are exact if the text of each event is one token. An engine
// sends each token as an event of its own unless it falls behind; the boundaries between several
// tokens of one event are unknown.
func (c *State) Retokenize(rank *worker.Rank, unconstrained bool, post func(body []byte) []byte) (reason string) {
	if len(c.EventEnds()) == 0 {
		c.Out = c.Out[:0]
		c.Delivered = 0
		return ""
	}
	if rank == nil {
		return "no_tokenizer"
	}
	pieces := make([][]byte, len(c.EventEnds()))
	buf := make([]byte, 0, len(c.Text())+2*len(c.EventEnds()))
	at := uint32(0)
	for i, end := range c.EventEnds() {
		quoted := append(append([]byte{'"'}, c.Text()[at:end]...), '"')
		from := len(buf)
		buf = jsonscan.Unquote(buf, quoted)
		pieces[i] = buf[from:len(buf):len(buf)]
		at = end
	}
	var ids []uint32
	var ok, exact bool
	if rank.Worker.Info().Engine == "sglang" {
		ids, exact, ok = c.tokenizePieces(post)
	} else {
		ids, exact, ok = c.tokenizeText(post, pieces)
	}
	switch {
	case !ok:
		return "no_tokenizer"
	case !exact && !unconstrained:
		return "retokenized"
	}
	c.Out, c.Delivered = ids, len(ids)
	return ""
}

// tokenizeText asks vLLM for the token ids and token strings of the whole text. exact reports
// whether each piece is one token.
func (c *State) tokenizeText(post func(body []byte) []byte, pieces [][]byte) (ids []uint32, exact, ok bool) {
	body := append(c.newTokenizeBody(), `,"return_token_strs":true,"prompt":"`...)
	body = append(append(body, c.Text()...), `"}`...)
	answer := post(body)
	raw, found, err := jsonscan.Find(answer, "tokens")
	if err != nil || !found || raw.Kind != jsonscan.Array {
		return nil, false, false
	}
	if ids, err = jsonscan.TokenIDs(nil, answer[raw.Start:raw.End]); err != nil || len(ids) == 0 {
		return nil, false, false
	}
	strs, found, err := jsonscan.Find(answer, "token_strs")
	if err != nil || !found || strs.Kind != jsonscan.Array {
		return ids, false, true
	}
	return ids, matchesTokens(answer[strs.Start:strs.End], pieces), true
}

// tokenizePieces asks SGLang for the token ids of each piece. exact reports whether each piece is
// one token.
func (c *State) tokenizePieces(post func(body []byte) []byte) (ids []uint32, exact, ok bool) {
	body := append(c.newTokenizeBody(), `,"prompt":[`...)
	at := uint32(0)
	for i, end := range c.EventEnds() {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(append(append(body, '"'), c.Text()[at:end]...), '"')
		at = end
	}
	answer := post(append(body, "]}"...))
	raw, found, err := jsonscan.Find(answer, "tokens")
	if err != nil || !found || raw.Kind != jsonscan.Array {
		return nil, false, false
	}
	exact = true
	n := 0
	for it := jsonscan.Walk(answer[raw.Start:raw.End]); it.Next(); n++ {
		had := len(ids)
		if ids, err = jsonscan.TokenIDs(ids, it.Raw()); err != nil {
			return nil, false, false
		}
		exact = exact && len(ids) == had+1
	}
	return ids, exact, n == len(c.EventEnds()) && len(ids) > 0
}

func (c *State) newTokenizeBody() []byte {
	body := append(make([]byte, 0, len(c.Text())+3*len(c.EventEnds())+128), `{"add_special_tokens":false`...)
	tmpl := c.template().body
	if model, found, _ := jsonscan.Find(append(slices.Clone(tmpl), '}'), "model"); found {
		body = append(append(body, `,"model":`...), tmpl[model.Start:model.End]...)
	}
	return body
}

// matchesTokens reports whether the pieces are exactly the tokens in a JSON array of token strings.
// A vocabulary writes its tokens as plain text, in the byte alphabet of byte-level BPE (GPT-2), or
// with ▁ for a space and <0xNN> for a byte (SentencePiece). matchesTokens tries all three on the
// whole array.
func matchesTokens(strs []byte, pieces [][]byte) bool {
	for _, spell := range [...]func(dst, token []byte) []byte{plainSpelling, byteSpelling, pieceSpelling} {
		i, same := 0, true
		buf, token := make([]byte, 0, 64), make([]byte, 0, 64) // Unquote into nil would alias its input
		for it := jsonscan.Walk(strs); same && it.Next(); i++ {
			token = jsonscan.Unquote(token[:0], it.Raw())
			buf = spell(buf[:0], token)
			same = i < len(pieces) && bytes.Equal(buf, pieces[i])
		}
		if same && i == len(pieces) {
			return true
		}
	}
	return false
}

func plainSpelling(dst, token []byte) []byte { return append(dst, token...) }

// byteSpelling decodes the alphabet of byte-level BPE: printable Latin-1 characters stand for
// themselves, and U+0100 and up stand for the other bytes in ascending order.
func byteSpelling(dst, token []byte) []byte {
	for len(token) > 0 {
		r, n := utf8.DecodeRune(token)
		token = token[n:]
		switch {
		case r < 0x100:
			dst = append(dst, byte(r))
		case int(r-0x100) < len(unprintable):
			dst = append(dst, unprintable[r-0x100])
		default:
			return append(dst, 0xff) // not in the alphabet; 0xff makes the comparison fail
		}
	}
	return dst
}

// unprintable are the bytes that the byte-level BPE alphabet maps to U+0100 and up.
var unprintable = func() (all []byte) {
	for b := range 256 {
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			all = append(all, byte(b))
		}
	}
	return all
}()

func pieceSpelling(dst, token []byte) []byte {
	const hex = "0123456789ABCDEF"
	if len(token) == 6 && bytes.HasPrefix(token, []byte("<0x")) && token[5] == '>' {
		hi, lo := bytes.IndexByte([]byte(hex), token[3]), bytes.IndexByte([]byte(hex), token[4])
		if hi >= 0 && lo >= 0 {
			return append(dst, byte(hi<<4|lo))
		}
	}
	return append(dst, bytes.ReplaceAll(token, []byte("▁"), []byte(" "))...)
}
