package tokenize

import (
	"bytes"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/objpool"
)

// promptWork is what one Prompt call needs: where the prompt lies in the body, and
// room for the engine's call. It borrows the body and goes back to a pool.
type promptWork struct {
	ids         []byte   // JSON array of the ids, where the request holds them
	text        []byte   // the prompt's bytes; nil where there is no prompt
	prefix      [][]byte // what precedes text in the rendered prompt
	extraTokens int      // estimated tokens of the prompts after the first
	estimate    int      // of all prompts
	skipReason  string   // why no engine is asked

	shape  shape
	prompt []byte // of shapePrompt: the JSON string
	system []byte // JSON string put before the messages, or nil

	segs [][]byte // the engine's request
	size int      // bytes in segs
}

// shape is the form of the engine's /tokenize request.
type shape uint8

const (
	shapeMessages shape = iota // the body's own messages
	shapePrompt                // a completion's string
	shapeInput                 // a string input as one user message
)

var works = objpool.Pool[promptWork]{New: func() *promptWork { return new(promptWork) }}

func getWork() *promptWork { return works.Get() }

func (w *promptWork) put() {
	clear(w.segs)
	clear(w.prefix)
	*w = promptWork{segs: w.segs[:0], prefix: w.prefix[:0]}
	works.Put(w)
}

// read finds the prompt.
func (w *promptWork) read(kind Kind, doc *jsonscan.Doc) {
	switch kind {
	case Chat:
		w.readChat(doc)
	case Completion:
		w.readCompletion(doc, jsonscan.KeyPrompt)
	case Native:
		if w.readCompletion(doc, jsonscan.KeyInputIDs); w.text == nil {
			w.readCompletion(doc, jsonscan.KeyText)
		}
	case Responses:
		w.readResponses(doc)
	case Messages:
		w.readMessages(doc)
	case Generate:
		w.ids = doc.Raw(jsonscan.KeyTokenIDs)
		w.text = trimBrackets(w.ids)
		w.skipReason = "the request's token ids cannot be read"
		w.estimate = countElements(w.ids)
	}
}

func (w *promptWork) readChat(doc *jsonscan.Doc) {
	messages := doc.Raw(jsonscan.KeyMessages)
	if messages == nil {
		return
	}
	w.text = trimBrackets(messages)
	w.addPrefix(doc, jsonscan.KeyChatTemplate, jsonscan.KeyChatTemplateKwargs, jsonscan.KeyTools)
	c := readContents(messages)
	w.estimate = tokensOf(c.text) + c.media*mediaTokens + w.prefixTokens()
	if c.media > 0 {
		w.skipReason = "the messages hold images or other media, which token ids do not tell apart"
	}
}

// readCompletion reads a prompt in any of its forms: text, ids, lists of either.
func (w *promptWork) readCompletion(doc *jsonscan.Doc, key jsonscan.Key) {
	prompt := doc.Raw(key)
	w.shape = shapePrompt
	switch doc.Values[key].Kind {
	case jsonscan.String:
		w.setPrompt(prompt)
	case jsonscan.Array:
		it := jsonscan.Walk(prompt)
		if !it.Next() {
			return
		}
		first := it.Raw()
		switch it.Value.Kind {
		case jsonscan.Number:
			w.ids, w.text, w.estimate = prompt, trimBrackets(prompt), countElements(prompt)
			w.skipReason = "the prompt's token ids cannot be read"
			return
		case jsonscan.Array:
			w.ids, w.text, w.estimate = first, trimBrackets(first), countElements(first)
			w.skipReason = "the prompt's token ids cannot be read"
		case jsonscan.String:
			w.setPrompt(first)
		default:
			return
		}
		for it.Next() {
			if it.Value.Kind == jsonscan.Array {
				w.extraTokens += countElements(it.Raw())
			} else {
				w.extraTokens += tokensOf(len(it.Raw()))
			}
		}
		w.estimate += w.extraTokens
	}
}

// mayHoldIDs says whether read may find ids, without looking far.
func mayHoldIDs(kind Kind, doc *jsonscan.Doc) bool {
	switch kind {
	case Completion, Native:
		return doc.Values[idsMember(kind)].Kind == jsonscan.Array
	case Generate:
		return true
	}
	return false
}

