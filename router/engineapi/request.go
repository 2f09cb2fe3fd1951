package engineapi

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"sluice/dataplane/fieldrules"
	"sluice/dataplane/jsonscan"
	"sluice/router/pd"
)

// member is a member that is passed on unchanged: its name and its JSON value. in is the name
// of its section and a dot, "" at the top level.
type member struct {
	name, raw []byte
	in        string
}

// request is a checked preprocessed request. Raw fields borrow from the JSON from which it was
// parsed.
type request struct {
	vals   [numFields][]byte // JSON; nil if absent or null
	tokens []uint32
	model  string

	engineFields []member // top-level members unknown to the router
	sampling     []member // unknown members of sampling_options, written beside the known ones

	hints           pd.Hints
	overlapWeight   float64
	temperature     float64
	reportsDecision bool // an annotation requests the choice
}

// has returns whether a field is present.
func (r *request) has(f field) bool { return r.vals[f] != nil }

// isTrue returns whether a flag is present and true.
func (r *request) isTrue(f field) bool { return string(r.vals[f]) == "true" }

// text returns the value of a string field.
func (r *request) text(f field) string { return string(appendText(nil, r.vals[f])) }

// reserved are top-level members of engine bodies that the router writes, or that callers may
// not set. Requests may not contain them as unknown members.
var reserved = names("prompt", "messages", "input", "input_ids", "text", "stream", "stream_options", "sampling_params", "n", "max_tokens", "max_completion_tokens",
	"min_tokens", "return_token_ids", "request_id", "rid", "cache_salt", "priority", "logprobs", "stop", "stop_token_ids", "ignore_eos", "best_of", "use_beam_search", "echo",
	"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "return_tokens_as_token_ids", "return_logprob", "top_logprobs_num", "lora_path", "lora_id", "structured_outputs",
	"detokenize", "prompt_token_ids", "cache_hit_threshold", "image_data", "video_data", "audio_data")

// reservedSampling are the reserved members of sampling_options.
var reservedSampling = names("lora_path", "lora_id", "max_tokens", "min_tokens", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "skip_special_tokens",
	"sampling_seed", "structured_outputs", "json_schema", "regex", "ebnf", "no_stop_trim", "output_kind", "detokenize", "thinking_token_budget", "model", "prompt", "stream", "return_token_ids")

// transferParams are the members that only the router may write, as the table of package front
// lists them: hosts and sockets that engines connect to, files that they load. Engines read them in
// any object that is merged into the request.
var transferParams = func() map[string]bool {
	m := make(map[string]bool)
	for name, onlyRouter := range fieldrules.EngineFields() {
		if onlyRouter {
			m[name] = true
		}
	}
	return m
}()

func names(list ...string) map[string]bool {
	m := make(map[string]bool, len(list))
	for _, n := range list {
		m[n] = true
	}
	return m
}

// parse parses a request in JSON that is known to be well-formed.
func (r *request) parse(body []byte) error {
	if err := r.section(body, topSection, r.addEngineField); err != nil {
		return err
	}
	for _, s := range [...]struct {
		of      field
		known   section
		unknown func(name, raw []byte, kind jsonscan.Kind) error
	}{
		{fStop, stopSection, r.addEngineSampling("stop_conditions")}, {fSampling, samplingSection, r.addEngineSampling("sampling_options")},
		{fOutput, outputSection, r.addEngineSampling("output_options")}, {fRouting, routingSection, checkUnknown(fRouting, routingSection)}, {fOverride, overrideSection, checkUnknown(fOverride, overrideSection)},
		{fPrefillResult, resultSection, checkUnknown(fPrefillResult, resultSection)}, {fBootstrap, bootstrapSection, checkUnknown(fBootstrap, bootstrapSection)}, {fMMRouting, mmSection, checkUnknown(fMMRouting, mmSection)},
	} {
		if raw := r.vals[s.of]; raw != nil {
			if err := r.section(raw, s.known, s.unknown); err != nil {
				return err
			}
		}
	}
	return r.checkCombined()
}

