package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"sluice/dataplane/upstream"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/worker"
)

const initLong = `Probes every engine (models, version, ranks, block size, role if it reports one, source of its KV
events) and writes a commented configuration file. An engine that does not answer is written as a
comment with the reason. No inference endpoint is called.

Engines with an API key or TLS are probed with engine_key and engine_tls, from the environment
(SLUICE_ENGINE_KEY, SLUICE_ENGINE_TLS_CA) or --set. The file contains engine_tls but never the key.`

const initExample = `
  sluice init http://10.0.0.1:8000 -o sluice.yaml
  sluice init --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000`

// probedEngine is one engine named on the command line and the result of its probe.
type probedEngine struct {
	worker    config.Worker
	roleGiven bool // the command line sets the role
	answer    *fleet.EngineInfo
}

func initCommand() *cobra.Command {
	var o initFlags
	fs := flag.NewFlagSet("sluice init", flag.ContinueOnError)
	o.access = config.RegisterAccessFlags(fs)
	cmd := newCommand(cobra.Command{
		Use: "init [flags] [URL[,key=value]...]...", GroupID: groupConfigure, Short: "probe engines and write a commented configuration file", Long: initLong, Example: initExample,
		Args:        cobra.ArbitraryArgs,
		Annotations: map[string]string{notes: workerKeyNotes()},
	}, "0 written, 1 no engine answered or the file cannot be written", func(cmd *cobra.Command, args []string) int {
		return runInit(&o, args, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	flags := cmd.Flags()
	flags.Func("engine", "`URL[,key=value]...` of an engine that prefills and decodes; may be repeated", o.addEngine(worker.Aggregated, true))
	flags.Func("prefill", "`URL[,key=value]...` of a prefill worker; may be repeated", o.addEngine(worker.Prefill, true))
	flags.Func("decode", "`URL[,key=value]...` of a decode worker; may be repeated", o.addEngine(worker.Decode, true))
	flags.StringVarP(&o.output, "output", "o", "", "`FILE` to write (default: standard output)")
	flags.BoolVar(&o.force, "force", false, "replace the file of --output if it exists")
	flags.BoolVar(&o.asJSON, "json", false, "print what the engines answered, and the configuration without --output, as JSON")
	flags.DurationVar(&o.timeout, "timeout", 5*time.Second, "`DURATION` of each probe request to an engine")
	return cmd
}

// initFlags are the values of the command's flags.
type initFlags struct {
	engines []probedEngine
	output  string
	force   bool
	asJSON  bool
	timeout time.Duration
	access  *config.Flags
}

// addEngine returns a function that adds the engine of a flag or an argument.
func (o *initFlags) addEngine(role worker.Role, roleGiven bool) func(string) error {
	return func(text string) error {
		w, err := config.ParseWorker(role, text)
		o.engines = append(o.engines, probedEngine{worker: w, roleGiven: roleGiven})
		return err
	}
}

// runInit probes the engines of the flags and of args and writes a configuration for them.
func runInit(o *initFlags, args []string, stdout, stderr io.Writer) int {
	for _, arg := range args {
		if err := o.addEngine(worker.Aggregated, false)(arg); err != nil {
			fmt.Fprintln(stderr, "sluice init:", err)
			return 2
		}
	}
	engines := o.engines
	if len(engines) == 0 {
		fmt.Fprintln(stderr, "sluice init: no engine was named; want at least one URL, as `sluice init http://127.0.0.1:8000`")
		return 2
	}
	cfg, err := o.access.Access(os.Environ())
	if err == nil {
		err = validateEngines(engines)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice init:", err)
		return 2
	}
	opt, err := app.EngineOptions(cfg, o.timeout)
	if err != nil {
		fmt.Fprintln(stderr, "sluice init:", err)
		return 1
	}
	probeAll(engines, o.timeout, opt)
	text, reached := renderConfig(engines, cfg, stderr)
	if reached == 0 {
		fmt.Fprintln(stderr, "sluice init: no engine answered, so there is nothing to write")
		return 1
	}
	if _, err := config.Parse("the file made", []byte(text)); err != nil {
		fmt.Fprintln(stderr, "sluice init: the engines' answers make no valid configuration:", err)
		return 1
	}
	if o.asJSON {
		err = printInitJSON(engines, text, o, stdout)
	} else {
		err = writeOutput(text, o.output, o.force, stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice init:", err)
		return 1
	}
	return 0
}

// initEngine is the JSON of one engine.
type initEngine struct {
	URL    string   `json:"url"`
	Error  string   `json:"error,omitempty"` // it did not answer; the configuration has it as a comment
	Engine string   `json:"engine,omitempty"`
	Ver    string   `json:"version,omitempty"`
	Role   string   `json:"role,omitempty"` // as the engine reports it
	Models []string `json:"models,omitempty"`
	Ranks  int      `json:"ranks,omitempty"`
	Block  int      `json:"block_size,omitempty"`
	Notes  []string `json:"notes,omitempty"`
}

// printInitJSON prints what the engines answered, with the configuration unless it writes that to a
// file.
func printInitJSON(engines []probedEngine, text string, o *initFlags, stdout io.Writer) error {
	out := struct {
		File    string       `json:"file,omitempty"`
		Engines []initEngine `json:"engines"`
		Config  string       `json:"config,omitempty"` // YAML
	}{File: o.output, Config: text}
	if o.output != "" {
		if err := writeOutput(text, o.output, o.force, nil); err != nil {
			return err
		}
		out.Config = ""
	}
	for _, e := range engines {
		a := e.answer
		one := initEngine{URL: e.worker.URL, Engine: a.Engine, Ver: a.Version, Models: a.Names(), Ranks: a.Ranks, Block: a.BlockSize, Notes: a.Notes}
		if a.RoleKnown {
			one.Role = a.Role.String()
		}
		if a.Err != nil {
			one = initEngine{URL: e.worker.URL, Error: a.Err.Error()}
		}
		out.Engines = append(out.Engines, one)
	}
	return encodeJSON(stdout, out)
}

// validateEngines validates the engines of the command line before any of them is probed.
func validateEngines(engines []probedEngine) error {
	c := config.Default()
	for _, e := range engines {
		c.Workers = append(c.Workers, e.worker)
	}
	return c.Validate()
}

func probeAll(engines []probedEngine, timeout time.Duration, opt upstream.Options) {
	var wg sync.WaitGroup
	for i := range engines {
		wg.Go(func() {
			w := &engines[i].worker
			engines[i].answer = probeURL(strings.TrimRight(w.URL, "/"), w.HealthPath, timeout, opt)
		})
	}
	wg.Wait()
}

// probeURL probes one server: its kind, models and health. healthPath is the path of the health
// check; "" selects the engines' usual paths.
func probeURL(url, healthPath string, timeout time.Duration, opt upstream.Options) *fleet.EngineInfo {
	ep, err := upstream.NewEndpoint(url, opt)
	if err != nil {
		return &fleet.EngineInfo{URL: url, Err: err}
	}
	defer ep.Close()
	return fleet.InspectHealth(context.Background(), ep, healthPath, timeout)
}

// renderConfig returns the text of the configuration and the number of engines that answered.
// It writes notes for the operator into the text and to stderr. access contains the engine_key
// and engine_tls with which the engines were probed.
func renderConfig(engines []probedEngine, access *config.Config, stderr io.Writer) (text string, reached int) {
	var b strings.Builder
	b.WriteString("# Written by `sluice init`. `sluice check --config FILE` prints its effect,\n# `sluice serve --config FILE` runs it. Lines that begin with # are defaults or notes.\n\n")
	b.WriteString("workers:\n")
	var count [3]int
	prefillEngines := map[string]bool{}
	for _, e := range engines {
		a, w := e.answer, e.worker
		if !e.roleGiven && a.RoleKnown {
			w.Role = a.Role
		}
		if w.ID == "" {
			w.ID = fmt.Sprintf("%s-%d", w.Role, count[w.Role])
		}
		count[w.Role]++
		entry, notes := renderWorker(w, a)
		if e.roleGiven && a.RoleKnown && a.Role != w.Role {
			notes = append(notes, fmt.Sprintf("it says its role is %s, not %s as given", a.Role, w.Role))
		}
		if a.Err != nil {
			fmt.Fprintf(stderr, "sluice init: %s is written as a comment: %v\n", w.URL, a.Err)
			fmt.Fprintf(&b, "\n  # did not answer: %s\n", comment(a.Err.Error()))
			for line := range strings.Lines(entry) {
				b.WriteString("  # " + line)
			}
			continue
		}
		reached++
		if w.Role == worker.Prefill {
			prefillEngines[a.Engine] = true
		}
		b.WriteString("\n")
		for _, n := range notes {
			fmt.Fprintf(stderr, "sluice init: %s: %s\n", w.URL, n)
			fmt.Fprintf(&b, "  # %s\n", comment(n))
		}
		for line := range strings.Lines(entry) {
			b.WriteString("  " + line)
		}
	}
	if reached == 0 {
		return "", 0
	}
	set := map[string]string{}
	for path, file := range map[string]string{"engine_tls.ca": access.EngineTLS.CA, "engine_tls.cert": access.EngineTLS.Cert, "engine_tls.key": access.EngineTLS.Key} {
		if file != "" {
			set[path] = fmt.Sprintf("%q", file)
		}
	}
	if access.EngineKey != "" {
		const note = "the engines were probed with engine_key, which is not written here: serve reads it from SLUICE_ENGINE_KEY"
		fmt.Fprintln(stderr, "sluice init:", note)
		b.WriteString("\n# " + note + ".\n")
	}
	switch {
	case len(prefillEngines) == 0:
	case prefillEngines[fleet.SGLang]:
		set["pd.family"] = "sglang # by the prefill workers' bootstrap servers"
	case prefillEngines[fleet.TRTLLM]:
		set["pd.family"] = "trtllm # context_only, then generation_only"
	default:
		set["pd.family"] = "nixl # vLLM's NixlConnector, pull; sluice check lists the others"
	}
	if len(prefillEngines) > 1 {
		family, _, _ := strings.Cut(set["pd.family"], " ")
		fmt.Fprintf(stderr, "sluice init: the prefill workers run different engines; pd.family is %s, and models on the others need their own (models.NAME.pd)\n", family)
	}
	b.WriteString("\n# Everything else, with its defaults.\n" + config.Sample(set))
	return b.String(), reached
}

// renderWorker returns one entry of the list of workers, and notes for the operator. Values that
// the router discovers by itself are written as comments, because they may change.
func renderWorker(w config.Worker, a *fleet.EngineInfo) (entry string, notes []string) {
	var b strings.Builder
	field := func(name, value, note string) {
		line := name + ": " + value
		if note != "" {
			line = fmt.Sprintf("%-36s # %s", line, comment(note))
		}
		b.WriteString("  " + line + "\n")
	}
	fmt.Fprintf(&b, "- id: %s\n", w.ID)
	field("url", w.URL, strings.TrimSpace(engineName(a.Engine)+" "+a.Version))
	roleNote := ""
	if a.Err == nil && !a.RoleKnown && w.Role == worker.Aggregated {
		if roleNote = "the engine does not report it; set prefill or decode if it is one"; a.UsesNIXL {
			roleNote = "it has a NIXL connector: set prefill or decode"
			notes = append(notes, "it shows NIXL metrics, so it is likely a prefill or decode worker; vLLM does not report which: set it with --prefill or --decode")
		}
	}
	field("role", w.Role.String(), roleNote)
	if len(w.Models) > 0 {
		field("models", list(w.Models), "")
	} else if len(a.Models) > 0 {
		field("# models", list(a.Names()), modelNote(a))
	}
	switch {
	case len(w.RankURLs) > 0:
		field("rank_urls", list(w.RankURLs), "")
		field("ranks", strings.ReplaceAll(fmt.Sprint(w.Ranks), " ", ", "), "")
	case len(w.Ranks) > 0:
		field("ranks", strings.ReplaceAll(fmt.Sprint(w.Ranks), " ", ", "), "")
	case a.Ranks-a.StartRank > 1 && a.StartRank > 0:
		field("ranks", fmt.Sprint(a.Ranks-a.StartRank), fmt.Sprintf("data-parallel ranks, addressed one by one; the engine calls them %d to %d", a.StartRank, a.Ranks-1))
	case a.Ranks > 1:
		field("ranks", fmt.Sprint(a.Ranks), "data-parallel ranks, addressed one by one")
	}
	if len(w.Labels) > 0 {
		field("labels", list(w.Labels), "")
	}
	if engine := w.Engine; engine != "" {
		field("engine", engine, "")
	} else if a.Engine != "" {
		field("engine", a.Engine, "")
	}
	switch {
	case w.HealthPath != "":
		field("health_path", fmt.Sprintf("%q", w.HealthPath), "")
	case a.HealthPath == fleet.ModelsPath:
		field("# health_path", fmt.Sprintf("%q", a.HealthPath), "it has no /health; name a better path if there is one")
	}
	if w.BlockSize > 0 {
		field("block_size", fmt.Sprint(w.BlockSize), "")
	} else if a.BlockSize > 0 {
		field("# block_size", fmt.Sprint(a.BlockSize), fmt.Sprintf("tokens, as reported; %d blocks", a.TotalBlocks))
	}
	switch {
	case len(w.KVEvents) > 0:
		field("kv_events", list(w.KVEvents), "")
	case len(a.Events) > 0:
		note := "now " + a.Events[0].Endpoint
		if a.Events[0].Replay != "" {
			note += ", replay " + a.Events[0].Replay
		}
		field("kv_events", "auto", note)
	case a.Err == nil:
		field("kv_events", "auto", "the engine reports none: its cache is predicted from the requests sent to it; tcp://HOST:PORT sets one")
	}
	if len(w.KVReplay) > 0 {
		field("kv_replay", list(w.KVReplay), "")
	}
	options := w.Options
	if a.BootstrapPort > 0 && options["bootstrap_port"] == nil {
		options = map[string][]string{"bootstrap_port": {fmt.Sprint(a.BootstrapPort)}}
	}
	if len(options) > 0 {
		b.WriteString("  options:\n")
		for _, key := range config.OptionKeys() {
			if v := options[key]; v != nil {
				fmt.Fprintf(&b, "    %s: %s\n", key, list(v))
			}
		}
	}
	return b.String(), append(notes, a.Notes...)
}

func engineName(engine string) string {
	switch engine {
	case fleet.VLLM:
		return "vLLM"
	case fleet.SGLang:
		return "SGLang"
	case fleet.TRTLLM:
		return "TensorRT-LLM"
	}
	return engine
}

func modelNote(a *fleet.EngineInfo) string {
	note := "as reported"
	if a.MaxModelLen > 0 {
		note += fmt.Sprintf("; up to %d tokens", a.MaxModelLen)
	}
	return note
}

// list returns a YAML flow list of quoted words. A word in Go's quoted form is also a valid
// double-quoted YAML string.
func list(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = fmt.Sprintf("%q", w)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// comment replaces unprintable characters in text from an engine, so that it stays on one line.
func comment(s string) string {
	return strings.Map(func(r rune) rune {
		if !worker.Printable(string(r)) {
			return ' '
		}
		return r
	}, s)
}

// writeOutput writes text to the file path, or to standard output if path is "". It replaces an
// existing file only if force is set, and then atomically.
func writeOutput(text, path string, force bool, stdout io.Writer) error {
	if path == "" {
		_, err := io.WriteString(stdout, text)
		return err
	}
	write := func(f *os.File) error {
		_, err := f.WriteString(text)
		return errors.Join(err, f.Chmod(0o644), f.Close())
	}
	if !force {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		switch {
		case errors.Is(err, os.ErrExist):
			return fmt.Errorf("%q exists already; --force replaces it", path)
		case err == nil:
			err = write(f)
		}
		if err != nil {
			return fmt.Errorf("cannot write %q: %w", path, err)
		}
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".sluice-init-*")
	if err == nil {
		defer os.Remove(f.Name())
		err = write(f)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("cannot write %q: %w", path, err)
	}
	return nil
}
