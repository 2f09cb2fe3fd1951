package tokenize

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// mediaTokens is the assumed number of tokens of an image or a clip; its bytes, often base64 in the
// body, say nothing about it.
const mediaTokens = 1024

// contents summarises the content of messages.
type contents struct {
	text     int  // bytes that become tokens, including JSON punctuation
	media    int  // parts that are not text
	hasParts bool // some content is not a plain string
}

// TextOnly reports whether the messages of a chat, a raw JSON array, contain only text: then their
// token ids identify them completely.
func TextOnly(messages []byte) bool {
	return len(messages) > 1 && readContents(messages).media == 0
}

// readContents summarises the messages of a chat. Without a nested array there are no parts, which
// a single search for the bracket shows.
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

// isText recognises the kinds of text parts by name: for any other kind, including future ones, the
// ids may not be complete. A part without a type is text if it has a text member (vLLM accepts such
// parts). Of two types the last one counts, as in engines' JSON readers.
func isText(part []byte) bool {
	text, typed, textType := false, false, false
	for f := jsonscan.Walk(part); f.Next(); {
		if f.Value.Kind != jsonscan.String {
			continue
		}
		if f.IsKey("type") {
			typed, textType = true, false
			switch string(f.Raw()) {
			case `"text"`, `"input_text"`, `"output_text"`, `"refusal"`, `"thinking"`:
				textType = true
			}
		}
		text = text || f.IsKey("text")
	}
	if typed {
		return textType
	}
	return text
}
