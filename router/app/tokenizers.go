package app

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"sluice/native/tokenizer"
	"sluice/router/config"
	"sluice/router/tokenize"
	"sluice/router/tokenize/chatinput"
	"sluice/router/tokenize/incremental"
	"sluice/router/worker"
)

// tokenizers loads the tokenizers of models and gives them to the Tokenizer. Loading takes seconds,
// so that it runs on a goroutine of its own; until it ends, and if it fails, prompts are tokenized
// by the engines.
type tokenizers struct {
	to   *tokenize.Tokenizer
	log  *slog.Logger
	open func() (modelLoader, error)

	mu      sync.Mutex
	set     tokenizerSettings
	roots   map[string]string // what engines have reported, by base model
	loading bool              // a goroutine runs
	again   bool              // what is wanted has changed since it began
	closed  bool
	ended   sync.WaitGroup

	loaded map[string]loadedModel // of that goroutine
}

// modelFolder is where a model's files are, and how its servers render.
type modelFolder struct {
	dir, format string
	template    string // a file that replaces the folder's templates, "" for none
	kwargs      string // a JSON object of the template's variables, "" for none
	trust       bool   // requests may contain a template
}

type loadedModel struct {
	from  modelFolder
	model closingModel // nil: it could not be loaded
	use   *tokenize.InProcess
}

type closingModel interface {
	tokenize.NativeModel
	Close()
}

// convertedModel is a model that knows the format of its vocabulary: native/tokenizer.Model.
type convertedModel interface {
	Info() tokenizer.Info
	Spec() []byte
}

// modelLoader is the library.
type modelLoader interface {
	load(dir string) (closingModel, []incremental.AddedToken, error)
}

// nativeLibrary is native/tokenizer.Library.
type nativeLibrary struct {
	*tokenizer.Library
	opt tokenizer.LoadOptions
}

func (l nativeLibrary) load(dir string) (closingModel, []incremental.AddedToken, error) {
	m, err := l.Load(dir, l.opt)
	if err != nil {
		return nil, nil, err
	}
	var tokens []incremental.AddedToken
	for _, t := range m.SpecialTokens() {
		tokens = append(tokens, incremental.AddedToken{ID: t.ID, Content: t.Content, SingleWord: t.SingleWord, LStrip: t.LStrip, RStrip: t.RStrip, Normalized: t.Normalized, Special: t.Special})
	}
	return m, tokens, nil
}

func newTokenizers(cfg *config.Config, to *tokenize.Tokenizer, log *slog.Logger) *tokenizers {
	opt := tokenizer.LoadOptions{Timeout: cfg.Tokens.Timeout}
	open := func() (modelLoader, error) {
		l, err := tokenizer.Open("")
		if err != nil {
			return nil, err
		}
		return nativeLibrary{l, opt}, nil
	}
	return &tokenizers{to: to, log: log, open: open, roots: map[string]string{}, loaded: map[string]loadedModel{}}
}

// tokenizerSettings are the settings that tokenizers are loaded by.
type tokenizerSettings struct {
	Mode   string                 // tokens.native
	Models map[string]modelFolder // models.NAME.tokenizer
}

func tokenizerSettingsOf(cfg *config.Config) tokenizerSettings {
	s := tokenizerSettings{Mode: cfg.Tokens.Native, Models: map[string]modelFolder{}}
	for name, m := range cfg.Models {
		if m.Tokenizer != "" {
			s.Models[name] = modelFolder{m.Tokenizer, m.ContentFormat, m.ChatTemplate, m.ChatTemplateKwargs, m.TrustRequestChatTemplate}
		}
	}
	return s
}

// configure takes over the settings, at the start and at a reload.
func (t *tokenizers) configure(s tokenizerSettings) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.set.Mode == s.Mode && maps.Equal(s.Models, t.set.Models) {
		return
	}
	t.set = s
	t.startLoading()
}

// maxRoots bounds the models whose folders engines have reported.
const maxRoots = 64

