package pd

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// What becomes of a stream whose text an engine holds to a grammar (migration.structured),
// when it must move: another engine begins the grammar anew, behind what has been told.
const (
	structuredExact         = "exact" // it moves where what is left of the grammar can be said
	structuredUnconstrained = "unconstrained"
)

// choiceGrammar is a request whose answer is one of several texts (vLLM's guided_choice, and
// structured_outputs with choice). Behind a part of the answer what may follow are the
// ends of those that begin with it: the engine's own grammar, as far as it has come.
type choiceGrammar struct {
	texts  [][]byte // as they are, escapes undone
	prefix []byte   // of the body, up to the list
	suffix []byte   // what stands behind it
}

// member appends the member of a request for what is left behind told; not ok: told is
// the beginning of none.
func (o *choiceGrammar) appendRemaining(dst, generated []byte) (_ []byte, ok bool) {
	dst = append(append(dst, o.prefix...), '[')
	for _, text := range o.texts {
		end, found := bytes.CutPrefix(text, generated)
		if !found {
			continue
		}
		if ok {
			dst = append(dst, ',')
		}
		dst, ok = jsonscan.AppendQuoted(dst, end), true
	}
	return append(append(dst, ']'), o.suffix...), ok
}

// appendRemainingGrammar appends the member of a's grammar that is left, behind a comma; ok where nothing
// is to be said.
func (a *resumeTemplate) appendRemainingGrammar(dst, generated []byte) ([]byte, bool) {
	if a.choice == nil {
		return dst, true
	}
	return a.choice.appendRemaining(append(dst, ','), generated)
}

// addGrammar takes in a member that holds the answer to a grammar. It is not copied; why is
// "structured" where the stream cannot move because of it.
func (m *templateBuilder) addGrammar(name string, raw []byte) (reason string) {
	if m.structured != structuredExact && m.structured != structuredUnconstrained {
		return "structured"
	}
	if o := parseChoice(name, raw); o != nil && m.choice == nil && m.choices < 2 && !m.inSampling {
		m.choice = o
		return ""
	}
	if m.structured == structuredExact {
		return "structured"
	}
	m.unconstrained = true
	return ""
}

// parseChoice reads a choice out of a member that asks for a grammar, nil where it asks for
// something else.
func parseChoice(name string, raw []byte) *choiceGrammar {
	o := &choiceGrammar{prefix: append(append([]byte{'"'}, name...), `":`...)}
	switch name {
	case "guided_choice":
	case "structured_outputs":
		list, member := []byte(nil), append(o.prefix, '{')
		for it := jsonscan.Walk(raw); it.Next(); {
			switch value := it.Raw(); {
			case it.IsKey("choice"):
				list = value
			case it.IsKey("json"), it.IsKey("regex"), it.IsKey("grammar"), it.IsKey("json_object"), it.IsKey("structural_tag"):
				if isSet(value) || string(value) == `""` {
					return nil
				}
			default:
				var buf [64]byte
				member = jsonscan.AppendQuoted(member, memberName(buf[:0], raw, it.Value.KeyStart))
				member = append(append(append(member, ':'), value...), ',')
			}
		}
		o.prefix, o.suffix, raw = append(member, `"choice":`...), []byte{'}'}, list
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
