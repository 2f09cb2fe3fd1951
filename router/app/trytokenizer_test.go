package app

import (
	"log/slog"
	"strings"
	"testing"

	"sluice/native/tokenizer"
	"sluice/router/tokenize"
	"sluice/router/tokenize/incremental"
)

// without is a double of a model that does not encode or does not render, and says why.
type without struct {
	letters
	text, chat bool
}

func (w without) Encode(dst []uint32, text []byte, special bool) ([]uint32, error) {
	if w.text && string(text) == "Hello, world" {
		return dst, &tokenizer.Error{Verb: "encode", Code: tokenizer.CodeLimit, Reason: "too long"}
	}
	return w.letters.Encode(dst, text, special)
}

func (w without) Prompt(dst []uint32, template string, input []byte, special bool, rest func([]byte) []byte) ([]uint32, error) {
	if w.chat {
		return dst, &tokenizer.Error{Verb: "render", Code: tokenizer.CodeTemplate, Reason: "no filter called x"}
	}
	return w.letters.Prompt(dst, template, input, special, rest)
}

type oneModel struct{ closingModel }

func (o oneModel) load(string) (closingModel, []incremental.AddedToken, error) {
	return o.closingModel, nil, nil
}

// TestTryTokenizer: a tokenizer is tried with a chat and a text, and what does not work is an error with
// the reason. Chats that another renders, or whose template another has, are not failures. The model is closed.
func TestTryTokenizer(t *testing.T) {
	closed := 0
	model := letters{closed: &closed}
	templated := map[string]string{"tokenizer.json": "{}", "chat_template.jinja": "x"}
	for name, c := range map[string]struct {
		model       closingModel
		files       map[string]string
		want, fails string
	}{
		"whole":              {model, templated, "a chat has ", ""},
		"tekken":             {converted{model}, map[string]string{"tekken.json": "{}"}, "a text has 12 ids; only completions are tokenized here: the engines render the model's chats: mistral-common", ""},
		"no template":        {without{letters: model, chat: true}, map[string]string{"tokenizer.json": "{}", "tokenizer_config.json": `{"chat_template":null}`}, "a text has 12 ids; it gives no ids for a chat: chats are tokenized here only with a template", ""},
		"bad template":       {without{letters: model, chat: true}, templated, "", "cannot render a chat template: the engines tokenize the prompts that select it: no filter called x"},
		"no texts":           {without{letters: model, text: true}, templated, "", "it cannot tokenize a text"},
		"no files":           {model, map[string]string{}, "", "tokenizer.json: no such file"},
		"unreadable setting": {model, templated, "", "nowhere.jinja"},
	} {
		t.Run(name, func(t *testing.T) {
			before, notes := closed, new(loadNotes)
			ts := newTokenizers(tokenize.New(tokenize.Options{}), slog.New(notes))
			ts.open = func() (modelLoader, error) { return oneModel{c.model}, nil }
			from := modelFolder{dir: modelDir(t, "m", c.files)}
			if name == "unreadable setting" {
				from.template = from.dir + "/nowhere.jinja"
			}
			got, err := ts.try("m", from, notes)
			if c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)) || c.fails == "" && err != nil || !strings.HasPrefix(got, c.want) {
				t.Errorf("%q, %v; want %q, %q", got, err, c.want, c.fails)
			}
			if closed != before+1 {
				t.Errorf("%d models closed, want 1", closed-before)
			}
		})
	}
}
