package main

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/pd/family"
	"sluice/router/worker"
)

// handOverLimit bounds how long a prefill engine may take for one token. It is long because an
// engine may compile kernels for its first request.
const handOverLimit = 30 * time.Second

// checkHandOvers sends a prefill request to each prefill worker and checks that the response
// contains a hand-over handle. It returns the workers without one. It skips families whose two legs must run concurrently. No other probe finds an engine
// that runs without a KV connector, and requests succeed too, since decode then runs each alone.
func checkHandOvers(cfg *config.Config) (failed []checkedServer) {
	specs := cfg.Specs()
	faults := make([]error, len(specs))
	var wg sync.WaitGroup
	for i := range specs {
		if s := &specs[i]; s.Role == worker.Prefill && (s.Engine == "" || s.Engine == "vllm") {
			wg.Go(func() { faults[i] = tryHandOver(cfg, s) })
		}
	}
	wg.Wait()
	for i, err := range faults {
		if err != nil {
			failed = append(failed, checkedServer{Worker: specs[i].ID, URL: specs[i].URL, Problems: []string{err.Error()}})
		}
	}
	return failed
}

func tryHandOver(cfg *config.Config, s *worker.Spec) error {
	url := s.URL
	if len(s.RankURLs) > 0 {
		url = s.RankURLs[0]
	}
	opt, err := app.EngineOptions(cfg, handOverLimit)
	if err != nil {
		return err
	}
	ep, err := upstream.NewEndpoint(url, opt)
	if err != nil {
		return err
	}
	defer ep.Close()
	model := servedModel(ep, s)
	pdConfig := cfg.PD
	if m, ok := cfg.Models[model]; ok && m.PD != nil {
		pdConfig = *m.PD
	}
	try, ok := family.NewProbe(pdConfig.Family, model)
	if model == "" || !ok {
		return nil // probeServers reports a server that does not answer; other families cannot be probed
	}
	resp, err := ep.Do(&upstream.Request{
		Method: "POST", Path: try.Path, Body: [][]byte{try.Body}, Deadline: time.Now().Add(handOverLimit),
		Fields: []upstream.Field{{Name: "Content-Type", Value: "application/json"}},
	}, nil)
	if err != nil {
		return fmt.Errorf("it does not answer a prefill request: %w", err)
	}
	defer resp.Release()
	answer, err := resp.ReadAll(nil, 1<<20)
	if err != nil {
		return fmt.Errorf("it does not answer a prefill request: %w", err)
	}
	return try.Check(resp.Status, answer)
}

// servedModel returns the name of a model that the worker serves: the first one of the
// configuration or, if there is none, of the engine's model list. It returns "" if neither
// names a model.
func servedModel(ep *upstream.Endpoint, s *worker.Spec) string {
	if len(s.Models) > 0 {
		return s.Models[0]
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	status, body, err := ep.Get("/v1/models", handOverLimit, 1<<20)
	if err != nil || status != 200 || json.Unmarshal(body, &list) != nil || len(list.Data) == 0 {
		return ""
	}
	return list.Data[0].ID
}
