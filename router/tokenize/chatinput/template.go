package chatinput

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
)

// KnowsDeveloper reports whether a chat template names the role "developer", as vLLM tests it.
func KnowsDeveloper(template string) bool {
	return strings.Contains(template, `"developer"`) || strings.Contains(template, `'developer'`)
}

// ContentParts reports whether a template expects contents as lists of parts, by vLLM's rule
// (renderers/hf.py, _detect_content_format): it does if it loops over a message's content, over a
// variable called content outside macros, or over a macro's parameter that is given a message's
// content. vLLM walks the syntax tree; ContentParts reads the tags, and may differ in templates
// that build such loops in other ways.
func ContentParts(template string) bool {
	t := parseTags(template)
	lists, plain := t.aliases("messages")
	if !plain {
		return false // vLLM gives up
	}
	var messages []string
	for _, f := range t.loops {
		if slices.ContainsFunc(lists, func(v string) bool { return accesses(f.over, v, "") }) {
			if f.target == "" {
				return false // not a plain variable: vLLM gives up
			}
			messages = append(messages, f.target)
		}
	}
	isContent := func(expr string) bool {
		return slices.ContainsFunc(messages, func(m string) bool { return accesses(expr, m, "content") })
	}
	for _, f := range t.loops {
		switch {
		case isContent(f.over):
			return true
		case f.macro != nil && slices.Contains(t.contentParams(f.macro, isContent), strings.TrimSpace(f.over)):
			return true
		case f.macro == nil && strings.TrimSpace(f.over) == "content":
			return true
		}
	}
	return false
}

// tags are the parts of a template that ContentParts looks at.
type tags struct {
	loops   []loop
	assigns [][2]string // target and value
	code    []string    // the inside of every tag
}

type loop struct {
	target, over string
	macro        *macro // that contains it
}

type macro struct {
	name   string
	params []string
}

var (
	tagPattern    = regexp.MustCompile(`(?s)\{#.*?#\}|\{%[-+]?(.*?)[-+]?%\}|\{\{[-+]?(.*?)[-+]?\}\}`)
	rawPattern    = regexp.MustCompile(`(?s)\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}`)
	loopPattern   = regexp.MustCompile(`(?s)^for\s+(.+?)\s+in\s+(.+)$`)
	ifPattern     = regexp.MustCompile(`(?s)\s+if\s+.*$|\s+recursive\s*$`)
	assignPattern = regexp.MustCompile(`(?s)^set\s+([^=]+?)\s*=\s*(.+)$`)
	macroPattern  = regexp.MustCompile(`(?s)^macro\s+(\w+)\s*\((.*)\)$`)
	filterPattern = regexp.MustCompile(`(?s)^\w+\s*(\(.*\))?$`)
	testPattern   = regexp.MustCompile(`(?s)^\w+\s*(\(.*\)|\s\w+)?$`)
	namePattern   = regexp.MustCompile(`^\w+$`)
)

func parseTags(template string) *tags {
	t := new(tags)
	var in *macro
	for _, m := range tagPattern.FindAllStringSubmatch(rawPattern.ReplaceAllString(template, ""), -1) {
		code := strings.TrimSpace(m[1] + m[2])
		if code == "" {
			continue
		}
		t.code = append(t.code, code)
		if f := loopPattern.FindStringSubmatch(code); f != nil {
			target := f[1]
			if !namePattern.MatchString(target) {
				target = ""
			}
			t.loops = append(t.loops, loop{target, ifPattern.ReplaceAllString(f[2], ""), in})
		} else if a := assignPattern.FindStringSubmatch(code); a != nil {
			t.assigns = append(t.assigns, [2]string{a[1], a[2]})
		} else if d := macroPattern.FindStringSubmatch(code); d != nil {
			in = &macro{name: d[1]}
			for _, p := range splitTop(d[2], ',') {
				name, _, _ := strings.Cut(p, "=")
				in.params = append(in.params, strings.TrimSpace(name))
			}
		} else if code == "endmacro" {
			in = nil
		}
	}
	return t
}

// aliases returns the variables that are set to name or a part of it. plain is false if something else than a plain
// variable is, such as a member of a namespace.
func (t *tags) aliases(name string) (out []string, plain bool) {
	out = []string{name}
	for i := 0; i < len(out); i++ {
		for _, a := range t.assigns {
			switch {
			case !accesses(a[1], out[i], ""):
			case !namePattern.MatchString(a[0]):
				return nil, false
			case !slices.Contains(out, a[0]):
				out = append(out, a[0])
			}
		}
	}
	return out, true
}

