package sim

import (
	"strings"
	"sync"
)

// The vocabulary is the same for every simulated model. Ids, in this order:
//
//	0..15     special tokens; text such as "<|im_start|>" gives them, as with real tokenizers
//	16..271   single bytes
//	wordBase  every word of wordList as " word", "word", " Word", "Word"
//	triBase   three lower-case letters, the first may be a space: 27*26*26
//	pairBase  any two bytes: 65536
//
// Encoding cuts text into words (a letter run with the space before it) and what
// lies between, takes a listed word whole and anything else greedily by threes,
// twos and ones; a newline is always a token of its own, so a chat's turns never
// change the tokens of the turns before. Every id decodes to fixed bytes and
// decode(encode(s)) == s for every s. About 3 bytes of English to a token.
const (
	tokEOS = iota
	tokStart
	tokEnd
	tokPad
	tokImage

	byteBase = 16
	wordBase = byteBase + 256
)

var specialText = [...]string{"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<|image|>"}

type vocabulary struct {
	words    int // listed words
	triBase  uint32
	pairBase uint32
	size     uint32
	ids      map[string]uint32 // the four forms of each word
	pieces   []string          // text of every id
}

// vocab is built on first use: 86k strings that share two backings.
var vocab = sync.OnceValue(func() *vocabulary {
	list := strings.Fields(wordList)
	v := &vocabulary{words: len(list), ids: make(map[string]uint32, 4*len(list))}
	v.triBase = uint32(wordBase + 4*len(list))
	v.pairBase = v.triBase + 27*26*26
	v.size = v.pairBase + 65536
	v.pieces = make([]string, v.size)
	copy(v.pieces, specialText[:])
	pairs := make([]byte, 0, 2*65536)
	for i := range 65536 {
		pairs = append(pairs, byte(i>>8), byte(i))
	}
	pairText := string(pairs)
	for i := range 65536 {
		v.pieces[int(v.pairBase)+i] = pairText[2*i : 2*i+2]
	}
	for i := range 256 {
		v.pieces[byteBase+i] = pairText[2*i+1 : 2*i+2]
	}
	for i, w := range list {
		cap := strings.ToUpper(w[:1]) + w[1:]
		for j, form := range [4]string{" " + w, w, " " + cap, cap} {
			id := uint32(wordBase + 4*i + j)
			v.pieces[id] = form
			if _, taken := v.ids[form]; !taken {
				v.ids[form] = id
			}
		}
	}
	tris := make([]byte, 0, 3*27*26*26)
	const first = " abcdefghijklmnopqrstuvwxyz"
	for i := range 27 * 26 * 26 {
		tris = append(tris, first[i/676], byte('a'+i/26%26), byte('a'+i%26))
	}
	triText := string(tris)
	for i := range 27 * 26 * 26 {
		v.pieces[int(v.triBase)+i] = triText[3*i : 3*i+3]
	}
	return v
})

func isLetter(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' }
func isLower(c byte) bool  { return c >= 'a' && c <= 'z' }

// encode appends the tokens of s to dst.
func (v *vocabulary) encode(dst []uint32, s string) []uint32 {
	for i := 0; i < len(s); {
		c := s[i]
		if c == '<' {
			if id, n := specialAt(s[i:]); n > 0 {
				dst, i = append(dst, id), i+n
				continue
			}
		}
		if c == '\n' {
			dst, i = append(dst, byteBase+'\n'), i+1
			continue
		}
		j := i
		if c == ' ' {
			j++
		}
		k := j
		for k < len(s) && isLetter(s[k]) {
			k++
		}
		if k > j {
			if id, ok := v.ids[s[i:k]]; ok {
				dst = append(dst, id)
			} else {
				dst = v.encodeBytes(dst, s[i:k])
			}
			i = k
			continue
		}
		for k = i + 1; k < len(s) && !isLetter(s[k]) && s[k] != ' ' && s[k] != '\n' && s[k] != '<'; k++ {
		}
		dst = v.encodeBytes(dst, s[i:k])
		i = k
	}
	return dst
}

// encodeBytes appends greedy pieces of up to three bytes.
func (v *vocabulary) encodeBytes(dst []uint32, s string) []uint32 {
	for len(s) > 0 {
		switch {
		case len(s) >= 3 && (s[0] == ' ' || isLower(s[0])) && isLower(s[1]) && isLower(s[2]):
			var a uint32
			if s[0] != ' ' {
				a = uint32(s[0]-'a') + 1
			}
			dst = append(dst, v.triBase+a*676+uint32(s[1]-'a')*26+uint32(s[2]-'a'))
			s = s[3:]
		case len(s) >= 2:
			dst = append(dst, v.pairBase+uint32(s[0])<<8+uint32(s[1]))
			s = s[2:]
		default:
			dst = append(dst, byteBase+uint32(s[0]))
			s = ""
		}
	}
	return dst
}

func specialAt(s string) (uint32, int) {
	for id, t := range specialText {
		if strings.HasPrefix(s, t) {
			return uint32(id), len(t)
		}
	}
	return 0, 0
}

// piece is the text of one id; ids outside the vocabulary have none.
func (v *vocabulary) piece(id uint32) string {
	if id < v.size {
		return v.pieces[id]
	}
	return ""
}

// decode is the text of ids.
func (v *vocabulary) decode(ids []uint32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(v.piece(id))
	}
	return b.String()
}

// Tokenize gives the ids of a text as every simulated engine's /tokenize does.
func Tokenize(text string) []uint32 { return vocab().encode(nil, text) }

// Detokenize gives the text of ids; unknown ids give none.
func Detokenize(ids []uint32) string { return vocab().decode(ids) }

// VocabSize is one more than the largest token id.
func VocabSize() int { return int(vocab().size) }
