package fieldrules

import (
	"strconv"
	"strings"

	"sluice/dataplane/jsonscan"
)

// fieldScan checks every member of a JSON value against engineFields in one pass: each byte
// is read once, whatever the shape, so that a hostile body costs no more than an honest one
// of its size. The value must be well-formed (jsonscan.Doc.Scan has accepted it); on
// anything else the pass ends early.
type fieldScan struct {
	b     []byte
	pos   int
	hosts MediaHosts
	text  []byte // scratch of judgeURL; at most maxMediaURL bytes
	bad   finding
}

// finding is a value that engines may not see. The zero finding is none.
type finding struct {
	start, end int // the value's bytes
	problem    problem
}

type problem uint8

const (
	noProblem problem = iota
	badMediaURL
	badRequestName
	nestedRequestNames
	textArgument
	loaderOption
)

func (f finding) found() bool { return f.problem != noProblem }

// first returns f, or g if f is none.
func (f finding) first(g finding) finding {
	if f.found() {
		return f
	}
	return g
}

// memberRule says how the value of a member is checked.
type memberRule uint8

const (
	ruleNone      memberRule = iota
	ruleOpaque               // engines do not act on it
	ruleName                 // an id of the request, or a list of them
	ruleArguments            // arguments of a loader
	ruleMedia                // names media
	ruleURL                  // names media if its object does
	ruleType                 // says whether its object names media
)

// ruleOf returns the rule for a member of an object at depth (1 is the body). name is in
// lower case; first is the first byte of the value.
func ruleOf(name []byte, first byte, depth int) memberRule {
	switch string(name) {
	case "rid":
		return ruleName
	case "mm_processor_kwargs":
		return ruleArguments
	case "url":
		return ruleURL
	case "type":
		return ruleType
	case "source":
		if first == '"' { // a document's title; Anthropic's source is an object
			return ruleNone
		}
		return ruleMedia
	}
	switch {
	case isOpaqueMember(name, depth):
		return ruleOpaque
	case jsonscan.IsSensitive(name):
		return ruleMedia
	}
	return ruleNone
}

// value checks the value at pos, an element or a member of a container at depth-1, and
// moves pos behind it. With asMedia it returns the first URL in it that would be refused if
// the value named media. Definite findings are in s.bad.
func (s *fieldScan) value(asMedia bool, depth int) (ifMedia finding) {
	switch s.peek() {
	case '"':
		start := s.pos
		s.skipString()
		if asMedia {
			return s.judgeURL(start, s.pos)
		}
	case '[':
		for s.open(); s.more(']'); {
			if s.skipNumbers(); s.peek() == ']' {
				continue
			}
			ifMedia = ifMedia.first(s.value(asMedia, depth+1))
			if s.bad.found() {
				return finding{}
			}
		}
	case '{':
		return s.object(depth)
	default:
		s.skipWord()
	}
	return ifMedia
}

// object checks the object at pos. It returns what is wrong with its url if it names media.
func (s *fieldScan) object(depth int) (url finding) {
	isMedia := false
	var buf [6 * maxRuledName]byte
	for s.open(); s.more('}'); {
		name := s.name(buf[:0])
		start := s.pos
		switch ruleOf(name, s.peek(), depth) {
		case ruleOpaque:
			s.skipValue()
		case ruleName:
			s.requestNames()
		case ruleArguments:
			s.arguments()
		case ruleMedia:
			s.bad = s.bad.first(s.value(true, depth+1))
		case ruleURL:
			url = url.first(s.value(true, depth+1))
		case ruleType: // engines differ in which of two they take: each counts
			s.value(false, depth+1)
			isMedia = isMedia || namesMedia(s.b[start:s.pos])
		default:
			s.value(false, depth+1)
		}
		if s.bad.found() {
			return finding{}
		}
	}
	if isMedia {
		s.bad = url
	}
	return url
}

// requestNames checks an id that a client gives its request, or an array of them.
func (s *fieldScan) requestNames() {
	if s.peek() != '[' {
		s.requestName()
		return
	}
	for s.open(); s.more(']') && !s.bad.found(); {
		s.requestName()
	}
}

func (s *fieldScan) requestName() {
	start, first := s.pos, s.peek()
	s.skipValue()
	switch {
	case first == '[' || first == '{':
		s.bad = finding{start, s.pos, nestedRequestNames}
	case first == '"' && !isRequestName(s.b[start:s.pos]):
		s.bad = finding{start, s.pos, badRequestName}
	}
}

// arguments checks a value that an engine passes to a loader. A string could be a path, an address or
// a credential there.
func (s *fieldScan) arguments() {
	switch s.peek() {
	case '"':
		start := s.pos
		s.skipString()
		s.bad = finding{start, s.pos, textArgument}
	case '[':
		for s.open(); s.more(']') && !s.bad.found(); {
			if s.skipNumbers(); s.peek() != ']' {
				s.arguments()
			}
		}
	case '{':
		var buf [6 * maxRuledName]byte
		for s.open(); s.more('}') && !s.bad.found(); {
			if isLoaderOption(s.name(buf[:0])) && s.peek() != 'n' { // null sets nothing
				start := s.pos
				s.skipValue()
				s.bad = finding{start, s.pos, loaderOption}
				return
			}
			s.arguments()
		}
	default:
		s.skipWord()
	}
}

