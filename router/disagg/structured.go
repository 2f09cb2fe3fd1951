package disagg

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// What becomes of a stream whose text an engine holds to a grammar (migration.structured),
// when it must move: another engine begins the grammar anew, behind what has been told.
const (
	structuredExact = "exact" // it moves where what is left of the grammar can be said
	structuredLoose = "unconstrained"
)

// oneOf is a request whose answer is one of several texts (vLLM's guided_choice, and
// structured_outputs with choice). Behind a part of the answer what may follow are the
// ends of those that begin with it: the engine's own grammar, as far as it has come.
type oneOf struct {
	texts  [][]byte // as they are, escapes undone
	member []byte   // of the body, up to the list
	end    []byte   // what stands behind it
}

// member appends the member of a request for what is left behind told; not ok: told is
// the beginning of none.
func (o *oneOf) rest(dst, told []byte) (_ []byte, ok bool) {
	dst = append(append(dst, o.member...), '[')
	for _, text := range o.texts {
		end, found := bytes.CutPrefix(text, told)
		if !found {
			continue
		}
		if ok {
			dst = append(dst, ',')
		}
		dst, ok = jsonscan.AppendQuoted(dst, end), true
	}
	return append(append(dst, ']'), o.end...), ok
}

// left appends the member of a's grammar that is left, behind a comma; ok where nothing
// is to be said.
func (a *asked) left(dst, told []byte) ([]byte, bool) {
	if a.oneOf == nil {
		return dst, true
	}
	return a.oneOf.rest(append(dst, ','), told)
}

// grammar takes in a member that holds the answer to a grammar. It is not copied; why is
// "structured" where the stream cannot move because of it.
func (m *mover) grammar(name string, raw []byte) (why string) {
	if m.structured != structuredExact && m.structured != structuredLoose {
		return "structured"
	}
	if o := choiceOf(name, raw); o != nil && m.oneOf == nil && m.choices < 2 && !m.inside {
		m.oneOf = o
		return ""
	}
	if m.structured == structuredExact {
		return "structured"
	}
	m.loose = true
	return ""
}

// choiceOf reads a choice out of a member that asks for a grammar, nil where it asks for
// something else.
func choiceOf(name string, raw []byte) *oneOf {
	o := &oneOf{member: append(append([]byte{'"'}, name...), `":`...)}
	switch name {
	case "guided_choice":
	case "structured_outputs":
		list, member := []byte(nil), append(o.member, '{')
		for it := jsonscan.Walk(raw); it.Next(); {
			switch value := it.Raw(); {
			case it.IsKey("choice"):
				list = value
			case it.IsKey("json"), it.IsKey("regex"), it.IsKey("grammar"), it.IsKey("json_object"), it.IsKey("structural_tag"):
				if isSet(value) || string(value) == `""` {
					return nil
				}
			default:
				var room [64]byte
				member = jsonscan.AppendQuoted(member, memberName(room[:0], raw, it.Value.KeyStart))
				member = append(append(append(member, ':'), value...), ',')
			}
		}
		o.member, o.end, raw = append(member, `"choice":`...), []byte{'}'}, list
	default:
		return nil
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if it.Value.Kind != jsonscan.String {
			return nil
		}
		o.texts = append(o.texts, jsonscan.Unquote(make([]byte, 0, it.Value.End-it.Value.Start), it.Raw()))
	}
	if len(o.texts) == 0 || len(raw) == 0 || raw[0] != '[' {
		return nil
	}
	return o
}
