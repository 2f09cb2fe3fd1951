package incremental

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// toy is a test double of the Hugging Face pipeline: the search for added tokens with their flags,
// normalizers and pre-tokenizers of a few types, and BPE over bytes with random merges. It follows
// tokenizers 0.23 stage by stage, in the plainest way. What it cannot show, namely that the real
// library behaves so, native/tokenizer's tests show with real tokenizers.
type toy struct {
	Added         []AddedToken
	Normalizer    string // "", "prepend" (Llama 2), "lower", "strip"
	PreTokenizer  string // "bytelevel", "metaspace-first", "metaspace-always", "none"
	AddPrefix     bool   // of bytelevel
	Before, After []uint32
	merges        map[[2]uint32]uint32
	next          uint32
}

// newToy returns a toy whose merges come from rng.
func newToy(rng *rand.Rand, added []AddedToken, normalizer, pre string, addPrefix bool) *toy {
	t := &toy{Added: added, Normalizer: normalizer, PreTokenizer: pre, AddPrefix: addPrefix, merges: map[[2]uint32]uint32{}, next: 256}
	letters := []uint32{' ', 'e', 't', 'a', 'o', 'i', 'n', '<', '|', '>', '\n', 0xe2, 0x96, 0x81, 's', 'x'}
	for range 400 {
		pick := func() uint32 {
			if t.next > 256 && rng.IntN(3) == 0 {
				return 256 + rng.Uint32N(t.next-256)
			}
			return letters[rng.IntN(len(letters))]
		}
		pair := [2]uint32{pick(), pick()}
		if _, ok := t.merges[pair]; !ok {
			t.merges[pair] = t.next
			t.next++
		}
	}
	for i := range t.Added {
		t.Added[i].ID = 10_000 + uint32(i)
	}
	return t
}

// file returns the tokenizer.json that NewRules reads.
func (t *toy) file() []byte {
	kind := func(k string, m map[string]any) any {
		if k == "" || k == "none" {
			return nil
		}
		m["type"] = k
		return m
	}
	normalizers := map[string]any{"": nil, "lower": kind("Lowercase", map[string]any{}), "strip": kind("Strip", map[string]any{}),
		"prepend": map[string]any{"type": "Sequence", "normalizers": []any{map[string]any{"type": "Prepend"}, map[string]any{"type": "Replace"}}}}
	pres := map[string]any{"none": nil, "bytelevel": kind("ByteLevel", map[string]any{}), "metaspace-first": kind("Metaspace", map[string]any{}), "metaspace-always": kind("Metaspace", map[string]any{})}
	single := []any{}
	specials := map[string]any{}
	add := func(name string, ids []uint32) {
		if ids != nil {
			single = append(single, map[string]any{"SpecialToken": map[string]any{"id": name}})
			specials[name] = map[string]any{"ids": ids}
		}
	}
	add("before", t.Before)
	single = append(single, map[string]any{"Sequence": map[string]any{"id": "A"}})
	add("after", t.After)
	b, err := json.Marshal(map[string]any{"added_tokens": t.Added, "normalizer": normalizers[t.Normalizer], "pre_tokenizer": pres[t.PreTokenizer],
		"post_processor": map[string]any{"type": "TemplateProcessing", "single": single, "special_tokens": specials}, "model": map[string]any{"type": "BPE"}})
	if err != nil {
		panic(err)
	}
	return b
}

// piece is a part of the text: a token, or text that begins at an offset of the original.
type piece struct {
	text   string
	offset int
	id     int64 // -1: none
}

func (t *toy) Encode(dst []uint32, text []byte, addSpecial bool) ([]uint32, error) {
	if addSpecial {
		dst = append(dst, t.Before...)
	}
	for _, p := range t.split(string(text), 0, false) {
		if p.id >= 0 {
			dst = append(dst, uint32(p.id))
			continue
		}
		for _, q := range t.split(t.normalize(p.text), p.offset, true) {
			if q.id >= 0 {
				dst = append(dst, uint32(q.id))
				continue
			}
			for _, word := range t.preTokenize(q.text, q.offset) {
				dst = t.bpe(dst, word)
			}
		}
	}
	if addSpecial {
		dst = append(dst, t.After...)
	}
	return dst, nil
}

// split finds the added tokens that are, or are not, normalized: leftmost, then longest.
func (t *toy) split(text string, offset int, normalized bool) []piece {
	var out []piece
	start := 0
	flush := func(to int) {
		if to > start {
			out = append(out, piece{text[start:to], offset + start, -1})
		}
	}
	for i := 0; i < len(text); {
		best := -1
		for j, a := range t.Added {
			if a.Normalized == normalized && strings.HasPrefix(text[i:], a.Content) && (best < 0 || len(a.Content) > len(t.Added[best].Content)) {
				best = j
			}
		}
		if best < 0 {
			i++
			continue
		}
		a := t.Added[best]
		from, to := i, i+len(a.Content)
		if a.SingleWord {
			l, _ := utf8.DecodeLastRuneInString(text[:from])
			r, _ := utf8.DecodeRuneInString(text[to:])
			if from > 0 && isWord(l) || to < len(text) && isWord(r) {
				i = to
				continue
			}
		}
		if a.LStrip {
			from = max(start, len(strings.TrimRightFunc(text[:from], unicode.IsSpace)))
		}
		if a.RStrip {
			to = len(text) - len(strings.TrimLeftFunc(text[to:], unicode.IsSpace))
		}
		flush(from)
		out = append(out, piece{text[from:to], offset + from, int64(a.ID)})
		i, start = to, to
	}
	flush(len(text))
	return out
}

func isWord(r rune) bool { return r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) }

func (t *toy) normalize(s string) string {
	switch t.Normalizer {
	case "prepend":
		return "▁" + strings.ReplaceAll(s, " ", "▁")
	case "lower":
		return strings.ToLower(s)
	case "strip":
		return strings.TrimSpace(s)
	}
	return s
}

func (t *toy) preTokenize(s string, offset int) []string {
	switch t.PreTokenizer {
	case "bytelevel":
		if t.AddPrefix && !strings.HasPrefix(s, " ") {
			s = " " + s
		}
		return cutBefore(s, " ")
	case "metaspace-first", "metaspace-always":
		s = strings.ReplaceAll(s, " ", "▁")
		if (t.PreTokenizer == "metaspace-always" || offset == 0) && !strings.HasPrefix(s, "▁") {
			s = "▁" + s
		}
		return cutBefore(s, "▁")
	}
	return []string{s}
}

// cutBefore cuts s before each sep.
func cutBefore(s, sep string) (out []string) {
	for len(s) > 0 {
		i := strings.Index(s[1:], sep)
		if i < 0 {
			return append(out, s)
		}
		out, s = append(out, s[:i+1]), s[i+1:]
	}
	return out
}

func (t *toy) bpe(dst []uint32, word string) []uint32 {
	ids := make([]uint32, len(word))
	for i := range ids {
		ids[i] = uint32(word[i])
	}
	for {
		best, at := t.next, -1
		for i := range len(ids) - 1 {
			if m, ok := t.merges[[2]uint32{ids[i], ids[i+1]}]; ok && m < best {
				best, at = m, i
			}
		}
		if at < 0 {
			return append(dst, ids...)
		}
		ids[at] = best
		ids = slices.Delete(ids, at+1, at+2)
	}
}
