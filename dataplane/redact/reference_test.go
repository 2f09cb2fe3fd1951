package redact

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"sluice/dataplane/jsonscan"
)

// bodies are answers of engines, and what a client may see of them, with null for a private member.
var bodies = []struct{ name, body, want string }{
	{"nothing private", `{"id":"a","choices":[{"text":"b"}]}`, `{"id":"a","choices":[{"text":"b"}]}`},
	{"null", `{"kv_transfer_params":null,"a":1}`, `{"kv_transfer_params":null,"a":1}`},
	{"object", `{"a":1,"kv_transfer_params":{"remote_host":"10.0.0.1","remote_block_ids":[1,2]},"b":2}`, `{"a":1,"kv_transfer_params":null,"b":2}`},
	{"first", `{"ec_transfer_params":{"x":{"y":["z"]}},"a":[1]}`, `{"ec_transfer_params":null,"a":[1]}`},
	{"alone", `{"kv_transfer_params":{"remote_host":"10.0.0.1"}}`, `{"kv_transfer_params":null}`},
	{"in a choice", `{"choices":[{"text":"t","disaggregated_params":{"opaque_state":"s}\"{"}},{"text":"u","disaggregated_params":null}]}`, `{"choices":[{"text":"t","disaggregated_params":null},{"text":"u","disaggregated_params":null}]}`},
	{"white space", "{ \"kv_transfer_params\" :\t{ \"remote_port\" : 1 } , \"a\" : [ ] }", `{"kv_transfer_params":null,"a":[]}`},
	{"name in a text", `{"choices":[{"text":"say \"kv_transfer_params\": {1}"}]}`, `{"choices":[{"text":"say \"kv_transfer_params\": {1}"}]}`},
}

// plain returns a body as encoding/json reads it, without its private members.
func plain(t *testing.T, body []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	return withoutPrivate(v)
}

func withoutPrivate(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, member := range v {
			if IsPrivate([]byte(key)) {
				delete(v, key)
				continue
			}
			v[key] = withoutPrivate(member)
		}
	case []any:
		for i := range v {
			v[i] = withoutPrivate(v[i])
		}
	}
	return v
}

// privateEmpty reports whether every private member in v is null or empty.
func privateEmpty(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		for key, member := range v {
			if IsPrivate([]byte(key)) {
				if n := reflect.ValueOf(member); member != nil && (n.Kind() != reflect.Map && n.Kind() != reflect.Slice && n.Kind() != reflect.String || n.Len() > 0 && strings.TrimSpace(n.String()) != "") {
					return false
				}
			} else if !privateEmpty(member) {
				return false
			}
		}
	case []any:
		for _, e := range v {
			if !privateEmpty(e) {
				return false
			}
		}
	}
	return true
}

// TestAgainstReference compares every exported function that changes text with encoding/json: the
// private members are gone or empty, everything else is as it was, and a function that works in
// place keeps the length.
func TestAgainstReference(t *testing.T) {
	for _, k := range bodies {
		want := plain(t, []byte(k.want))
		inPlace := map[string]func([]byte){
			"InPlace":    func(b []byte) { InPlace(b, 200) },
			"InPlace400": func(b []byte) { InPlace(b, 400) },
			"Feed": func(b []byte) {
				v := Redactor{DetectFormat: true}
				for len(b) > 0 { // cut anywhere
					n := 1 + rand.IntN(len(b))
					v.Feed(b[:n])
					b = b[n:]
				}
			},
			"FeedAll": func(b []byte) {
				v, at := Redactor{DetectFormat: true}, rand.IntN(len(b)+1)
				v.FeedAll([][]byte{b[:at], b[at:]})
			},
		}
		for name, f := range inPlace {
			if name == "InPlace400" && k.name == "name in a text" {
				continue // a refusal loses such a text, see TestErrorTextsAreHidden
			}
			for range 20 {
				got := []byte(k.body)
				f(got)
				if len(got) != len(k.body) || !reflect.DeepEqual(plain(t, got), want) {
					t.Errorf("%s, %s: %q", k.name, name, got)
				}
				var v any
				if _ = json.Unmarshal(got, &v); !privateEmpty(v) {
					t.Errorf("%s, %s: %q has a private value", k.name, name, got)
				}
			}
		}
		event := "data: " + k.body + "\n\n"
		appends := map[string][]byte{
			"Append": Append([]byte("before "), []byte(k.body))[len("before "):],
			"From":   From([]byte("before "+k.body), len("before "))[len("before "):],
			"Event":  bytes.TrimPrefix(Rewriter{}.Event(nil, []byte(event)), []byte("data: ")),
		}
		for name, got := range appends {
			if !reflect.DeepEqual(plain(t, got), want) || k.name != "name in a text" && bytes.Contains(got, []byte("_params")) && mayHoldPrivate([]byte(k.body)) {
				t.Errorf("%s, %s: %q", k.name, name, got)
			}
		}
		v, fed := NewEventRedactor(false), []byte(event)
		v.Feed(fed)
		if len(fed) != len(event) || !reflect.DeepEqual(plain(t, bytes.TrimPrefix(fed, []byte("data: "))), want) {
			t.Errorf("%s, event: %q", k.name, fed)
		}
	}
}

