package engineapi

import (
	"encoding/binary"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/transcript"
)

// eventTemplate is the shape of a stream's events that contain new tokens and nothing else,
// which are nearly all, and the positions of the other numbers that the converter needs. An
// event of this shape is read without a walk over its members.
type eventTemplate struct {
	shape jsonscan.EventShape
	// Gaps of shape; -1: the events have no such number.
	index, prompt, total, cached int
}

// learn stores the shape of data; text and ids are parts of data, or nil.
func (t *eventTemplate) learn(data, text, ids []byte) bool {
	if len(ids) == 0 || ids[0] != '[' {
		return false
	}
	t.index, t.prompt, t.total, t.cached = -1, -1, -1, -1
	var content jsonscan.Value
	if len(text) > 0 && text[0] == '"' {
		content = locate(data, text, jsonscan.String)
	}
	return t.shape.Learn(data, content, locate(data, ids, jsonscan.Array))
}

// gap returns the gap of the number part, nil for none, in the event just learned. If part is
// present but not a number, gap resets the shape so that it matches nothing.
func (t *eventTemplate) gap(data, part []byte) int {
	if part == nil {
		return -1
	}
	n := t.shape.Gap(cap(data) - cap(part))
	if n < 0 {
		t.shape.Reset()
	}
	return n
}

// number returns the value of a gap in the matched event, 0 for none.
func (t *eventTemplate) number(data []byte, gap int) int { return atoi(t.shape.Raw(data, gap)) }

// locate returns the position in data of part, a subslice of data.
func locate(data, part []byte, kind jsonscan.Kind) jsonscan.Value {
	from := cap(data) - cap(part)
	return jsonscan.Value{Start: from, End: from + len(part), Kind: kind}
}

// readTemplate processes an event of completions or generate if it has the template's shape.
func (c *converter) readTemplate(data []byte) (done bool, err error) {
	tokens, _, ok := c.eventTemplate.shape.Match(c.scratch[:0], data)
	if !ok || len(tokens) == 0 {
		return false, nil
	}
	c.scratch = tokens
	return true, c.sendTokenIDs(tokens, c.eventTemplate.number(data, c.eventTemplate.index))
}

// readRecord processes the id record at the beginning of p, which belongs to the stream's only
// choice, and returns its length; 0 if p does not begin with a record.
func (c *converter) readRecord(p []byte) (n int, err error) {
	ids, n := transcript.ParseIDRecord(p)
	if len(ids) == 0 || c.ended {
		return n, nil
	}
	if c.dialect == native {
		if len(c.sentByChoice) == 0 {
			c.sentByChoice = append(c.sentByChoice, 0)
		}
		c.sentByChoice[0] += len(ids) / 4
		c.usage.completion = c.sentByChoice[0]
	}
	var room [8]uint32
	list := room[:0]
	for ; len(ids) > 0; ids = ids[4:] {
		list = append(list, binary.LittleEndian.Uint32(ids))
	}
	return n, c.sendTokenIDs(list, 0)
}

// sendTokenIDs sends an item that has token ids and nothing else. Nearly all items are like
// this. The function touches as little memory as possible, because with many streams each
// stream's memory is cold.
func (c *converter) sendTokenIDs(ids []uint32, index int) error {
	if c.sendIDs != nil && index == 0 && !c.hasPending && c.firstComments == nil {
		c.outputTokens += len(ids)
		return c.sendIDs(ids)
	}
	c.begin()
	c.current.tokens, c.current.index = append(c.current.tokens, ids...), index
	return c.sendItem()
}

// readNativeTemplate processes an event of SGLang's /generate if it has the template's shape.
func (c *converter) readNativeTemplate(data []byte) (done bool, err error) {
	t := &c.eventTemplate
	t.shape.Cumulative = c.formKnown && !c.deltas
	fresh, passed, ok := t.shape.Match(c.scratch[:0], data)
	if !ok {
		return false, nil
	}
	c.scratch = fresh
	i := t.number(data, t.index)
	if i >= len(c.sentByChoice) || passed > c.sentByChoice[i] {
		return false, nil // a skipped id is needed
	}
	if t.prompt >= 0 {
		c.usage.prompt = t.number(data, t.prompt)
	}
	if t.cached >= 0 {
		c.usage.cached = t.number(data, t.cached)
	}
	total := -1
	if t.total >= 0 {
		total = t.number(data, t.total)
	}
	n, _ := c.newTokens(i, total, passed)
	if n == 0 {
		return true, nil
	}
	return true, c.sendTokenIDs(fresh[len(fresh)-n:], i)
}
