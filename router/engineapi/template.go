package engineapi

import (
	"encoding/binary"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// eventTemplate is the shape of a stream's events that tell tokens and nothing else, which
// are nearly all, and where in it the values are that are read besides. Such an event
// need not be walked.
type eventTemplate struct {
	shape jsonscan.EventShape
	// Gaps of shape; -1: the events have no such number.
	index, prompt, total, cached int
}

// learn keeps the shape of data; text and ids, nil for none, are parts of it.
func (t *eventTemplate) learn(data, text, ids []byte) bool {
	if len(ids) == 0 || ids[0] != '[' {
		return false
	}
	t.index, t.prompt, t.total, t.cached = -1, -1, -1, -1
	var said jsonscan.Value
	if len(text) > 0 && text[0] == '"' {
		said = locate(data, text, jsonscan.String)
	}
	return t.shape.Learn(data, said, locate(data, ids, jsonscan.Array))
}

// gap finds the number part, nil for none, of the event just learned. A value that is
// there and no number makes the shape one that nothing matches.
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

// number is the value of a gap in the event that matched, 0 for none.
func (t *eventTemplate) number(data []byte, gap int) int { return atoi(t.shape.Raw(data, gap)) }

// locate says where part, which was cut out of data, lies in it.
func locate(data, part []byte, kind jsonscan.Kind) jsonscan.Value {
	from := cap(data) - cap(part)
	return jsonscan.Value{Start: from, End: from + len(part), Kind: kind}
}

// readTemplate takes an event of completions or generate that has the template's shape.
func (c *converter) readTemplate(data []byte) (done bool, err error) {
	tokens, _, ok := c.eventTemplate.shape.Match(c.scratch[:0], data)
	if !ok || len(tokens) == 0 {
		return false, nil
	}
	c.scratch = tokens
	return true, c.sendTokenIDs(tokens, c.eventTemplate.number(data, c.eventTemplate.index))
}

// readRecord takes the record that p begins with, of the stream's only choice, and gives its
// length; 0 where there is none.
func (c *converter) readRecord(p []byte) (n int, err error) {
	ids, n := relay.ParseIDRecord(p)
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

// sendTokenIDs is put for an item that has token ids and nothing else. Nearly all are such, and
// they touch as little memory as may be: of many streams none has its own at hand.
func (c *converter) sendTokenIDs(ids []uint32, index int) error {
	if c.sendIDs != nil && index == 0 && !c.hasPending && c.firstComments == nil {
		c.outputTokens += len(ids)
		return c.sendIDs(ids)
	}
	c.begin()
	c.current.tokens, c.current.index = append(c.current.tokens, ids...), index
	return c.sendItem()
}

// readNativeTemplate takes an event of SGLang's /generate that has the template's shape.
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
		return false, nil // what was passed over is needed
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