// TestErrorTextsAreHidden: an engine's refusal that names a part of a handle loses its words, in
// JSON, in an event, and in a body that is neither. One that names none stays as it is.
func TestErrorTextsAreHidden(t *testing.T) {
	for _, k := range []struct {
		body  string
		hides bool
	}{
		{`{"error":{"message":"cannot read remote_host=10.0.0.1 of the peer, which has closed","code":400}}`, true},
		{`{"detail":[{"loc":["body","kv_transfer_params"],"input":{"x":"10.0.0.1"}}]}`, true},
		{"data: {\"error\":{\"message\":\"no remote_block_ids at 10.0.0.1 for this one\"}}\n\n", true},
		{"bootstrap_host is 10.0.0.1", true},
		{`{"error":{"message":"r\u0065mote_host=10.0.0.1 is not reachable from this engine"}}`, true},
		{`{"error":{"message":"the model does not exist at 10.0.0.1"}}`, false},
		{"the model does not exist at 10.0.0.1", false},
	} {
		if got := MayNameHandle([]byte(k.body)); got != k.hides {
			t.Errorf("MayNameHandle(%q) is %v", k.body, got)
		}
		got := []byte(k.body)
		InPlace(got, 400)
		if bytes.Contains(got, []byte("10.0.0.1")) == k.hides || !k.hides && string(got) != k.body || len(got) != len(k.body) {
			t.Errorf("%q became %q", k.body, got)
		}
	}
}

// TestNameChecksMissNothing: the quick checks say yes to every text with a private member, in every
// escaping of its name, and no where the value is null.
func TestNameChecksMissNothing(t *testing.T) {
	if ShortestPrivateName != len("ec_transfer_params") || (Rewriter{}).MaxEvent() <= 0 {
		t.Errorf("shortest name %d, largest event %d", ShortestPrivateName, Rewriter{}.MaxEvent())
	}
	for _, name := range private {
		if !IsPrivate([]byte(name)) || len(name) < ShortestPrivateName {
			t.Errorf("%s: private %v", name, IsPrivate([]byte(name)))
		}
		for i := range name {
			escaped := name[:i] + `\u00` + string("0123456789abcdef"[name[i]>>4]) + string("0123456789abcdef"[name[i]&15]) + name[i+1:]
			for _, key := range []string{name, escaped} {
				text := []byte(`{"` + key + `":{"a":1}}`)
				if !MayHoldPrivateValue(text) || !MayNamePrivate(text) {
					t.Errorf("%s: value %v, name %v", text, MayHoldPrivateValue(text), MayNamePrivate(text))
				}
				if InPlace(text, 200); bytes.Contains(text, []byte(`"a"`)) {
					t.Errorf("%s keeps its value", text)
				}
			}
		}
		if MayHoldPrivateValue([]byte(`{"` + name + `": null}`)) {
			t.Errorf("%s of null has a value", name)
		}
	}
	for _, name := range []string{"kv_transfer_param", "params", "transfer_params", "input", ""} {
		if IsPrivate([]byte(name)) {
			t.Errorf("%q is private", name)
		}
	}
	for _, name := range []string{"input", "tools", "metadata", "schema", "variables"} {
		body := `{"` + name + `":{"kv_transfer_params":{"a":1}}}`
		text := []byte(body)
		if InPlace(text, 200); !IsExemptMember([]byte(name)) || string(text) != body {
			t.Errorf("%s of the client became %s", name, text)
		}
		if InPlace(text, 400); bytes.Contains(text, []byte(`"a"`)) {
			t.Errorf("%s of a refusal stayed: %s", name, text)
		}
	}
	if _, ok := jsonscan.EscapedByte([]byte(`\u0061`)); !ok {
		t.Error("no escape was tested")
	}
}