// contentParams returns the parameters of a macro that some call gives a message's content.
func (t *tags) contentParams(m *macro, isContent func(string) bool) (params []string) {
	call := regexp.MustCompile(`\b` + m.name + `\s*\(`)
	for _, code := range t.code {
		if strings.HasPrefix(code, "macro ") {
			continue
		}
		for _, at := range call.FindAllStringIndex(code, -1) {
			for i, arg := range splitTop(untilClose(code[at[1]:]), ',') {
				name, value, named := strings.Cut(arg, "=")
				switch {
				case named && isContent(value):
					params = append(params, strings.TrimSpace(name))
				case i < len(m.params) && isContent(arg):
					params = append(params, m.params[i])
				}
			}
		}
	}
	return params
}

// accesses reports whether expr is name, or its member key, behind any filters, tests and slices.
func accesses(expr, name, key string) bool {
	parts := splitTop(expr, '|')
	last := &parts[len(parts)-1]
	if i := strings.Index(*last, " is "); i >= 0 {
		if !testPattern.MatchString(strings.TrimSpace((*last)[i+len(" is "):])) {
			return false
		}
		*last = (*last)[:i]
	}
	for _, filter := range parts[1:] {
		if !filterPattern.MatchString(strings.TrimSpace(filter)) {
			return false // such as messages|length - 1, which is a difference
		}
	}
	expr = strings.TrimSpace(parts[0])
	for strings.HasSuffix(expr, "]") {
		i := strings.LastIndexByte(expr, '[')
		if i < 0 || !strings.Contains(expr[i:], ":") {
			break
		}
		expr = strings.TrimSpace(expr[:i])
	}
	for strings.HasPrefix(expr, "(") && strings.HasSuffix(expr, ")") {
		expr = strings.TrimSpace(expr[1 : len(expr)-1])
	}
	if key == "" {
		return expr == name
	}
	rest, ok := strings.CutPrefix(expr, name)
	return ok && (rest == "."+key || rest == "['"+key+"']" || rest == `["`+key+`"]`)
}

// splitTop splits s at separators outside quotes and brackets.
func splitTop(s string, sep byte) (out []string) {
	depth, from := 0, 0
	var quote byte
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case quote != 0:
			if c == '\\' {
				i++
			} else if c == quote {
				quote = 0
			}
		case c == '\'' || c == '"':
			quote = c
		case c == '(' || c == '[' || c == '{':
			depth++
		case c == ')' || c == ']' || c == '}':
			depth--
		case c == sep && depth == 0:
			out = append(out, s[from:i])
			from = i + 1
		}
	}
	return append(out, s[from:])
}

// untilClose returns s up to the bracket that closes the one before s.
func untilClose(s string) string {
	depth := 0
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			if depth--; depth < 0 {
				return s[:i]
			}
		}
	}
	return s
}

// bare makes undefined what a template does not have where vLLM tries it for MergesSystem.
const bare = "{%- set bos_token = sluice_undefined %}{% set eos_token = sluice_undefined %}{% set unk_token = sluice_undefined %}{% set sep_token = sluice_undefined %}" +
	"{% set pad_token = sluice_undefined %}{% set cls_token = sluice_undefined %}{% set mask_token = sluice_undefined %}{% set tools = sluice_undefined %}" +
	"{% set documents = sluice_undefined %}{% set raise_exception = sluice_undefined %}{% set strftime_now = sluice_undefined %}"

// MergesSystem reports whether vLLM joins the system messages of a Messages request to one at the
// start, by its own rule (entrypoints/anthropic/serving.py, _detect_merge_inline_system): it does if
// the template fails for a conversation with a second one, tried without the functions, special tokens
// and tags that transformers adds to Jinja. render renders a template of any source.
func MergesSystem(template string, render func(template string, input []byte) ([]byte, error)) bool {
	if template == "" || slices.Contains(parseTags(template).code, "generation") {
		return true
	}
	_, err := render(bare+template, []byte(`{"messages":[{"role":"system","content":"t"},{"role":"user","content":"t"},{"role":"system","content":"t"},{"role":"user","content":"t"}],"add_generation_prompt":false}`))
	return err != nil
}

// FindDisabledEffort returns the reasoning_effort by which vLLM turns thinking off in a Messages
// request, by its own rule (entrypoints/anthropic/serving.py, _probe_disabled_thinking_effort): "none",
// or "low" if the template refuses "none" or takes it for another one. render renders the input of
// the model's template.
func FindDisabledEffort(s *Settings, render func(input []byte) ([]byte, error)) string {
	prompt := func(effort string) ([]byte, bool) {
		var in Input
		if in.Read(Chat, []byte(`{"messages":[{"role":"user","content":"Hi"}],"reasoning_effort":"`+effort+`"}`), s) != "" {
			return nil, false
		}
		text, err := render(in.Chat)
		return text, err == nil
	}
	none, ok := prompt("none")
	if !ok {
		return "low"
	}
	for _, effort := range []string{"low", "medium", "high", "xhigh", "max"} {
		if text, ok := prompt(effort); ok && bytes.Equal(text, none) {
			return "low"
		}
	}
	return "none"
}
