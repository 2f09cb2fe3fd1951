package incremental

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// AddedToken is a token that a tokenizer finds in the text before its own rules apply. The names
// are those of tokenizer.json.
type AddedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// Rules are what of a tokenizer decides where a text may be cut. They are immutable.
type Rules struct {
	// Prefix and Suffix are the ids that the post-processor adds to a text if special tokens are
	// requested.
	Prefix, Suffix []uint32
	// LongestAdded is the number of characters of the longest added token.
	LongestAdded int

	boundaries *boundarySet
}

// Boundaries returns the number of boundary tokens. Without one every text is encoded as a whole.
func (r *Rules) Boundaries() int { return len(r.boundaries.ids) }

// ErrNotIncremental is in every error of NewRules for a tokenizer whose texts cannot be encoded in
// parts, or are not known to be.
var ErrNotIncremental = errors.New("texts of this tokenizer are encoded as a whole")

// tokenizerFile is the part of a tokenizer.json that Rules are made from.
type tokenizerFile struct {
	Truncation    json.RawMessage `json:"truncation"`
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   []AddedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Model         struct {
		Type    string   `json:"type"`
		Dropout *float64 `json:"dropout"`
		Alpha   *float64 `json:"alpha"`
		NBest   *float64 `json:"nbest_size"`
	} `json:"model"`
}

// The stages that are functions of their piece (tokenizers 0.23). A Sequence is one if its members
// are.
var (
	pureNormalizers   = []string{"BertNormalizer", "Strip", "StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Precompiled", "Replace", "Prepend", "ByteLevel"}
	purePreTokenizers = []string{"BertPreTokenizer", "ByteLevel", "Delimiter", "CharDelimiterSplit", "Metaspace", "Whitespace", "WhitespaceSplit", "Split", "Punctuation", "Digits", "UnicodeScripts", "FixedLength"}
	models            = []string{"BPE", "WordPiece", "WordLevel", "Unigram"}
)

// NewRules reads a tokenizer.json. tokens are the added tokens in force, if the caller knows them
// better than the file (a tokenizer_config.json may change their flags); nil means the file's own.
func NewRules(tokenizerJSON []byte, tokens []AddedToken) (*Rules, error) {
	var f tokenizerFile
	if err := json.Unmarshal(tokenizerJSON, &f); err != nil {
		return nil, fmt.Errorf("incremental: cannot read tokenizer.json: %w", err)
	}
	if tokens == nil {
		tokens = f.AddedTokens
	}
	r := new(Rules)
	for _, check := range []func() error{
		func() error { return checkAbsent("truncation", f.Truncation) },
		func() error { return checkAbsent("padding", f.Padding) },
		func() error { return checkStages("normalizer", f.Normalizer, "normalizers", pureNormalizers) },
		func() error { return checkStages("pre_tokenizer", f.PreTokenizer, "pretokenizers", purePreTokenizers) },
		func() error { return f.checkModel() },
		func() (err error) { r.Prefix, r.Suffix, err = affixes(f.PostProcessor); return },
	} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	r.boundaries = newBoundarySet(boundaryTokens(tokens))
	for _, t := range tokens {
		r.LongestAdded = max(r.LongestAdded, utf8.RuneCountInString(t.Content))
	}
	return r, nil
}

func refuse(field, value, accepted string) error {
	return fmt.Errorf("incremental: %s is %s, not %s: %w", field, value, accepted, ErrNotIncremental)
}

func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

func checkAbsent(field string, raw json.RawMessage) error {
	if isNull(raw) {
		return nil
	}
	return refuse(field, "set", "null")
}

// checkStages accepts null, a stage of a known type, or a Sequence of such.
func checkStages(field string, raw json.RawMessage, members string, known []string) error {
	if isNull(raw) {
		return nil
	}
	var stage map[string]json.RawMessage
	if err := json.Unmarshal(raw, &stage); err != nil {
		return refuse(field, "malformed", "an object")
	}
	var kind string
	_ = json.Unmarshal(stage["type"], &kind)
	if kind != "Sequence" {
		if slices.Contains(known, kind) {
			return nil
		}
		return refuse(field, fmt.Sprintf("%q", kind), "one of "+strings.Join(known, ", "))
	}
	var list []json.RawMessage
	if err := json.Unmarshal(stage[members], &list); err != nil {
		return refuse(field, "a Sequence without members", "a list")
	}
	for _, m := range list {
		if err := checkStages(field, m, members, known); err != nil {
			return err
		}
	}
	return nil
}

func (f *tokenizerFile) checkModel() error {
	// The type was added to the format later; then the members tell it, which the library does.
	if f.Model.Type != "" && !slices.Contains(models, f.Model.Type) {
		return refuse("model.type", fmt.Sprintf("%q", f.Model.Type), "one of "+strings.Join(models, ", "))
	}
	if d := f.Model.Dropout; d != nil && *d != 0 {
		return refuse("model.dropout", fmt.Sprint(*d), "0")
	}
	if a := f.Model.Alpha; a != nil && *a != 0 {
		return refuse("model.alpha", fmt.Sprint(*a), "0")
	}
	if n := f.Model.NBest; n != nil && *n > 1 {
		return refuse("model.nbest_size", fmt.Sprint(*n), "at most 1")
	}
	return nil
}

