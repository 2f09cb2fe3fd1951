package tokenize

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// mediaTokens is what an image or a clip is taken for in an estimate; its
// bytes, often base64 in the body, say nothing.
const mediaTokens = 1024

// contents is what messages are made of.
type contents struct {
	text     int  // bytes that become tokens, JSON punctuation included
	media    int  // parts that are no text
	hasParts bool // some content is not a plain string
}

// TextOnly says whether the messages of a chat, a raw JSON array, hold nothing
// but text: then their token ids say all of them.
func TextOnly(messages []byte) bool {
	return len(messages) > 1 && readContents(messages).media == 0
}

// readContents looks through the messages of a chat. Where they hold no array
// within there are no parts, and one search for the bracket says so.
func readContents(messages []byte) contents {
	c := contents{text: len(messages)}
	if bytes.IndexByte(messages[1:], '[') < 0 {
		return c
	}
	for m := jsonscan.Walk(messages); m.Next(); {
		if m.Value.Kind != jsonscan.Object {
			continue
		}
		for f := jsonscan.Walk(m.Raw()); f.Next(); {
			if f.Value.Kind == jsonscan.Array && f.IsKey("content") {
				c.hasParts = true
				c.readParts(f.Raw())
			}
		}
	}
	return c
}

func (c *contents) readParts(parts []byte) {
	for p := jsonscan.Walk(parts); p.Next(); {
		if p.Value.Kind == jsonscan.String || p.Value.Kind == jsonscan.Object && isText(p.Raw()) {
			continue
		}
		c.media++
		c.text -= len(p.Raw())
	}
}

// isText knows the kinds of text parts by name: of any other kind, also one
// invented tomorrow, the ids may not tell all. A part without a type is text
// when it has one (vLLM takes such parts).
func isText(part []byte) bool {
	text := false
	for f := jsonscan.Walk(part); f.Next(); {
		if f.Value.Kind != jsonscan.String {
			continue
		}
		if f.IsKey("type") {
			switch string(f.Raw()) {
			case `"text"`, `"input_text"`, `"output_text"`, `"refusal"`, `"thinking"`:
				return true
			}
			return false
		}
		text = text || f.IsKey("text")
	}
	return text
}
