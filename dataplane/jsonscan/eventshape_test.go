package jsonscan

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// shapeOf learns the shape of an event by the values of its members text and ids.
func shapeOf(s *EventShape, event string) bool {
	find := func(name string) Value {
		v, _, _ := Find([]byte(event), name)
		return v
	}
	return s.Learn([]byte(event), find("text"), find("ids"))
}

func TestEventShape(t *testing.T) {
	var s EventShape
	const learned = `{"text":"a","ids":[1, 2],"m":{"id":"r-1","n":5,"x":null,"t":0.5}}`
	if _, _, ok := s.Match(nil, []byte(learned)); ok {
		t.Error("the zero Shape matches")
	}
	if !shapeOf(&s, learned) {
		t.Fatal("not learned")
	}
	n := s.Gap(strings.Index(learned, "5,"))
	if n < 0 || s.Gap(3) >= 0 || s.Gap(-1) >= 0 || s.Raw(nil, -1) != nil {
		t.Errorf("gaps %d, %d", n, s.Gap(3))
	}
	for _, c := range []struct {
		event, n string
		ids      []uint32
	}{
		{learned, "5", []uint32{1, 2}},
		{`{"text":"\u00e9\"ids\":[9]","ids":[],"m":{"id":"r-1","n":0,"x":null,"t":-1e9}}`, "0", nil},
		{`{"text":"","ids":[4294967295,0],"m":{"id":"r-1","n":123456789012,"x":null,"t":7}}`, "123456789012", []uint32{4294967295, 0}},
	} {
		dst := []uint32{77}
		ids, passed, ok := s.Match(dst, []byte(c.event))
		if !ok || passed != 0 || !slices.Equal(ids[1:], c.ids) || ids[0] != 77 {
			t.Errorf("%s: %v, %d, %v", c.event, ids, passed, ok)
		}
		if got := string(s.Raw([]byte(c.event), n)); got != c.n || s.Start(n) != strings.Index(c.event, `"n":`)+4 {
			t.Errorf("%s: n is %s at %d", c.event, got, s.Start(n))
		}
	}
	for _, event := range []string{
		``, `{`, learned[:len(learned)-1], learned + " ", ` ` + learned,
		`{"text":null,"ids":[1],"m":{"id":"r-1","n":5,"x":null,"t":0.5}}`,
		`{"text":"a","ids":[1],"m":{"id":"r-2","n":5,"x":null,"t":0.5}}`,
		`{"text":"a","ids":[1],"m":{"id":"r-1","n":5,"x":1,"t":0.5}}`,
		`{"text":"a","ids":[-1],"m":{"id":"r-1","n":5,"x":null,"t":0.5}}`,
		`{"text":"a","ids":[4294967296],"m":{"id":"r-1","n":5,"x":null,"t":0.5}}`,
		`{"text":"a","ids":[1],"m":{"id":"r-1","n":05,"x":null,"t":0.5}}`,
		`{"text":"a","ids":[1],"m":{"id":"r-1","n":"5","x":null,"t":0.5}}`,
		`{"text":"a","ids":[1],"m":{"id":"r-1","n":5,"x":null,"t":0.}}`,
		`{"text":"a\q","ids":[1],"m":{"id":"r-1","n":5,"x":null,"t":0.5}}`,
		"{\"text\":\"a\xff\",\"ids\":[1],\"m\":{\"id\":\"r-1\",\"n\":5,\"x\":null,\"t\":0.5}}",
		`{"text":"a","ids":[1],"m":{"id":"r-1","n":5,"x":null,"t":0.5,"y":1}}`,
	} {
		if ids, _, ok := s.Match([]uint32{7}, []byte(event)); ok || !slices.Equal(ids, []uint32{7}) {
			t.Errorf("%q matches: %v", event, ids)
		}
	}
	for _, event := range []string{`{"a":01}`, `{"a":-}`, `{"a":"\q"}`, `{"a":"b`, `[` + strings.Repeat("1,", maxGaps) + `1]`, `{"a":"b"}`} {
		if s.Learn([]byte(event), Value{}, Value{}) {
			t.Errorf("%s is learned", event)
		}
		if _, _, ok := s.Match(nil, []byte(event)); ok {
			t.Errorf("%s matches", event)
		}
	}
	if !shapeOf(&s, learned) {
		t.Fatal("not learned again")
	}
	s.Reset()
	if _, _, ok := s.Match(nil, []byte(learned)); ok {
		t.Error("what was forgotten matches")
	}
}

