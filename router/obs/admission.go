package obs

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/router/admission"
)

// maxTenants bounds the tenants with series of their own; the others are counted as admission.Overflow.
const maxTenants = 200

// admissionMetrics are the metrics of requests that wait for a rank.
type admissionMetrics struct {
	classes labelMap[string, admissionClass]
	refused labelMap[[2]string, counter] // by class and reason
	tenants labelMap[[2]string, counter] // by tenant and outcome
	waiting labelMap[string, string]     // the tenants that have waited, with the labels of their series
}

// admissionClass has the counts of one class.
type admissionClass struct {
	enqueued            counter
	ended               labelMap[string, counter] // by outcome
	wait, forecastError *histogram
	preemptions         counter
	resumed             labelMap[string, counter] // ends of suspensions by outcome
	suspension          *histogram
}

func (a *admissionMetrics) init() {
	a.classes.bound, a.classes.overflow = 100, otherWord
	a.classes.create = func(string) *admissionClass {
		c := &admissionClass{wait: newHistogram(queueBounds, false), forecastError: newHistogram(queueBounds, false), suspension: newHistogram(queueBounds, false)}
		for _, outcome := range admission.Outcomes {
			c.ended.get(outcome.String())
		}
		return c
	}
	a.refused.overflow = func(k [2]string) [2]string { return [2]string{otherValue, k[1]} }
	a.tenants.bound = maxTenants * 5
	a.tenants.overflow = func(k [2]string) [2]string { return [2]string{admission.Overflow, k[1]} }
	a.waiting.bound = maxTenants
	a.waiting.overflow = func(string) string { return admission.Overflow }
	a.waiting.create = func(tenant string) *string { return &tenant }
}

func tenantLabel(tenant string) string {
	if tenant == "" {
		return admission.NoTenant
	}
	return admission.ShownTenant(tenant)
}

// Enqueued implements admission.Observer.
func (m *Metrics) Enqueued(class, tenant string) { m.admission.classes.get(class).enqueued.Add(1) }

// Dequeued implements admission.Observer.
func (m *Metrics) Dequeued(class, tenant string, outcome admission.Outcome, waited, forecast time.Duration) {
	c := m.admission.classes.get(class)
	c.ended.get(outcome.String()).Add(1)
	m.admission.tenants.get([2]string{tenantLabel(tenant), outcome.String()}).Add(1)
	if outcome != admission.Dispatched {
		return
	}
	c.wait.observe(waited)
	if forecast >= 0 {
		c.forecastError.observe((waited - forecast).Abs())
	}
}

// AdmissionRefused implements pd.Observer.
func (m *Metrics) AdmissionRefused(class, tenant string, reason front.Reason) {
	m.admission.refused.get([2]string{class, string(reason)}).Add(1)
	m.admission.tenants.get([2]string{tenantLabel(tenant), "refused"}).Add(1)
}

// StreamSuspended implements pd.Observer.
func (m *Metrics) StreamSuspended(class, tenant string) {
	m.admission.classes.get(class).preemptions.Add(1)
	m.admission.tenants.get([2]string{tenantLabel(tenant), "preempted"}).Add(1)
}

// StreamResumed implements pd.Observer.
func (m *Metrics) StreamResumed(class, outcome string, took time.Duration) {
	c := m.admission.classes.get(class)
	c.resumed.get(outcome).Add(1)
	c.suspension.observe(took)
}

// ExposeAdmission makes each scrape report what waits in each class and of each tenant.
func (m *Metrics) ExposeAdmission(c *admission.Controller) {
	for _, c := range c.Classes() {
		m.admission.classes.get(c.Class) // counters begin at 0, not at a class's first wait
	}
	m.addCollector(func(p *page) {
		m.admission.collectTenants(p, c.TenantWaits())
		for _, c := range c.Classes() {
			m.admission.classes.get(c.Class) // of a reloaded configuration
			labels := labelPairs("class", c.Class)
			p.add("sluice_admission_waiting_requests", labels, float64(c.Requests))
			p.add("sluice_admission_waiting_tokens", labels, float64(c.Tokens))
			p.add("sluice_admission_oldest_wait_seconds", labels, c.Oldest.Seconds())
			p.add("sluice_admission_suspended_streams", labels, float64(c.Suspended))
		}
	})
}

