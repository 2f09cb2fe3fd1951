package admission

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestReloadOfClasses: waiting requests follow a reload that replaces the classes: they are in the class of
// the same name, which may have another place in the order, and those of a class that is gone in the default
// class. New requests see the new classes.
func TestReloadOfClasses(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	classes := func(names, fallback string) string {
		return fmt.Sprintf("limits: {rank_requests: 1}\nadmission:\n  trusted: [any]\n  max_wait: 2m\n  min_share: 0\n  default_class: %s\n  classes: [%s]\n", fallback, names)
	}
	r := harness.StartReloadRouter(t, classes("{name: high}, {name: low}, {name: gone}", "low"), e.URL())
	release := hang(e)
	defer release()
	var o clients
	o.send(t, r.Router, "first")
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
	for _, class := range []string{"gone", "low", "high"} {
		o.send(t, r.Router, "of-"+class, "X-Sluice-Priority", class)
		testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r.Router, class) == 1 })
	}

	next := classes("{name: low}, {name: high}, {name: last, priorities: [1..9]}", "last")
	status, changes, message := r.ReloadWith(next)
	if status != 200 || len(changes) != 4 {
		t.Fatalf("status %d, %s, changes %v; want the new order, the new default, one class less and one more", status, message, changes)
	}
	for class, n := range map[string]int{"low": 1, "high": 1, "last": 1} {
		if got := waiting(r.Router, class); got != n {
			t.Errorf("%d requests of class %s wait after the reload; want %d", got, class, n)
		}
	}
	var view struct{ Classes []struct{ Class string } }
	queues := harness.Get(t, "http://"+r.Admin.Addr()+"/admin/v1/queues", "Authorization", "Bearer test-token-0123456789")
	if err := json.Unmarshal(queues.Body, &view); err != nil {
		t.Fatalf("%v: %s", err, queues.Body)
	}
	var shown []string
	for _, c := range view.Classes {
		shown = append(shown, c.Class)
	}
	if got := strings.Join(shown, " "); got != "low high last" {
		t.Errorf("the queue has the classes %s; want low, high and last", got)
	}
	harness.WantReason(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Priority", "gone"), 400, "bad_header")
	o.send(t, r.Router, "number", "X-Sluice-Priority", "5")
	testwait.UntilWithin(t, 20*time.Second, "a number of the new class selects it", func() bool { return waiting(r.Router, "last") == 2 })
	if status, changes, message := r.ReloadWith(next); status != 200 || len(changes) > 0 {
		t.Errorf("a second reload of the same file: status %d, %s, changes %v; want none", status, message, changes)
	}
	release()
	if served, refused := o.wait(e); served != "[first of-low of-high of-gone number]" || refused != "[]" {
		t.Errorf("served %s, refused %s; want the order of the new classes, and none refused", served, refused)
	}
	wantEmpty(t, r.Router, e)
}
