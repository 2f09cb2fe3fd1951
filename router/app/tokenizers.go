package app

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/native/tokenizer"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/tokenize"
	"sluice/router/tokenize/chatinput"
	"sluice/router/tokenize/incremental"
	"sluice/router/worker"
)

// tokenizers loads the tokenizers of models and gives them to the Tokenizer. Loading takes seconds,
// so that it runs on a goroutine of its own; until a model is loaded, and if that fails, its prompts
// are tokenized by the engines.
type tokenizers struct {
	to   *tokenize.Tokenizer
	log  *slog.Logger
	open func() (modelLoader, error)
	// servers returns engines that serve a model, for template. Both are called on the loader's goroutine.
	servers  func(model string) []*worker.Worker
	template func(w *worker.Worker) (string, error)

	mu      sync.Mutex
	set     tokenizerSettings
	roots   map[string]string // what engines have reported, by base model
	joined  []*worker.Worker  // engines that have become ready and were not asked for their template
	loading bool              // a goroutine runs
	again   bool              // what is wanted has changed since it began
	reread  bool              // the files may have changed too
	closed  bool
	late    []lateModel // that have been loaded after all
	ended   sync.WaitGroup
	stop    chan struct{} // closed by close

	loadTimeout time.Duration           // how long others wait for a model that is being loaded
	loaded      map[string]*loadedModel // of that goroutine
	pending     map[string]modelFolder  // of that goroutine: what takes longer than loadTimeout to load
	templates   map[string]string       // of that goroutine: what the engines render with, by model; "": the folder's own
}

// maxLoadTime is more than any model takes to load from a disk that works.
const maxLoadTime = 20 * time.Second

// lateModel is a model for which the loader has not waited.
type lateModel struct {
	name  string
	model *loadedModel
}

// modelFolder is where a model's files are, and how its servers render.
type modelFolder struct {
	dir, format string
	template    string // a file that replaces the folder's templates, "" for none
	kwargs      string // a JSON object of the template's variables, "" for none
	trust       bool   // requests may contain a template
	noTools     bool   // tools are not rendered if none is to be called
}

// loadedModel is a model that was loaded, or could not be.
type loadedModel struct {
	from     modelFolder
	template string       // of the servers, "": the folder's own
	content  string       // fingerprint of the folder before it was read
	model    closingModel // nil: it could not be loaded
	added    []incremental.AddedToken
	use      *tokenize.InProcess // nil: it could not be loaded
	failed   string              // why
}

// closingModel is a model of the library.
type closingModel interface {
	tokenize.NativeModel
	SetTimeout(time.Duration)
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
type nativeLibrary struct{ *tokenizer.Library }

func (l nativeLibrary) load(dir string) (closingModel, []incremental.AddedToken, error) {
	m, err := l.Load(dir, tokenizer.LoadOptions{})
	if err != nil {
		return nil, nil, err
	}
	return m, addedTokens(m.SpecialTokens()), nil
}

func addedTokens(all []tokenizer.SpecialToken) (tokens []incremental.AddedToken) {
	for _, t := range all {
		tokens = append(tokens, incremental.AddedToken{ID: t.ID, Content: t.Content, SingleWord: t.SingleWord, LStrip: t.LStrip, RStrip: t.RStrip, Normalized: t.Normalized, Special: t.Special})
	}
	return tokens
}

func newTokenizers(to *tokenize.Tokenizer, log *slog.Logger) *tokenizers {
	open := func() (modelLoader, error) {
		l, err := tokenizer.Open("")
		if err != nil {
			return nil, err
		}
		return nativeLibrary{l}, nil
	}
	return &tokenizers{
		to: to, log: log, open: open, roots: map[string]string{}, loaded: map[string]*loadedModel{}, templates: map[string]string{},
		stop: make(chan struct{}), loadTimeout: maxLoadTime, pending: map[string]modelFolder{},
		servers:  func(string) []*worker.Worker { return nil },
		template: func(*worker.Worker) (string, error) { return "", nil },
	}
}

// askServers makes models be rendered with the templates that their engines in f report.
func (t *tokenizers) askServers(f *fleet.Fleet) {
	t.servers = func(model string) (all []*worker.Worker) {
		for _, w := range f.View().Workers {
			if serves(w, model) {
				all = append(all, w)
			}
		}
		return all
	}
	t.template = func(w *worker.Worker) (string, error) { return tokenize.ServerTemplate(f.Endpoint(w.Ranks[0])) }
}

// serves reports whether a worker is a vLLM engine that has a model, not as an adapter of another.
func serves(w *worker.Worker, model string) bool {
	info := w.Info()
	return info.Engine == "vllm" && slices.Contains(info.Models, model) && !slices.Contains(info.Adapters, model)
}

// tokenizerSettings are the settings that tokenizers are loaded by.
type tokenizerSettings struct {
	Mode    string                 // tokens.native
	Models  map[string]modelFolder // models.NAME.tokenizer
	Timeout time.Duration          // tokens.timeout
}

func tokenizerSettingsOf(cfg *config.Config) tokenizerSettings {
	s := tokenizerSettings{Mode: cfg.Tokens.Native, Models: map[string]modelFolder{}, Timeout: cfg.Tokens.Timeout}
	for name, m := range cfg.Models {
		if m.Tokenizer != "" {
			s.Models[name] = modelFolder{m.Tokenizer, m.ContentFormat, m.ChatTemplate, m.ChatTemplateKwargs, m.TrustRequestChatTemplate, m.ExcludeTools}
		}
	}
	return s
}

// configure takes over the settings, at the start and at a reload, which also loads what failed or
// has changed in its folder and tries models again whose ids differed from an engine's.
func (t *tokenizers) configure(s tokenizerSettings) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set, t.reread = s, true
	t.startLoading()
}

