package jsonscan

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

var seeds = []string{
	`{}`, `{"model":"m","stream":true,"max_tokens":1}`, ` {"a" : [1, 2.5e-3, "x\u00e9\n", null, {"b":{}}] } `, `{"sampling_params":{"max_tokens":5,"n":2,"z":[]},"n":1}`,
	`{"prompt":[1,2,33],"token_ids":[1, 2,3]}`, `{"model":"a","mod\u0065l":"b"}`, `{"a":"\ud800","b":"` + "é漢😀" + `"}`, "{\"a\":\"\xff\"}", `{"a":[01]}`, `{"a":-0}`, `[1]`, ``,
	"{\"prompt\":[\n 1,\n 22,\t333,\r\n4444 , 55555,  666666]}", `{"prompt":[12345678,`, `{"prompt":[1, 2, ]}`,
	`{"stream":"yes"}`, `{"n":1.0,"max_tokens":9223372036854775808}`, `{"a":[[[[[[[[[[]]]]]]]]]]}`,
}

// FuzzScan holds the form check against encoding/json. They differ by what is
// stated in Scan: UTF-8 is checked, the outer value is an object, depth is
// bounded.
func FuzzScan(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		want := json.Valid(body) && utf8.Valid(body) && bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) && jsonDepth(body) <= defaultDepth
		_, _, err := Find(body, "none")
		if (err == nil) != want {
			t.Fatalf("Find says %v, encoding/json says well-formed: %v\n%q", err, want, body)
		}
		var d Doc
		err = d.Scan(body, Limits{})
		var se *SyntaxError
		if err != nil && (!errors.As(err, &se) || se.Offset < 0 || se.Offset > len(body) || se.Want == "" || se.Got == "" || !utf8.ValidString(se.Error())) {
			t.Fatalf("bad error %v for %q", err, body)
		}
		if !want {
			if err == nil {
				t.Fatalf("Scan accepts %q", body)
			}
			return
		}
		checkDoc(t, &d, body, err)
	})
}

// checkDoc compares what was found with what encoding/json finds.
func checkDoc(t *testing.T, d *Doc, body []byte, err error) {
	keys, vals := decodeMembers(t, body)
	top := make(map[string]json.RawMessage, len(keys))
	dup := false
	for i, k := range keys {
		if topKey([]byte(k)) != noKey {
			dup = dup || top[k] != nil
			top[k] = vals[i]
		}
	}
	if dup && err == nil {
		t.Fatalf("a second known key passed in %q", body)
	}
	if err != nil {
		return
	}
	if d.Members != len(keys) {
		t.Fatalf("%d members, want %d in %q", d.Members, len(keys), body)
	}
	for k := Key(0); k < KeySamplingMaxTokens; k++ {
		if !bytes.Equal(d.Raw(k), top[k.Name()]) {
			t.Fatalf("%s is %q, want %q in %q", k.Name(), d.Raw(k), top[k.Name()], body)
		}
	}
	for _, k := range []Key{KeyPrompt, KeyTokenIDs, KeyInputIDs} {
		if ids, ok := d.ScannedIDs(k, nil); ok {
			if want, err := TokenIDs(nil, d.Raw(k)); err != nil || !slices.Equal(ids, want) {
				t.Fatalf("%s is %v, want %v, %v in %q", k.Name(), ids, want, err, body)
			}
		}
	}
	var model string
	if raw := d.Raw(KeyModel); raw != nil {
		if json.Unmarshal(raw, &model) != nil || model != string(d.String(KeyModel)) {
			t.Fatalf("model %s unescaped to %q, want %q", raw, d.String(KeyModel), model)
		}
	}
}

// FuzzEdited holds splices against the same edits done to a decoded object.
func FuzzEdited(f *testing.F) {
	for i, s := range seeds {
		f.Add([]byte(s), []byte{byte(i), byte(3 * i), byte(7 * i), 30, 31, 32, 33, 34})
	}
	f.Add([]byte(`{"n":1,"stream":true,"max_tokens":2,"x":1}`), []byte{3, 1, 4, 2, 35, 33})
	f.Fuzz(func(t *testing.T, body, ops []byte) {
		var d Doc
		if d.Scan(body, Limits{}) != nil {
			return
		}
		var edits []Edit
		for _, o := range ops[:min(len(ops), 40)] {
			k := Key(o) % NumKeys
			if !slices.ContainsFunc(edits, func(e Edit) bool { return e.Key == k }) {
				edits = append(edits, Edit{Key: k, Op: Op(o / byte(NumKeys) % 3), Value: []byte(`{"new":12345678901234567890}`)})
			}
		}
		got := d.Edited(nil, edits...)
		if joined := bytes.Join(d.Segments(nil, edits...), nil); !bytes.Equal(got, joined) {
			t.Fatalf("Edited %q and Segments %q differ", got, joined)
		}
		if !json.Valid(got) {
			t.Fatalf("%q with %v became %q", body, edits, got)
		}
		wantKeys, wantVals := applyEdits(t, body, edits)
		gotKeys, gotVals := decodeMembers(t, got)
		if !slices.Equal(gotKeys, wantKeys) {
			t.Fatalf("%q with %v has members %q, want %q", body, edits, gotKeys, wantKeys)
		}
		for i := range gotVals {
			if !sameJSON(gotVals[i], wantVals[i]) {
				t.Fatalf("%q with %v: %s is %s, want %s", body, edits, gotKeys[i], gotVals[i], wantVals[i])
			}
		}
	})
}

