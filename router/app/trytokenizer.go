package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"sluice/dataplane/jsonscan"
	"sluice/router/config"
	"sluice/router/tokenize"
)

// TryTokenizer loads the tokenizer of models.NAME.tokenizer as serve does, and renders and encodes a
// short chat and a text with it. It returns what works, in words; the error says what does not. It takes
// up to some seconds.
func TryTokenizer(cfg *config.Config, name string) (string, error) {
	notes := new(loadNotes)
	t := newTokenizers(tokenize.New(tokenize.Options{}), slog.New(notes))
	return t.try(name, tokenizerSettingsOf(cfg).Models[name], notes)
}

// try is TryTokenizer with a t that logs to notes and is used for nothing else.
func (t *tokenizers) try(name string, from modelFolder, notes *loadNotes) (string, error) {
	l, to := t.load(name, from, 0, ""), t.to
	if l.use == nil {
		return "", errors.New(l.failed)
	}
	defer l.model.Close()
	to.SetNatives(map[string]*tokenize.InProcess{name: l.use})
	text, chat := tryPrompt(to, name, tokenize.Completion, `{"prompt":"Hello, world"}`), tryPrompt(to, name, tokenize.Chat, `{"messages":[{"role":"user","content":"Hello, world"}]}`)
	switch {
	case text == 0:
		notes.warnings = append(notes.warnings, "it cannot tokenize a text")
	case chat == 0 && len(notes.all) == 0:
		notes.all = append(notes.all, "it gives no ids for a chat: chats are tokenized here only with a template that chat_template names or an engine reports")
	}
	if len(notes.warnings) > 0 {
		return "", errors.New(strings.Join(notes.warnings, "; "))
	}
	found := fmt.Sprintf("a text has %d ids", text)
	if chat > 0 {
		found = fmt.Sprintf("a chat has %d ids and a text %d", chat, text)
	}
	return strings.Join(append([]string{found}, notes.all...), "; "), nil
}

// tryPrompt returns the number of a prompt's ids, 0 if it was not tokenized in this process.
func tryPrompt(to *tokenize.Tokenizer, model string, kind tokenize.Kind, body string) int {
	var doc jsonscan.Doc
	var p tokenize.Prompt
	if doc.Scan([]byte(body), jsonscan.Limits{}) != nil || !to.PromptInProcess(&p, &tokenize.NativeQuery{Model: model, Kind: kind, Doc: &doc}) || p.Source != tokenize.FromNative {
		return 0
	}
	return len(p.Tokens)
}

// loadNotes is a slog.Handler that keeps what loading a model reports, each with its reason.
type loadNotes struct{ all, warnings []string }

func (n *loadNotes) Enabled(context.Context, slog.Level) bool { return true }
func (n *loadNotes) WithAttrs([]slog.Attr) slog.Handler       { return n }
func (n *loadNotes) WithGroup(string) slog.Handler            { return n }

func (n *loadNotes) Handle(_ context.Context, r slog.Record) error {
	note, hasReason := r.Message, false
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "reason" || a.Key == "error" {
			note, hasReason = fmt.Sprintf("%s: %v", note, a.Value), true
		}
		return true
	})
	switch {
	case r.Level >= slog.LevelWarn:
		n.warnings = append(n.warnings, note)
	case hasReason:
		n.all = append(n.all, note)
	}
	return nil
}