// idsMember is the member that holds the prompt's ids, of a kind that may hold them.
func idsMember(kind Kind) jsonscan.Key {
	switch kind {
	case Native:
		return jsonscan.KeyInputIDs
	case Generate:
		return jsonscan.KeyTokenIDs
	}
	return jsonscan.KeyPrompt
}

func (w *promptWork) setPrompt(quoted []byte) {
	w.prompt, w.text = quoted, trimBrackets(quoted)
	w.estimate = tokensOf(len(w.text))
}

// readResponses asks an engine only for what it turns into one user message
// (and a system message): what it makes of other items, of tools and of earlier
// responses is its own affair.
func (w *promptWork) readResponses(doc *jsonscan.Doc) {
	input := doc.Raw(jsonscan.KeyInput)
	kind := doc.Values[jsonscan.KeyInput].Kind
	if kind <= jsonscan.Null {
		return
	}
	w.text = trimBrackets(input)
	w.addPrefix(doc, jsonscan.KeyTools, jsonscan.KeyInstructions)
	simple := kind == jsonscan.String && !doc.Has(jsonscan.KeyTools) && w.setSystem(doc, jsonscan.KeyInstructions) &&
		!doc.Has(jsonscan.KeyPreviousResponseID)
	if !simple {
		w.skipReason = "only a responses request with a string input, without tools and earlier responses, is tokenized"
	}
	w.shape, w.prompt = shapeInput, input
	w.estimate = tokensOf(len(w.text)) + w.prefixTokens()
}

// readMessages asks an engine only where all contents are strings, which every
// converter of this API passes on as they are.
func (w *promptWork) readMessages(doc *jsonscan.Doc) {
	messages := doc.Raw(jsonscan.KeyMessages)
	if messages == nil {
		return
	}
	w.text = trimBrackets(messages)
	w.addPrefix(doc, jsonscan.KeyTools, jsonscan.KeySystem)
	c := readContents(messages)
	if c.hasParts || doc.Has(jsonscan.KeyTools) || !w.setSystem(doc, jsonscan.KeySystem) {
		w.skipReason = "only a messages request with string contents, without tools, is tokenized"
	}
	w.estimate = tokensOf(c.text) + c.media*mediaTokens + w.prefixTokens()
}

// setSystem takes a string member as the system message; absent will do too.
func (w *promptWork) setSystem(doc *jsonscan.Doc, k jsonscan.Key) bool {
	if !doc.Has(k) {
		return true
	}
	w.system = doc.Raw(k)
	return doc.Values[k].Kind == jsonscan.String
}

// addPrefix notes members that the template puts before the text.
func (w *promptWork) addPrefix(doc *jsonscan.Doc, keys ...jsonscan.Key) {
	for _, k := range keys {
		if doc.Has(k) {
			w.prefix = append(w.prefix, doc.Raw(k))
		}
	}
}

func (w *promptWork) prefixTokens() int {
	n := 0
	for _, b := range w.prefix {
		n += tokensOf(len(b))
	}
	return n
}

// maxJoined bounds the text that has to be copied, for tools stand before it.
const maxJoined = 1 << 20

// joinText gives what to hash in text mode: the body's own bytes where nothing
// precedes them, else a copy in room, cut at maxJoined.
func (w *promptWork) joinText(buf []byte) (text, kept []byte) {
	if len(w.prefix) == 0 {
		return w.text, buf
	}
	buf = buf[:0]
	w.prefix = append(w.prefix, w.text)
	for i, b := range w.prefix {
		if i > 0 && len(buf) < maxJoined {
			buf = append(buf, 0) // no JSON holds it: parts cannot run together
		}
		buf = append(buf, b[:min(len(b), maxJoined-len(buf))]...)
	}
	return buf, buf
}

// trimBrackets is a JSON array, string or object without its outer two bytes and the
// space next to them: with the closing bracket gone the next turn's bytes go on
// from this turn's.
func trimBrackets(raw []byte) []byte {
	if len(raw) < 2 {
		return raw
	}
	if raw[0] == '"' {
		return raw[1 : len(raw)-1]
	}
	return bytes.Trim(raw[1:len(raw)-1], " \t\r\n")
}

// tokensOf estimates the tokens in n bytes of text, four bytes each.
func tokensOf(n int) int { return (n + 3) / 4 }

// countElements is how many elements a flat array has.
func countElements(array []byte) int {
	if len(trimBrackets(array)) == 0 {
		return 0
	}
	return bytes.Count(array, []byte{','}) + 1
}