// applyEdits is the plain model of Edited over ordered members.
func applyEdits(t *testing.T, body []byte, edits []Edit) (keys []string, vals []json.RawMessage) {
	keys, vals = decodeMembers(t, body)
	parent := slices.Index(keys, "sampling_params")
	var nested, top []Edit
	parentEdited := false
	for _, e := range edits {
		if e.Key.nested() {
			nested = append(nested, e)
		} else {
			top = append(top, e)
			parentEdited = parentEdited || e.Key == KeySamplingParams
		}
	}
	if parent >= 0 && !parentEdited && vals[parent][0] == '{' {
		k, v := decodeMembers(t, vals[parent])
		k, v = applyTo(k, v, nested, func(k Key) string { return k.Name()[len("sampling_params."):] })
		vals[parent] = encodeMembers(k, v)
	}
	return applyTo(keys, vals, top, Key.Name)
}

func applyTo(keys []string, vals []json.RawMessage, edits []Edit, name func(Key) string) ([]string, []json.RawMessage) {
	for _, e := range edits {
		i := slices.Index(keys, name(e.Key))
		switch {
		case i < 0 && e.Op == Set:
			keys, vals = append(keys, name(e.Key)), append(vals, e.Value)
		case i < 0:
		case e.Op == Remove:
			keys, vals = slices.Delete(keys, i, i+1), slices.Delete(vals, i, i+1)
		default:
			vals[i] = e.Value
		}
	}
	return keys, vals
}

func encodeMembers(keys []string, vals []json.RawMessage) json.RawMessage {
	out := []byte{'{'}
	for i, k := range keys {
		if i > 0 {
			out = append(out, ',')
		}
		q, _ := json.Marshal(k)
		out = append(append(append(out, q...), ':'), vals[i]...)
	}
	return append(out, '}')
}

// decodeMembers gives the members of an object in order, twice where a name
// stands twice.
func decodeMembers(t *testing.T, body []byte) (keys []string, vals []json.RawMessage) {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(body))
	if _, err := dec.Token(); err != nil {
		t.Fatal(err)
	}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			t.Fatal(err)
		}
		keys, vals = append(keys, tok.(string)), append(vals, v)
	}
	return keys, vals
}

// sameJSON compares two values with their numbers as text.
func sameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	decode := func(raw []byte) (v any) {
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.UseNumber()
		if dec.Decode(&v) != nil {
			return new(int)
		}
		return v
	}
	return reflect.DeepEqual(decode(a), decode(b))
}

// jsonDepth is the deepest nesting of a well-formed body.
func jsonDepth(body []byte) (deepest int) {
	depth, inString := 0, false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			depth++
			deepest = max(deepest, depth)
		case c == '}' || c == ']':
			depth--
		}
	}
	return deepest
}

func FuzzTokenIDs(f *testing.F) {
	for _, s := range []string{`[]`, `[1,2]`, "[" + strings.Repeat("1, 22,333 ,4444,  55555,\n666666,7777777,88888888,", 4) + "9]", ` [ 0 , 4294967295 ] `, `[4294967296]`, `[1.0]`, `[[1]]`, `[-1]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var want []uint32
		werr := json.Unmarshal(raw, &want)
		if werr == nil && bytes.ContainsAny(raw, "n") { // null is an id, or an array, to encoding/json only
			return
		}
		got, err := TokenIDs(nil, raw)
		if (err == nil) != (werr == nil) || err == nil && !slices.Equal(got, want) {
			t.Fatalf("TokenIDs(%q) = %v, %v; encoding/json %v, %v", raw, got, err, want, werr)
		}
		if err == nil {
			if again, err := TokenIDs(nil, AppendTokenIDs(nil, got)); err != nil || !slices.Equal(again, got) {
				t.Fatalf("%v comes back as %v, %v", got, again, err)
			}
		}
	})
}
