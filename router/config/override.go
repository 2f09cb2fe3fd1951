package config

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"sluice/router/worker"
)

// forEachField calls f for each field that a single text can set: the scalars and lists of strings
// outside of workers, models and other lists of entries.
func forEachField(v reflect.Value, path string, f func(path string, v reflect.Value, tag reflect.StructTag)) {
	forAll(v, path, func(path string, v reflect.Value, tag reflect.StructTag) {
		if !hasEntries(v) {
			f(path, v, tag)
		}
	})
}

// forAll calls f for each field of v and its structs, but not for those within entries.
func forAll(v reflect.Value, path string, f func(path string, v reflect.Value, tag reflect.StructTag)) {
	for _, field := range fieldsOf(v.Type()) {
		sub, fv := joinPath(path, field.Tag.Get("yaml")), v.FieldByIndex(field.Index)
		if fv.Kind() == reflect.Struct {
			forAll(fv, sub, f)
			continue
		}
		f(sub, fv, field.Tag)
	}
}

// hasEntries reports whether the field v has entries with fields of their own, which no single text can
// set.
func hasEntries(v reflect.Value) bool {
	return v.Kind() == reflect.Map || v.Kind() == reflect.Pointer || v.Kind() == reflect.Slice && v.Type().Elem().Kind() != reflect.String
}

// set parses text into the field at path. from is the flag or environment variable that errors name.
func (c *Config) set(path, text string, from string, errs *errorList) {
	at := origin{from: from}
	var known []string
	found := false
	forEachField(reflect.ValueOf(c).Elem(), "", func(p string, v reflect.Value, tag reflect.StructTag) {
		known = append(known, p)
		if p != path {
			return
		}
		found = true
		c.origins[p] = at
		if v.Kind() == reflect.Slice {
			bare := text
			if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
				bare = text[1 : len(text)-1]
			}
			if bare = needsNoQuotes.Replace(bare); bare != text {
				errs.add(at, p, "%s; want comma-separated words without quotes, such as %s", quoted(text), quoted(bare))
				return
			}
			words := strings.FieldsFunc(text, func(r rune) bool { return r == '+' || r == ',' })
			for i := range words {
				words[i] = strings.TrimSpace(words[i])
			}
			v.Set(reflect.ValueOf(words))
			return
		}
		if err := setScalar(v, tag, text); err != nil {
			errs.add(at, p, "%v", err)
		}
	})
	if !found {
		errs.add(at, path, "no such field; %s", nearFields(path, known))
	}
}

// nearFields names the known paths that may be meant by a wrong one: the nearest, those with the same
// last part, or those of the same group.
func nearFields(path string, known []string) string {
	const most = 3
	group, last := "", path
	if i := strings.LastIndexByte(path, '.'); i >= 0 {
		group, last = path[:i+1], path[i+1:]
	}
	near := func(k string) int { return distance(path, k) }
	var found []string
	for _, k := range known {
		if near(k) <= max(len(path)/4, 2) || strings.HasSuffix("."+k, "."+last) {
			found = append(found, k)
		}
	}
	if len(found) == 0 && group != "" {
		for _, k := range known {
			if strings.HasPrefix(k, group) && distance(last, k[len(group):]) <= max(len(last)/2, 3) {
				found = append(found, k)
			}
		}
	}
	slices.SortStableFunc(found, func(a, b string) int { return near(a) - near(b) })
	if found = found[:min(len(found), most)]; len(found) > 0 {
		return "did you mean " + joinOr(found) + "?"
	}
	return "`sluice config print-defaults` and docs/config.md list the fields"
}

// needsNoQuotes removes the quotes from a list that was written in YAML's syntax, for the suggestion
// in an error.
var needsNoQuotes = strings.NewReplacer(`"`, "", `'`, "")

// addWorker adds the worker of a flag or an environment variable. It replaces a worker with the same
// id from another source.
func (c *Config) addWorker(role worker.Role, text, from string, errs *errorList) {
	at := origin{from: from}
	w, err := ParseWorker(role, text)
	if err != nil {
		errs.add(at, "", "%v", err)
		return
	}
	i := len(c.Workers)
	if w.ID != "" {
		if same := slices.IndexFunc(c.Workers, func(o Worker) bool { return o.ID == w.ID }); same >= 0 {
			// Replace only a worker of another source: an id used twice on one command line is an error.
			if c.originOf(fmt.Sprintf("workers[%d]", same)).from != from {
				i = same
			}
		}
	}
	path := fmt.Sprintf("workers[%d]", i)
	if i == len(c.Workers) {
		c.Workers = append(c.Workers, w)
	} else {
		c.Workers[i] = w
		for p := range c.origins {
			if strings.HasPrefix(p, path+".") {
				delete(c.origins, p)
			}
		}
	}
	c.origins[path] = at
}