// judgeURL checks the string in s.b[start:end] as the place of media.
func (s *fieldScan) judgeURL(start, end int) finding {
	verdict, text := judgeURL(s.b[start:end], s.text[:0], s.hosts)
	if cap(text) > cap(s.text) {
		s.text = text
	}
	if verdict.why == urlAllowed {
		return finding{}
	}
	return finding{start, end, badMediaURL}
}

// field makes the refusal of s.bad: the pass over the body is repeated to find the path.
func (s *fieldScan) field() *Refusal {
	if !s.bad.found() {
		return nil
	}
	raw := s.b[s.bad.start:s.bad.end]
	bad := new(Refusal)
	switch s.bad.problem {
	case badMediaURL:
		verdict, _ := judgeURL(raw, nil, s.hosts)
		bad.Forbidden, bad.Message = true, verdict.message()
	case badRequestName:
		bad.Message = requestNameMessage(raw)
	case nestedRequestNames:
		bad.Message = "must be a string or an array of strings, got an array or object in it"
	case textArgument:
		bad.Forbidden, bad.Message = true, "is a string: engines pass these arguments to a loader, which may read it as a path, an address or a credential; want numbers, true, false, null, and arrays and objects of these"
	case loaderOption:
		bad.Forbidden, bad.Message = true, "says from where an engine loads a processor and may not be sent by a client; leave it out"
	}
	path := fieldScan{b: s.b}
	path.locate(s.bad.start, bad)
	return bad
}

// locate adds the names on the way from pos to the value that begins at offset at,
// innermost first. It returns whether the value at pos holds that offset.
func (s *fieldScan) locate(at int, bad *Refusal) bool {
	if s.peek() != 0 && s.pos == at {
		return true
	}
	switch s.peek() {
	case '[':
		n := 0
		for s.open(); s.more(']'); n++ {
			if s.locate(at, bad) {
				bad.within(strconv.Itoa(n))
				return true
			}
		}
	case '{':
		for s.open(); s.more('}'); {
			key := s.pos
			s.skipString()
			name := s.b[key:s.pos]
			s.colon()
			if s.locate(at, bad) {
				bad.within(memberName(name))
				return true
			}
		}
	default:
		s.skipValue()
	}
	return false
}

// memberName is the name of a member for an error message.
func memberName(quoted []byte) string {
	const most = 64
	if len(quoted) > 6*most {
		return strings.ToValidUTF8(string(quoted[1:most]), "") + "…"
	}
	return string(jsonscan.Text(quoted))
}

// maxRuledName is at least the length of every name that ruleOf knows.
const maxRuledName = 32

// Field reads a member's name and its colon. It returns the name in lower case, for Go's
// JSON decoder matches names without case; nil for one that is too long to have a rule.
func (s *fieldScan) name(buf []byte) []byte {
	start := s.pos
	s.skipString()
	quoted := s.b[start:s.pos]
	s.colon()
	if len(quoted) > 6*maxRuledName { // more than the longest name with all of it escaped
		return nil
	}
	name := jsonscan.Unquote(buf, quoted)
	for i, c := range name {
		if 'A' <= c && c <= 'Z' {
			name[i] = c | 0x20
		}
	}
	return name
}

// peek returns the byte at pos, 0 at the end.
func (s *fieldScan) peek() byte {
	if s.pos < len(s.b) {
		return s.b[s.pos]
	}
	return 0
}

func (s *fieldScan) skipSpace() {
	for s.pos < len(s.b) && s.b[s.pos] <= ' ' {
		s.pos++
	}
}

// open enters the container at pos.
func (s *fieldScan) open() { s.pos++ }

// more moves to the next element or member; false behind the last one, where it leaves the
// container.
func (s *fieldScan) more(end byte) bool {
	if s.skipSpace(); s.peek() == ',' {
		s.pos++
		s.skipSpace()
	}
	switch s.peek() {
	case end:
		s.pos++
		return false
	case 0, ']', '}', ':':
		s.pos = len(s.b)
		return false
	}
	return true
}

func (s *fieldScan) colon() {
	if s.skipSpace(); s.peek() == ':' {
		s.pos++
	}
	s.skipSpace()
}

func (s *fieldScan) skipString() {
	if s.peek() != '"' {
		s.pos = len(s.b)
		return
	}
	s.pos = jsonscan.StringEnd(s.b, s.pos)
}

// skipNumbers skips what lies between here and the next element of an array that is not a
// number: a prompt in token ids is most of a body.
func (s *fieldScan) skipNumbers() {
	for s.pos < len(s.b) && numberByte[s.b[s.pos]] {
		s.pos++
	}
}

var numberByte = func() (set [256]bool) {
	for _, c := range []byte("0123456789+-.eE, \n\r\t") {
		set[c] = true
	}
	return set
}()

// skipWord skips a number, true, false or null.
func (s *fieldScan) skipWord() {
	for s.pos < len(s.b) {
		switch c := s.b[s.pos]; {
		case c <= ' ', c == ',', c == ']', c == '}', c == ':', c == '"', c == '[', c == '{':
			return
		}
		s.pos++
	}
}

// skipValue skips the value at pos.
func (s *fieldScan) skipValue() {
	for depth := 0; s.pos < len(s.b); {
		switch s.b[s.pos] {
		case '"':
			s.skipString()
		case '[', '{':
			depth++
			s.pos++
			continue
		case ']', '}':
			depth--
			s.pos++
		case ',', ':', ' ', '\n', '\r', '\t':
			s.pos++
			continue
		default:
			s.skipWord()
		}
		if depth <= 0 {
			return
		}
	}
}