// workerReady considers the folder that a worker's engine has reported.
func (t *tokenizers) workerReady(w *worker.Worker) {
	info := w.Info()
	if info.Engine != "vllm" || !filepath.IsAbs(info.Root) || info.Base == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.roots[info.Base] == info.Root || len(t.roots) >= maxRoots {
		return
	}
	t.roots[info.Base] = info.Root
	if t.set.Mode == "auto" {
		t.startLoading()
	}
}

// startLoading is called with mu held.
func (t *tokenizers) startLoading() {
	t.again = true
	if t.loading || t.closed {
		return
	}
	t.loading = true
	t.ended.Go(t.loadAll)
}

// wanted returns what is to be loaded, and whether something has changed since the last call.
func (t *tokenizers) wanted() (map[string]modelFolder, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.again || t.closed {
		t.loading = false
		return nil, false
	}
	t.again = false
	want := map[string]modelFolder{}
	if t.set.Mode == "off" {
		return want, true
	}
	if t.set.Mode == "auto" {
		for name, dir := range t.roots {
			if hasVocabulary(dir) {
				want[name] = modelFolder{dir: dir, format: "auto"}
			}
		}
	}
	maps.Copy(want, t.set.Models)
	return want, true
}

// hasVocabulary reports whether a folder has a file that the library may load.
func hasVocabulary(dir string) bool {
	for _, name := range []string{"tokenizer.json", "tekken.json", "tiktoken.model", "qwen.tiktoken"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return true
		}
	}
	return false
}

func (t *tokenizers) loadAll() {
	for {
		want, changed := t.wanted()
		if !changed {
			return
		}
		var unused []closingModel
		for name, have := range t.loaded {
			if want[name] != have.from {
				if have.model != nil {
					unused = append(unused, have.model)
				}
				delete(t.loaded, name)
			}
		}
		for name, from := range want {
			if _, ok := t.loaded[name]; !ok {
				t.loaded[name] = t.load(name, from)
			}
		}
		use := map[string]*tokenize.InProcess{}
		for name, l := range t.loaded {
			if l.use != nil {
				use[name] = l.use
			}
		}
		t.to.SetNatives(use)
		for _, m := range unused {
			m.Close() // running calls end first
		}
	}
}

// load loads one model. What fails is logged once, and remembered until the settings change.
func (t *tokenizers) load(name string, from modelFolder) loadedModel {
	failed := loadedModel{from: from}
	library, err := t.open()
	if err != nil {
		t.log.Warn("no tokenizer library: the engines tokenize the model's prompts", "model", name, "error", err)
		return failed
	}
	model, tokens, err := library.load(from.dir)
	if err != nil {
		t.log.Warn("cannot load the tokenizer: the engines tokenize the model's prompts", "model", name, "file", from.dir, "error", err)
		return failed
	}
	use, err := t.prepare(name, from, model, tokens)
	if err != nil {
		model.Close()
		t.log.Warn("cannot use the tokenizer: the engines tokenize the model's prompts", "model", name, "file", from.dir, "error", err)
		return failed
	}
	t.log.Info("tokenizer loaded", "model", name, "file", from.dir)
	return loadedModel{from, model, use}
}