var workerVariables = []struct {
	name string
	role worker.Role
}{{"SLUICE_ENGINE", worker.Aggregated}, {"SLUICE_PREFILL", worker.Prefill}, {"SLUICE_DECODE", worker.Decode}}

// serviceVar matches the variables that Kubernetes sets for a service named sluice or sluice-admin, so
// that they are not reported as unknown.
var serviceVar = regexp.MustCompile(`_(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_.*)?)$`)

// applyEnv sets fields from environ, whose elements are "NAME=value". The name of a field's variable
// is SLUICE_ and the field's path. SLUICE_ENGINE, SLUICE_PREFILL and SLUICE_DECODE each have a list of
// workers separated by spaces.
// A name that begins like a group of fields and matches none is an error, as an unknown field of a
// file is. Any other name that is similar to a known one gets only a warning, because the variable may
// belong to another program.
func (c *Config) applyEnv(environ []string, f *errorList) {
	names := map[string]string{} // variable -> path
	groups := map[string]bool{}
	old, used := map[string]string{}, given{}
	for was, path := range oldPaths() {
		old[envName(was)] = path
	}
	forEachField(reflect.ValueOf(c).Elem(), "", func(path string, _ reflect.Value, _ reflect.StructTag) {
		names[envName(path)] = path
		if group, _, nested := strings.Cut(path, "."); nested {
			groups[envName(group)+"_"] = true
		}
	})
	for _, v := range slices.Sorted(slices.Values(environ)) {
		name, text, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, "SLUICE_") || text == "" {
			continue
		}
		if i := slices.IndexFunc(workerVariables, func(w struct {
			name string
			role worker.Role
		}) bool {
			return w.name == name
		}); i >= 0 {
			for _, spec := range strings.Fields(text) {
				c.addWorker(workerVariables[i].role, spec, name, f)
			}
			continue
		}
		path, ok := names[name]
		if renamed, isOld := old[name]; !ok && isOld {
			path, ok = renamed, true
			c.inputWarnings = append(c.inputWarnings, renamedWarning("environment", name, envName(path)))
		}
		if before, conflicts := used.conflict(path, name); ok && conflicts {
			f.add(origin{from: name}, path, "given by %s, too; want %s alone", before, envName(path))
			continue
		}
		if ok {
			c.set(path, text, name, f)
			continue
		}
		grouped := false
		for group := range groups {
			if strings.HasPrefix(name, group) && !serviceVar.MatchString(name) {
				known := make([]string, 0, len(names))
				for n := range names {
					if strings.HasPrefix(n, group) {
						known = append(known, n)
					}
				}
				slices.Sort(known)
				grouped = true
				f.add(origin{from: name}, "", "no such variable%s", nearestOrAll(name, known, "; known: "))
			}
		}
		if !grouped && name != configVar && !serviceVar.MatchString(name) {
			c.warnUnknownVar(name, names)
		}
	}
}

const (
	varPrefix = "SLUICE_"
	configVar = varPrefix + "CONFIG" // the file, see ConfigPath
)

// warnUnknownVar adds a warning if the variable sets nothing and its name is similar to that of one
// that does.
func (c *Config) warnUnknownVar(name string, fields map[string]string) {
	known := []string{strings.TrimPrefix(configVar, varPrefix)}
	for n := range fields {
		known = append(known, strings.TrimPrefix(n, varPrefix))
	}
	for _, w := range workerVariables {
		known = append(known, strings.TrimPrefix(w.name, varPrefix))
	}
	slices.Sort(known)
	if best := nearest(strings.TrimPrefix(name, varPrefix), known); best != "" {
		c.inputWarnings = append(c.inputWarnings, fmt.Sprintf("the variable %s sets nothing (did you mean %q?)", name, varPrefix+best))
	}
}

// InputWarnings returns warnings about the file, the environment and the flags: old names of fields,
// and variables that set nothing but are similar to a known one.
func (c *Config) InputWarnings() []string { return c.inputWarnings }