// section parses one object.
func (r *request) section(raw []byte, known section, unknown func(name, raw []byte, kind jsonscan.Kind) error) error {
	var room [64]byte
	for it := jsonscan.Walk(raw); it.Next(); {
		name := it.Key(room[:0])
		f, ok := known[string(name)]
		value, kind := it.Raw(), it.Value.Kind
		switch {
		case kind == jsonscan.Null && (ok || unknown == nil):
		case !ok:
			if err := unknown(bytes.Clone(name), value, kind); err != nil {
				return err
			}
		case r.vals[f] != nil:
			return &FieldError{Field: rules[f].in + rules[f].name, Got: "it twice", Want: "it once"}
		case !rules[f].check(value, kind):
			return &FieldError{Field: rules[f].in + rules[f].name, Got: quoteValue(value, kind), Want: rules[f].want}
		default:
			r.vals[f] = value
		}
	}
	return nil
}

// checkUnknown rejects unknown members in a section that only the router reads. A misspelled
// hint would otherwise have no effect and nobody would notice.
func checkUnknown(of field, known section) func(name, raw []byte, kind jsonscan.Kind) error {
	return func(name, raw []byte, kind jsonscan.Kind) error {
		if kind <= jsonscan.Null {
			return nil
		}
		return &FieldError{Field: rules[of].name + "." + string(name), Got: "a member that is not known", Want: "one of " + known.list()}
	}
}

// isReserved returns whether no caller may set a top-level member of engine bodies.
func isReserved(name []byte) bool { return reserved[string(name)] || transferParams[string(name)] }

// addEngineField adds an unknown top-level member for the engine. A null member with a name
// that the router reserves counts as absent, like any other null.
func (r *request) addEngineField(name, raw []byte, kind jsonscan.Kind) error {
	switch {
	case !isReserved(name):
	case kind == jsonscan.Null:
		return nil
	default:
		return &FieldError{Field: string(name), Got: "it is set by the router; leave it out", Forbidden: true}
	}
	if kind == jsonscan.Object {
		if err := hasNoTransferParams(string(name), raw); err != nil {
			return err
		}
	}
	return add(&r.engineFields, member{name: name, raw: raw})
}

// maxEngineFields is the maximum number of unknown members of a section.
const maxEngineFields = 256

// add appends a member to those of a section.
func add(to *[]member, m member) error {
	for _, o := range *to {
		if bytes.Equal(o.name, m.name) {
			return &FieldError{Field: m.in + string(m.name), Got: "it twice", Want: "it once"}
		}
	}
	if len(*to) == maxEngineFields {
		return &FieldError{Field: strings.TrimSuffix(m.in, "."), Got: fmt.Sprintf("more than %d members that are the engine's", maxEngineFields), Want: "no more"}
	}
	*to = append(*to, m)
	return nil
}

func (r *request) addEngineSampling(in string) func(name, raw []byte, kind jsonscan.Kind) error {
	return func(name, raw []byte, kind jsonscan.Kind) error {
		full := in + "." + string(name)
		if kind == jsonscan.Null {
			return nil
		}
		if isReserved(name) || reservedSampling[string(name)] {
			return &FieldError{Field: full, Got: "it is set by the router; leave it out", Forbidden: true}
		}
		if kind == jsonscan.Object {
			if err := hasNoTransferParams(full, raw); err != nil {
				return err
			}
		}
		return add(&r.sampling, member{name, raw, in + "."})
	}
}

// hasNoTransferParams checks that an object has no top-level member that engines would read as
// transfer parameters.
func hasNoTransferParams(in string, raw []byte) error {
	var room [64]byte
	for it := jsonscan.Walk(raw); it.Next(); {
		if name := it.Key(room[:0]); transferParams[string(name)] && it.Value.Kind > jsonscan.Null {
			return &FieldError{Field: in + "." + string(name), Got: "it is set by the router; leave it out", Forbidden: true}
		}
	}
	return nil
}

