package discovery

import (
	"context"
	"strings"
	"testing"
	"time"

	"sluice/router/fleet"
	"sluice/router/worker"
)

var (
	_ Sink   = (*fleet.Fleet)(nil)
	_ Source = Static(nil)
)

func TestStatic(t *testing.T) {
	f := fleet.New(fleet.Options{})
	defer f.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- Static{{ID: "a", URL: "http://127.0.0.1:1"}, {ID: "b", URL: "http://127.0.0.1:2", Role: worker.Decode}}.Run(ctx, f)
	}()
	waiting, stop := context.WithTimeout(context.Background(), 30*time.Second)
	defer stop()
	if _, ok := f.Wait(waiting, func(v *fleet.View) bool { return len(v.Workers) == 2 }); !ok {
		t.Fatal("the workers never came")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := len(f.View().Workers); n != 2 {
		t.Errorf("%d workers left after the source ended; want 2", n)
	}
}

func TestStaticTellsEveryFault(t *testing.T) {
	f := fleet.New(fleet.Options{})
	defer f.Close()
	err := Static{{ID: "a", URL: "http://h:1"}, {ID: "a", URL: "http://h:2"}, {ID: "b", URL: "nonsense"}, {ID: "c", URL: "http://h:3"}}.Run(context.Background(), f)
	if err == nil || !strings.Contains(err.Error(), `"a"`) || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("%v", err)
	}
	if n := len(f.View().Workers); n != 2 {
		t.Errorf("%d workers; want the 2 good ones", n)
	}
}
