package chatinput

import (
	"bufio"
	"encoding/json"
	"os"
	"testing"
)

// TestContentPartsOfArchive compares ContentParts with vLLM's function for the templates of current models;
// scripts/tokenizer_golden.py formats writes the file and runs it.
func TestContentPartsOfArchive(t *testing.T) {
	path := os.Getenv("SLUICE_CONTENT_FORMATS")
	if path == "" {
		t.Skip("SLUICE_CONTENT_FORMATS names no file; scripts/tokenizer_golden.py formats sets it")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	lines := bufio.NewScanner(f)
	for lines.Buffer(nil, 8<<20); lines.Scan(); n++ {
		var c struct {
			Name, Template string
			Parts          bool
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		if got := ContentParts(c.Template); got != c.Parts {
			t.Errorf("%s: parts %v, want %v", c.Name, got, c.Parts)
		}
	}
	if lines.Err() != nil || n == 0 {
		t.Fatalf("%d templates in %s: %v", n, path, lines.Err())
	}
	t.Logf("%d templates", n)
}

// TestContentParts: the formats are those that vLLM 0.32 finds for the same templates
// (vllm.renderers.hf._detect_content_format).
func TestContentParts(t *testing.T) {
	for template, want := range map[string]bool{
		`{% for message in messages %}{{ message.content }}{% endfor %}`:                                                                                                               false,
		`{% for message in messages %}{% for c in message.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                              true,
		`{%- for m in messages[1:] -%}{%- for c in m['content'] | list -%}{{ c['text'] }}{% endfor %}{% endfor %}`:                                                                     true,
		`{% set loop_messages = messages %}{% for m in loop_messages %}{% set content = m.content %}{% for c in content %}{{ c }}{% endfor %}{% endfor %}`:                             true,
		`{% for message in messages %}{% for c in message.tool_calls %}{{ c }}{% endfor %}{% endfor %}`:                                                                                false,
		`{% macro show(x) %}{% for c in x %}{{ c.text }}{% endfor %}{% endmacro %}{% for message in messages %}{{ show(message.content) }}{% endfor %}`:                                true,
		`{% macro show(content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}{% for message in messages %}{{ show(message.name) }}{% endfor %}`:                       false,
		`{% macro show(a, x) %}{% for c in x %}{{ c.text }}{% endfor %}{% endmacro %}{% for message in messages %}{% set t = show(1, x=message['content']) %}{% endfor %}`:             true,
		`{# {% for message in messages %}{% for c in message.content %} #}{{ messages }}`:                                                                                              false,
		`{% for message in messages if message.role == 'user' %}{% for c in message.content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endfor %}`:                                true,
		`{% for message in msgs %}{% for c in message.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                  false,
		`{% for message in messages %}{% for c in message.content.split('x') %}{{ c }}{% endfor %}{% endfor %}`:                                                                        false,
		`{% set ns = namespace() %}{% set ns.rest = messages[1:] %}{% for message in messages %}{% for c in message.content %}{{ c.text }}{% endfor %}{% endfor %}`:                    false,
		`{% set ns = namespace() %}{% set ns.n = 1 %}{% for message in messages %}{% for c in message.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                  true,
		`{% raw %}{% for message in messages %}{% for c in message.content %}{% endraw %}{{ messages }}`:                                                                               false,
		`{% set ns = namespace() %}{% set n = messages|length - 1 %}{% set ns.n = n %}{% for message in messages %}{% for c in message.content %}{{ c.text }}{% endfor %}{% endfor %}`: true,
		`{% for message in messages %}{% for c in message.content|length - 1 %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                   false,
	} {
		if got := ContentParts(template); got != want {
			t.Errorf("%s: parts %v, want %v", template, got, want)
		}
	}
	if !KnowsDeveloper(`{% if m.role == "developer" %}`) || KnowsDeveloper(`{# developer #}`) {
		t.Error("KnowsDeveloper")
	}
}
