package chatinput

import (
	"bytes"
	"slices"

	"sluice/dataplane/jsonscan"
)

// billingHeader begins a line of Claude Code's system prompts that the server drops.
const billingHeader = "x-anthropic-billing-header"

func hasBillingHeader(quoted []byte) bool {
	return bytes.HasPrefix(jsonscan.Text(quoted), []byte(billingHeader))
}

// part is an element of a message's content.
type part struct {
	text      []byte // a JSON string; nil: the server skips the part
	extra     []byte // the part's object if members besides its text are kept
	named     bool   // its type is "text", or it is a string
	reference bool   // to a tool, whose name text is
}

// writeContent appends a message's content: a string, or with Parts a list. A tool's is a string
// unless it refers to tools.
func (in *Input) writeContent(m *message, role string, t Template) {
	list := t.Parts && (role != "tool" || hasReference(m))
	if list {
		in.Chat = append(in.Chat, '[')
	} else {
		in.Chat = append(in.Chat, '"')
	}
	if m.kind(mContent) == jsonscan.String {
		in.writePart(&part{text: m.get(mContent), named: true}, list, role, t, 0)
	} else {
		in.checkContent(m, role)
		n := 0
		for it := jsonscan.Walk(m.content()); it.Next() && in.reason == ""; {
			if p := in.readPart(it.Raw(), it.Value.Kind); p.text != nil {
				n += in.writePart(&p, list, role, t, n)
			}
		}
	}
	if list {
		in.Chat = append(in.Chat, ']')
	} else {
		in.Chat = append(in.Chat, '"')
	}
}

// hasReference reports whether a message's content has a reference to a tool.
func hasReference(m *message) bool {
	if !bytes.Contains(m.content(), []byte("tool_reference")) {
		return false
	}
	var o object
	for it := jsonscan.Walk(m.content()); it.Next(); {
		if o.find(it.Raw(), "type"); o.isString(0, "tool_reference") {
			return true
		}
	}
	return false
}

// dropHeader removes the billing header from a text of a system message. It returns false if then
// nothing is left, and the server drops the part.
func (in *Input) dropHeader(p *part, role string) bool {
	if role != "system" || !p.named || !hasBillingHeader(p.text) {
		return true
	}
	_, rest, _ := bytes.Cut(jsonscan.Text(p.text), []byte("\n"))
	if len(rest) == 0 {
		return false
	}
	in.buf = jsonscan.AppendQuoted(in.buf[:0], rest)
	p.text = in.buf
	return true
}

// writePart appends a part behind n others, to a list or to a string; it returns how many parts it
// became.
func (in *Input) writePart(p *part, list bool, role string, t Template, n int) int {
	if !in.dropHeader(p, role) {
		return 0
	}
	text := p.text
	if !list {
		if len(text) == 2 && !t.Parts {
			return 0 // the server drops empty strings, but not empty parts
		}
		if n > 0 {
			in.Chat = append(in.Chat, `\n`...)
		}
		in.Chat = append(in.Chat, text[1:len(text)-1]...)
		return 1
	}
	if n > 0 {
		in.Chat = append(in.Chat, ',')
	}
	if p.reference {
		in.Chat = append(append(append(in.Chat, `{"type":"tool_reference","name":`...), text...), '}')
		return 1
	}
	in.Chat = append(append(in.Chat, `{"type":"text","text":`...), text...)
	for it := jsonscan.Walk(p.extra); it.Next(); {
		if !it.IsKey("type") && !it.IsKey("text") && !it.IsKey("thinking") && !it.IsKey("refusal") {
			in.Chat = append(in.Chat, ',')
			in.Chat = append(in.Chat, p.extra[it.Value.KeyStart:it.Value.End]...)
		}
	}
	in.Chat = append(in.Chat, '}')
	return 1
}

// partMembers are the members that the server knows in parts of any type.
var partMembers = []string{"type", "text", "refusal", "thinking", "name", "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
	"prompt_cache_breakpoint", "uuid", "video_embeds", "video_url"}

const (
	pType = iota
	pText
	pRefusal
	pThinking
	pName
	pOther
)

// textMembers are the types of parts that are text, and the members that have it.
var textMembers = map[string]int{"text": pText, "input_text": pText, "output_text": pText, "refusal": pRefusal, "thinking": pThinking, "tool_reference": pName}

// mediaTypes are the types of parts that are not text.
var mediaTypes = []string{"audio_embeds", "audio_url", "image_embeds", "image_pil", "image_url", "input_audio", "input_image", "prompt_embeds", "video_embeds", "video_url"}

// readPart reads a part. A part that is text only to a server that takes it needs no other check.
func (in *Input) readPart(raw []byte, kind jsonscan.Kind) (p part) {
	if kind == jsonscan.String {
		return part{text: raw, named: true}
	}
	if kind != jsonscan.Object {
		in.refuse("a message has a part that is neither text nor an object")
		return p
	}
	var o object
	o.find(raw, partMembers...)
	name := ""
	if o.kind(pType) == jsonscan.String {
		name = string(jsonscan.Text(o.get(pType)))
	}
	for i := pOther; i < len(partMembers); i++ {
		if o.kind(i) != jsonscan.Absent {
			in.fail("a message contains media, or a part that is not modelled")
			return p
		}
	}
	at, isText := textMembers[name]
	switch {
	case slices.Contains(mediaTypes, name):
		in.fail("a message contains media")
		return p
	case !isText:
		in.refuse("a message has a part of an unknown type")
		return p
	}
	if o.kind(at) != jsonscan.String {
		// The server skips a text without a value.
		if o.has(at) || name != "text" && name != "refusal" {
			in.fail("a part has no text")
		}
		return p
	}
	for i := pText; i < pOther; i++ {
		if i != at && o.kind(i) != jsonscan.Absent {
			in.fail("a part has members of several types")
			return p
		}
	}
	p = part{text: o.get(at), named: name == "text", reference: name == "tool_reference"}
	if members(raw) > 2 && !p.reference {
		p.extra = raw
	}
	return p
}

// isEmpty reports whether a list has no elements.
func isEmpty(list []byte) bool { return len(bytes.TrimSpace(list[1:len(list)-1])) == 0 }

// members returns the number of an object's members.
func members(object []byte) (n int) {
	for it := jsonscan.Walk(object); it.Next(); {
		n++
	}
	return n
}
