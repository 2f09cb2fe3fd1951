package pd

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/router/admission"
	"sluice/router/config"
	"sluice/router/pd/reqbody"
	"sluice/router/session"
	"sluice/router/worker"
)

// The request headers that decide how a request waits. llm-d's names are read too; it has renamed
// those of the targets once.
const (
	headerPriority  = "X-Sluice-Priority"
	headerDeadline  = "X-Sluice-Deadline-Ms"
	headerObjective = "x-llm-d-inference-objective"
	headerFairness  = "x-llm-d-inference-fairness-id"

	maxTenantName = 128 // bytes
)

// The headers of the targets, the current name first.
var (
	headersTTFT = [...]string{"x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"}
	headersTPOT = [...]string{"x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"}
)

// admissionSettings are derived from config.Admission.
type admissionSettings struct {
	*config.Admission
	queue    admission.Settings
	classes  []admissionClass
	byModel  map[string]*admissionClass
	fallback *admissionClass // the default class
	preempts bool            // requests may suspend streams of lower classes
	selects  bool            // a header or a body can select a class
	byBody   bool            // the body's priority can
}

// admissionClass is one class with what its requests inherit.
type admissionClass struct {
	config.AdmissionClass
	index  int
	wait   time.Duration // longest wait
	refuse bool          // requests whose target cannot be met are refused
	spans  [][2]int      // values of the body's priority
}

// newAdmissionSettings derives the settings. It returns nil if admission is off.
func newAdmissionSettings(a *config.Admission, maxBytes int64) (*admissionSettings, error) {
	if a.Mode == "off" || a.Mode == "" {
		return nil, nil
	}
	s := &admissionSettings{Admission: a, byModel: map[string]*admissionClass{}}
	classes := a.PriorityClasses()
	if a.Mode == "fifo" {
		classes = []config.AdmissionClass{{Name: config.DefaultClassName}}
	}
	s.classes = make([]admissionClass, len(classes))
	s.fallback = &s.classes[0]
	s.queue.Limits = admission.Limits{MaxRequests: a.MaxRequests, MaxBytes: maxBytes, MaxTenants: a.MaxTenants}
	for i, k := range classes {
		c := &s.classes[i]
		*c = admissionClass{AdmissionClass: k, index: i, wait: a.MaxWait, refuse: a.UnmetTarget == "refuse"}
		if k.MaxWait > 0 {
			c.wait = k.MaxWait
		}
		if k.UnmetTarget != "" {
			c.refuse = k.UnmetTarget == "refuse"
		}
		if i == len(classes)-1 && i > 0 && c.MinShare == 0 {
			c.MinShare = a.MinShare
		}
		for _, text := range k.Priorities {
			from, to, err := config.ParsePriorities(text)
			if err != nil {
				return nil, fmt.Errorf("pd: cannot read the priorities of class %s: %w", k.Name, err)
			}
			c.spans = append(c.spans, [2]int{from, to})
			s.byBody = true
		}
		for _, m := range k.Models {
			s.byModel[m] = c
		}
		if k.Name == a.DefaultClass {
			s.fallback, s.queue.Default = c, i
		}
		s.queue.Classes = append(s.queue.Classes, admission.Class{Name: k.Name, MinShare: c.MinShare, MaxRequests: k.MaxRequests, MaxBytes: k.MaxBytes})
	}
	s.selects = len(classes) > 1
	s.preempts = a.Preemption && s.selects
	return s, nil
}

// class returns the class of a name, nil if there is none.
func (s *admissionSettings) class(name string) *admissionClass {
	for i := range s.classes {
		if s.classes[i].Name == name {
			return &s.classes[i]
		}
	}
	return nil
}

// classOf returns the class whose priorities contain a decimal number, nil if none does.
func (s *admissionSettings) classOf(number []byte) *admissionClass {
	p, err := strconv.Atoi(string(number))
	if err != nil {
		return nil
	}
	for i := range s.classes {
		for _, span := range s.classes[i].spans {
			if p >= span[0] && p <= span[1] {
				return &s.classes[i]
			}
		}
	}
	return nil
}

// wanted says which values of the priority header there are.
func (s *admissionSettings) wanted() string {
	var names, numbers []string
	for i := range s.classes {
		c := &s.classes[i]
		if names = append(names, c.Name); len(c.Priorities) > 0 {
			numbers = append(numbers, c.Name+": "+joinLimited(c.Priorities))
		}
	}
	if len(numbers) == 0 {
		return "want a class (" + strings.Join(names, ", ") + ")"
	}
	return "want a class (" + strings.Join(names, ", ") + ") or one of its priorities (" + strings.Join(numbers, "; ") + ")"
}

