package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// reloadable lists the fields, and groups of fields, that a running router applies. All others need
// a new process (sluice restart), for the reasons in restartOnly. Of workers and api_keys, which are
// lists, single entries are added and removed. router/app/reload.go applies each of these to a
// running router; a test compares the two lists.
var reloadable = []string{
	"log.level", "proxies", "cors", "compression", "strip_forbidden", "media_hosts", "migration", "steering", "sessions", "relay.early_headers_after", "relay.comment_interval",
	"limits.max_body", "limits.memory_budget", "limits.max_depth", "limits.max_conns", "limits.max_conns_per_ip", "limits.engine_conns", "limits.pool_waiters", "limits.rank_requests", "limits.rank_tokens",
	"admission",
	"timeouts.head", "timeouts.keep_alive", "timeouts.body", "timeouts.body_idle", "timeouts.write", "timeouts.prefill", "timeouts.decode", "timeouts.first_byte", "timeouts.stream_idle", "timeouts.pool_wait",
	"timeouts.connect", "timeouts.engine_idle", "timeouts.engine_age", "timeouts.drain", "timeouts.drain_delay", "timeouts.restart",
	"health.interval", "health.timeout", "health.path", "health.unhealthy_threshold", "health.metrics_interval", "health.probe_inference", "fleet.retry_budget_ratio", "fleet.retry_budget_min_per_second", "transfers.stall_timeout",
	"health.breaker_failures", "health.breaker_open_time", "health.frozen_process", "health.frozen_core", "health.frozen_host",
	"pd.lease", "pd.lease_margin", "pd.abort_delay", "pd.abandoned_decode_timeout", "pd.completion_timeout", "pd.max_attempts", "pd.decode_attempts", "pd.decode_only_fallback", "pd.local_prefill_tokens",
	"pd.local_when_faster", "pd.prefill_by_ids", "pd.prefill_labels", "pd.decode_labels", "pd.cache_hit_threshold", "pd.reasoning_parser",
	"schedule.overlap_weight", "schedule.prefill_weight", "schedule.decode_weight", "schedule.queue_weight",
	"schedule.host_weight", "schedule.disk_weight", "schedule.in_flight_weight", "schedule.eviction_weight", "schedule.others_weight", "schedule.temperature", "schedule.policy",
	"schedule.prefill_ms", "schedule.transfer_ms", "schedule.block_ms", "tokens",
	"index.approx_ttl", "registration.token", "registration.lease", "registration.max_lease", "registration.max_workers",
}

// Reloadable reports whether a reload applies a change of the field at path to a running router.
func Reloadable(path string) bool {
	return slices.ContainsFunc(reloadable, func(p string) bool { return path == p || strings.HasPrefix(path, p+".") })
}

// Effect is the effect of a change on a running router.
type Effect string

// The effects of a change.
const (
	Applied Effect = "applied" // a reload applies it to the running router
	Restart Effect = "restart" // it needs a new process: sluice restart
)

// Change is one field whose value differs. Values are formatted as in a file; "" means that the
// field is not set. Both values of a secret are masked.
type Change struct {
	Path   string `json:"path"` // timeouts.prefill, workers["prefill-0"].labels
	Old    string `json:"old"`
	New    string `json:"new"`
	Effect Effect `json:"effect"`
	Reason string `json:"reason,omitempty"` // why it needs a new process; "" if Effect is Applied
	// Warning describes a change that is probably not intended.
	Warning string `json:"warning,omitempty"`
}

// MarshalJSON writes Reason also as why, its former name, for one release.
func (c Change) MarshalJSON() ([]byte, error) {
	type members Change
	return json.Marshal(struct {
		members
		Why string `json:"why,omitempty"`
	}{members(c), c.Reason})
}

