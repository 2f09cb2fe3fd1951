package jsonscan

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"strconv"
	"unicode/utf8"
)

// Value is the position of a member in the body: Body[KeyStart] is the opening quote of its key,
// and Body[Start:End] the value without surrounding space. All three are byte offsets.
type Value struct {
	KeyStart, Start, End int
	Kind                 Kind
}

// Limits bound what a scan accepts.
type Limits struct {
	MaxDepth int // nesting of objects and arrays; 0: 64; at most 1024
}

// Doc is one scanned body, which it borrows. A Doc must not be used concurrently while Scan runs.
// Afterwards it is read-only, except for ScannedIDs.
type Doc struct {
	Body []byte
	// Open and Close are the offsets of the outer object's braces. Members is the number of its
	// members.
	Open, Close, Members int

	samplingMembers int       // members of sampling_params, if that is an object
	present         [2]uint64 // by Key: which Values are not Absent; the others are undefined

	// MayBeSensitive: a member at any depth of the body may have one of the names for which
	// IsSensitive is true.
	MayBeSensitive bool

	ids       []uint32 // of the member idsKey, see ScannedIDs; reused by the next scan
	idsKey    Key
	pooledIDs *[]uint32 // the pooled slice of ids, if it is from a pool

	Values [NumKeys]Value
}

var _ [128 - NumKeys]struct{} // each key has a bit in Doc.present

const (
	defaultDepth = 64
	hardDepth    = 1024 // the scan recurses, so this bounds any configuration
)

func (l Limits) depth() int {
	if l.MaxDepth <= 0 {
		return defaultDepth
	}
	return min(l.MaxDepth, hardDepth)
}

// Scan scans body into d and discards the previous content. On a *SyntaxError d is empty. The body
// must be one object, well-formed by RFC 8259 and valid UTF-8. Escaped lone surrogates are
// accepted, as engines do. A known member may occur only once, however its key is escaped
// ("mod\u0065l" is model), and must have its type: model string or null, stream bool or null,
// counts integers or null (also 1.0 and 1e3, as engines accept them), messages and token_ids
// arrays, and so on. Unknown members are only checked for form.
func (d *Doc) Scan(body []byte, lim Limits) error {
	d.reset()
	s := scanner{b: body, maxDepth: lim.depth(), doc: d}
	d.Open = s.document(scopeTop)
	if s.err != nil {
		d.reset()
		return s.err
	}
	d.Body = body
	d.Close = s.last
	return nil
}

// reset empties d and keeps its memory for ids. Values that were absent are not written.
func (d *Doc) reset() {
	for i, set := range d.present {
		for ; set != 0; set &= set - 1 {
			d.Values[64*i+bits.TrailingZeros64(set)] = Value{}
		}
	}
	d.Body, d.Open, d.Close, d.Members, d.samplingMembers, d.present, d.MayBeSensitive = nil, 0, 0, 0, 0, [2]uint64{}, false
	d.releaseIDs(d.ids)
}

// has reports whether k is present.
func (d *Doc) has(k Key) bool { return d.present[k>>6]>>(k&63)&1 != 0 }

// Has reports whether k is present and not null.
func (d *Doc) Has(k Key) bool { return d.has(k) && d.Values[k].Kind > Null }

// Raw returns the bytes of the value in the body; nil: absent.
func (d *Doc) Raw(k Key) []byte {
	if !d.has(k) {
		return nil
	}
	v := &d.Values[k]
	return d.Body[v.Start:v.End]
}

// Int returns an integer member; ok is false if it is absent, null or not an int64.
func (d *Doc) Int(k Key) (n int64, ok bool) {
	if !d.has(k) || d.Values[k].Kind != Number {
		return 0, false
	}
	return Integer(d.Raw(k))
}

// Bool returns a boolean member. Absent and null are false.
func (d *Doc) Bool(k Key) bool {
	return d.has(k) && d.Values[k].Kind == Bool && d.Body[d.Values[k].Start] == 't'
}