func envName(path string) string {
	return "SLUICE_" + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// Flags holds the configuration flags of one command line.
type Flags struct {
	config  string
	sets    []setting
	workers []workerFlag
}

type setting struct{ flag, path, text string }

type workerFlag struct {
	flag string
	role worker.Role
	text string
}

// namedFlags are the fields that have a flag of their own; --set sets all others.
var namedFlags = []struct{ name, path, usage string }{
	{"listen", "listen", "`ADDR` for clients; port 0 selects a free one [127.0.0.1:8080]"},
	{"admin", "admin.listen", "`ADDR` of the admin listener, loopback only, or off [127.0.0.1:9901]"},
	{"pd", "pd.family", "prefill/decode `FAMILY`: " + joinOr(Families()) + " [nixl if there are prefill workers]"},
	{"prefill-model-labels", "pd.prefill_labels", "comma-separated `LABELS`; only prefill workers with one of them are chosen [all workers]"},
	{"nixl-proxy-host", "lmcache.proxy_host", "`HOST` to which LMCache's prefill workers send notifications that KV has been written [127.0.0.1]"},
	{"nixl-proxy-port", "lmcache.proxy_port", "`PORT` to which LMCache's prefill workers send notifications that KV has been written [8500]"},
	{"nixl-peer-host", "lmcache.peer_host", "`HOST` of decode workers' LMCache ports, for workers without peer_host [the host of their URL]"},
	{"nixl-peer-init-port", "lmcache.peer_init_port", "comma-separated `PORTS` for decode workers without init_port, one for each tensor-parallel rank"},
	{"nixl-peer-alloc-port", "lmcache.peer_alloc_port", "comma-separated `PORTS` for decode workers without alloc_port, one for each tensor-parallel rank"},
	{"nixl-finished-req-ttl", "lmcache.finished_req_ttl", "`DURATION` for which a notification that no request waits for is kept [300s]"},
	{"nixl-cleanup-interval", "lmcache.cleanup_interval", "`DURATION` between removals of expired notifications [60s]"},
	{"decode-model-labels", "pd.decode_labels", "comma-separated `LABELS`; only decode workers with one of them are chosen [all workers]"},
	{"workers-file", "discovery.file", "YAML `FILE` with workers, read again when it changes"},
	{"register", "registration.listen", "`ADDR` on which workers register, or off; requires registration.networks, and registration.token (SLUICE_REGISTRATION_TOKEN) or registration.client_ca [off]"},
	{"log-level", "log.level", "log `LEVEL`: debug, info, warn, error [info]"},
	{"log-format", "log.format", "log `FORMAT`: text, json [text]"},
	{"policy", "schedule.policy", "scheduling `POLICY`: kv, round_robin, random, least_loaded, session [kv]"},
	{"tokens", "tokens.mode", "source of token ids, a `MODE`: auto, engine, text, ids [auto]"},
	{"max-body", "limits.max_body", "largest request body, a `SIZE` such as 32MiB [32MiB]"},
	{"prefill-timeout", "timeouts.prefill", "timeout of a prefill leg, a `DURATION` [5m]"},
	{"decode-timeout", "timeouts.decode", "timeout of a decode or aggregated leg, a `DURATION` [10m]"},
	{"pool-wait", "timeouts.pool_wait", "`DURATION` for which a request waits for a pool without a healthy worker [5s]"},
	{"drain", "timeouts.drain", "`DURATION` for which streams may continue after SIGTERM [30s]"},
	{"lease", "pd.lease", "`DURATION` for which a prefill worker keeps blocks for decode [30s]"},
}

// RegisterFlags adds the configuration's flags to fs.
func RegisterFlags(fs *flag.FlagSet) *Flags {
	f := &Flags{}
	fs.StringVar(&f.config, "config", "", "configuration `FILE` in YAML; environment variables and flags override it [the variable SLUICE_CONFIG]")
	for _, w := range []struct {
		name string
		role worker.Role
		what string
	}{
		{"engine", worker.Aggregated, "an engine that prefills and decodes"},
		{"prefill", worker.Prefill, "a prefill worker"},
		{"decode", worker.Decode, "a decode worker"},
	} {
		f.worker(fs, w.name, w.role, "`URL[,key=value]...` of "+w.what+"; may be repeated")
	}
	for _, n := range namedFlags {
		f.addNamed(fs, n.name, n.path, n.usage)
	}
	f.set(fs, anyField)
	return f
}

// accessPaths are the fields that determine how the router connects to engines.
var accessPaths = []string{"engine_key", "engine_tls.ca", "engine_tls.cert", "engine_tls.key"}

// RegisterAccessFlags adds --set to fs for a command that connects to engines and reads no
// configuration. Flags.Access returns the result.
func RegisterAccessFlags(fs *flag.FlagSet) *Flags {
	f := &Flags{}
	f.set(fs, "`PATH=VALUE` of "+joinOr(accessPaths)+"; may be repeated")
	return f
}

// Access returns the default configuration with the fields of accessPaths set from environ and the
// flags.
func (f *Flags) Access(environ []string) (*Config, error) {
	c, found := Default(), &errorList{}
	environ = slices.DeleteFunc(slices.Clone(environ), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return !slices.ContainsFunc(accessPaths, func(path string) bool { return envName(path) == name })
	})
	for _, s := range f.sets {
		if !slices.Contains(accessPaths, s.path) {
			found.add(origin{from: s.flag}, s.path, "not used here; want one of %s", joinOr(accessPaths))
		}
	}
	if err := found.err(); err != nil {
		return nil, err
	}
	return f.applyOver(c, environ, found)
}

