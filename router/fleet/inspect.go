package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// The kinds of engines.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
	TRTLLM = "trtllm" // TensorRT-LLM's server calls itself tensorrt_llm
)

// maxInspectBody bounds the small JSON responses; SGLang's /server_info is the largest.
const maxInspectBody = 4 << 20

// Model is one entry of an engine's /v1/models.
type Model struct {
	ID          string
	Parent      string // the base model of a LoRA adapter
	MaxModelLen int    // tokens; 0 unknown
	Root        string // vLLM: the folder or the hub's name that the model was loaded from
}

// EngineInfo is what one engine server reports about itself. Everything except URL may be missing:
// engines differ and may return invalid data.
type EngineInfo struct {
	URL         string
	Engine      string // VLLM, SGLang or TRTLLM; "" unknown
	Version     string
	Models      []Model // base models first
	MaxModelLen int     // tokens, of the first model
	BlockSize   int     // tokens per KV block; 0 unknown
	TotalBlocks int     // KV blocks per rank; 0 unknown
	Ranks       int     // data-parallel ranks of the engine on all nodes: one more than the highest seen; 0 unknown
	// StartRank is the lowest rank seen. If it is above 0 the server is one node of several, and
	// its header counts from there (vLLM).
	StartRank int
	// Role, if the engine reports one: SGLang does, vLLM does not.
	Role      worker.Role
	RoleKnown bool
	// BootstrapPort of an SGLang prefill engine; 0 unknown.
	BootstrapPort int
	// Deltas: SGLang's /generate streams only new text instead of all text so far; nil unknown.
	Deltas *bool
	// UsesNIXL: the engine shows NIXL transfer metrics, so it has a KV connector and is a prefill
	// or decode worker, or both.
	UsesNIXL bool
	Events   []EventSource
	// HealthPath is where InspectHealth found the server healthy; "" if it was not probed.
	HealthPath string
	// Err is why Models is empty; the engine cannot be used then.
	Err error
	// Notes describe what else could not be learned, and why.
	Notes []string
	// Refused are those of Notes about values that are not accepted from engines.
	Refused []string

	incarnation incarnation
}

// Names returns the models' names.
func (a *EngineInfo) Names() []string {
	var names []string
	for _, m := range a.Models {
		names = append(names, m.ID)
	}
	return names
}

// adapters returns the names of the models that are adapters of another.
func (a *EngineInfo) adapters() (names []string) {
	for _, m := range a.Models {
		if m.Parent != "" {
			names = append(names, m.ID)
		}
	}
	return names
}

// Inspect queries one engine server: /v1/models, /version, /metrics, and then /kv_event_sources
// (vLLM) or /server_info (SGLang). It calls no inference endpoint. It takes at most twice timeout.
func Inspect(ctx context.Context, ep *upstream.Endpoint, timeout time.Duration) *EngineInfo {
	a := &EngineInfo{URL: ep.URL(), incarnation: incarnation{tokens: -1}}
	fetch := func(path string, limit int) ([]byte, error) {
		status, body, err := get(ctx, ep, path, timeout, limit)
		switch {
		case err != nil:
			return nil, fmt.Errorf("GET %s: %s", path, short(err))
		case status != 200:
			return nil, fmt.Errorf("GET %s returned %d; want 200", path, status)
		}
		return body, nil
	}

	var wg sync.WaitGroup
	var models, version, metrics []byte
	var versionErr, metricsErr error
	wg.Go(func() { models, a.Err = fetch("/v1/models", maxInspectBody) })
	wg.Go(func() { version, versionErr = fetch("/version", maxInspectBody) })
	wg.Go(func() { metrics, metricsErr = fetch("/metrics", metricsBody) })
	wg.Wait()

	if a.Err == nil {
		a.readModels(models)
	}
	if versionErr == nil {
		a.readVersion(version)
	}
	if metricsErr == nil {
		a.readMetrics(metrics)
	} else {
		a.addNote("load, block size and restarts are unknown", metricsErr)
	}

	if a.Engine != SGLang {
		body, err := fetch("/kv_event_sources", maxInspectBody)
		if err == nil {
			err = a.readEventSources(body)
		}
		if err != nil && a.Engine == VLLM {
			a.addNote("KV events are known only from kv_events in the configuration", err)
		}
	}
	if a.Engine != VLLM {
		body, err := fetch("/server_info", maxInspectBody)
		if err == nil {
			err = a.readServerInfo(body)
		}
		if err != nil && a.Engine == SGLang {
			a.addNote("role, ranks and KV events are unknown", err)
		}
	}
	a.incarnation.sources = joinSources(a.Events)
	return a
}