// Find locates a top-level member of any object, for engine responses (kv_transfer_params, usage,
// tokens). ok is false if it is absent. Of several members with the name the last counts, as in the
// engines' parsers. It returns a *SyntaxError if body is not a well-formed object. The document is
// checked as by Scan with default limits; the rules of known members do not apply.
func Find(body []byte, name string) (v Value, ok bool, err error) {
	v, _, err = FindTwo(body, name, "")
	return v, v.Kind != Absent, err
}

// FindTwo is Find for two members in one pass. An absent one is the zero Value; on an error both
// are.
func FindTwo(body []byte, first, second string) (one, two Value, err error) {
	s := scanner{b: body, maxDepth: defaultDepth, names: [2]string{first, second}}
	s.document(scopeFind)
	if s.err != nil {
		return Value{}, Value{}, s.err
	}
	return s.found[0], s.found[1], nil
}

// scope is how the members of an object are treated.
type scope uint8

const (
	scopeNone     scope = iota // only checked for form
	scopeTop                   // known members of a request
	scopeSampling              // known members of sampling_params
	scopeFind                  // members by name
)

// scanner is one pass over b. Its methods take the offset at which they begin and return the offset
// after their value, or -1 with err set.
type scanner struct {
	b        []byte
	maxDepth int
	doc      *Doc // for scopeTop and scopeSampling
	last     int  // offset of the closing brace of the last object read
	err      error
	names    [2]string // for scopeFind
	found    [2]Value

	// For FindTokenIDs.
	ids           []uint32 // after ids[:idsFrom] those of names[0], for foundIDsValue
	idsFrom       int
	wantIDs       bool
	foundIDsValue bool
}

func (s *scanner) fail(offset int, field, got, want string) int {
	s.err = &SyntaxError{Offset: offset, Field: field, Got: got, Want: want}
	return -1
}

func (s *scanner) unexpected(i int, want string) int {
	return s.fail(min(i, len(s.b)), "", unexpected(s.b, i), want)
}

