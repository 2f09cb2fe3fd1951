package tokenizer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"time"
)

// Name is the library's file name.
const Name = "libsluice_tokenizer.so"

// Variable is the environment variable that names the library's file; nothing else is
// tried then.
const Variable = "SLUICE_TOKENIZER_LIBRARY"

// SystemFolder is where packages install the library.
const SystemFolder = "/usr/lib/sluice"

// LoadOptions bound a model. A zero value has the defaults.
type LoadOptions struct {
	MaxInput  int           // bytes of a request or a text (32 MiB)
	MaxOutput int           // bytes of a rendered text (64 MiB)
	Timeout   time.Duration // of a call, including its wait for a thread (10 s)
	Reference bool          // encode with Hugging Face's tokenizers, although a faster encoder gives the same ids; for tests and measurements
}

// Info describes a model.
type Info struct {
	Encoder        string          `json:"encoder"`    // fastokens, or tokenizers where that one does not give the same ids
	Format         string          `json:"format"`     // of its file: tokenizer.json, tekken or tiktoken
	Kind           string          `json:"kind"`       // bpe, unigram, wordpiece or wordlevel
	VocabSize      int             `json:"vocab_size"` // with added tokens
	BOS            *uint32         `json:"bos_id"`     // nil if the model names none
	EOS            *uint32         `json:"eos_id"`
	EOSIDs         json.RawMessage `json:"eos_ids"`   // eos_token_id of generation_config.json: a number, a list or null
	AddedIDs       []uint32        `json:"added_ids"` // the ids that special tokens add to a text
	Templates      []string        `json:"templates"` // "default", "tool_use", …; empty if there is none
	TokenizerClass string          `json:"tokenizer_class"`
}

// HasTemplate reports whether the model has a chat template.
func (i *Info) HasTemplate() bool { return len(i.Templates) > 0 }

// SpecialToken is an added token: one that is split from a text before the model's own
// rules.
type SpecialToken struct {
	ID      uint32 `json:"id"`
	Content string `json:"content"`
	Flags
}

// Flags say how an added token is matched. The fields are those of tokenizer.json.
type Flags struct {
	Special    bool `json:"special"`
	Normalized bool `json:"normalized"`
	LStrip     bool `json:"lstrip"`
	RStrip     bool `json:"rstrip"`
	SingleWord bool `json:"single_word"`
}

// selfTestModel returns the tokenizer.json of a model with the tokens "a" and "b".
func selfTestModel() string {
	return `{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,` +
		`"model":{"type":"BPE","unk_token":"<unk>","vocab":{"<unk>":0,"a":1,"b":2},"merges":[]}}`
}

// candidates returns where the library is looked for, in order.
func candidates(path string) []string {
	if path != "" {
		return []string{path}
	}
	if path = os.Getenv(Variable); path != "" {
		return []string{path}
	}
	var all []string
	if exe, err := os.Executable(); err == nil {
		if exe, err = filepath.EvalSymlinks(exe); err == nil {
			all = append(all, filepath.Join(filepath.Dir(exe), Name))
		}
	}
	return append(all, Name, filepath.Join(SystemFolder, Name))
}
