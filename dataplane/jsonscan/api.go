package jsonscan

// Key is a member of a request body that the router knows by name.
type Key uint8

// The known top-level members, and the nested ones of sampling_params.
const (
	KeyModel Key = iota
	KeyStream
	KeyStreamOptions
	KeyN
	KeyMaxTokens
	KeyMaxCompletionTokens
	KeyMaxOutputTokens
	KeyMinTokens
	KeyMinCompletionTokens
	KeyPrompt
	KeyMessages
	KeyInput
	KeySystem
	KeyInstructions
	KeyTools
	KeyToolChoice
	KeyTokenIDs
	KeySamplingParams
	KeyCacheSalt
	KeyRequestID
	KeyReturnTokenIDs
	KeyChatTemplate
	KeyChatTemplateKwargs
	KeyAddGenerationPrompt
	KeyContinueFinalMessage
	KeyAddSpecialTokens
	KeyKVTransferParams
	KeyDisaggPrefillResp
	KeyBootstrapHost
	KeyBootstrapPort
	KeyBootstrapRoom
	KeyDisaggregatedParams
	KeySamplingMaxTokens // sampling_params.max_tokens
	KeySamplingMinTokens // sampling_params.min_tokens
	KeySamplingN         // sampling_params.n
	NumKeys
)

// Kind is the JSON type of a value.
type Kind uint8

// The kinds; Absent means the member is not there.
const (
	Absent Kind = iota
	Null
	Bool
	Number
	String
	Array
	Object
)

// Value is where a member lies in the body: Body[KeyStart:KeyStart+…] is the
// quoted key, Body[Start:End] the value without surrounding space.
type Value struct {
	KeyStart, Start, End int
	Kind                 Kind
}

// Limits bound what a scan accepts.
type Limits struct {
	MaxDepth int // nesting of objects and arrays; 0 means 64
}

// Doc is one scanned body. It borrows the body; both are the caller's.
type Doc struct {
	Body   []byte
	Values [NumKeys]Value
	// Open and Close are the offsets of the outer object's braces; Members is
	// how many members it has.
	Open, Close, Members int
}

// SyntaxError says what is wrong with a body, and where. Duplicate known keys,
// a wrong type of a known member, too great a depth, invalid UTF-8 in a known
// string and trailing bytes are errors of this type too.
type SyntaxError struct {
	Offset int    // byte offset in the body
	Field  string // dotted name of the member, "" for the document
	Got    string // what was found, quoted and cut to 40 bytes
	Want   string // what would be accepted
}

// Error implements error.
func (e *SyntaxError) Error() string { panic("contract") }

// Scan reads body into d, forgetting what d held. It fails with *SyntaxError.
// Types are checked for known members (model string, stream bool or null,
// counts integers or null, messages array, token_ids array, …).
func (d *Doc) Scan(body []byte, lim Limits) error { panic("contract") }

// Has says whether k is present and not null.
func (d *Doc) Has(k Key) bool { return d.Values[k].Kind > Null }

// Raw is the value's bytes as they stand in the body, nil when absent.
func (d *Doc) Raw(k Key) []byte { panic("contract") }

// Int reads an integer member; ok is false when absent, null or no int64.
func (d *Doc) Int(k Key) (n int64, ok bool) { panic("contract") }

// Bool reads a boolean member; absent and null are false.
func (d *Doc) Bool(k Key) bool { panic("contract") }

// String appends the unescaped string member to dst. With no escape in the
// value and a nil dst it returns the body's own bytes without copying.
func (d *Doc) String(k Key, dst []byte) []byte { panic("contract") }

// Op is what an Edit does with its member.
type Op uint8

// The operations of an Edit.
const (
	Set     Op = iota // replace the value where present, else append as last member
	Replace           // replace the value where present, else nothing
	Remove            // cut the member, with its comma
)

// Edit changes one member. Value is raw JSON. An Edit of a nested member whose
// parent is absent does nothing. Keys may not repeat in one call.
type Edit struct {
	Key   Key
	Op    Op
	Value []byte
}

// Edited appends the body with the edits applied to dst: all other bytes are
// the body's own, in order; what Set adds comes after the last member.
func (d *Doc) Edited(dst []byte, edits ...Edit) []byte { panic("contract") }

// TokenIDs appends the token ids of a raw JSON array of non-negative integers.
// It fails with *SyntaxError when raw is something else (also for an array of
// arrays, or an id over 2^32-1).
func TokenIDs(dst []uint32, raw []byte) ([]uint32, error) { panic("contract") }

// Find locates a top-level member of any object, for engine responses
// (kv_transfer_params, usage, tokens). ok is false when it is absent; it fails
// with *SyntaxError when body is no well-formed object. Whole-document checks
// are the same as Scan's, known-member rules do not apply.
func Find(body []byte, name string) (v Value, ok bool, err error) { panic("contract") }
