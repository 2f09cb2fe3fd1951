package tokenize

import (
	"bytes"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/objpool"
)

// promptWork is the working state of one Prompt call: where the prompt is in the body, and buffers
// for the engine request. It borrows the body and is pooled.
type promptWork struct {
	ids         []byte   // JSON array of the ids, if the request contains them
	text        []byte   // the prompt's bytes; nil if there is no prompt
	prefix      [][]byte // what precedes text in the rendered prompt
	extraTokens int      // estimated tokens of the prompts after the first
	estimate    int      // estimated tokens of all prompts
	skipReason  string   // why no engine is asked

	server Server
	shape  shape
	prompt []byte // for shapePrompt: the JSON string
	system []byte // JSON string inserted before the messages, or nil

	segs [][]byte // the engine request
	size int      // bytes in segs
}

// shape is the form of the engine's /tokenize request.
type shape uint8

const (
	shapeMessages shape = iota // the body's own messages
	shapePrompt                // a completion's string
	shapeInput                 // a string input as one user message
	numShapes
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
		w.skipReason = "cannot parse the request's token ids"
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
		w.skipReason = "the messages contain images or other media, which token ids do not distinguish"
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
			w.skipReason = "cannot parse the prompt's token ids"
			return
		case jsonscan.Array:
			w.ids, w.text, w.estimate = first, trimBrackets(first), countElements(first)
			w.skipReason = "cannot parse the prompt's token ids"
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

// mayHoldIDs reports, from a quick check, whether read may find ids.
func mayHoldIDs(kind Kind, doc *jsonscan.Doc) bool {
	switch kind {
	case Completion, Native:
		return doc.Values[idsMember(kind)].Kind == jsonscan.Array
	case Generate:
		return true
	}
	return false
}

// idsMember returns the member that contains the prompt's ids, for a kind that may contain them.
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

// readResponses prepares an engine request only for what the engine converts to one user message
// (and a system message): how it converts other items, tools and earlier responses is not
// specified.
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
	switch {
	case !simple:
		w.skipReason = "only responses requests with a string input, without tools and earlier responses, are tokenized"
	case w.server == SGLang && doc.Has(jsonscan.KeyReasoning): // whose absent effort is not that of a chat
		w.skipReason = "SGLang's /tokenize does not take a responses request's reasoning"
	}
	w.shape, w.prompt = shapeInput, input
	w.estimate = tokensOf(len(w.text)) + w.prefixTokens()
}

// readMessages prepares an engine request only if all contents are strings, which every converter
// of this API passes on unchanged.
func (w *promptWork) readMessages(doc *jsonscan.Doc) {
	messages := doc.Raw(jsonscan.KeyMessages)
	if messages == nil {
		return
	}
	w.text = trimBrackets(messages)
	w.addPrefix(doc, jsonscan.KeyTools, jsonscan.KeySystem)
	c := readContents(messages)
	if c.hasParts || doc.Has(jsonscan.KeyTools) || !w.setSystem(doc, jsonscan.KeySystem) {
		w.skipReason = "only messages requests with string contents and without tools are tokenized"
	} else if w.server == SGLang && !asSGLangChat(doc, messages) {
		w.skipReason = "SGLang's /tokenize does not take a messages request's thinking, effort and system messages between others"
	}
	w.estimate = tokensOf(c.text) + c.media*mediaTokens + w.prefixTokens()
}

// asSGLangChat reports whether SGLang makes of a messages request a chat without further members, of
// the same messages.
func asSGLangChat(doc *jsonscan.Doc, messages []byte) bool {
	var effort [1]jsonscan.Value
	jsonscan.Members(doc.Body, effort[:], "output_config")
	return !doc.Has(jsonscan.KeyThinking) && effort[0].Kind <= jsonscan.Null && !bytes.Contains(messages, []byte(`"system"`))
}

// setSystem uses a string member as the system message; it may be absent or empty.
func (w *promptWork) setSystem(doc *jsonscan.Doc, k jsonscan.Key) bool {
	if !doc.Has(k) || len(doc.Raw(k)) == len(`""`) { // the servers drop an empty one
		return true
	}
	w.system = doc.Raw(k)
	return doc.Values[k].Kind == jsonscan.String
}

// addPrefix records members that the template places before the text.
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

// maxJoined bounds the text that is copied because tools precede it.
const maxJoined = 1 << 20

// joinText returns what to hash in text mode: the body's own bytes if nothing precedes them,
// otherwise a copy in buf, cut at maxJoined.
func (w *promptWork) joinText(buf []byte) (text, kept []byte) {
	if len(w.prefix) == 0 {
		return w.text, buf
	}
	buf = buf[:0]
	w.prefix = append(w.prefix, w.text)
	for i, b := range w.prefix {
		if i > 0 && len(buf) < maxJoined {
			buf = append(buf, 0) // JSON does not contain this byte, so the parts stay distinct
		}
		buf = append(buf, b[:min(len(b), maxJoined-len(buf))]...)
	}
	return buf, buf
}

// trimBrackets returns a JSON array, string or object without its outer two bytes and the adjacent
// space: without the closing bracket the next turn's bytes continue this turn's.
func trimBrackets(raw []byte) []byte {
	if len(raw) < 2 {
		return raw
	}
	if raw[0] == '"' {
		return raw[1 : len(raw)-1]
	}
	return bytes.Trim(raw[1:len(raw)-1], " \t\r\n")
}

// tokensOf estimates the tokens in n bytes of text, at four bytes each.
func tokensOf(n int) int { return (n + 3) / 4 }

// countElements returns the number of elements of a flat array.
func countElements(array []byte) int {
	if len(trimBrackets(array)) == 0 {
		return 0
	}
	return bytes.Count(array, []byte{','}) + 1
}
