package engineapi

import (
	"fmt"
	"slices"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/router/fleet"
	"sluice/router/pd"
)

// engineDialect is the API of an engine that a request is written in.
type engineDialect uint8

const (
	completions engineDialect = iota // vLLM's /v1/completions, with return_token_ids (0.10.2 and later)
	generate                         // vLLM's /inference/v1/generate, streaming since 0.20
	native                           // SGLang's /generate
	trtllm                           // TensorRT-LLM's /v1/completions, not detokenized
)

// endpoints are where each dialect goes. They are the front's own, so that the
// runner treats a request as if it had come by them.
var endpoints = [...]front.Endpoint{
	completions: {Path: "/v1/completions", Kind: front.Completions, Protocol: relay.OpenAI, Disaggregable: true},
	generate:    {Path: "/inference/v1/generate", Kind: front.Generate, Protocol: relay.OpenAI, Disaggregable: true},
	native:      {Path: "/generate", Kind: front.NativeGenerate, Protocol: relay.OpenAI, Disaggregable: true},
	trtllm:      {Path: "/v1/completions", Kind: front.Completions, Protocol: relay.OpenAI, Disaggregable: true},
}

// modelPool is what the bodies depend on of the workers that serve a model.
type modelPool struct {
	dialect      engineDialect
	maxLen       int // the shortest of the model's lengths, in tokens; 0 unknown
	longestKnown int // the longest of them; 0: some worker has not told
	blockSize    int
}

// poolOf looks what the workers of a model offer. ok is false where there are
// none yet; an error says why what there is cannot take tokens.
func (e *Engine) poolOf(model string) (p modelPool, ok bool, err error) {
	view := e.opt.Fleet.View()
	fp, found := view.Pool(model)
	if !found {
		return p, false, nil
	}
	seen := map[string]string{} // engine → a worker of it
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
		takesGenerate = takesGenerate && pd.VersionAtLeast(info.Version, 0, 20, 0)
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
		return p, true, fmt.Errorf("the workers of model %q are of several engines, %s, which take tokens in different ways", fp.Model, strings.Join(list, ", "))
	}
	for engine := range seen {
		switch engine {
		case fleet.SGLang:
			p.dialect = native
		case "trtllm":
			p.dialect = trtllm
		default: // vLLM, and what speaks its API without saying what it is
			p.dialect = completions
			if e.opt.VLLM == "generate" || e.opt.VLLM == "auto" && takesGenerate && e.opt.Runner.HandsOver(fp.Model, front.Generate) {
				p.dialect = generate
			}
		}
	}
	return p, true, nil
}

// deltasOf says whether a native stream of a worker holds deltas; nil where its
// engine has not told.
func (e *Engine) deltasOf(id string) *bool {
	for _, w := range e.opt.Fleet.View().Workers {
		if w.Spec.ID == id {
			return w.Info().Deltas
		}
	}
	return nil
}
