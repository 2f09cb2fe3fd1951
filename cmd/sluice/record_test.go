package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/recording/replay"
	"sluice/router/worker"
)

// TestRecordAndReplay records a router's traffic and replays it with another policy.
func TestRecordAndReplay(t *testing.T) {
	dir := t.TempDir()
	mod := func(o *sim.Options) { o.Blocks = 1024; o.Speed = 20 }
	var workers []config.Worker
	for i := range 3 {
		workers = append(workers, harness.SimWorker(harness.StartSim(t, mod), worker.Aggregated, fmt.Sprint("w", i)))
	}
	r := harness.StartRouter(t, func(c *config.Config) { c.Recording.Dir = dir }, workers...)
	testwait.UntilWithin(t, 10*time.Second, "the feeds are live", func() bool {
		for _, k := range r.AllRanks() {
			if worker.FeedState(k.Feed.Load()) != worker.FeedLive {
				return false
			}
		}
		return true
	})
	const clients, turns = 6, 12
	const secret = "xyzzy plugh"
	var wg sync.WaitGroup
	for who := range clients {
		wg.Go(func() {
			words := fmt.Sprintf("%s: talk %d. %s", secret, who, strings.Repeat(harness.Prompt, 4))
			for turn := range turns {
				words += fmt.Sprintf(" turn %d of talk %d: %s", turn, who, harness.Prompt)
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`, words)
				if a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", body); err != nil || a.Status != 200 {
					t.Errorf("%v %v", a, err)
				}
			}
		})
	}
	wg.Wait()
	r.Stop()
	if err := <-r.Done; err != nil {
		t.Fatal(err)
	}
	r.Done <- nil
	files, _ := filepath.Glob(filepath.Join(dir, "*.rec"))
	if len(files) != 1 {
		t.Fatalf("files %v", files)
	}
	raw, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(raw, []byte("plugh")) {
		t.Error("a prompt's text is in the recording")
	}

	trace, err := replay.Load(files, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	if len(trace.Requests) != clients*turns || len(trace.Ranks) != 3 || trace.Ranks[0].CapacityEstimated || trace.Events == 0 || trace.Dropped != 0 {
		t.Fatalf("trace %v, %d dropped", trace, trace.Dropped)
	}
	if trace.Compared != clients*turns || trace.Agreed < trace.Compared/2 {
		t.Errorf("the events put through the index give the recorded overlap in %d of %d choices", trace.Agreed, trace.Compared)
	}
	rates, ok := trace.Calibrate()
	if !ok {
		t.Fatal("no times to first token")
	}
	again := trace.Run(replay.Variant{Recorded: true}, rates)
	if f := again.Fidelity; f.Requests != clients*turns || f.WithinOneBlock < f.Requests*9/10 {
		t.Errorf("the model with the recorded choices: %+v", f)
	}
	kv := trace.Run(replay.Variant{Policy: "kv", Weights: trace.Weights}, rates)
	rr := trace.Run(replay.Variant{Policy: "round_robin", Weights: trace.Weights}, rates)
	if kv.Requests != clients*turns || kv.HitRate < rr.HitRate+0.1 || rr.HitRate <= 0 {
		t.Errorf("kv finds %.2f, round robin %.2f", kv.HitRate, rr.HitRate)
	}

	var out, errs bytes.Buffer
	if code := runArgs("replay", []string{"--policy", "round_robin", "--set", "overlap_weight=0.5,queue_weight=2", files[0]}, &out, &errs); code != 0 || errs.Len() != 0 {
		t.Fatalf("%d, %s", code, &errs)
	}
	for _, want := range []string{`measured +\d+\.\d %`, `model, recorded choices +\d`, `model, same weights +\d`, `model, round_robin +\d`,
		`model, overlap_weight=0.5,queue_weight=2 +\d`, `within a block for 9\d\.\d %|within a block for 100\.0 %`, `\d ms`} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	shown := regexp.MustCompile(`same weights +(\d+\.\d) %`).FindStringSubmatch(out.String())
	if v, _ := strconv.ParseFloat(shown[1], 64); v < 100*kv.HitRate-15 || v > 100*kv.HitRate+15 {
		t.Errorf("shown %v, found %v", v, kv.HitRate)
	}
	t.Logf("\n%s", &out)

	cut := filepath.Join(dir, "cut")
	os.WriteFile(cut, raw[:len(raw)-5], 0o600)
	truncated := filepath.Join(dir, "stump") // the frame with its requests is truncated, so none of them remains
	os.WriteFile(truncated, raw[:len(raw)-30], 0o600)
	foreign := filepath.Join(dir, "foreign")
	os.WriteFile(foreign, []byte("hello"), 0o600)
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{cut}, 0, "truncated"}, {[]string{truncated}, 1, "no request was placed"}, {[]string{foreign}, 1, "not a recording"}, {[]string{filepath.Join(dir, "none")}, 1, "no such file"},
		{nil, 2, "want the files"}, {[]string{"--set", "overlap=1", files[0]}, 2, "overlap_weight"}, {[]string{"--set", "overlap_weight=NaN", files[0]}, 2, "0 or more"}, {[]string{"--policy", "best", files[0]}, 2, "round_robin"},
		{[]string{files[0], "--policy"}, 2, "--policy"},
	} {
		var out, errs bytes.Buffer
		if code := runArgs("replay", c.args, &out, &errs); code != c.code || !strings.Contains(errs.String(), c.want) {
			t.Errorf("replay %v: %d, %s; want %d and %q", c.args, code, &errs, c.code, c.want)
		}
	}
}

func TestRecordFromARunningRouter(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w"))
	testwait.UntilWithin(t, 10*time.Second, "the feed is live", func() bool { return worker.FeedState(r.AllRanks()[0].Feed.Load()) == worker.FeedLive })
	// Blocks that the engine cached before the recording began are part of the recording.
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(strings.Repeat(harness.Prompt, 3))), 200)
	testwait.UntilWithin(t, 10*time.Second, "its blocks are in the index", func() bool { return r.Index.CachedBlocks(r.AllRanks()[0].Slot) > 2 })
	held := r.Index.CachedBlocks(r.AllRanks()[0].Slot)
	out := t.TempDir()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var stdout, stderr harness.SyncBuffer
	code := make(chan int, 1)
	go func() {
		code <- run(ctx, []string{"record", "--json", "--runtime-file", r.Config.Admin.RuntimeFile, "--out", out}, &stdout, &stderr)
	}()
	testwait.UntilWithin(t, 10*time.Second, "the recording is in progress", func() bool { return r.Metric("sluice_recording_active") == 1 })
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(strings.Repeat(harness.Prompt, 3))), 200)
	testwait.UntilWithin(t, 10*time.Second, "it is written", func() bool {
		files, _ := filepath.Glob(filepath.Join(out, "*.rec"))
		if len(files) == 0 {
			return false
		}
		trace, err := replay.Load(files, func(error) {})
		return err == nil && len(trace.Requests) == 1 && trace.Requests[0].Ended
	})
	stop()
	var written recorded
	if c := <-code; c != 0 || json.Unmarshal([]byte(stdout.String()), &written) != nil || len(written.Files) != 1 || written.Bytes <= 0 || written.Seconds <= 0 || stderr.String() != "" {
		t.Errorf("%d: %s %s", c, &stdout, &stderr)
	}
	var result struct{ Recordings []replayReport }
	runJSON(t, &result, 0, append([]string{"replay", "--json", "--policy", "random"}, written.Files...)...)
	if len(result.Recordings) != 1 || result.Recordings[0].Requests != 1 || result.Recordings[0].Ranks != 1 || result.Recordings[0].Began == nil ||
		len(result.Recordings[0].Model) != 3 || result.Recordings[0].Model[0].Name != "recorded choices" || result.Recordings[0].Model[2].Name != "random" {
		t.Errorf("replay: %+v", result)
	}
	testwait.UntilWithin(t, 10*time.Second, "the router records no more", func() bool { return r.Metric("sluice_recording_active") == 0 })
	files, _ := filepath.Glob(filepath.Join(out, "*.rec"))
	trace, err := replay.Load(files, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	reported := trace.Requests[0].Cached
	if trace.InitialBlocks < held || reported < 2*trace.Requests[0].BlockSize || trace.Compared != 1 || trace.Agreed != 1 {
		t.Errorf("%d blocks held before, the router had %d; %d tokens cached; the overlap is the recorded one in %d of %d", trace.InitialBlocks, held, reported, trace.Agreed, trace.Compared)
	}
	for _, v := range []replay.Variant{{Recorded: true}, {Policy: "kv", Weights: trace.Weights}} {
		got := trace.Run(v, replay.DefaultRates)
		if f := got.Fidelity; f.Requests != 1 || f.WithinOneBlock != 1 || f.Reported != reported {
			t.Errorf("the model finds %d tokens cached, the engine reported %d: %+v", f.Modelled, reported, f)
		}
	}
}
