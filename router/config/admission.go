package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"sluice/router/worker"
)

// DefaultClassName is the name of the admission class that exists if none is configured.
const DefaultClassName = "default"

// MaxClasses bounds the number of admission classes.
const MaxClasses = 16

// WaitingBytes returns the bound on the bodies of the requests that wait for admission.
func (c *Config) WaitingBytes() int64 {
	if c.Admission.MaxBytes > 0 {
		return c.Admission.MaxBytes
	}
	return c.Limits.MemoryBudget / 2
}

// PriorityClasses returns the configured admission classes, the highest first, or one class if there
// are none.
func (a *Admission) PriorityClasses() []AdmissionClass {
	if len(a.Classes) > 0 {
		return a.Classes
	}
	return []AdmissionClass{{Name: DefaultClassName}}
}

// ParsePriorities parses a number ("5") or a range ("-10..-1") of priorities of a request's body.
func ParsePriorities(text string) (from, to int, err error) {
	first, last, ranged := strings.Cut(text, "..")
	if !ranged {
		last = first
	}
	from, errFrom := strconv.Atoi(first)
	to, errTo := strconv.Atoi(last)
	if errFrom != nil || errTo != nil || from > to {
		return 0, 0, fmt.Errorf("%s is neither a number nor a range; want a number such as 5, or a range such as -10..-1", quoted(text))
	}
	return from, to, nil
}

// checkAdmission checks admission, and what refers to its classes.
func (c *Config) checkAdmission(bad report) {
	a := &c.Admission
	if c.Sessions.LimitActive && a.Mode == "off" {
		bad("sessions.limit_active", "sessions without a place wait in the admission queue, and admission.mode is off; want fair, fifo, or limit_active: false")
	}
	if a.MaxBytes > c.Limits.MemoryBudget {
		bad("admission.max_bytes", "%d is more than limits.memory_budget, %d; want at most that", a.MaxBytes, c.Limits.MemoryBudget)
	}
	if !isHeaderName(a.TenantHeader) {
		bad("admission.tenant_header", "%s is not a header name; want letters, digits and dashes, such as X-Sluice-Tenant", quoted(a.TenantHeader))
	}
	for i, p := range a.Trusted {
		if _, err := netip.ParsePrefix(p); err != nil && p != "any" && p != "unix" && p != "off" || p == "off" && len(a.Trusted) > 1 {
			bad(fmt.Sprintf("admission.trusted[%d]", i), `%s; want networks such as 10.0.0.0/8, "unix", "any", or "off" alone`, quoted(p))
		}
	}
	if a.Preemption && c.Migration.MaxAttempts == 0 {
		bad("admission.preemption", "preempted streams go on as migrated ones do, and migration.max_attempts is 0; want it above 0, or preemption off")
	}
	c.checkClasses(bad)
	var names []string
	for _, class := range a.PriorityClasses() {
		names = append(names, class.Name)
	}
	refers := func(path, name string) {
		if !slices.Contains(names, name) {
			bad(path, "there is no class %s%s; want one of %s", quoted(name), suggestion(name, names), strings.Join(names, ", "))
		}
	}
	if a.DefaultClass != "" {
		refers("admission.default_class", a.DefaultClass)
	}
	for i := range c.APIKeys {
		for j, name := range c.APIKeys[i].Classes {
			refers(fmt.Sprintf("api_keys[%d].classes[%d]", i, j), name)
		}
	}
}

// preemptionUnused says why admission.preemption suspends no stream, "" if it can. It is not an error: a router
// without classes may get them by a reload.
func (a *Admission) preemptionUnused() string {
	const without = "admission.preemption has no effect: "
	switch {
	case !a.Preemption:
		return ""
	case a.Mode != "fair":
		return without + "requests have no classes with admission.mode " + a.Mode + "; want fair"
	case len(a.Classes) < 2:
		return without + "only streams of a lower class are suspended, and there is one class; want two or more in admission.classes"
	}
	return ""
}

func (c *Config) checkClasses(bad report) {
	a := &c.Admission
	if len(a.Classes) > MaxClasses {
		bad("admission.classes", "%d classes; want at most %d", len(a.Classes), MaxClasses)
	}
	names, models, shares := map[string]int{}, map[string]string{}, 0.0
	type span struct {
		from, to int
		class    string
	}
	var spans []span
	for i := range a.Classes {
		k, path := &a.Classes[i], fmt.Sprintf("admission.classes[%d]", i)
		switch first, twice := names[k.Name]; {
		case !idForm.MatchString(k.Name):
			bad(path+".name", "%s is not a name of a class; want 1 to 128 letters, digits and ._:@-, and no - at the beginning", quoted(k.Name))
		case twice:
			bad(path+".name", "%s is also the name of admission.classes[%d]; want a unique name", quoted(k.Name), first)
		}
		names[k.Name] = i
		for j, m := range k.Models {
			if other, twice := models[m]; twice {
				bad(fmt.Sprintf("%s.models[%d]", path, j), "the model %s has the class %s already; want one class", quoted(m), other)
			}
			models[m] = k.Name
			if m == "" || !worker.Printable(m) {
				bad(fmt.Sprintf("%s.models[%d]", path, j), "%s is not a model name", quoted(m))
			}
		}
		for j, text := range k.Priorities {
			at := fmt.Sprintf("%s.priorities[%d]", path, j)
			from, to, err := ParsePriorities(text)
			if err != nil {
				bad(at, "%v", err)
				continue
			}
			for _, s := range spans {
				if from <= s.to && s.from <= to {
					bad(at, "%s overlaps priorities of the class %s; want each priority in one class", quoted(text), s.class)
				}
			}
			spans = append(spans, span{from, to, k.Name})
		}
		if shares += k.MinShare; shares > 0.9 {
			bad(path+".min_share", "the shares of this and the classes above add up to %.2f; want at most 0.9", shares)
		}
		if u := k.UnmetTarget; u != "" && u != "refuse" && u != "late" {
			bad(path+".unmet_target", "%s; want refuse or late", quoted(u))
		}
	}
}

func isHeaderName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	})
}