func (f *Flags) worker(fs *flag.FlagSet, name string, role worker.Role, usage string) {
	fs.Func(name, usage, func(s string) error {
		f.workers = append(f.workers, workerFlag{"--" + name, role, s})
		return nil
	})
}

func (f *Flags) addNamed(fs *flag.FlagSet, name, path, usage string) {
	fs.Func(name, usage, func(s string) error {
		f.sets = append(f.sets, setting{"--" + name, path, s})
		return nil
	})
}

const anyField = "`PATH=VALUE` of any other field of the file, such as health.unhealthy_threshold=3 or, for a list, registration.networks=10.0.0.0/16,fd00::/8; may be repeated"

func (f *Flags) set(fs *flag.FlagSet, usage string) {
	fs.Func("set", usage, func(s string) error {
		path, value, found := strings.Cut(s, "=")
		if !found {
			return fmt.Errorf("want PATH=VALUE, such as health.unhealthy_threshold=3")
		}
		f.sets = append(f.sets, setting{"--set", path, value})
		return nil
	})
}

// ConfigPath returns the value of --config, else of SLUICE_CONFIG, or "".
func (f *Flags) ConfigPath() string {
	if f.config != "" {
		return f.config
	}
	return os.Getenv(configVar)
}

// applySets sets the fields of --set and of the named flags.
func (f *Flags) applySets(c *Config, errs *errorList) {
	old, used := oldPaths(), given{}
	for _, s := range f.sets {
		path := s.path
		if renamed, isOld := old[path]; isOld {
			path = renamed
			c.inputWarnings = append(c.inputWarnings, renamedWarning(s.flag, s.path, path))
		}
		if before, conflicts := used.conflict(path, s.path); conflicts {
			errs.add(origin{from: s.flag}, path, "given as %s and as %s; want only %s", before, s.path, path)
			continue
		}
		c.set(path, s.text, s.flag, errs)
	}
}

// apply applies the flags to c and checks the result.
func (f *Flags) apply(c *Config, errs *errorList) error {
	f.applySets(c, errs)
	for _, w := range f.workers {
		c.addWorker(w.role, w.text, w.flag, errs)
	}
	c.fillDefaults()
	c.check(errs)
	return errs.err()
}

// Resolve builds the configuration of a command: it reads the file, if one is named, applies the
// environment and then the flags, and checks the result. Errors are of type Errors, except for a file
// that cannot be read.
func (f *Flags) Resolve(environ []string) (*Config, error) {
	path := f.ConfigPath()
	if path == "" {
		return f.applyOver(Default(), environ, &errorList{})
	}
	text, err := readFile(path)
	if err != nil {
		return nil, err
	}
	was := isBlank(text)
	reparse := func(text []byte) (*Config, error) {
		var found errorList
		if isBlank(text) && !was {
			// An editor that is still writing, or a full disk, leaves an empty file; it must not remove
			// all workers.
			found.add(origin{file: path, line: 1, col: 1}, "", "the file is empty and was not when it was read before; want the new configuration, or a comment if nothing is to be set")
			return nil, found.err()
		}
		return f.applyOver(read(path, text, &found), environ, &found)
	}
	c, err := reparse(text)
	if err != nil {
		return nil, err
	}
	c.path, c.reparse = path, reparse
	return c, nil
}

// LogFormat returns log.format from the file, the environment and the flags, so that errors in other
// fields can be reported in that format. It returns the default if log.format itself has an error.
func (f *Flags) LogFormat(environ []string) string {
	c, errs := Default(), &errorList{}
	if path := f.ConfigPath(); path != "" {
		if text, err := readFile(path); err == nil {
			c = read(path, text, errs)
		}
	}
	c.applyEnv(environ, errs)
	f.applySets(c, errs)
	return c.Log.Format
}

// isBlank reports whether text contains nothing but white space; a comment counts as content.
func isBlank(text []byte) bool { return len(bytes.TrimSpace(text)) == 0 }

// LoadWithEnv reads the file at path, applies the environment, and checks the result.
func LoadWithEnv(path string, environ []string) (*Config, error) {
	return (&Flags{config: path}).Resolve(environ)
}

// applyOver applies the environment and the flags to c and checks the result. found has the errors of
// c's file.
func (f *Flags) applyOver(c *Config, environ []string, found *errorList) (*Config, error) {
	c.applyEnv(environ, found)
	if err := f.apply(c, found); err != nil {
		return nil, err
	}
	return c, nil
}
