package jsonscan

import "testing"

// Members finds what Find finds, name by name.
func TestMembers(t *testing.T) {
	names := []string{"a", "remote_block_ids", "b"}
	for _, object := range []string{
		`{}`, `{"a":1}`, ` { "b" : [1, {"a":2}] , "a" : null } `, `{"a":1,"a":"two"}`, `{"\u0061":true,"c":{"b":1}}`,
		`{"remote_block_ids":[[1,2],[3]],"x\"y":0,"b":-1.5e3}`, `{"remote\u005fblock_ids":{}}`,
	} {
		vals := []Value{{Kind: Bool}, {Kind: Bool}, {Kind: Bool}}
		Members([]byte(object), vals, names...)
		for i, name := range names {
			if want, _, err := Find([]byte(object), name); err != nil || vals[i] != want {
				t.Errorf("%s in %s: %+v, want %+v (%v)", name, object, vals[i], want, err)
			}
		}
	}
	for _, none := range []string{``, `[1,"a"]`, `"a"`, `7`} {
		vals := []Value{{Kind: Bool}}
		if Members([]byte(none), vals, "a"); vals[0].Kind != Absent {
			t.Errorf("a member of %q: %+v", none, vals[0])
		}
	}
	var vals [1]Value
	object := []byte(`{"a":[1,2,3]}`)
	if n := testing.AllocsPerRun(100, func() { Members(object, vals[:], "a") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
