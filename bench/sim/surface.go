package sim

import (
	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/lmcache"
	"sluice/bench/sim/mooncake"
	"sluice/bench/sim/nixl"
	"sluice/bench/sim/orchestrated"
	"sluice/bench/sim/sglang"
	"sluice/bench/sim/storage"
	"sluice/bench/sim/trtllm"
)

// surface is the HTTP surface of one engine: the endpoints that generate, the other
// endpoints, and the format of its errors.
type surface struct {
	inference map[string]func(*api.Response) api.Format // endpoints that generate, all POST
	get, post map[string]func(*conn, *httpconn.Request)
	failure   func(status int, msg, param string) []byte
	read      func(path string, raw []byte) (*api.Body, error)
	// headFirst means that the head of a stream is sent before the engine schedules the
	// request, and so before its first token (vLLM's AsyncLLM.generate, 0.32).
	headFirst bool
}

// surfaces by Options.Engine.
var surfaces = map[string]*surface{
	"vllm":   {inference: api.VLLMFormats, get: vllmGet, post: vllmPost, failure: api.VLLMError, read: func(_ string, raw []byte) (*api.Body, error) { return api.ReadBody(raw) }, headFirst: true},
	"sglang": {inference: api.SGLangFormats, get: sglangGet, post: sglangPost, failure: api.SGLangError, read: api.ReadSGLangBody},
	"trtllm": {inference: api.TRTLLMFormats, get: trtllmGet, post: trtllmPost, failure: api.SGLangError, read: api.ReadTRTLLMBody},
}

// errorBody returns an error in the format of the engine and its release.
func (e *Engine) errorBody(status int, msg, param string) []byte {
	if e.o.Engine == "vllm" && e.o.VLLM.FlatErrors() {
		return api.SGLangError(status, msg, param) // the same flat object
	}
	return e.surface.failure(status, msg, param)
}

// pdFamilies are the hand-overs that an engine can speak, by Options.PD.
var pdFamilies = map[string]func(l *incarnation) core.Family{
	"nixl":      func(l *incarnation) core.Family { return nixl.New(&l.Process) },
	"none":      func(*incarnation) core.Family { return nixl.Ignored{} },
	"nixl-push": func(l *incarnation) core.Family { return nixl.NewPush(&l.Process) },
	"mooncake":  func(l *incarnation) core.Family { return mooncake.New(&l.Process) },
	"sglang":    func(l *incarnation) core.Family { return sglang.New(&l.Process, l.bootstrap) },

	"lmcache":      func(l *incarnation) core.Family { return lmcache.New(&l.Process) },
	"orchestrated": func(l *incarnation) core.Family { return orchestrated.New(&l.Process) },
	"storage":      func(l *incarnation) core.Family { return storage.New(&l.Process) },
	"trtllm":       func(l *incarnation) core.Family { return trtllm.New(&l.Process) },
}
