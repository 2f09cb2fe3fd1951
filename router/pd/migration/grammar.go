package migration

import (
	"bytes"

	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
)

// Values of migration.structured: what happens when a stream whose output a grammar constrains must
// migrate. The next engine starts the grammar from its beginning, after the text already sent.
const (
	structuredExact         = "exact" // migrate only if the rest of the grammar can be expressed
	structuredUnconstrained = "unconstrained"
)

// choiceGrammar is the grammar of a request whose response is one of several texts (vLLM's
// guided_choice, and structured_outputs with choice). After a part of the response, the allowed
// continuations are the remainders of the texts that start with it.
type choiceGrammar struct {
	texts  [][]byte // without JSON escapes
	prefix []byte   // of the member, up to the list
	suffix []byte   // of the member, after the list
}

// appendRemaining appends the request member that allows the continuations after generated. ok is
// false if no text starts with generated.
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

// appendRemainingGrammar appends a comma and the member for the rest of a's grammar. ok is true if
// a has no grammar.
func (a *Template) appendRemainingGrammar(dst, generated []byte) ([]byte, bool) {
	if a.choice == nil {
		return dst, true
	}
	return a.choice.appendRemaining(append(dst, ','), generated)
}

// addGrammar handles a member that constrains the response with a grammar, instead of copying it.
// It returns "structured" if the stream cannot migrate because of it.
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

// parseChoice parses a choice from a grammar member. It returns nil if the member holds another
// kind of grammar.
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
				if reqbody.IsSet(value) || string(value) == `""` {
					return nil
				}
			default:
				var buf [64]byte
				member = jsonscan.AppendQuoted(member, reqbody.MemberName(buf[:0], raw, it.Value.KeyStart))
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
