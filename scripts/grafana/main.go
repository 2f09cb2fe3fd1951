// Command grafana checks dashboards against Grafana's own schema: the Go types that the Grafana project
// generates from it, with the options of every kind of panel and the queries of the Prometheus data source.
//
//	go run . FILE…
//
// A member that the schema does not have, a value of a wrong type and a broken constraint are errors. So
// are a dashboard without panels, a panel without a query and two panels that overlap, which the schema
// allows and Grafana draws badly. The exit code is 1 after an error.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
)

func main() {
	plugins.RegisterDefaultPlugins()
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "grafana: want the files of dashboards as arguments")
		os.Exit(2)
	}
	failed := false
	for _, path := range os.Args[1:] {
		panels, queries, err := check(path)
		if err != nil {
			failed = true
			fmt.Printf("FAIL  %s: %v\n", path, err)
			continue
		}
		fmt.Printf("ok    %s: %d panels, %d queries\n", path, panels, queries)
	}
	if failed {
		os.Exit(1)
	}
}

// check reads a dashboard and returns how many panels and queries it has.
func check(path string) (panels, queries int, err error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	// The strict decoder returns a list of errors that may be empty and not nil, and then leaves panels out.
	// So the values come from the other decoder.
	var strict, board dashboard.Dashboard
	if err := strict.UnmarshalJSONStrict(raw); err != nil && err.Error() != "" {
		return 0, 0, err
	}
	if err := json.Unmarshal(raw, &board); err != nil {
		return 0, 0, err
	}
	if err := board.Validate(); err != nil && err.Error() != "" {
		return 0, 0, err
	}
	if len(board.Panels) == 0 {
		return 0, 0, fmt.Errorf("it has no panels")
	}
	ids := make(map[uint32]string)
	taken := make(map[[2]uint32]string)
	for _, entry := range board.Panels {
		panel := entry.Panel
		if panel == nil || panel.Title == nil || panel.Id == nil || panel.GridPos == nil {
			return 0, 0, fmt.Errorf("want panels with a title, an id and a place only")
		}
		if other, ok := ids[*panel.Id]; ok {
			return 0, 0, fmt.Errorf("the panels %q and %q have the id %d", other, *panel.Title, *panel.Id)
		}
		ids[*panel.Id] = *panel.Title
		place := panel.GridPos
		for x := place.X; x < place.X+place.W; x++ {
			for y := place.Y; y < place.Y+place.H; y++ {
				if other, ok := taken[[2]uint32{x, y}]; ok || x >= 24 {
					return 0, 0, fmt.Errorf("the panel %q overlaps %q or the right edge", *panel.Title, other)
				}
				taken[[2]uint32{x, y}] = *panel.Title
			}
		}
		if len(panel.Targets) == 0 {
			return 0, 0, fmt.Errorf("the panel %q has no query", *panel.Title)
		}
		for _, target := range panel.Targets {
			query, ok := target.(*prometheus.Dataquery)
			if !ok {
				return 0, 0, fmt.Errorf("the panel %q has a query of %T, not of Prometheus", *panel.Title, target)
			}
			if query.Expr == "" {
				return 0, 0, fmt.Errorf("the panel %q has an empty query", *panel.Title)
			}
			queries++
		}
	}
	return len(board.Panels), queries, nil
}