// classedPrincipal is a front.Principal whose configuration names classes. apikey.Key implements it.
type classedPrincipal interface {
	// Classes returns the classes that requests of the key may ask for; the first is that of
	// requests that ask for none.
	Classes() []string
	// Weight returns the weight of the key's tenant.
	Weight() int
}

// admissionPart says how a request waits for a rank.
type admissionPart struct {
	class      *admissionClass // nil: the request does not wait
	tenant     string          // for the order of the queue; "" if tenants do not decide it
	weight     int
	ttft, tpot time.Duration // targets; 0: none

	late            bool         // the forecast says that the target cannot be met
	startBy         int64        // by the queue's clock: the latest start that meets the target of the first token; 0: no such target
	bindLate        bool         // choices take only ranks with capacity
	prefersUntil    time.Time    // until when it may wait for a full rank that holds its prefix; zero: it has not
	preferred       *worker.Rank // the full rank that it waited for at preferredAt; nil: none
	preferredAt     time.Time
	waitSince       time.Time // when the request was first in the queue; zero: never
	startsAtDecode  bool      // reservedDecode is a choice of startAtDecode
	lookedUp        time.Time // when the overlap was last looked up
	reservedPrefill chosenPrefill
	preemption      *preemption       // nil: it has asked for no suspension
	suspendedFor    *preemption       // of the request for which this one, the rest of a stream, was suspended; nil for none
	yieldUntil      time.Time         // until when that request goes first
	place           *session.Wait     // for a place among the active sessions; nil: none, or it has ended
	engineDelay     time.Duration     // the part of the forecast that is not for its own prompt; see setDue
	anySize         bool              // capacity is looked at for a request of one token
	ignoresClaims   bool              // capacity is looked at without the claims of others
	lacksKVSince    time.Time         // since when only its KV fits nowhere
	stalledAt       *worker.Rank      // the rank of a claim that it has given up; nil: none
	claimAgain      time.Time         // when it may have another one
	backlog         admission.Backlog // of its pool at the last TryStart
	isUndecided     *atomic.Int64     // the count of undecided that includes the request, or nil
	undecidedAs     undecidedKey      // under which it is counted too; zero if nothing restricts it
}

// readAdmission finds the class, the tenant, the targets and the deadline of the request. It answers
// with an error and returns false if a header is invalid.
func (q *request) readAdmission() bool {
	s := q.settings.admission
	deadline, ok := q.readMilliseconds(headerDeadline)
	if !ok {
		return false
	}
	var invalid *invalidHeader
	if q.sessionTenant, invalid = q.settings.tenantOf(q.x); invalid != nil {
		return q.refuseSteering(invalid.name, invalid.value, invalid.what)
	}
	if s == nil {
		q.setDeadline(deadline, headerDeadline)
		return true
	}
	if s.Mode != "fifo" {
		q.tenant = q.sessionTenant
	}
	if !q.readClass(s) {
		return false
	}
	if s.selects {
		q.entry.SetClass(q.class.Name, q.tenant)
	}
	for i := len(headersTTFT) - 1; i >= 0; i-- { // the current name prevails
		ttft, ok := q.readMilliseconds(headersTTFT[i])
		if !ok {
			return false
		}
		tpot, ok := q.readMilliseconds(headersTPOT[i])
		if !ok {
			return false
		}
		if ttft > 0 {
			q.ttft = ttft
		}
		if tpot > 0 {
			q.tpot = tpot
		}
	}
	model := q.settings.Models[q.pool.Model]
	q.ttft = firstPositive(q.ttft, model.TTFT, q.class.TTFT)
	q.tpot = firstPositive(q.tpot, model.TPOT, q.class.TPOT)
	switch {
	case deadline > 0:
		q.setDeadline(deadline, headerDeadline)
	case model.Deadline > 0:
		q.setDeadline(model.Deadline, "models."+q.pool.Model+".deadline")
	case q.class.Deadline > 0:
		q.setDeadline(q.class.Deadline, "the deadline of class "+q.class.Name)
	}
	return true
}

func firstPositive(list ...time.Duration) time.Duration {
	for _, d := range list {
		if d > 0 {
			return d
		}
	}
	return 0
}

// setDeadline ends the request after d, unless its response has begun or its caller's deadline is
// earlier. 0 sets none. from names what has set d, for the error.
func (q *request) setDeadline(d time.Duration, from string) {
	if d <= 0 {
		return
	}
	if at := q.req.Received.Add(d); q.deadline.IsZero() || at.Before(q.deadline) {
		q.deadline, q.deadlineFrom = at, from
		q.x.FailAt(at, front.Deadline, q.timeOver())
	}
}

