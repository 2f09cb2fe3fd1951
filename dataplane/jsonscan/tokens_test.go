package jsonscan

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestTokenIDs(t *testing.T) {
	for raw, want := range map[string][]uint32{
		`[]`: nil, ` [ ] `: nil, `[0]`: {0}, `[1,2,3]`: {1, 2, 3}, "[ 4294967295 ,\n7 , 0]": {math.MaxUint32, 7, 0},
	} {
		got, err := TokenIDs(nil, []byte(raw))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("TokenIDs(%s) = %v, %v", raw, got, err)
		}
	}
	for _, raw := range []string{``, `1`, `[`, `[1`, `[1,`, `[1,]`, `[,]`, `[-1]`, `[1.0]`, `[1e3]`, `[01]`, `[4294967296]`, `[99999999999999999999999]`,
		`[[1]]`, `["1"]`, `[null]`, `[1] x`, `[]]`, `[1 2]`, `{}`, "[1\x00]"} {
		dst := []uint32{9}
		if got, err := TokenIDs(dst, []byte(raw)); err == nil || !slices.Equal(got, dst) {
			t.Errorf("TokenIDs(%q) = %v, %v, want an error and what was there", raw, got, err)
		}
	}
}

// Ids in every layout, well formed and not, at every place of a block: what encoding/json
// takes is taken, and reads the same; so with a scan that passes over it.
func TestTokenIDsInEveryLayout(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	seps := []string{",", ",", ",", ", ", ",  ", ",\n", " ,", ",,", " ", ";", ",\t "}
	for n := range 50_000 {
		raw := []byte("[")
		if n%3 == 0 {
			raw = append(raw, "        "[:rng.IntN(9)]...)
		}
		sep, odd := seps[rng.IntN(4)], rng.IntN(4) == 0
		for k := range 1 + rng.IntN(60) {
			if k > 0 {
				if odd && rng.IntN(30) == 0 {
					raw = append(raw, seps[rng.IntN(len(seps))]...)
				} else {
					raw = append(raw, sep...)
				}
			}
			id := rng.Uint64() >> (rng.IntN(32) + 32)
			if odd && rng.IntN(60) == 0 {
				id = rng.Uint64() >> rng.IntN(64)
				raw = append(raw, "0"[:rng.IntN(2)]...)
			}
			raw = strconv.AppendUint(raw, id, 10)
		}
		if raw = append(raw, ']'); odd && rng.IntN(3) == 0 {
			raw[rng.IntN(len(raw))] = byte(rng.IntN(256))
		}
		var want []uint32
		werr := json.Unmarshal(raw, &want)
		if got, err := TokenIDs(nil, raw); (err == nil) != (werr == nil) || err == nil && !slices.Equal(got, want) {
			t.Fatalf("TokenIDs(%q) = %v, %v; encoding/json %v, %v", raw, got, err, want, werr)
		}
		body := append(append([]byte(`{"x":`), raw...), '}')
		var d Doc
		if err := d.Scan(body, Limits{}); (err == nil) != json.Valid(body) {
			t.Fatalf("Scan(%q) = %v; encoding/json says %v", body, err, json.Valid(body))
		}
	}
}

// Blocks in which few ids end and blocks in which many do, with something wrong in each place:
// as many are read as encoding/json reads, or none.
func TestTokenIDsOfOneLength(t *testing.T) {
	for digits := 1; digits < 10; digits++ {
		for _, sep := range []string{",", ", "} {
			var whole []byte
			for k := range 3 * simdBlock / (digits + 1) {
				whole = append(whole, "987654321"[k%3:][:min(digits, 9-k%3)]...)
				whole = append(whole, sep...)
			}
			raw := append(append([]byte("[        "), whole...), '0', ']')
			for at := range raw {
				for _, c := range []byte{raw[at], '0', ',', ' ', ']', '/', ':', 0, 0xff} {
					was := raw[at]
					raw[at] = c
					var want []uint32
					werr := json.Unmarshal(raw, &want)
					if got, err := TokenIDs(nil, raw); (err == nil) != (werr == nil) || err == nil && !slices.Equal(got, want) {
						t.Fatalf("TokenIDs(%q) = %v, %v; encoding/json %v, %v", raw, got, err, want, werr)
					}
					for _, room := range []int{1, maxIDsPerBlock, maxIDsPerBlock + 1, 2 * maxIDsPerBlock} { // what is behind it stays
						dst := make([]uint32, room+4)
						for i := range dst {
							dst[i] = 77
						}
						got, err := TokenIDs(dst[:0:room], raw)
						if err == nil && !slices.Equal(got, want) || !slices.Equal(dst[room:], []uint32{77, 77, 77, 77}) {
							t.Fatalf("TokenIDs(%q) with room for %d: %v, %v", raw, room, got, dst[room:])
						}
					}
					raw[at] = was
				}
			}
		}
	}
}

