package obs

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// Metrics is a prometheus.Gatherer: each scrape reads the counters and builds the families. A
// prometheus.Registry of collectors would check, hash and sort every series of every rank again
// (BenchmarkScrape); it serves only the series of the process and of the Go runtime.
var _ prometheus.Gatherer = (*Metrics)(nil)

// page collects the series of one scrape by family.
type page struct{ families map[string]*dto.MetricFamily }

// family returns the family with the name. It panics if the name is not in the Catalog: a bug,
// which the first test that uses the metric finds.
func (p *page) family(name string) *dto.MetricFamily {
	if f := p.families[name]; f != nil {
		return f
	}
	entry := families[name]
	if entry == nil {
		panic("obs: metric " + name + " is not in the catalog")
	}
	f := &dto.MetricFamily{Name: &entry.Name, Help: &entry.Help, Type: metricTypes[entry.Type].Enum()}
	p.families[name] = f
	return f
}

var metricTypes = map[string]dto.MetricType{"counter": dto.MetricType_COUNTER, "gauge": dto.MetricType_GAUGE, "histogram": dto.MetricType_HISTOGRAM}

// add appends a series to a counter or a gauge. labels may be shared by several series.
func (p *page) add(name string, labels []*dto.LabelPair, value float64) {
	f := p.family(name)
	s := newSeries(f.GetType(), labels)
	s.set(value)
	f.Metric = append(f.Metric, &s.Metric)
}

// addAll appends one series for each set of labels for which read is ok. It allocates the series
// of a family together.
func (p *page) addAll(name string, labels [][]*dto.LabelPair, read func(i int) (value float64, ok bool)) {
	f := p.family(name)
	isCounter := f.GetType() == dto.MetricType_COUNTER
	all := make([]seriesValue, len(labels))
	f.Metric = slices.Grow(f.Metric, len(labels))
	for i := range all {
		v, ok := read(i)
		if !ok {
			continue
		}
		s := &all[i]
		s.init(isCounter, labels[i])
		s.set(v)
		f.Metric = append(f.Metric, &s.Metric)
	}
}

// seriesValue is one series of a counter or a gauge in one piece of memory.
type seriesValue struct {
	dto.Metric
	counter dto.Counter
	gauge   dto.Gauge
	value   float64
}

func newSeries(t dto.MetricType, labels []*dto.LabelPair) *seriesValue {
	s := new(seriesValue)
	s.init(t == dto.MetricType_COUNTER, labels)
	return s
}

func (s *seriesValue) init(isCounter bool, labels []*dto.LabelPair) {
	s.Label = labels
	if isCounter {
		s.counter.Value, s.Counter = &s.value, &s.counter
	} else {
		s.gauge.Value, s.Gauge = &s.value, &s.gauge
	}
}

func (s *seriesValue) set(v float64) { s.value = v }

// labelPairs returns the labels name, value, name, value, ….
func labelPairs(labels ...string) []*dto.LabelPair {
	if len(labels) == 0 {
		return nil
	}
	pairs, out := make([]dto.LabelPair, len(labels)/2), make([]*dto.LabelPair, len(labels)/2)
	for i := range pairs {
		pairs[i].Name, pairs[i].Value = &labels[2*i], &labels[2*i+1]
		out[i] = &pairs[i]
	}
	return out
}

// Gather implements prometheus.Gatherer. The families are in the order of the Catalog; those of the
// process and of the Go runtime follow. The caller must not modify them.
func (m *Metrics) Gather() ([]*dto.MetricFamily, error) {
	p := page{families: make(map[string]*dto.MetricFamily, len(Catalog))}
	m.collectCounters(&p)
	m.collectHistograms(&p)
	m.models.collect(&p)
	m.collectWorkers(&p)
	m.mu.Lock()
	collectors := m.collectors
	m.mu.Unlock()
	for _, collect := range collectors {
		collect(&p)
	}
	out := make([]*dto.MetricFamily, 0, len(p.families)+64)
	for i := range Catalog {
		if f := p.families[Catalog[i].Name]; f != nil && len(f.Metric) > 0 {
			out = append(out, f)
		}
	}
	if m.legacyNames.Load() {
		out = addLegacy(out)
	}
	process, err := m.process.Gather()
	return append(out, process...), err
}

// WritePrometheus writes all metrics, including those of the process, in the Prometheus text
// format.
func (m *Metrics) WritePrometheus(w io.Writer) { m.write(w, textFormat) }

var textFormat = expfmt.NewFormat(expfmt.TypeTextPlain)

// TextContentType is the Content-Type of WritePrometheus.
var TextContentType = contentType(textFormat)

// WriteAs writes all metrics in the format that a scrape's Accept header asks for: the Prometheus
// text format 0.0.4, OpenMetrics, or delimited protocol buffers. start is called with the
// Content-Type before the first byte.
func (m *Metrics) WriteAs(w io.Writer, accept string, start func(contentType string)) {
	format := expfmt.NegotiateIncludingOpenMetrics(http.Header{"Accept": {accept}})
	start(contentType(format))
	m.write(w, format)
}

// contentType returns the Content-Type of a format. Names and labels have only ASCII letters,
// digits and underscores, so no scheme of escaping needs to be named.
func contentType(format expfmt.Format) string {
	t, _, _ := strings.Cut(string(format), "; escaping=")
	return t
}

func (m *Metrics) write(w io.Writer, format expfmt.Format) {
	all, _ := m.Gather() // an error comes with what could be read
	enc := expfmt.NewEncoder(w, format)
	for _, f := range all {
		if enc.Encode(f) != nil {
			return // the client has gone
		}
	}
	if c, ok := enc.(expfmt.Closer); ok {
		_ = c.Close()
	}
}

// gauge is a series whose value is read at each scrape.
type gauge struct {
	name   string
	labels []*dto.LabelPair
	key    string
	read   func() float64
}

// GaugeFunc adds a series whose value f returns at each scrape. name must be in the Catalog, which
// says whether it is a gauge or a counter; labels are name, value, name, value, …. A series that
// exists already stays as it is.
func (m *Metrics) GaugeFunc(f func() float64, name string, labels ...string) {
	if families[name] == nil {
		panic("obs: metric " + name + " is not in the catalog")
	}
	g := gauge{name: name, labels: labelPairs(labels...), key: fmt.Sprintf("%s%q", name, labels), read: f}
	m.mu.Lock()
	defer m.mu.Unlock()
	at, exists := slices.BinarySearchFunc(m.gauges, g.key, func(g gauge, key string) int { return cmp.Compare(g.key, key) })
	if !exists {
		// A copy: a scrape reads the list without the lock.
		m.gauges = slices.Concat(m.gauges[:at], []gauge{g}, m.gauges[at:])
	}
}

// addCollector makes each scrape call collect.
func (m *Metrics) addCollector(collect func(*page)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collectors = append(slices.Clip(m.collectors), collect)
}

// addMap appends one series for each entry of a labelMap, in the order of their labels.
func addMap[K comparable](p *page, name string, counts *labelMap[K, counter], labels func(K) []string) {
	type entry struct {
		key    string
		labels []string
		value  uint64
	}
	all := counts.all()
	entries := make([]entry, 0, len(all))
	for k, c := range all {
		l := labels(k)
		entries = append(entries, entry{strings.Join(l, "\x00"), l, c.Get()})
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.key, b.key) })
	for _, e := range entries {
		p.add(name, labelPairs(e.labels...), float64(e.value))
	}
}