// collectTenants reports what waits of each tenant that has waited at a scrape before: a series that ends with
// the wait would keep its last value in graphs.
func (a *admissionMetrics) collectTenants(p *page, waits map[string]admission.TenantWait) {
	series := map[string]admission.TenantWait{}
	for tenant, w := range waits {
		label := *a.waiting.get(tenant)
		s := series[label]
		series[label] = admission.TenantWait{Requests: s.Requests + w.Requests, Oldest: max(s.Oldest, w.Oldest)}
	}
	for _, label := range slices.Sorted(maps.Keys(a.waiting.all())) {
		p.add("sluice_admission_tenant_waiting_requests", labelPairs("tenant", label), float64(series[label].Requests))
		p.add("sluice_admission_tenant_oldest_wait_seconds", labelPairs("tenant", label), series[label].Oldest.Seconds())
	}
}

func (a *admissionMetrics) collect(p *page) {
	classes := a.classes.all()
	for _, name := range slices.Sorted(maps.Keys(classes)) {
		c := classes[name]
		p.add("sluice_admission_enqueued_total", labelPairs("class", name), float64(c.enqueued.Get()))
		addMap(p, "sluice_admission_ended_total", &c.ended, func(outcome string) []string { return []string{"class", name, "outcome", outcome} })
		c.wait.collect(p, "sluice_admission_wait_seconds", "class", name)
		c.forecastError.collect(p, "sluice_admission_forecast_error_seconds", "class", name)
		p.add("sluice_admission_preemptions_total", labelPairs("class", name), float64(c.preemptions.Get()))
		addMap(p, "sluice_admission_suspensions_ended_total", &c.resumed, func(outcome string) []string { return []string{"class", name, "outcome", outcome} })
		c.suspension.collect(p, "sluice_admission_suspension_seconds", "class", name)
	}
	addMap(p, "sluice_admission_refused_total", &a.refused, func(k [2]string) []string { return []string{"class", k[0], "reason", k[1]} })
	addMap(p, "sluice_admission_tenant_requests_total", &a.tenants, func(k [2]string) []string { return []string{"tenant", k[0], "outcome", k[1]} })
}

// AdmissionCount is the number of requests of a class or of a tenant that ended to wait with an
// outcome since the start, or that were refused.
type AdmissionCount struct {
	Class    string `json:"class,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	Outcome  string `json:"outcome"` // of the wait; "refused", with the reason for a class
	Requests uint64 `json:"requests"`
}

// AdmissionCounts returns the counts by class and by tenant, sorted.
func (m *Metrics) AdmissionCounts() (classes, tenants []AdmissionCount) {
	a := &m.admission
	for name, c := range a.classes.all() {
		for outcome, n := range c.ended.all() {
			if n.Get() > 0 {
				classes = append(classes, AdmissionCount{Class: name, Outcome: outcome, Requests: n.Get()})
			}
		}
		if n := c.preemptions.Get(); n > 0 {
			classes = append(classes, AdmissionCount{Class: name, Outcome: "preempted", Requests: n})
		}
	}
	for k, n := range a.refused.all() {
		classes = append(classes, AdmissionCount{Class: k[0], Outcome: "refused, " + k[1], Requests: n.Get()})
	}
	for k, n := range a.tenants.all() {
		tenants = append(tenants, AdmissionCount{Tenant: k[0], Outcome: k[1], Requests: n.Get()})
	}
	for _, counts := range [...][]AdmissionCount{classes, tenants} {
		slices.SortFunc(counts, func(a, b AdmissionCount) int {
			return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Outcome, b.Outcome))
		})
	}
	return classes, tenants
}
