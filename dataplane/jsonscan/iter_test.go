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

// TestNextMembers: one walk finds what Next and Members find in two, and ends where they end.
func TestNextMembers(t *testing.T) {
	for _, raw := range []string{
		`[{"role":"user","content":"a"},{"content":"b\"}","x":[{"role":"no"}],"role":"z"}]`,
		` [ { "r\u006fle" : "user" , "content" : { "role" : "no" } } , 1 , "x", [ ] , { } , null, {"role":1,"role":2} ] `,
		`{"a":{"role":"user"},"b":{"content":{}},"c":"role"}`,
		`[]`, `{}`, `1`, ``, `[{"role":1}`, `[{"role":1},`, `[{"role"}]`, `[{"role":1 "content":2}]`, `[{"role":1]]`, `[{"role":1},}]`, `[{]`, `[{"role":[}]`,
	} {
		var want, got [2]Value
		two, one := Walk([]byte(raw)), Walk([]byte(raw))
		for n := 0; ; n++ {
			ok := one.NextMembers(got[:], "role", "content")
			if ok != two.Next() {
				// Next skips a member without a colon or comma; a scan accepts neither.
				if one.Value.Kind != Absent {
					t.Errorf("%s: element %d: NextMembers returned %v", raw, n, ok)
				}
				break
			}
			if !ok {
				break
			}
			if one.Value != two.Value {
				t.Errorf("%s: element %d is at %v, want %v", raw, n, one.Value, two.Value)
			}
			Members(two.Raw(), want[:], "role", "content")
			for i := range want {
				if want[i].Kind != Absent {
					want[i].KeyStart += two.Value.Start
					want[i].Start += two.Value.Start
					want[i].End += two.Value.Start
				}
			}
			if got != want {
				t.Errorf("%s: element %d has %v, want %v", raw, n, got, want)
			}
		}
	}
}