// checkCombined checks constraints across fields and fills in the hints.
func (r *request) checkCombined() error {
	if !r.has(fTokenIDs) {
		return &FieldError{Field: "token_ids", Got: "nothing", Want: rules[fTokenIDs].want}
	}
	var err error
	if r.tokens, err = jsonscan.TokenIDs(r.tokens[:0], r.vals[fTokenIDs]); err != nil || len(r.tokens) == 0 {
		got := "none"
		if err != nil {
			got = err.Error()
		}
		return &FieldError{Field: "token_ids", Got: got, Want: rules[fTokenIDs].want}
	}
	r.model = r.text(fModel)
	if least, most := r.count(fMinTokens), r.count(fMaxTokens); r.has(fMaxTokens) && least > most {
		return &FieldError{Field: "stop_conditions.min_tokens", Got: strconv.Itoa(least), Want: fmt.Sprintf("at most max_tokens, which is %d", most)}
	}
	if n, best := r.count(fN), r.count(fBestOf); best > 0 && best < max(n, 1) {
		return &FieldError{Field: "sampling_options.best_of", Got: strconv.Itoa(best), Want: fmt.Sprintf("at least n, which is %d", max(n, 1))}
	}
	if r.has(fPrefillResult) && !r.has(fResultParams) {
		return &FieldError{Field: "prefill_result.disaggregated_params", Got: "nothing", Want: rules[fResultParams].want}
	}
	for _, f := range [...]field{fBootstrapHost, fBootstrapPort, fBootstrapRoom} {
		if r.has(fBootstrap) && !r.has(f) {
			return &FieldError{Field: rules[f].in + rules[f].name, Got: "nothing", Want: rules[f].want}
		}
	}
	for it := jsonscan.Walk(r.vals[fAnnotations]); it.Next(); {
		if string(it.Raw()) == `"decision"` {
			r.reportsDecision = true
		}
	}
	h := &r.hints
	h.ExpectedOutput = r.count(fExpected)
	h.HasHandle = r.has(fPrefillResult) || r.has(fBootstrap)
	if r.has(fOverlapWeight) {
		r.overlapWeight, _ = strconv.ParseFloat(string(r.vals[fOverlapWeight]), 64)
		h.OverlapWeight = &r.overlapWeight
	}
	if r.has(fRouterTemperature) {
		r.temperature, _ = strconv.ParseFloat(string(r.vals[fRouterTemperature]), 64)
		h.Temperature = &r.temperature
	}
	return nil
}

// count returns a field's integer, 0 if absent.
func (r *request) count(f field) int {
	n, _ := strconv.ParseInt(string(r.vals[f]), 10, 64)
	return int(n)
}

// labels returns the labels of routing_constraints.
func (r *request) labels() (list string, err error) {
	if !r.has(fConstraints) {
		return "", nil
	}
	var room [64]byte
	for it := jsonscan.Walk(r.vals[fConstraints]); it.Next(); {
		name, value := it.Key(room[:0]), it.Raw()
		in := "routing.routing_constraints." + string(name)
		switch {
		case it.Value.Kind <= jsonscan.Null:
		case string(name) != "labels": // an unknown constraint would not be observed
			return "", &FieldError{Field: in, Got: "a member that is not known", Want: "labels"}
		case !workerIDs(value, it.Value.Kind):
			return "", &FieldError{Field: in, Got: quoteValue(value, it.Value.Kind), Want: "an array of workers' labels, at least one"}
		default:
			list = joinIDs(value)
		}
	}
	if list == "" {
		return "", &FieldError{Field: "routing.routing_constraints", Got: quoteValue(r.vals[fConstraints], jsonscan.Object), Want: rules[fConstraints].want}
	}
	return list, nil
}

// maxJoinedIDs is one more than the Runner accepts in a steering header. The Runner therefore
// rejects a longer list, and the list needs no more memory than that.
const maxJoinedIDs = 65

// joinIDs returns the first maxJoinedIDs ids of a list as a header value.
func joinIDs(raw []byte) string {
	var out []byte
	for it, n := jsonscan.Walk(raw), 0; n < maxJoinedIDs && it.Next(); n++ {
		if n > 0 {
			out = append(out, ',')
		}
		out = append(out, bytes.Trim(it.Raw(), `"`)...)
	}
	return string(out)
}