func (t *tokenizers) prepare(name string, from modelFolder, model closingModel, tokens []incremental.AddedToken) (*tokenize.InProcess, error) {
	format, text := "tokenizer.json", []byte(nil)
	if c, ok := model.(convertedModel); ok {
		format, text = c.Info().Format, c.Spec()
	}
	if text == nil {
		var err error
		if text, err = os.ReadFile(filepath.Join(from.dir, "tokenizer.json")); err != nil {
			return nil, err
		}
	}
	code, err := renderedByCode(from.dir, format)
	if err != nil {
		return nil, err
	}
	if code != "" {
		t.log.Info("only completions are tokenized here: the engines render the model's chats", "model", name, "reason", code)
	}
	// The library drops truncation and padding, as vLLM does; the rules look at the rest.
	rules, err := incremental.NewRules(withoutTraining(text), tokens)
	if err != nil {
		t.log.Info("whole prompts are encoded each time", "model", name, "reason", err)
		rules = nil
	}
	templates := chatTemplates(from.dir)
	use := tokenize.NativeModel(model)
	if from.template != "" {
		text, err := os.ReadFile(from.template)
		if err != nil {
			return nil, err
		}
		templates = map[string]string{"default": string(text)}
		use = givenTemplate{model, string(text)}
	}
	settings := settingsOf(from, templates)
	if settings.CodeRendered = code != ""; code == "" {
		t.reportTemplates(name, templates, use)
		tryTemplates(&settings, templates, use)
	}
	return t.to.NewInProcess(name, use, rules, settings)
}

// givenTemplate is a model whose servers were started with a template of their own.
type givenTemplate struct {
	tokenize.NativeModel
	source string
}

func (g givenTemplate) Prompt(dst []uint32, template string, input []byte, addSpecial bool, rest func([]byte) []byte) ([]uint32, error) {
	if template == "" {
		template = g.source
	}
	return g.NativeModel.Prompt(dst, template, input, addSpecial, rest)
}

// settingsOf returns how the servers of a model render: what the settings say, and what vLLM finds from
// the template that it selects for a request.
func settingsOf(from modelFolder, templates map[string]string) chatinput.Settings {
	of := func(template string) chatinput.Template {
		t := chatinput.Template{Developer: chatinput.KnowsDeveloper(template)}
		switch from.format {
		case "openai":
			t.Parts = true
		case "string":
		default:
			t.Parts = chatinput.ContentParts(template)
		}
		return t
	}
	s := chatinput.Settings{Plain: of(templates["default"]), TrustTemplate: from.trust}
	s.WithTools = s.Plain
	if t, ok := templates["tool_use"]; ok {
		s.WithTools = of(t)
	}
	if from.kwargs != "" {
		s.Defaults = bytes.TrimSpace([]byte(from.kwargs))
	}
	return s
}

// reportTemplates logs which of the templates that vLLM selects cannot be rendered here. The engines
// tokenize the prompts of those.
func (t *tokenizers) reportTemplates(name string, templates map[string]string, model tokenize.NativeModel) {
	for template, tools := range map[string]string{"default": "null", "tool_use": `[{"type":"function","function":{"name":"f","description":"","parameters":{"type":"object","properties":{}}}}]`} {
		if _, ok := templates[template]; !ok {
			continue
		}
		_, err := renderer(model)("", []byte(`{"messages":[{"role":"user","content":"t"}],"tools":`+tools+`,"add_generation_prompt":true}`))
		if err == nil {
			continue
		}
		reason := err.Error()
		if e := new(tokenizer.Error); errors.As(err, &e) {
			if e.Refused() {
				continue
			}
			reason = e.Reason // it can quote the messages above
		}
		t.log.Warn("cannot render a chat template: the engines tokenize the prompts that select it", "model", name, "detail", template, "error", reason)
	}
}

// withoutTraining returns a tokenizer.json without the settings that servers replace.
func withoutTraining(text []byte) []byte {
	var f map[string]json.RawMessage
	if json.Unmarshal(text, &f) != nil {
		return text
	}
	delete(f, "truncation")
	delete(f, "padding")
	out, err := json.Marshal(f)
	if err != nil {
		return text
	}
	return out
}

// codeRendered are architectures whose chats vLLM renders by code of its own and not with the
// folder's template (vLLM 0.32, ModelConfig and OnlineRenderer.use_harmony). Their completions are
// texts for the folder's tokenizer.
var codeRendered = map[string]string{
	"GptOssForCausalLM": "Harmony", "KimiK3ForConditionalGeneration": "Kimi-K3",
	"DeepseekV32ForCausalLM": "DeepSeek-V3.2", "DeepseekV4ForCausalLM": "DeepSeek-V4", "DeepseekV4ForConditionalGeneration": "DeepSeek-V4", "DeepseekV41ForCausalLM": "DeepSeek-V4.1",
	"InklingForCausalLM": "Inkling", "InklingForConditionalGeneration": "Inkling",
}