func (a *EngineInfo) addNote(what string, err error) {
	a.Notes = append(a.Notes, fmt.Sprintf("%s: %v", what, err))
}

// accepts reports whether text that the engine returned in a field of the response at path can be
// displayed; it adds a note if not.
func (a *EngineInfo) accepts(path, field, text string) bool {
	if worker.Printable(text) {
		return true
	}
	if len(a.Refused) < maxRefused {
		why := fmt.Sprintf("GET %s: %s: %s is ignored; want printable text without control, direction and zero-width characters", path, field, strconv.QuoteToASCII(text[:min(len(text), 200)]))
		a.Refused, a.Notes = append(a.Refused, why), append(a.Notes, why)
	}
	return false
}

// maxRoot bounds Model.Root, in bytes.
const maxRoot = 1024

// maxRefused bounds EngineInfo.Refused.
const maxRefused = 8

func (a *EngineInfo) readModels(body []byte) {
	var list struct {
		Data []struct {
			ID      string  `json:"id"`
			OwnedBy string  `json:"owned_by"`
			Parent  *string `json:"parent"`
			MaxLen  float64 `json:"max_model_len"`
			Root    string  `json:"root"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		a.Err = fmt.Errorf(`cannot parse GET /v1/models: %w; want {"data":[{"id":…}]}`, err)
		return
	}
	for i, d := range list.Data {
		if d.ID == "" || len(d.ID) > 512 || len(a.Models) == 1024 || !a.accepts("/v1/models", fmt.Sprintf("data[%d].id", i), d.ID) {
			continue
		}
		if d.Parent != nil && !a.accepts("/v1/models", fmt.Sprintf("data[%d].parent", i), *d.Parent) {
			continue
		}
		m := Model{ID: d.ID, MaxModelLen: clampInt(d.MaxLen)}
		if d.Parent != nil {
			m.Parent = *d.Parent
		}
		if len(d.Root) <= maxRoot && worker.Printable(d.Root) {
			m.Root = d.Root
		}
		a.Models = append(a.Models, m)
		switch engine := strings.ToLower(d.OwnedBy); engine {
		case VLLM, SGLang:
			a.Engine = engine
		case "tensorrt_llm":
			a.Engine = TRTLLM
		}
	}
	slices.SortStableFunc(a.Models, func(x, y Model) int { return min(len(x.Parent), 1) - min(len(y.Parent), 1) })
	if len(a.Models) == 0 {
		a.Err = errors.New("GET /v1/models lists no model")
		if len(a.Refused) > 0 {
			a.Err = fmt.Errorf("GET /v1/models lists no usable model: %s", a.Refused[0])
		}
		return
	}
	a.MaxModelLen = a.Models[0].MaxModelLen
}

func (a *EngineInfo) readVersion(body []byte) {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) == nil && len(v.Version) <= 128 && a.accepts("/version", "version", v.Version) {
		a.Version = v.Version
	}
}

func (a *EngineInfo) readMetrics(text []byte) {
	p := readPage(text)
	a.incarnation = p.incarnation
	if a.Engine == "" {
		a.Engine = p.engine
	}
	a.BlockSize, a.TotalBlocks = p.blockSize, p.totalBlocks
	for rank := range p.loads {
		if rank >= 0 {
			a.Ranks = max(a.Ranks, rank+1)
		}
	}
	if a.Engine == VLLM { // it shows all its ranks from the start
		a.setStartRank(slices.Min(slices.AppendSeq([]int{math.MaxInt}, maps.Keys(p.loads))))
	}
	a.UsesNIXL = strings.Contains(string(text), "\nvllm:nixl_")
}

// readEventSources reads vLLM's GET /kv_event_sources (0.31 and later): an object of the resolved
// event configurations by data-parallel rank.
func (a *EngineInfo) readEventSources(body []byte) error {
	var ranks map[string]struct {
		Enabled   *bool   `json:"enable_kv_cache_events"`
		Publisher string  `json:"publisher"`
		Endpoint  string  `json:"endpoint"`
		Replay    *string `json:"replay_endpoint"`
		Topic     string  `json:"topic"`
	}
	if err := json.Unmarshal(body, &ranks); err != nil {
		return fmt.Errorf(`cannot parse GET /kv_event_sources: %w; want {"0":{"endpoint":…}}`, err)
	}
	for key, src := range ranks {
		rank, err := strconv.ParseUint(key, 10, 16)
		if err != nil || src.Publisher == "null" || src.Enabled != nil && !*src.Enabled || !strings.Contains(src.Endpoint, "://") {
			continue
		}
		if !a.accepts("/kv_event_sources", key+".endpoint", src.Endpoint) || src.Replay != nil && !a.accepts("/kv_event_sources", key+".replay_endpoint", *src.Replay) {
			continue
		}
		e := EventSource{Rank: uint16(rank), Endpoint: replaceWildcardHost(src.Endpoint, a.URL), Topic: src.Topic, Origin: "/kv_event_sources"}
		if src.Replay != nil {
			e.Replay = replaceWildcardHost(*src.Replay, a.URL)
		}
		a.Events = append(a.Events, e)
		a.Ranks = max(a.Ranks, int(rank)+1)
	}
	slices.SortFunc(a.Events, func(x, y EventSource) int { return int(x.Rank) - int(y.Rank) })
	if len(a.Events) > 0 {
		a.setStartRank(int(a.Events[0].Rank))
	}
	return nil
}

// setStartRank records the lowest rank that the engine has shown.
func (a *EngineInfo) setStartRank(rank int) {
	if rank >= 0 && rank < worker.MaxSlots {
		a.StartRank = rank
	}
}

// MissingRanks returns why the engine does not have the ranks of a Spec, by the engine's or the
// server's numbers; "" if it has them or does not report its ranks.
func (a *EngineInfo) MissingRanks(spec *worker.Spec) string {
	if a.Ranks == 0 || len(spec.RankURLs) > 0 || len(spec.Ranks) == 0 {
		return ""
	}
	start := cmp.Or(spec.StartRank, a.StartRank)
	last := int(slices.Max(spec.Ranks))
	engines := last
	if !worker.GlobalRanks(spec.Ranks, start) {
		engines += start
	}
	switch {
	case engines < a.Ranks && start >= a.StartRank:
		return ""
	case a.StartRank > 0:
		return fmt.Sprintf("the engine has ranks %d to %d, here 0 to %d, but rank %d is configured (start_rank %d); want ranks and start_rank as the engine has them",
			a.StartRank, a.Ranks-1, a.Ranks-1-a.StartRank, last, start)
	}
	return fmt.Sprintf("the engine has ranks 0 to %d, but rank %d is configured; want ranks that the engine has", a.Ranks-1, engines)
}

// readServerInfo reads SGLang's GET /server_info.
func (a *EngineInfo) readServerInfo(body []byte) error {
	var info struct {
		Version       string   `json:"version"`
		Mode          *string  `json:"disaggregation_mode"`
		BootstrapPort float64  `json:"disaggregation_bootstrap_port"`
		DPSize        float64  `json:"dp_size"`
		PageSize      *float64 `json:"page_size"`
		Deltas        *bool    `json:"incremental_streaming_output"` // before 0.5.10 "stream_output"
		OldDeltas     *bool    `json:"stream_output"`
		Events        *struct {
			Publisher string   `json:"publisher"`
			Host      string   `json:"endpoint_host"`
			Port      float64  `json:"endpoint_port_base"`
			Replay    *float64 `json:"replay_endpoint_port_base"`
			Topic     string   `json:"topic"`
			Load      *float64 `json:"load_endpoint_port_base"`
			LoadTopic string   `json:"load_topic"`
			BlockSize float64  `json:"block_size"`
			DPSize    float64  `json:"dp_size"`
		} `json:"kv_events"`
	}
	if err := json.Unmarshal(body, &info); err != nil {
		return fmt.Errorf(`cannot parse GET /server_info: %w; want an object with "disaggregation_mode" and "dp_size"`, err)
	}
	if info.Mode == nil && info.PageSize == nil {
		return errors.New(`GET /server_info contains neither "disaggregation_mode" nor "page_size"`)
	}
	a.Engine = SGLang
	if a.Version == "" && len(info.Version) <= 128 && a.accepts("/server_info", "version", info.Version) {
		a.Version = info.Version
	}
	if a.Deltas = info.Deltas; a.Deltas == nil {
		a.Deltas = info.OldDeltas
	}
	a.RoleKnown = true
	if info.Mode != nil {
		switch *info.Mode {
		case "prefill":
			a.Role, a.BootstrapPort = worker.Prefill, portOf(info.BootstrapPort)
		case "decode":
			a.Role = worker.Decode
		}
	}
	if info.PageSize != nil && a.BlockSize == 0 {
		a.BlockSize = clampInt(*info.PageSize)
	}
	a.Ranks = max(a.Ranks, min(clampInt(info.DPSize), worker.MaxSlots))
	if e := info.Events; e != nil && e.Publisher == "zmq" && portOf(e.Port) > 0 {
		for rank := range max(min(clampInt(e.DPSize), worker.MaxSlots), 1) {
			src := EventSource{Rank: uint16(rank), Topic: e.Topic, Origin: "/server_info"}
			src.Endpoint = offsetPort(replaceWildcardHost("tcp://*:"+strconv.Itoa(portOf(e.Port)), a.URL), rank)
			if e.Replay != nil && portOf(*e.Replay) > 0 {
				src.Replay = offsetPort(replaceWildcardHost("tcp://*:"+strconv.Itoa(portOf(*e.Replay)), a.URL), rank)
			}
			if e.Load != nil && portOf(*e.Load) > 0 {
				src.Load, src.LoadTopic = offsetPort(replaceWildcardHost("tcp://*:"+strconv.Itoa(portOf(*e.Load)), a.URL), rank), e.LoadTopic
			}
			if src.Endpoint != "" {
				a.Events = append(a.Events, src)
			}
		}
	}
	return nil
}

// tinyCompletion returns the body of a request for one token.
func tinyCompletion(model string) ([]byte, error) {
	return json.Marshal(map[string]any{"model": model, "prompt": "a", "max_tokens": 1})
}

// tryCompletion sends a request for one token.
func tryCompletion(ctx context.Context, ep *upstream.Endpoint, model string) error {
	body, err := tinyCompletion(model)
	if err != nil {
		return err
	}
	const limit = 30 * time.Second // a cold engine compiles on its first token
	status, _, err := send(ctx, ep, &upstream.Request{
		Method: "POST", Path: "/v1/completions", Body: [][]byte{body}, Deadline: time.Now().Add(limit),
		Fields: []upstream.Field{{Name: "Content-Type", Value: "application/json"}},
	}, maxInspectBody)
	if err == nil && status != 200 {
		err = fmt.Errorf("POST /v1/completions returned %d; want 200", status)
	}
	return err
}

// positive parses a decimal from 1 to 2^30.
func positive(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 31)
	return int(n), err == nil && n > 0 && n <= 1<<30
}

// clampInt converts a JSON number from an engine to an int; 0 if it is out of range.
func clampInt(v float64) int {
	if !usable(v) || v > 1<<30 {
		return 0
	}
	return int(v)
}

func portOf(v float64) int {
	if n := clampInt(v); n <= 65535 {
		return n
	}
	return 0
}
