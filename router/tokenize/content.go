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

// isText says whether a content part is text. It knows the types of text parts by name: the
// token ids may not contain all of a part of any other type, including types invented
// later. A part without a type is text when it has a text member (vLLM takes such parts). Of
// two types the last one counts, as in engines' JSON readers.
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