// renderedByCode says by what code the servers render a folder's chats, "" if they use its template.
// format is that of its vocabulary. The error is for models whose texts vLLM tokenizes by code too.
func renderedByCode(dir, format string) (string, error) {
	switch format {
	case "tekken":
		return "mistral-common", nil
	case "tiktoken":
		return "the model's own Python module", nil
	}
	var c struct {
		Architectures []string `json:"architectures"`
	}
	if text, err := os.ReadFile(filepath.Join(dir, "config.json")); err == nil {
		_ = json.Unmarshal(text, &c)
	}
	for _, a := range c.Architectures {
		if a == "MoonshotKimiaForCausalLM" {
			return "", errors.New("vLLM tokenizes texts of Kimi-Audio by its own code")
		}
		if code := codeRendered[a]; code != "" {
			return fmt.Sprintf("vLLM's code for %s", code), nil
		}
	}
	return "", nil
}

// tryTemplates sets what vLLM finds by rendering: how it treats system messages between others, and how
// thinking is disabled.
func tryTemplates(s *chatinput.Settings, templates map[string]string, model tokenize.NativeModel) {
	render := renderer(model)
	s.MergeSystem = chatinput.MergesSystem(templates["default"], render)
	if t, ok := templates["tool_use"]; ok && !s.MergeSystem {
		s.MergeSystem = chatinput.MergesSystem(t, render)
	}
	s.DisabledEffort = chatinput.FindDisabledEffort(s, func(input []byte) ([]byte, error) { return render("", input) })
}

// renderer returns a function that renders with a template of any source, "" for the model's own.
func renderer(model tokenize.NativeModel) func(template string, input []byte) ([]byte, error) {
	return func(template string, input []byte) (text []byte, err error) {
		_, err = model.Prompt(nil, template, input, false, func(t []byte) []byte {
			text = bytes.Clone(t)
			return nil
		})
		return text, err
	}
}

// chatTemplates returns the folder's templates by name; one alone is called "default".
func chatTemplates(dir string) map[string]string {
	all := map[string]string{}
	if text, err := os.ReadFile(filepath.Join(dir, "chat_template.jinja")); err == nil {
		all["default"] = string(text)
	}
	more, _ := filepath.Glob(filepath.Join(dir, "additional_chat_templates", "*.jinja"))
	for _, file := range more {
		if text, err := os.ReadFile(file); err == nil {
			all[strings.TrimSuffix(filepath.Base(file), ".jinja")] = string(text)
		}
	}
	if len(all) > 0 {
		return all
	}
	var c struct {
		Template json.RawMessage `json:"chat_template"`
	}
	text, err := os.ReadFile(filepath.Join(dir, "tokenizer_config.json"))
	if err != nil || json.Unmarshal(text, &c) != nil {
		return all
	}
	var one string
	if json.Unmarshal(c.Template, &one) == nil {
		all["default"] = one
		return all
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	_ = json.Unmarshal(c.Template, &list)
	for _, l := range list {
		all[l.Name] = l.Template
	}
	return all
}

// close stops loading and closes the models. Requests have ended.
func (t *tokenizers) close() {
	if t == nil {
		return
	}
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.ended.Wait()
	t.to.SetNatives(nil)
	for _, l := range t.loaded {
		if l.model != nil {
			l.model.Close()
		}
	}
}

// tokensDiffer logs that a model's ids are not the engine's.
func (r *Router) tokensDiffer(m tokenize.Mismatch) {
	r.log.Warn("native token ids differ from the engine's: the engines tokenize the model's prompts until this one restarts",
		"model", m.Model, "url", m.URL, "detail", m.String())
}
