package engineapi

import (
	"fmt"
	"slices"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/sse"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// engineDialect is the engine API in which the router writes a request.
type engineDialect uint8

const (
	completions engineDialect = iota // vLLM's /v1/completions, with return_token_ids (0.10.2 and later)
	generate                         // vLLM's /inference/v1/generate, streaming since 0.20
	native                           // SGLang's /generate
	trtllm                           // TensorRT-LLM's /v1/completions, without detokenization
)

// endpoints are the endpoints of the dialects. They equal the front's, so that the Runner
// treats a request as if it had arrived there.
var endpoints = [...]front.Endpoint{
	completions: {Path: "/v1/completions", Kind: front.Completions, Protocol: sse.OpenAI, Disaggregable: true},
	generate:    {Path: "/inference/v1/generate", Kind: front.Generate, Protocol: sse.OpenAI, Disaggregable: true},
	native:      {Path: "/generate", Kind: front.NativeGenerate, Protocol: sse.OpenAI, Disaggregable: true},
	trtllm:      {Path: "/v1/completions", Kind: front.Completions, Protocol: sse.OpenAI, Disaggregable: true},
}

// modelPool is the information about a model's workers that the bodies depend on.
type modelPool struct {
	dialect      engineDialect
	maxLen       int // the shortest of the workers' context lengths, in tokens; 0: unknown
	longestKnown int // the longest of them; 0: some worker has not reported its length
	blockSize    int
}

// poolOf determines the dialect and limits of a model's workers. ok is false while the model
// has no worker. An error explains why the workers cannot accept tokens.
func (e *Engine) poolOf(model string) (p modelPool, ok bool, err error) {
	view := e.opt.Fleet.View()
	fp, found := view.Pool(model)
	if !found {
		return p, false, nil
	}
	seen := map[string]string{} // engine name to one of its workers
	takesGenerate, modelsKnown := true, true
	for _, w := range view.Workers {
		if !slices.Contains(w.Info().Models, fp.Model) {
			continue
		}
		info := w.Info()
		engine := info.Engine
		if engine == "" {
			engine = w.Spec.Engine
		}
		seen[engine] = w.Spec.ID
		takesGenerate = takesGenerate && worker.VersionAtLeast(info.Version, 0, 20, 0)
		if info.MaxModelLen > 0 && (p.maxLen == 0 || info.MaxModelLen < p.maxLen) {
			p.maxLen = info.MaxModelLen
		}
		p.longestKnown, modelsKnown = max(p.longestKnown, info.MaxModelLen), modelsKnown && info.MaxModelLen > 0
		for _, r := range w.Ranks {
			if n := r.BlockSize(); n > 0 && p.blockSize == 0 {
				p.blockSize = n
			}
		}
	}
	if !modelsKnown {
		p.longestKnown = 0
	}
	if len(seen) > 1 {
		var list []string
		for engine, id := range seen {
			if engine == "" {
				engine = "unknown"
			}
			list = append(list, engine+" ("+id+")")
		}
		slices.Sort(list)
		return p, true, fmt.Errorf("the workers of model %q run different engines (%s), whose token APIs differ", fp.Model, strings.Join(list, ", "))
	}
	for engine := range seen {
		switch engine {
		case fleet.SGLang:
			p.dialect = native
		case "trtllm":
			p.dialect = trtllm
		default: // vLLM, and engines with its API that do not report their name
			p.dialect = completions
			if e.opt.VLLM == "generate" || e.opt.VLLM == "auto" && takesGenerate && e.opt.Runner.HandsOver(fp.Model, front.Generate) {
				p.dialect = generate
			}
		}
	}
	return p, true, nil
}

// deltasOf returns whether a worker's native streams contain deltas; nil if its engine has not
// reported it.
func (e *Engine) deltasOf(id string) *bool {
	for _, w := range e.opt.Fleet.View().Workers {
		if w.Spec.ID == id {
			return w.Info().Deltas
		}
	}
	return nil
}