// timeOver is the error of a request whose deadline has passed.
func (q *request) timeOver() string {
	const text = "the request's time is over"
	if q.deadline.IsZero() { // its caller has disconnected at a deadline of its own
		return text
	}
	return text + ": its response had not begun within " + q.deadline.Sub(q.req.Received).Round(time.Millisecond).String() + " (" + q.deadlineFrom + ")"
}

// readMilliseconds reads a header with a number of milliseconds, 0 if it is absent.
func (q *request) readMilliseconds(name string) (time.Duration, bool) {
	const longest = 24 * time.Hour
	value := q.x.Header(name)
	if len(value) == 0 {
		return 0, true
	}
	ms, err := strconv.ParseFloat(string(value), 64)
	if err != nil || !isDecimal(value) || !(ms > 0) || ms > float64(longest.Milliseconds()) {
		return 0, q.refuseSteering(name, string(value), "want milliseconds as a decimal number such as 1500 or 0.5, above 0 and at most 86400000")
	}
	return max(time.Duration(math.Round(ms*float64(time.Millisecond))), 1), true
}

// isDecimal reports whether text is one or more digits, which a point and further digits may follow.
func isDecimal(text []byte) bool {
	whole, fraction, hasPoint := bytes.Cut(text, []byte("."))
	return isDigits(whole) && (!hasPoint || isDigits(fraction))
}

func isDigits(text []byte) bool {
	for _, c := range text {
		if c < '0' || c > '9' {
			return false
		}
	}
	return len(text) > 0
}

// readClass finds the class. What a request asks for counts if its key or its client's address allows
// it; otherwise it has the class of its key, its model, or the default class.
func (q *request) readClass(s *admissionSettings) bool {
	var allowed []string
	q.weight = 1
	if key, ok := q.req.Principal.(classedPrincipal); ok {
		allowed, q.weight = key.Classes(), max(key.Weight(), 1)
	}
	switch {
	case len(allowed) > 0 && s.class(allowed[0]) != nil:
		q.class = s.class(allowed[0])
	case s.byModel[q.pool.Model] != nil:
		q.class = s.byModel[q.pool.Model]
	default:
		q.class = s.fallback
	}
	trusted := q.settings.trusted.allow(q.req.ClientIP, q.req.Unix)
	if !s.selects || !trusted && len(allowed) == 0 {
		return true
	}
	asked, ok := q.askedClass(s)
	if !ok {
		return false
	}
	if asked != nil && (trusted || containsName(allowed, asked.Name)) {
		q.class = asked
	}
	return true
}

func containsName(list []string, name string) bool {
	for _, n := range list {
		if n == name {
			return true
		}
	}
	return false
}

// askedClass returns the class that the request asks for, nil if it asks for none. The header of the router
// must name one. Objectives and the body's priority are also meant for others: llm-d gives requests of an
// unknown objective the default priority, and to vLLM any integer is a priority. So what names no class there
// asks for none.
func (q *request) askedClass(s *admissionSettings) (*admissionClass, bool) {
	if value := q.x.Header(headerPriority); len(value) > 0 {
		if c := s.class(string(value)); c != nil {
			return c, true
		}
		if c := s.classOf(value); c != nil {
			return c, true
		}
		return nil, q.refuseSteering(headerPriority, string(value), s.wanted())
	}
	if value := q.x.Header(headerObjective); len(value) > 0 {
		if c := s.class(string(value)); c != nil {
			return c, true
		}
	}
	if s.byBody {
		if raw := reqbody.Member(&q.req.Doc, "priority"); raw != nil {
			return s.classOf(raw), true
		}
	}
	return nil, true
}

// invalidHeader says why the value of a header is refused.
type invalidHeader struct{ name, value, what string }

// tenantOf returns the tenant of a request: the one that a trusted client names, else the API key.
func (s *settings) tenantOf(x front.Exchange) (tenant string, _ *invalidHeader) {
	req := x.Request()
	if s.trusted.allow(req.ClientIP, req.Unix) {
		name := s.Admission.TenantHeader
		value := x.Header(name)
		if len(value) == 0 {
			name = headerFairness
			value = x.Header(name)
		}
		switch {
		case len(value) > maxTenantName:
			return "", &invalidHeader{name, string(value[:40]) + "…", fmt.Sprintf("it has %d bytes; want at most %d", len(value), maxTenantName)}
		case !worker.Printable(string(value)):
			return "", &invalidHeader{name, string(value), "want printable text"}
		case len(value) > 0:
			return string(value), nil
		}
	}
	return ownerOf(req.Principal), nil
}
