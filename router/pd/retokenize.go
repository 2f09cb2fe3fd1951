package pd

import (
	"bytes"
	"slices"
	"time"
	"unicode/utf8"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// canRetokenize says whether a rank's engine makes ids of text in a way that shows
// whether they are those it generated: vLLM tells each token's spelling beside the
// ids (return_token_strs), SGLang takes texts one by one.
func canRetokenize(r *worker.Rank) bool {
	switch r.Worker.Info().Engine {
	case "vllm", "sglang":
		return true
	}
	return false
}

// maxRetokenizeAnswer bounds an engine's answer about a text.
const maxRetokenizeAnswer = 32 << 20

// retokenize makes ids of the text told, by an engine's tokenizer, and puts them in
// Out: "" when they are exactly those that the client was told the text of. That is
// so when each event's text is one token: an engine sends a token as an event of its
// own, unless it falls behind. Where it put several in one, how they were cut is not
// known.
func (c *migrationState) retokenize(client front.ClientGoneNotifier) (reason string) {
	if len(c.EventEnds()) == 0 {
		c.Out = c.Out[:0]
		c.Delivered = 0
		return ""
	}
	loose := slices.Contains(c.stream.r.options().Migration.Allow, "retokenized")
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
	rank := c.tokenizer()
	if rank == nil {
		return "no_tokenizer"
	}
	var ids []uint32
	var ok, exact bool
	if rank.Worker.Info().Engine == "sglang" {
		ids, exact, ok = c.tokenizePieces(client, rank)
	} else {
		ids, exact, ok = c.tokenizeText(client, rank, pieces)
	}
	switch {
	case !ok:
		return "no_tokenizer"
	case !exact && !loose:
		return "retokenized"
	}
	c.Out, c.Delivered = ids, len(ids)
	return ""
}

// tokenizer is a ready rank of the model whose engine makes ids of text.
func (c *migrationState) tokenizer() *worker.Rank {
	pool, ok := c.stream.r.options().Fleet.View().Pool(c.model)
	if !ok {
		return nil
	}
	failed := c.getExtra().failed
	for _, ranks := range [...][]*worker.Rank{pool.Decode, pool.Aggregated, pool.Prefill} {
		for _, r := range ranks {
			if r != c.stream.rank && !slices.Contains(failed, r) && canRetokenize(r) {
				return r
			}
		}
	}
	return nil
}

// tokenizeText asks vLLM for the ids of the whole text and how each is spelt; exact:
// each piece is one of them.
func (c *migrationState) tokenizeText(client front.ClientGoneNotifier, rank *worker.Rank, pieces [][]byte) (ids []uint32, exact, ok bool) {
	body := append(c.newTokenizeBody(), `,"return_token_strs":true,"prompt":"`...)
	body = append(append(body, c.Text()...), `"}`...)
	answer := c.postTokenize(client, rank, body)
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

// tokenizePieces asks SGLang for the ids of each piece; exact: each has one.
func (c *migrationState) tokenizePieces(client front.ClientGoneNotifier, rank *worker.Rank) (ids []uint32, exact, ok bool) {
	body := append(c.newTokenizeBody(), `,"prompt":[`...)
	at := uint32(0)
	for i, end := range c.EventEnds() {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(append(append(body, '"'), c.Text()[at:end]...), '"')
		at = end
	}
	answer := c.postTokenize(client, rank, append(body, "]}"...))
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

func (c *migrationState) newTokenizeBody() []byte {
	body := append(make([]byte, 0, len(c.Text())+3*len(c.EventEnds())+128), `{"add_special_tokens":false`...)
	tmpl := c.template().body
	if model, found, _ := jsonscan.Find(append(slices.Clone(tmpl), '}'), "model"); found {
		body = append(append(body, `,"model":`...), tmpl[model.Start:model.End]...)
	}
	return body
}

// postTokenize posts body to a rank's /tokenize; nil when there was no answer in time.
func (c *migrationState) postTokenize(client front.ClientGoneNotifier, rank *worker.Rank, body []byte) []byte {
	opt := c.stream.r.options()
	by := time.Now().Add(opt.Migration.TokenizeWait)
	if end := c.deadline.time(); end.Before(by) {
		by = end
	}
	var call upstream.Call
	client.OnClientGone(call.Cancel)
	defer client.OnClientGone(nil)
	resp, err := opt.Fleet.Endpoint(rank).Do(&upstream.Request{
		Method: "POST", Path: "/tokenize", Fields: c.fields(), Body: [][]byte{body}, Deadline: by,
	}, &call)
	if err != nil {
		c.stream.addNote("tokenizing on " + rank.ID.String() + " failed: " + err.Error())
		return nil
	}
	defer resp.Release()
	answer, err := resp.ReadAll(nil, maxRetokenizeAnswer)
	if err != nil || resp.Status != 200 {
		return nil
	}
	return answer
}

// matchesTokens says whether each piece is one token of a JSON array of spellings. A
// vocabulary spells its tokens as text, byte by byte with an alphabet of its own
// (GPT-2's), or with ▁ for a space and <0xNN> for a byte (SentencePiece's); which
// one it is shows by the whole.
func matchesTokens(strs []byte, pieces [][]byte) bool {
	for _, spell := range [...]func(dst, token []byte) []byte{plainSpelling, byteSpelling, pieceSpelling} {
		i, same := 0, true
		buf, token := make([]byte, 0, 64), make([]byte, 0, 64) // Unquote into nil lends the text itself
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

// byteSpelling undoes the alphabet of byte-level BPE: printable Latin-1 stands for
// itself, the other bytes, in their order, for U+0100 and up.
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
			return append(dst, 0xff) // no byte of this alphabet: equal to no text
		}
	}
	return dst
}

// unprintable are the bytes that have no sign of their own in that alphabet.
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