// document reads the outer object and returns the offset of its opening brace.
func (s *scanner) document(in scope) int {
	open := skipSpace(s.b, 0)
	if open >= len(s.b) {
		return s.fail(open, "", "an empty body", "a JSON object")
	}
	if s.b[open] != '{' {
		return s.unexpected(open, "a JSON object")
	}
	i := s.object(open, 1, in)
	if i < 0 {
		return -1
	}
	s.last = i - 1
	if i = skipSpace(s.b, i); i < len(s.b) {
		return s.unexpected(i, "nothing after the object")
	}
	return open
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// value reads the value at i. depth is its own nesting depth, if it nests.
func (s *scanner) value(i, depth int) (end int, kind Kind) {
	b := s.b
	if i >= len(b) {
		return s.unexpected(i, "a value"), Absent
	}
	switch c := b[i]; {
	case c == '"':
		return s.str(i), String
	case c == '-' || '0' <= c && c <= '9':
		return s.number(i), Number
	case c == '{':
		return s.object(i, depth, scopeNone), Object
	case c == '[':
		return s.array(i, depth), Array
	case c == 't' && hasLiteral(b, i, "true"):
		return i + 4, Bool
	case c == 'f' && hasLiteral(b, i, "false"):
		return i + 5, Bool
	case c == 'n' && hasLiteral(b, i, "null"):
		return i + 4, Null
	}
	return s.unexpected(i, "a value"), Absent
}

func hasLiteral(b []byte, i int, lit string) bool {
	return len(b)-i >= len(lit) && string(b[i:i+len(lit)]) == lit
}

func (s *scanner) tooDeep(i int) int {
	n := strconv.Itoa(s.maxDepth)
	return s.fail(i, "", "nesting deeper than "+n, "at most "+n+" levels of objects and arrays")
}

// object reads the object whose brace is at i.
func (s *scanner) object(i, depth int, in scope) int {
	if depth > s.maxDepth {
		return s.tooDeep(i)
	}
	b, n := s.b, 0
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == '}' {
		return i + 1
	}
	for {
		if i >= len(b) || b[i] != '"' {
			return s.unexpected(i, "a member's name in quotes")
		}
		key := i
		if i = s.str(i); i < 0 {
			return -1
		}
		keyEnd := i
		if i < len(b) && b[i] != ':' {
			i = skipSpace(b, i)
		}
		if i >= len(b) || b[i] != ':' {
			return s.unexpected(i, `":" after a member's name`)
		}
		if i++; i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if in == scopeNone {
			if s.doc != nil && mayBeSensitive(b[key+1:keyEnd-1]) {
				s.doc.MayBeSensitive = true
			}
			i, _ = s.value(i, depth+1)
		} else {
			i = s.knownMember(key, keyEnd, i, depth, in)
		}
		if i < 0 {
			return -1
		}
		n++
		if i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i >= len(b) {
			return s.unexpected(i, `"," or "}"`)
		}
		switch b[i] {
		case ',':
			if i++; i < len(b) && b[i] <= ' ' {
				i = skipSpace(b, i)
			}
		case '}':
			if in == scopeTop {
				s.doc.Members = n
			} else if in == scopeSampling {
				s.doc.samplingMembers = n
			}
			return i + 1
		default:
			return s.unexpected(i, `"," or "}"`)
		}
	}
}

// knownMember reads the value at i of the member with the key b[key:keyEnd], and stores it if in
// knows the name.
func (s *scanner) knownMember(key, keyEnd, i, depth int, in scope) int {
	var buf [maxNameLen]byte
	name := unescapedName(s.b[key+1:keyEnd-1], buf[:0], max(len(s.names[0]), len(s.names[1])))
	if in == scopeFind {
		if s.wantIDs && string(name) == s.names[0] {
			if end := s.foundIDs(i, depth+1); end >= 0 {
				return end
			}
		}
		end, kind := s.value(i, depth+1)
		for n := range s.names {
			if end >= 0 && string(name) == s.names[n] {
				s.found[n] = Value{KeyStart: key, Start: i, End: end, Kind: kind}
			}
		}
		return end
	}
	k := noKey
	if in == scopeTop {
		k = topKey(name)
	} else {
		k = samplingKey(name)
	}
	if k == noKey {
		s.doc.MayBeSensitive = s.doc.MayBeSensitive || mayBeSensitive(name)
		end, _ := s.value(i, depth+1)
		return end
	}
	if s.doc.has(k) {
		return s.fail(key, k.Name(), "a second "+strconv.Quote(members[k].name), "it only once")
	}
	var end int
	var kind Kind
	switch {
	case k == KeySamplingParams && i < len(s.b) && s.b[i] == '{':
		end, kind = s.object(i, depth+1, scopeSampling), Object
	case k == KeyPrompt || k == KeyTokenIDs || k == KeyInputIDs:
		if end, kind = s.promptIDs(k, i, depth+1), Array; end < 0 {
			end, kind = s.value(i, depth+1)
		}
	default:
		end, kind = s.value(i, depth+1)
	}
	if end < 0 {
		return -1
	}
	v := &s.doc.Values[k]
	*v = Value{KeyStart: key, Start: i, End: end, Kind: kind}
	s.doc.present[k>>6] |= 1 << (k & 63)
	return s.checkType(k, v)
}

// checkType checks the type of k and returns the value's end.
func (s *scanner) checkType(k Key, v *Value) int {
	m := &members[k]
	raw := s.b[v.Start:v.End]
	if m.allowed&(1<<v.Kind) == 0 {
		return s.fail(v.Start, m.name, excerpt(raw)+" ("+v.Kind.String()+")", m.want)
	}
	if m.count && v.Kind == Number {
		if _, ok := Integer(raw); !ok {
			return s.fail(v.Start, m.name, excerpt(raw)+" (number)", countRange)
		}
	}
	return v.End
}

// unescapedName returns a key without escapes, written to buf. A name longer than longest (at least
// maxNameLen), which cannot be a known one, is returned unchanged.
func unescapedName(raw, buf []byte, longest int) []byte {
	if len(raw) > 6*max(maxNameLen, longest) || bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	return appendUnescaped(buf, raw)
}

// array reads the array whose bracket is at i.
func (s *scanner) array(i, depth int) int {
	if depth > s.maxDepth {
		return s.tooDeep(i)
	}
	b := s.b
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == ']' {
		return i + 1
	}
	for {
		if i = skipIDs(b, i); i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i, _ = s.value(i, depth+1); i < 0 {
			return -1
		}
		if i < len(b) && b[i] <= ' ' {
			i = skipSpace(b, i)
		}
		if i >= len(b) {
			return s.unexpected(i, `"," or "]"`)
		}
		switch b[i] {
		case ',':
			if i++; i < len(b) && b[i] <= ' ' {
				i = skipSpace(b, i)
			}
		case ']':
			return i + 1
		default:
			return s.unexpected(i, `"," or "]"`)
		}
	}
}

// skipIDs skips elements that are plain integers of up to eight digits followed by a comma and at
// most one space, as in long arrays of token ids. It stops at the first other element.
func skipIDs(b []byte, i int) int {
	if wide && len(b)-i >= simdBlock && b[i]-'0' <= 9 {
		i = skipWide(b, i)
	}
	for i+9 <= len(b) {
		n := digits(binary.LittleEndian.Uint64(b[i:]))
		if n == 0 || b[i+n] != ',' || b[i] == '0' && n > 1 {
			return i
		}
		if i += n + 1; i < len(b) && b[i] == ' ' {
			i++
		}
	}
	return i
}

// number reads the number at i by the grammar of RFC 8259, section 6.
func (s *scanner) number(i int) int {
	b := s.b
	if b[i] == '-' {
		i++
	}
	switch {
	case i < len(b) && b[i] == '0':
		if i++; i < len(b) && b[i]-'0' <= 9 {
			return s.unexpected(i, "no digit after a leading zero")
		}
	case i < len(b) && b[i]-'0' <= 9:
		i = skipDigits(b, i)
	default:
		return s.unexpected(i, "a digit")
	}
	if i < len(b) && b[i] == '.' {
		start := i + 1
		if i = skipDigits(b, start); i == start {
			return s.unexpected(i, "a digit after the point")
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		start := i
		if i = skipDigits(b, start); i == start {
			return s.unexpected(i, "a digit in the exponent")
		}
	}
	return i
}

func skipDigits(b []byte, i int) int {
	for i < len(b) && b[i]-'0' <= 9 {
		i++
	}
	return i
}

// str reads the string whose opening quote is at i.
func (s *scanner) str(i int) int {
	end, high := stringEnd(s.b, i+1)
	if end < 0 {
		return s.badString(^end)
	}
	if high && !validUTF8(s.b[i:end]) {
		return s.badUTF8(i, end)
	}
	return end
}

func (s *scanner) badString(i int) int {
	switch {
	case i >= len(s.b):
		return s.unexpected(i, "a closing quote")
	case s.b[i] == '\\':
		end := min(i+6, len(s.b))
		return s.fail(i, "", `the escape "`+excerpt(s.b[i:end])+`"`, `one of \" \\ \/ \b \f \n \r \t or \u and four hex digits`)
	}
	return s.fail(i, "", "the control character "+unexpected(s.b, i)+" in a string", `it escaped, as in \n`)
}

func (s *scanner) badUTF8(i, end int) int {
	for i < end {
		r, n := utf8.DecodeRune(s.b[i:end])
		if r == utf8.RuneError && n == 1 {
			break
		}
		i += n
	}
	return s.fail(i, "", "invalid UTF-8 "+unexpected(s.b[:i+1], i), "a body in UTF-8")
}