// maxRoots bounds the models whose folders engines have reported.
const maxRoots = 64

// workerReady considers the folder that a worker's engine has reported, and the template that it may
// report.
func (t *tokenizers) workerReady(w *worker.Worker) {
	info := w.Info()
	if info.Engine != "vllm" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	start := false
	if filepath.IsAbs(info.Root) && info.Base != "" && t.roots[info.Base] != info.Root && len(t.roots) < maxRoots {
		t.roots[info.Base] = info.Root
		start = t.set.Mode == "auto"
	}
	for _, model := range info.Models {
		if t.set.Mode != "off" && t.set.Models[model].dir != "" || t.set.Mode == "auto" && t.roots[model] != "" {
			start = true
		}
	}
	if start {
		t.joined = append(t.joined, w)
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

// wantedModels is what a round of loading works on.
type wantedModels struct {
	folders map[string]modelFolder
	joined  []*worker.Worker
	late    []lateModel
	reread  bool
	timeout time.Duration
}

// wanted returns what is to be loaded, or nil if nothing has changed since the last call.
func (t *tokenizers) wanted() *wantedModels {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.again || t.closed {
		t.loading = false
		return nil
	}
	want := &wantedModels{folders: map[string]modelFolder{}, joined: t.joined, late: t.late, reread: t.reread, timeout: t.set.Timeout}
	t.again, t.reread, t.joined, t.late = false, false, nil, nil
	if t.set.Mode == "off" {
		return want
	}
	if t.set.Mode == "auto" {
		for name, dir := range t.roots {
			if hasVocabulary(dir) {
				want.folders[name] = modelFolder{dir: dir, format: "auto"}
			}
		}
	}
	maps.Copy(want.folders, t.set.Models)
	return want
}

// hasVocabulary reports whether a folder has a file that the library may load.
func hasVocabulary(dir string) bool {
	for _, name := range vocabularyFiles {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return true
		}
	}
	return false
}

func (t *tokenizers) loadAll() {
	for {
		want := t.wanted()
		if want == nil {
			return
		}
		for _, l := range want.late {
			t.take(l, want)
		}
		for name, have := range t.loaded {
			if _, ok := want.folders[name]; !ok {
				delete(t.loaded, name)
				delete(t.templates, name)
				t.publish(have)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(want.folders)) {
			t.update(name, want)
			if t.isClosed() {
				break
			}
		}
	}
}

// take puts a model to use that was loaded late, if it is still the one that is wanted.
func (t *tokenizers) take(l lateModel, want *wantedModels) {
	if from, ok := t.pending[l.name]; !ok || from != l.model.from {
		l.close()
		return
	}
	delete(t.pending, l.name)
	if want.folders[l.name] != l.model.from {
		l.close()
		t.publish(nil)
		return
	}
	have := t.loaded[l.name]
	t.loaded[l.name] = l.model
	t.publish(have)
}

func (l lateModel) close() {
	if l.model.model != nil {
		l.model.model.Close()
	}
}

func (t *tokenizers) isClosed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closed
}

// update loads a model if that is necessary, and puts it to use at once: loading the next one may
// take seconds. A model that is loaded is used until its successor is.
func (t *tokenizers) update(name string, want *wantedModels) {
	from, have := want.folders[name], t.loaded[name]
	if p, ok := t.pending[name]; ok && p == from {
		return // it is still being loaded
	}
	isNew := have == nil || have.from != from
	if isNew || want.reread {
		t.askTemplate(name, from, t.servers(name))
	}
	t.askTemplate(name, from, slices.DeleteFunc(slices.Clone(want.joined), func(w *worker.Worker) bool { return !serves(w, name) }))
	if isNew || want.reread && (have.use == nil || have.content != from.fingerprint()) {
		delete(t.pending, name)
		if l := t.loadWithin(name, from, want.timeout); l != nil {
			t.loaded[name] = l
			t.publish(have)
		} else {
			t.pending[name] = from
			t.publish(nil)
		}
		return
	}
	if have.use == nil {
		return
	}
	have.model.SetTimeout(want.timeout)
	switch {
	case have.template != t.templates[name]:
		replaced := have.use
		if t.use(have, name, t.templates[name]); have.use != nil && !want.reread { // a reload tries all models again
			have.use.Follow(replaced)
		}
		t.publish(nil)
	case want.reread:
		have.use.Retry()
	}
}

// maxAsked bounds the engines that are asked for a model's template at a time.
const maxAsked = 2

// askTemplate asks engines for a model's template until one answers. The last of them is asked first: of
// engines that render differently, the one that became ready last is right.
func (t *tokenizers) askTemplate(name string, from modelFolder, engines []*worker.Worker) {
	if from.template != "" {
		return // the settings say it
	}
	slices.Reverse(engines)
	for _, w := range engines[:min(len(engines), maxAsked)] {
		template, err := t.template(w)
		if err == nil {
			t.templates[name] = template
			return
		}
		t.log.Info("cannot ask an engine for its chat template", "model", name, "worker", w.Spec.ID, "error", err)
	}
}

// publish gives the models to the Tokenizer, and closes the one that another has replaced, which may be nil.
func (t *tokenizers) publish(replaced *loadedModel) {
	use, failed := map[string]*tokenize.InProcess{}, map[string]string{}
	for name, l := range t.loaded {
		if l.use != nil {
			use[name] = l.use
		} else {
			failed[name] = l.failed
		}
	}
	for name := range t.pending {
		failed[name] = "it is still being loaded"
	}
	t.to.SetNatives(use)
	t.to.SetFailed(failed)
	if replaced != nil && replaced.model != nil {
		replaced.model.Close() // running calls end first
	}
}

// loadWithin loads one model on a goroutine of its own, for which others do not wait longer than loadTimeout: a folder on
// a disk that does not answer blocks it without end. It returns nil if the model is not loaded by then; the loader
// gets it when it is.
func (t *tokenizers) loadWithin(name string, from modelFolder, timeout time.Duration) *loadedModel {
	// Without a buffer a model is received, or goes to late, but is never lost between the two.
	loaded, left := make(chan *loadedModel), make(chan struct{})
	template := t.templates[name]
	go func() {
		l := t.load(name, from, timeout, template)
		select {
		case loaded <- l:
		case <-left:
			late := lateModel{name, l}
			t.mu.Lock()
			defer t.mu.Unlock()
			if t.closed {
				late.close()
				return
			}
			t.late = append(t.late, late)
			t.startLoading()
		}
	}()
	timer := time.NewTimer(t.loadTimeout)
	defer timer.Stop()
	select {
	case l := <-loaded:
		return l
	case <-timer.C:
		t.log.Warn("a tokenizer is still being loaded: the engines tokenize the model's prompts until it is", "model", name, "file", from.dir)
	case <-t.stop:
	}
	close(left)
	return nil
}

// load loads one model. What fails is logged, and tried again at the next reload. template is that of the servers.
func (t *tokenizers) load(name string, from modelFolder, timeout time.Duration, template string) *loadedModel {
	l := &loadedModel{from: from, content: from.fingerprint()}
	library, err := t.open()
	if err != nil {
		l.failed = "no tokenizer library: " + err.Error()
		t.log.Warn("no tokenizer library: the engines tokenize the model's prompts", "model", name, "error", err)
		return l
	}
	if l.model, l.added, err = library.load(from.dir); err != nil {
		l.model, l.failed = nil, err.Error()
		t.log.Warn("cannot load the tokenizer: the engines tokenize the model's prompts", "model", name, "file", from.dir, "error", err)
		return l
	}
	l.model.SetTimeout(timeout)
	if t.use(l, name, template); l.use != nil {
		t.log.Info("tokenizer loaded", "model", name, "file", from.dir)
	}
	return l
}

// use prepares a model to be used with the template of its servers.
func (t *tokenizers) use(l *loadedModel, name, template string) {
	l.template = template
	var err error
	if l.use, err = t.prepare(name, l); err != nil {
		l.model.Close()
		l.model, l.use, l.failed = nil, nil, err.Error()
		t.log.Warn("cannot use the tokenizer: the engines tokenize the model's prompts", "model", name, "file", l.from.dir, "error", err)
	}
}

func (t *tokenizers) prepare(name string, l *loadedModel) (*tokenize.InProcess, error) {
	from, model := l.from, l.model
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
	// The library drops truncation and padding, as vLLM does; the rules look at the rest.
	rules, err := incremental.NewRules(withoutTraining(text), l.added)
	if err != nil {
		t.log.Info("whole prompts are encoded each time", "model", name, "reason", err)
		rules = nil
	}
	templates := chatTemplates(from.dir)
	if code == "" && from.template == "" && processorTemplates(from.dir, templates) {
		code = "the folder has a template of a processor, with which the engines may render"
	}
	if code != "" {
		t.log.Info("only completions are tokenized here: the engines render the model's chats", "model", name, "reason", code)
	}
	given, err := l.givenTemplate(templates)
	if err != nil {
		return nil, err
	}
	use := tokenize.NativeModel(model)
	if given != "" && code == "" {
		t.log.Info("chats are rendered with the template of the engines", "model", name)
		templates = map[string]string{"default": given}
		use = givenTemplate{model, given}
	}
	settings := settingsOf(from, templates)
	if settings.CodeRendered = code != ""; code == "" {
		t.reportTemplates(name, templates, use)
		tryTemplates(&settings, templates, use)
	}
	return t.to.NewInProcess(name, use, rules, settings)
}

// givenTemplate returns the template with which the servers were started, by the settings or by their own report; ""
// if they use the folder's.
func (l *loadedModel) givenTemplate(folder map[string]string) (string, error) {
	if l.from.template != "" {
		text, err := os.ReadFile(l.from.template)
		return string(text), err
	}
	if len(folder) == 1 && folder["default"] == l.template {
		return "", nil
	}
	return l.template, nil // of several templates the server reports none
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
	s := chatinput.Settings{Plain: of(templates["default"]), TrustTemplate: from.trust, NoToolsIfNone: from.noTools}
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

// vocabularyFiles are the vocabularies that the library may load.
var vocabularyFiles = []string{"tokenizer.json", "tekken.json", "tiktoken.model", "qwen.tiktoken"}

// fingerprint identifies what loading a model reads: the names and contents of the files of its folder, the
// names of those by which Mistral's folders are known, and the file of the settings' template.
func (from modelFolder) fingerprint() string {
	names := append([]string{"config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja"}, vocabularyFiles...)
	names = append(names, processorFiles...)
	more, _ := filepath.Glob(filepath.Join(from.dir, "additional_chat_templates", "*.jinja"))
	files := append(more, from.template)
	for _, name := range names {
		files = append(files, filepath.Join(from.dir, name))
	}
	h := xxh3.New()
	for _, file := range files {
		f, err := os.Open(file)
		if err != nil {
			continue
		}
		n, err := io.Copy(h, f)
		f.Close()
		fmt.Fprintf(h, "%s %d %v\n", file, n, err)
	}
	for _, pattern := range []string{"consolidated*.safetensors", "tokenizer.model.v*"} {
		found, _ := filepath.Glob(filepath.Join(from.dir, pattern))
		fmt.Fprintf(h, "%q\n", found)
	}
	return fmt.Sprintf("%x", h.Sum128().Bytes())
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
		if one != "" { // null: none
			all["default"] = one
		}
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

// processorFiles may have the template of a multimodal model's processor.
var processorFiles = []string{"chat_template.json", "processor_config.json"}

// processorTemplates reports whether a folder has a template of a processor that is not the tokenizer's one and
// only template. Without tools vLLM prefers it, if transformers can make a processor of the folder; with tools it
// does not (vLLM 0.32, renderers/hf.py, resolve_chat_template).
func processorTemplates(dir string, templates map[string]string) bool {
	for _, name := range processorFiles {
		var c struct {
			Template json.RawMessage `json:"chat_template"`
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || json.Unmarshal(text, &c) != nil || len(c.Template) == 0 || string(c.Template) == "null" {
			continue
		}
		var one string
		if json.Unmarshal(c.Template, &one) != nil || len(templates) != 1 || templates["default"] != one {
			return true
		}
	}
	return false
}

// close stops loading and closes the models. Requests have ended. It waits a few seconds for the loader, which may be
// reading from a disk that does not answer; its models are then left to the end of the process.
func (t *tokenizers) close() {
	if t == nil {
		return
	}
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.stop)
	}
	t.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		t.ended.Wait()
		close(ended)
	}()
	timer := time.NewTimer(min(t.loadTimeout, 5*time.Second))
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		t.log.Warn("the loader of tokenizers does not end")
		return
	}
	t.to.SetNatives(nil)
	t.to.SetFailed(nil)
	for _, l := range t.loaded {
		if l.model != nil {
			l.model.Close()
		}
	}
}

// tokensDiffer logs that a model's ids are not the engine's.
func (r *Router) tokensDiffer(m tokenize.Mismatch) {
	r.log.Warn("native token ids differ from the engine's: the engines tokenize the model's prompts until this one restarts or leaves",
		"model", m.Model, "url", m.URL, "detail", m.String())
}
