package textgen

import (
	"strings"
	"sync"
)

// The vocabulary is the same for every simulated model. Ids, in this order:
//
//	0..15     special tokens; text such as "<|im_start|>" encodes to them, as with real tokenizers
//	16..271   single bytes
//	WordBase  every word of wordList as " word", "word", " Word", "Word"
//	triBase   three lower-case letters, the first may be a space: 27*26*26
//	pairBase  any two bytes: 65536
//
// Encoding splits text into words (letters with the space before them) and the text
// between words. A listed word is one token; everything else is encoded greedily in
// pieces of three, two and one bytes. A newline is always a token of its own, so a turn
// of a chat never changes the tokens of earlier turns. Every id decodes to fixed bytes,
// and decoding an encoded text returns it unchanged. A token is about 3 bytes of English.
const (
	EOS = iota
	tokStart
	tokEnd
	tokPad
	tokImage

	ByteBase = 16
	WordBase = ByteBase + 256
)

var specialText = [...]string{"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<|image|>"}

type vocabulary struct {
	Words    int // listed words
	triBase  uint32
	pairBase uint32
	size     uint32
	ids      map[string]uint32 // the four forms of each word
	pieces   []string          // text of every id
}

// Vocab returns the vocabulary. It is built on first use: 86,000 strings that share two
// backing strings.
var Vocab = sync.OnceValue(func() *vocabulary {
	list := strings.Fields(wordList)
	v := &vocabulary{Words: len(list), ids: make(map[string]uint32, 4*len(list))}
	v.triBase = uint32(WordBase + 4*len(list))
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
		v.pieces[ByteBase+i] = pairText[2*i+1 : 2*i+2]
	}
	for i, w := range list {
		cap := strings.ToUpper(w[:1]) + w[1:]
		for j, form := range [4]string{" " + w, w, " " + cap, cap} {
			id := uint32(WordBase + 4*i + j)
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

// Append appends the token ids of s to dst.
func (v *vocabulary) Append(dst []uint32, s string) []uint32 {
	for i := 0; i < len(s); {
		c := s[i]
		if c == '<' {
			if id, n := specialAt(s[i:]); n > 0 {
				dst, i = append(dst, id), i+n
				continue
			}
		}
		if c == '\n' {
			dst, i = append(dst, ByteBase+'\n'), i+1
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
			dst = append(dst, ByteBase+uint32(s[0]))
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

// Piece returns the text of one id, or "" for an id outside the vocabulary.
func (v *vocabulary) Piece(id uint32) string {
	if id < v.size {
		return v.pieces[id]
	}
	return ""
}

// decode returns the text of ids.
func (v *vocabulary) decode(ids []uint32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(v.Piece(id))
	}
	return b.String()
}

// Tokenize returns the token ids of a text, as /tokenize of every simulated engine does.
func Tokenize(text string) []uint32 { return Vocab().Append(nil, text) }

// Detokenize returns the text of ids; unknown ids have none.
func Detokenize(ids []uint32) string { return Vocab().decode(ids) }

// VocabSize returns one more than the largest token id.
func VocabSize() int { return int(Vocab().size) }