// UnmarshalJSON accepts why as well: a router of the previous release sends no reason.
func (c *Change) UnmarshalJSON(text []byte) error {
	type members Change
	var v struct {
		members
		Why string `json:"why"`
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	*c = Change(v.members)
	c.Reason = cmp.Or(c.Reason, v.Why)
	return nil
}

// noWorkers is the Warning of a change that removes the last worker of the file.
const noWorkers = "the file no longer contains a worker: requests are refused unless another source has workers"

// Changes returns the fields whose values differ between c, the running configuration, and next, in
// the order of the struct.
func (c *Config) Changes(next *Config) []Change {
	d := changeCollector{}
	d.walk(reflect.ValueOf(*c), reflect.ValueOf(*next), "", "")
	if len(c.Workers) > 0 && len(next.Workers) == 0 && len(d.changes) > 0 {
		last := slices.IndexFunc(d.changes, func(c Change) bool { return strings.HasPrefix(c.Path, "workers") })
		if last >= 0 {
			d.changes[last].Warning = noWorkers
		}
	}
	return d.changes
}

// Apply returns a copy of c with the reloadable fields of next, which is what the running router uses
// after a reload. Apply checks the combination, because a new value may be invalid together with one
// that stays as it is until a restart. It modifies neither c nor next.
func (c *Config) Apply(next *Config) (*Config, error) {
	merged := *c
	merged.origins = next.origins
	// Lists of entries, such as admission.classes, are copied like other fields.
	forAll(reflect.ValueOf(next).Elem(), "", func(path string, v reflect.Value, _ reflect.StructTag) {
		if Reloadable(path) {
			at(&merged, path).Set(v)
		}
	})
	merged.applyLists(next)
	if sameModels(c, next) {
		merged.Models = next.Models
	}
	checked := merged
	if c.PD.Family == "off" { // new prefill workers have no effect until the restart
		checked.PD.Family = next.PD.Family
	}
	var f errorList
	checked.check(&f)
	if err := f.err(); err != nil {
		return nil, fmt.Errorf("%w\nthe running router keeps its values of the fields that need a restart; sluice restart applies all", err)
	}
	return &merged, nil
}

// ApplyLists is Apply for workers and API keys only, whose changes in the file are applied without a
// reload command.
func (c *Config) ApplyLists(next *Config) *Config {
	merged := *c
	merged.applyLists(next)
	return &merged
}

func (c *Config) applyLists(next *Config) {
	c.Workers = slices.Clone(next.Workers)
	if c.CanReloadKeys(next) {
		c.APIKeys = slices.Clone(next.APIKeys)
	}
}

// sameModels reports whether a and b override the same models with the same families. Only then can a
// running router apply the overrides, because it creates the parts of a family at the start.
func sameModels(a, b *Config) bool {
	if a.PD.Family != b.PD.Family {
		return false
	}
	return maps.EqualFunc(a.Models, b.Models, func(x, y Model) bool {
		return (x.PD == nil) == (y.PD == nil) && (x.PD == nil || x.PD.Family == y.PD.Family)
	})
}

// at returns the field at a path of forEachField.
func at(c *Config, path string) (field reflect.Value) {
	v := reflect.ValueOf(c).Elem()
	for name := range strings.SplitSeq(path, ".") {
		f, _ := fieldsOf(v.Type()).find(name)
		v = v.FieldByIndex(f.Index)
	}
	return v
}

// changeCollector collects changes.
type changeCollector struct {
	changes []Change
	old     *Config
	next    *Config
}

func (d *changeCollector) add(path, old, next string, applied bool) {
	c := Change{Path: path, Old: old, New: next, Effect: Applied}
	if !applied {
		c.Effect = Restart
		if c.Reason = restartReason(path); c.Reason == "" {
			c.Reason = entryRestartReason(path)
		}
	}
	d.changes = append(d.changes, c)
}

// walk compares two values of one type. within is the effect of every change inside an entry of a
// list; outside of lists it is "", and each field has an effect of its own.
func (d *changeCollector) walk(a, b reflect.Value, path string, within Effect) {
	if a.Type() == reflect.TypeFor[Config]() {
		d.old, d.next = new(Config), new(Config)
		*d.old, *d.next = a.Interface().(Config), b.Interface().(Config)
	}
	for _, f := range fieldsOf(a.Type()) {
		sub := joinPath(path, f.Tag.Get("yaml"))
		d.field(a.FieldByIndex(f.Index), b.FieldByIndex(f.Index), sub, f.Tag, within)
	}
}

func (d *changeCollector) field(a, b reflect.Value, path string, tag reflect.StructTag, within Effect) {
	applied := within == Applied || within == "" && Reloadable(path)
	switch {
	case reflect.DeepEqual(a.Interface(), b.Interface()):
	case path == "workers":
		d.entries(a, b, path, Applied, workerName)
	case path == "api_keys":
		effect := Restart
		if d.old.CanReloadKeys(d.next) {
			effect = Applied
		}
		d.entries(a, b, path, effect, entryName)
	case path == "discovery.dns":
		d.entries(a, b, path, Restart, entryName)
	case path == "admission.classes":
		d.order(a, b, path, Applied, entryName)
		d.entries(a, b, path, Applied, entryName)
	case path == "models":
		d.models(a, b)
	case a.Kind() == reflect.Struct:
		d.walk(a, b, path, within)
	case a.Kind() == reflect.Pointer && !a.IsNil() && !b.IsNil():
		d.walk(a.Elem(), b.Elem(), path, within)
	default:
		d.add(path, fieldText(a, tag), fieldText(b, tag), applied)
	}
}

// order compares the order of two lists whose entries are identified by key.
func (d *changeCollector) order(a, b reflect.Value, path string, effect Effect, key func(reflect.Value) string) {
	names := func(v reflect.Value) string {
		list := make([]string, v.Len())
		for i := range list {
			list[i] = key(v.Index(i))
		}
		if len(list) == 0 {
			return ""
		}
		return "[" + strings.Join(list, ", ") + "]"
	}
	if was, is := names(a), names(b); was != is {
		d.add(path, was, is, effect == Applied)
	}
}

// entries compares two lists whose entries are identified by key.
func (d *changeCollector) entries(a, b reflect.Value, path string, effect Effect, key func(reflect.Value) string) {
	index := func(v reflect.Value) (names []string, by map[string]reflect.Value) {
		by = map[string]reflect.Value{}
		for i := range v.Len() {
			name := key(v.Index(i))
			for n := 2; ; n++ { // number the entries that have the same name
				if _, twice := by[name]; !twice {
					break
				}
				name = fmt.Sprintf("%s (%d)", key(v.Index(i)), n)
			}
			by[name] = v.Index(i)
			names = append(names, name)
		}
		return names, by
	}
	was, old := index(a)
	is, next := index(b)
	for _, name := range was {
		sub := fmt.Sprintf("%s[%q]", path, name)
		if v, ok := next[name]; ok {
			d.walk(old[name], v, sub, effect)
		} else {
			d.add(sub, entryText(old[name]), "", effect == Applied)
		}
	}
	for _, name := range is {
		if _, ok := old[name]; !ok {
			d.add(fmt.Sprintf("%s[%q]", path, name), "", entryText(next[name]), effect == Applied)
		}
	}
}

func (d *changeCollector) models(a, b reflect.Value) {
	same := sameModels(d.old, d.next)
	effect := Restart
	if same {
		effect = Applied
	}
	names := map[string]bool{}
	for _, m := range []reflect.Value{a, b} {
		for _, k := range m.MapKeys() {
			names[k.String()] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		path := fmt.Sprintf("models[%q]", name)
		x, y := a.MapIndex(reflect.ValueOf(name)), b.MapIndex(reflect.ValueOf(name))
		switch {
		case !x.IsValid():
			d.add(path, "", "configured", false)
		case !y.IsValid():
			d.add(path, "configured", "", false)
		default:
			d.walk(x, y, path, effect)
		}
	}
}

func entryName(v reflect.Value) string { return v.FieldByName("Name").String() }

// workerName returns a worker's id, or its URL if it has none.
func workerName(v reflect.Value) string {
	if id := v.FieldByName("ID").String(); id != "" {
		return id
	}
	return v.FieldByName("URL").String()
}

// entryText formats the fields of a list's entry that are set.
func entryText(v reflect.Value) string {
	var parts []string
	for _, f := range fieldsOf(v.Type()) {
		fv := v.FieldByIndex(f.Index)
		if fv.IsZero() && fv.Kind() != reflect.Uint8 {
			continue
		}
		parts = append(parts, f.Tag.Get("yaml")+": "+fieldText(fv, f.Tag))
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

// fieldText formats a value as it is written in a file. Secrets are masked.
func fieldText(v reflect.Value, tag reflect.StructTag) string {
	switch {
	case v.IsZero() && (v.Kind() == reflect.String || v.Kind() == reflect.Slice || v.Kind() == reflect.Map || v.Kind() == reflect.Pointer):
		return ""
	case tag.Get("secret") != "":
		return maskedText
	case v.Kind() == reflect.Slice:
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = fmt.Sprint(v.Index(i).Interface())
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case v.Kind() == reflect.Map || v.Kind() == reflect.Pointer:
		return fmt.Sprintf("%+v", reflect.Indirect(v).Interface())
	}
	return scalarYAML(v, tag)
}