// postProcessor is a post_processor, or a member of a Sequence of them.
type postProcessor struct {
	Type       string            `json:"type"`
	Processors []json.RawMessage `json:"processors"`
	Single     []struct {
		SpecialToken *struct {
			ID string `json:"id"`
		} `json:"SpecialToken"`
		Sequence *struct {
			ID string `json:"id"`
		} `json:"Sequence"`
	} `json:"single"`
	SpecialTokens map[string]struct {
		IDs []uint32 `json:"ids"`
	} `json:"special_tokens"`
	Sep []json.RawMessage `json:"sep"` // of BERT and RoBERTa: the token and its id
	Cls []json.RawMessage `json:"cls"`
}

// affixes returns the ids that a post-processor adds before and after a text.
func affixes(raw json.RawMessage) (before, after []uint32, err error) {
	if isNull(raw) {
		return nil, nil, nil
	}
	var p postProcessor
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, nil, refuse("post_processor", "malformed", "a known one")
	}
	switch p.Type {
	case "ByteLevel": // changes offsets only
		return nil, nil, nil
	case "Sequence":
		for _, m := range p.Processors {
			b, a, err := affixes(m)
			if err != nil {
				return nil, nil, err
			}
			before, after = append(b, before...), append(after, a...)
		}
		return before, after, nil
	case "TemplateProcessing":
		return p.template()
	case "BertProcessing", "RobertaProcessing":
		var cls, sep uint32
		if len(p.Cls) == 2 && len(p.Sep) == 2 && json.Unmarshal(p.Cls[1], &cls) == nil && json.Unmarshal(p.Sep[1], &sep) == nil {
			return []uint32{cls}, []uint32{sep}, nil
		}
	}
	return nil, nil, refuse("post_processor", fmt.Sprintf("%q", p.Type), "ByteLevel, TemplateProcessing with one sequence, BertProcessing, RobertaProcessing or a Sequence of them")
}

func (p *postProcessor) template() (before, after []uint32, err error) {
	sequences := 0
	for _, piece := range p.Single {
		switch {
		case piece.Sequence != nil:
			sequences++
		case piece.SpecialToken != nil:
			t, ok := p.SpecialTokens[piece.SpecialToken.ID]
			if !ok {
				return nil, nil, refuse("post_processor.single", fmt.Sprintf("%q", piece.SpecialToken.ID), "a member of special_tokens")
			}
			if sequences == 0 {
				before = append(before, t.IDs...)
			} else {
				after = append(after, t.IDs...)
			}
		default:
			return nil, nil, refuse("post_processor.single", "an unknown piece", "SpecialToken or Sequence")
		}
	}
	if sequences != 1 {
		return nil, nil, refuse("post_processor.single", fmt.Sprintf("%d sequences", sequences), "one")
	}
	return before, after, nil
}

// boundaryTokens returns the tokens of the package comment's rule. A content that occurs twice has
// no certain id, and is none.
func boundaryTokens(tokens []AddedToken) []AddedToken {
	raw := make([]AddedToken, 0, len(tokens))
	for _, t := range tokens {
		if !t.Normalized && t.Content != "" {
			raw = append(raw, t)
		}
	}
	overlaps := newOverlaps(raw)
	out := make([]AddedToken, 0, len(raw))
	for _, t := range raw {
		if !t.LStrip && !t.SingleWord && isPunctuation(t.Content[0]) && isPunctuation(t.Content[len(t.Content)-1]) && !overlaps.with(t.Content) {
			out = append(out, t)
		}
	}
	return out
}

// isPunctuation reports whether c is ASCII punctuation that is not a word character.
func isPunctuation(c byte) bool {
	return c > ' ' && c < 0x7f && c != '_' && (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9')
}

// overlaps finds which token may share bytes with an occurrence of another.
type overlaps struct {
	tokens   []string        // sorted
	count    map[string]int  // of each content
	suffixes map[string]bool // the proper suffixes of all tokens
	all      string          // all tokens, each after a byte that no text contains
}

func newOverlaps(tokens []AddedToken) *overlaps {
	o := &overlaps{count: map[string]int{}, suffixes: map[string]bool{}}
	var all strings.Builder
	for _, t := range tokens {
		o.tokens = append(o.tokens, t.Content)
		o.count[t.Content]++
		all.WriteString("\xff" + t.Content)
		for i := 1; i < len(t.Content); i++ {
			o.suffixes[t.Content[i:]] = true
		}
	}
	slices.Sort(o.tokens)
	o.all = all.String()
	return o
}

// with reports whether t fails one of the first two conditions of the package comment.
func (o *overlaps) with(t string) bool {
	if o.count[t] != 1 || strings.Count(o.all, t) != 1 {
		return true // another token contains t; or t itself twice
	}
	for i := 1; i <= len(t); i++ {
		if o.suffixes[t[:i]] {
			return true
		}
	}
	return false
}
