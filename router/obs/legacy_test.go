package obs

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// labelList returns labels as the text format shows them.
func labelList(labels ...string) string {
	var all []string
	for i := 0; i+1 < len(labels); i += 2 {
		all = append(all, labels[i]+`="`+strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(labels[i+1])+`"`)
	}
	return strings.Join(all, ",")
}

// TestLegacyNames checks that the former series have the values of the present ones with
// metrics.legacy_names, and are absent without it.
func TestLegacyNames(t *testing.T) {
	m := NewMetrics()
	type pair struct{ old, present string }
	var pairs []pair
	value := 100
	expose := func(l *LegacySeries, labelValue string) {
		f := families[l.Name]
		if f == nil {
			t.Fatalf("%s is not in the catalog", l.Name)
		}
		if families[l.Old] != nil {
			t.Fatalf("%s is in the catalog and a former name", l.Old)
		}
		value++
		n := float64(value)
		var labels, old []string
		if f.Labels != "" {
			for _, name := range strings.Split(f.Labels, ", ") {
				v, was, wasName := `a,b="\`, `a,b="\`, name // a label value with a comma, a quote and a backslash
				if name == l.Label {
					v, was = labelValue, labelValue
					if o, renamed := l.Values[labelValue]; renamed {
						was = o
					}
					if l.OldName != "" {
						wasName = l.OldName
					}
				}
				labels, old = append(labels, name, v), append(old, wasName, was)
			}
		}
		m.GaugeFunc(func() float64 { return n }, l.Name, labels...)
		oldName := l.Old
		if oldName == "" {
			oldName = l.Name
		}
		line := func(name string, labels []string) string {
			if len(labels) > 0 {
				name += "{" + labelList(labels...) + "}"
			}
			return fmt.Sprintf("\n%s %v\n", name, n)
		}
		pairs = append(pairs, pair{line(oldName, old), line(l.Name, labels)})
	}
	for i := range LegacyNames {
		l := &LegacyNames[i]
		if l.Old == "" && l.OldName == "" {
			for v := range l.Values {
				expose(l, v)
			}
			continue
		}
		expose(l, "unchanged")
		for v := range l.Values {
			expose(l, v)
		}
	}
	write := func() string {
		var b bytes.Buffer
		m.WritePrometheus(&b)
		return b.String()
	}
	page := write()
	for _, p := range pairs {
		if !strings.Contains(page, p.present) {
			t.Errorf("without legacy names there is no%s", p.present)
		}
		if strings.Contains(page, p.old) {
			t.Errorf("without legacy names there is%s", p.old)
		}
	}
	for i := range LegacyNames {
		if old := LegacyNames[i].Old; old != "" && regexp.MustCompile(`\b`+old+`\b`).MatchString(page) {
			t.Errorf("without legacy names there is %s", old)
		}
	}
	m.ShowLegacyNames()
	page = write()
	for _, p := range pairs {
		if !strings.Contains(page, p.present) || strings.Count(page, p.old) != 1 {
			t.Errorf("with legacy names: want one%sbeside%s", p.old, p.present)
		}
	}
	// The lines of one metric name are contiguous.
	ended, last := map[string]bool{}, ""
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "#") || strings.HasPrefix(line, "process_") || strings.HasPrefix(line, "go_") {
			continue
		}
		name := line[:strings.IndexAny(line, "{ ")]
		if name != last && ended[name] {
			t.Errorf("the lines of %s are in two places", name)
		}
		ended[last], last = true, name
	}
}

// TestUpgradingTable compares the table of former series in docs/upgrading.md with LegacyNames;
// -rewrite writes it.
func TestUpgradingTable(t *testing.T) {
	const path, head = "../../docs/upgrading.md", "## Metrics\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), head)
	intro, rest, found2 := strings.Cut(rest, "| old | new |\n| --- | --- |\n")
	if !found || !found2 {
		t.Fatalf("%s has no table of metrics", path)
	}
	for strings.HasPrefix(rest, "|") {
		_, rest, _ = strings.Cut(rest, "\n")
	}
	var table strings.Builder
	documentLegacy(&table)
	want := before + head + intro + table.String() + rest
	if *rewrite {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(text) != want {
		t.Errorf("%s is out of date; run: go test ./router/obs -run TestUpgradingTable -rewrite", path)
	}
}