func TestEventShapeCumulative(t *testing.T) {
	var s EventShape
	shapeOf(&s, `{"ids":[1]}`)
	s.Cumulative = true
	for _, c := range []struct {
		ids    string
		passed int
		want   []uint32
	}{
		{"[1]", 0, []uint32{1}}, {"[1,2]", 1, []uint32{2}}, {"[1,2]", 2, nil}, {"[1,25]", 0, []uint32{1, 25}}, {"[1,25, 3 ]", 2, []uint32{3}},
		{"[1,25, 3 ,4]", 3, []uint32{4}}, {"[1,25]", 0, []uint32{1, 25}}, {"[]", 0, nil}, {"[7]", 0, []uint32{7}},
	} {
		ids, passed, ok := s.Match(nil, []byte(`{"ids":`+c.ids+`}`))
		if !ok || passed != c.passed || !slices.Equal(ids, c.want) {
			t.Errorf("%s: %v, %d passed, %v; want %v, %d", c.ids, ids, passed, ok, c.want, c.passed)
		}
	}
	for _, bad := range []string{"[7,]", "[7,x]", "[7", "[7 8]", "[7,4294967296]"} {
		if _, _, ok := s.Match(nil, []byte(`{"ids":`+bad+`}`)); ok {
			t.Errorf("%s matches", bad)
		}
		if _, passed, ok := s.Match(nil, []byte(`{"ids":[7]}`)); !ok || passed > 1 {
			t.Errorf("after %s: %v, %d passed", bad, ok, passed)
		}
	}
}

// FuzzEventShape: an event that has a Shape says what a walk finds in it, and is as well
// formed as the one that was learned.
func FuzzEventShape(f *testing.F) {
	f.Add([]byte(`{"text":"a","ids":[1],"m":{"n":1,"f":-0.5e3}}`), []byte(`{"text":"b\n","ids":[1,23],"m":{"n":2,"f":7}}`))
	f.Add([]byte(`{"ids":[1],"ids":[2]}`), []byte(`{"ids":[3],"ids":[4, 5]}`))
	f.Add([]byte(`{"ids":[1]}`), []byte(`{"ids":[1 ,2]}`))
	f.Add([]byte(`{"text":"\u00e9","n":10}`), []byte(`{"text":"é","n":0}`))
	f.Add([]byte(`{"n":1}x`), []byte(`{"n":2}x`))
	f.Fuzz(func(t *testing.T, learned, event []byte) {
		var s EventShape
		_, _, bad := Find(learned, "text")
		if !shapeOf(&s, string(learned)) {
			return
		}
		for _, repeats := range []bool{false, true} {
			s.Cumulative = repeats
			for round := range 2 {
				ids, passed, ok := s.Match(nil, event)
				if !ok {
					continue
				}
				list, has, err := Find(event, "ids")
				if (err == nil) != (bad == nil) {
					t.Fatalf("%q has the shape of %q, which was %v; a scan says %v", event, learned, bad, err)
				}
				if err != nil {
					continue
				}
				if was, _, _ := Find(learned, "ids"); was.Kind != list.Kind {
					t.Fatalf("ids of %q: %v; of %q: %v", event, list.Kind, learned, was.Kind)
				}
				if !has || list.Kind != Array {
					continue
				}
				want, err := TokenIDs(nil, event[list.Start:list.End])
				if err != nil || passed > 0 && !repeats || passed > len(want) || !slices.Equal(ids, want[passed:]) {
					t.Fatalf("%q, round %d: %v behind %d; want %v (%v)", event, round, ids, passed, want, err)
				}
			}
		}
	})
}

func BenchmarkEventShape(b *testing.B) {
	event := func(n int) []byte {
		ids := AppendTokenIDs(nil, slices.Repeat([]uint32{12345}, n))
		return fmt.Appendf(nil, `{"text":"%s","ids":%s,"meta_info":{"id":"0123456789abcdef","finish_reason":null,"prompt_tokens":400,"weight_version":"default","completion_tokens":%d,"cached_tokens":384,"dp_rank":null}}`,
			bytes.Repeat([]byte(" word"), n), ids, n)
	}
	for _, n := range []int{1, 500} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var s EventShape
			e := event(n)
			shapeOf(&s, string(e))
			s.Cumulative = true
			var ids []uint32
			b.ReportAllocs()
			for b.Loop() {
				var ok bool
				if ids, _, ok = s.Match(ids[:0], e); !ok {
					b.Fatal("no match")
				}
			}
		})
	}
}