// The form of 64 bytes together is what it is byte for byte, from block to block.
func TestWideForm(t *testing.T) {
	if !wide {
		t.Skip("no wide registers")
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for n := range 20_000 {
		text := make([]byte, 3*simdBlock)
		for i := range text {
			text[i] = "0123456789012345678901234567,, \x00"[rng.IntN(28+rng.IntN(5))]
		}
		var p simdCarry
		var last byte
		row, zero := 0, false
		for at := 0; at < len(text); at += simdBlock {
			var wrong, commas, spaces uint64
			for i, c := range text[at : at+simdBlock] {
				bit, bad := uint64(1)<<i, false
				switch {
				case c-'0' <= 9:
					row++
					bad = row > 7 || zero && row == 2
					zero = row == 1 && c == '0'
				case c == ',':
					commas |= bit
					bad = row == 0
				case c == ' ':
					spaces |= bit
					bad = last != ','
				default:
					bad = true
				}
				if c-'0' > 9 {
					row, zero = 0, false
				}
				if last = c; bad {
					wrong |= bit
				}
			}
			w, c, s := wideForm(&text[at], &p)
			if w != wrong || c != commas || s != spaces {
				t.Fatalf("text %d, block at %d of %q: %x, %x, %x, want %x, %x, %x", n, at, text, w, c, s, wrong, commas, spaces)
			}
		}
	}
}

// An array that ends too soon is refused, wherever it does.
func TestTokenIDsCutShort(t *testing.T) {
	for _, sep := range []string{",", ", ", ",  "} {
		for digits := 1; digits < 9; digits++ {
			whole := "[        " + strings.Repeat("12345678"[:digits]+sep, 30)
			for n := range len(whole) {
				if ids, err := TokenIDs(nil, []byte(whole[:n])); err == nil {
					t.Fatalf("%q is read as %v", whole[:n], ids)
				}
			}
		}
	}
}

// A scan takes ids along where the prompt is nothing else, and accepts what it ever did.
func TestScannedIDs(t *testing.T) {
	var d Doc
	room := []uint32{7}
	for raw, want := range map[string][]uint32{
		`[1,2,3]`: {1, 2, 3}, "[ 0 ,\n4294967295]": {0, math.MaxUint32}, `[5]`: {5},
		`[]`: nil, `[4294967296]`: nil, `[1,-1]`: nil, `[1,2.5]`: nil, `[1,"a"]`: nil, `["a"]`: nil, `[[1,2]]`: nil, `"1"`: nil, `null`: nil,
		"[1" + strings.Repeat(",1", maxScannedIDs/2) + "]": nil,
	} {
		if err := d.Scan([]byte(`{"model":"m","prompt":`+raw+`}`), Limits{}); err != nil || string(d.Raw(KeyPrompt)) != raw {
			t.Fatalf("prompt %.40s: %.40s, %v", raw, d.Raw(KeyPrompt), err)
		}
		if ids, ok := d.ScannedIDs(KeyTokenIDs, room); ok || !slices.Equal(ids, room) {
			t.Errorf("prompt %.40s: another member's ids are %v", raw, ids)
		}
		ids, ok := d.ScannedIDs(KeyPrompt, room)
		if ok != (want != nil) || ok && !slices.Equal(ids, want) {
			t.Errorf("prompt %.40s: took %v, %v", raw, ids, ok)
		}
		if _, again := d.ScannedIDs(KeyPrompt, nil); again {
			t.Errorf("prompt %.40s: taken twice", raw)
		}
	}
	for _, raw := range []string{`[1,]`, `[1`, `[01]`, `[1 2]`, `[1,2`, `[1,,2]`, `[-]`} {
		if err := d.Scan([]byte(`{"prompt":`+raw+`}`), Limits{}); err == nil {
			t.Errorf("prompt %s is accepted", raw)
		} else if _, ok := d.ScannedIDs(KeyPrompt, nil); ok {
			t.Errorf("prompt %s has ids", raw)
		}
	}
	if err := d.Scan([]byte(`{"prompt":[1,2]}`), Limits{MaxDepth: 1}); err == nil {
		t.Error("an array deeper than allowed is accepted")
	}
	if err := d.Scan([]byte(`{"prompt":[1,2]}`), Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := d.Scan([]byte(`{"prompt":"x"}`), Limits{}); err != nil {
		t.Fatal(err)
	}
	if ids, ok := d.ScannedIDs(KeyPrompt, nil); ok {
		t.Errorf("the body before had %v", ids)
	}
}

// Ids of long prompts are taken along too, each time those of that body, and what memory
// they need does not stay with the Doc.
func TestManyScannedIDs(t *testing.T) {
	var d Doc
	var room []uint32
	for i, n := range []int{10, 20_000, 70_000, 3, 60_000, 70_000, 20_000, 1} {
		want := make([]uint32, n)
		for k := range want {
			want[k] = uint32(100_000*(i%3) + k)
		}
		body := append(AppendTokenIDs([]byte(`{"prompt":`), want), '}')
		if err := d.Scan(body, Limits{}); err != nil {
			t.Fatal(err)
		}
		if n == 60_000 { // nobody takes these
			continue
		}
		ids, ok := d.ScannedIDs(KeyPrompt, room)
		if !ok || !slices.Equal(ids, want) {
			t.Fatalf("body %d: %d ids, %v, want %d", i, len(ids), ok, len(want))
		}
		if cap(d.ids) > maxRetainedIDs {
			t.Errorf("body %d: room for %d ids is kept", i, cap(d.ids))
		}
		room = ids
	}
}

func TestAppendTokenIDs(t *testing.T) {
	for _, ids := range [][]uint32{nil, {0}, {1, 22, math.MaxUint32}} {
		raw := AppendTokenIDs([]byte("x"), ids)
		got, err := TokenIDs(nil, raw[1:])
		if err != nil || !slices.Equal(got, ids) || raw[0] != 'x' {
			t.Errorf("%v -> %s -> %v, %v", ids, raw, got, err)
		}
	}
}

func TestInteger(t *testing.T) {
	for raw, want := range map[string]int64{"0": 0, "-0": 0, "12": 12, "-7": -7, "5.0": 5, "1e3": 1000, "1.5E+1": 15, "-120e-1": -12, "9007199254740992e0": 1 << 53, "1e16": 1e16, "1e18": 1e18, "-1e18": -1e18, "9223372036854775807": math.MaxInt64, "-9223372036854775808": math.MinInt64} {
		if n, ok := Integer([]byte(raw)); !ok || n != want {
			t.Errorf("Integer(%s) = %d, %v", raw, n, ok)
		}
	}
	for _, raw := range []string{"", "-", "1.5", "1e-2", "1.25e1", "1e19", "-9.3e18", "9223372036854775808.0", "1e400", "1e", "5.000000000000000000000000000000000000000000000000000000000000000000001", "9223372036854775808", "-9223372036854775809", "18446744073709551617", "x"} {
		if n, ok := Integer([]byte(raw)); ok {
			t.Errorf("Integer(%s) = %d", raw, n)
		}
	}
}

// TestUnquoteCopies: Unquote into no memory once returned the input's own bytes, which a caller that
// kept the result as scratch memory then overwrote.
func TestUnquoteCopies(t *testing.T) {
	body := []byte(`{"a":"text","b":"other"}`)
	scratch := Unquote(nil, body[5:11])
	scratch = Unquote(scratch[:0], body[16:23])
	if string(body) != `{"a":"text","b":"other"}` || string(scratch) != "other" {
		t.Errorf("the body is %s, the text %s", body, scratch)
	}
	if text := Text(body[5:11]); string(text) != "text" || cap(text) != len(text) {
		t.Errorf("Text = %s with room for %d bytes, which belong to the body", text, cap(text))
	}
}

func TestUnquote(t *testing.T) {
	for raw, want := range map[string]string{
		`""`: "", `"a"`: "a", `"\"\\\/\b\f\n\r\t"`: "\"\\/\b\f\n\r\t", `"\u0041\u00e9x"`: "Aéx", `"\ud83d\ude00"`: "😀",
		`"\ud83dx"`: "\ufffdx", `"\ude00"`: "\ufffd", `"\ud83d\ud83d\ude00"`: "\ufffd😀", `"\ud83d\n"`: "\ufffd\n",
	} {
		if got := string(Text([]byte(raw))); got != want {
			t.Errorf("Text(%s) = %q, want %q", raw, got, want)
		}
		if got := string(Unquote([]byte("x"), []byte(raw))); got != "x"+want {
			t.Errorf("Unquote with a prefix (%s) = %q", raw, got)
		}
	}
}
