package engineapi

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"sluice/dataplane/jsonscan"
)

// FieldError describes an invalid field of a request. It is found before anything is sent to an
// engine.
type FieldError struct {
	Field     string // dotted path; "" for the whole request
	Got, Want string
	// Forbidden means that callers may not set the field, or that it names a host that is not
	// allowed.
	Forbidden bool
}

// Error implements error.
func (e *FieldError) Error() string {
	switch {
	case e.Field == "":
		return "the request: got " + e.Got + "; want " + e.Want
	case e.Want == "":
		return "field " + strconv.Quote(e.shownName()) + ": " + e.Got
	}
	return "field " + strconv.Quote(e.shownName()) + ": got " + e.Got + "; want " + e.Want
}

// shownName returns the field's name, truncated because callers choose the names of members.
func (e *FieldError) shownName() string { return truncate(e.Field, 200) }

// field is a known member of a request, within its sections.
type field uint8

// The known fields. Those of stop_conditions, sampling_options and output_options are written
// into the engine's body by name (body.go).
const (
	none field = iota

	fModel
	fTokenIDs
	fStop
	fSampling
	fOutput
	fEOS
	fAnnotations
	fRouting
	fOverride
	fPrefillResult
	fBootstrap
	fMMRouting
	fMDCSum
	fMigrationLink
	fContext

	fMaxTokens
	fStopStrings
	fStopIDs
	fStopIDsVisible
	fStopIDsHidden
	fMinTokens
	fIgnoreEOS
	fMaxThinking

	fN
	fBestOf
	fPresence
	fFrequency
	fRepetition
	fTemperature
	fTopP
	fTopK
	fMinP
	fBeam
	fLengthPenalty
	fSeed
	fIncludeStop
	fGuided

	fLogprobs
	fPromptLogprobs
	fSkipSpecial
	fFormattedPrompt
	fTokensAsIDs
	fNoStopTrim

	fInstance
	fPrefillWorker
	fDecodeWorker
	fRank
	fPrefillRank
	fExpected
	fLoRA
	fCacheSalt
	fPriorityJump
	fStrictPriority
	fPriority
	fAllowed
	fConstraints
	fSession
	fPrefillOnly

	fOverlapWeight
	fRouterTemperature

	fResultParams
	fPromptDetails

	fBootstrapHost
	fBootstrapPort
	fBootstrapRoom
	fHandoff

	fRoutingTokens
	fBlockInfos
	fExpandedLen
	fMMBlockSize

	numFields
)

// rule is the constraint on a field's value.
type rule struct {
	name  string
	check func(raw []byte, kind jsonscan.Kind) bool
	want  string
	in    string // the section's name and a dot
}

var rules [numFields]rule

// section contains the known members of one object of a request.
type section map[string]field

// list returns the names in alphabetical order.
func (s section) list() string {
	return strings.Join(slices.Sorted(maps.Keys(s)), ", ")
}

var (
	topSection, stopSection, samplingSection, outputSection, routingSection = section{}, section{}, section{}, section{}, section{}
	overrideSection, resultSection, bootstrapSection, mmSection             = section{}, section{}, section{}, section{}
)

func isKind(k jsonscan.Kind) func([]byte, jsonscan.Kind) bool {
	return func(_ []byte, got jsonscan.Kind) bool { return got == k }
}

func integer(least, most int64) func([]byte, jsonscan.Kind) bool {
	return func(raw []byte, kind jsonscan.Kind) bool {
		n, err := strconv.ParseInt(string(raw), 10, 64)
		return kind == jsonscan.Number && err == nil && n >= least && n <= most
	}
}

// unsigned accepts an unsigned integer of up to 64 bits.
func unsigned(raw []byte, kind jsonscan.Kind) bool {
	_, err := strconv.ParseUint(string(raw), 10, 64)
	return kind == jsonscan.Number && err == nil
}

// number returns a check for a number from least (exclusive if open) to most.
func number(least, most float64, open bool) func([]byte, jsonscan.Kind) bool {
	return func(raw []byte, kind jsonscan.Kind) bool {
		v, err := strconv.ParseFloat(string(raw), 64)
		return kind == jsonscan.Number && err == nil && v >= least && v <= most && !(open && v == least)
	}
}

func ids(raw []byte, kind jsonscan.Kind) bool {
	if kind != jsonscan.Array {
		return false
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if _, err := strconv.ParseUint(string(it.Raw()), 10, 32); err != nil {
			return false
		}
	}
	return true
}

func texts(raw []byte, kind jsonscan.Kind) bool {
	if kind != jsonscan.Array {
		return false
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if it.Value.Kind != jsonscan.String {
			return false
		}
	}
	return true
}

// anyEmpty returns whether a string, or any string of an array, is empty.
func anyEmpty(raw []byte, kind jsonscan.Kind) bool {
	if kind == jsonscan.String {
		return len(raw) <= 2
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if len(it.Raw()) <= 2 {
			return true
		}
	}
	return false
}

// workerID accepts a worker id, the name in the configuration. A number stands for its digits.
func workerID(raw []byte, kind jsonscan.Kind) bool {
	if kind == jsonscan.Number {
		return unsigned(raw, kind)
	}
	if kind != jsonscan.String || len(raw) <= 2 || len(raw) > 258 {
		return false
	}
	for _, c := range raw[1 : len(raw)-1] {
		if c <= ' ' || c == ',' || c == '\\' || c == '"' || c >= 0x7f {
			return false
		}
	}
	return true
}

func workerIDs(raw []byte, kind jsonscan.Kind) bool {
	if kind != jsonscan.Array {
		return false
	}
	n := 0
	for it := jsonscan.Walk(raw); it.Next(); n++ {
		if !workerID(it.Raw(), it.Value.Kind) {
			return false
		}
	}
	return n > 0
}

// isHeaderValue accepts a string without control characters, which may appear in a header line.
func isHeaderValue(raw []byte, kind jsonscan.Kind) bool {
	if kind != jsonscan.String || len(raw) > 258 {
		return false
	}
	for _, c := range raw[1 : len(raw)-1] {
		if c < ' ' || c == '\\' || c >= 0x7f {
			return false
		}
	}
	return true
}

func init() {
	def := func(s section, in string, f field, name, want string, check func([]byte, jsonscan.Kind) bool) {
		rules[f] = rule{name: name, check: check, want: want, in: in}
		s[name] = f
	}
	const anyCount, limit = "an integer from 0 to 16777216", 1 << 24
	object, text, flag := isKind(jsonscan.Object), isKind(jsonscan.String), isKind(jsonscan.Bool)
	count := integer(0, limit)
	for f, name := range map[field]string{fStop: "stop_conditions", fSampling: "sampling_options", fOutput: "output_options", fRouting: "routing",
		fOverride: "router_config_override", fPrefillResult: "prefill_result", fBootstrap: "bootstrap_info", fMMRouting: "mm_routing_info",
		fMigrationLink: "migration_link", fContext: "context"} {
		def(topSection, "", f, name, "an object", object)
	}
	def(topSection, "", fModel, "model", "a string", text)
	def(topSection, "", fTokenIDs, "token_ids", "an array of token ids, integers from 0 to 4294967295, at least one", func(_ []byte, k jsonscan.Kind) bool { return k == jsonscan.Array })
	def(topSection, "", fEOS, "eos_token_ids", "an array of token ids", ids)
	def(topSection, "", fAnnotations, "annotations", "an array of strings", texts)
	def(topSection, "", fMDCSum, "mdc_sum", "a string", text)

	stop := func(f field, name, want string, check func([]byte, jsonscan.Kind) bool) {
		def(stopSection, "stop_conditions.", f, name, want, check)
	}
	stop(fMaxTokens, "max_tokens", anyCount, count)
	stop(fStopStrings, "stop", "a string or an array of strings, none of them empty", func(raw []byte, k jsonscan.Kind) bool {
		return (k == jsonscan.String || texts(raw, k)) && !anyEmpty(raw, k)
	})
	stop(fStopIDs, "stop_token_ids", "an array of token ids", ids)
	stop(fStopIDsVisible, "stop_token_ids_visible", "an array of token ids", ids)
	stop(fStopIDsHidden, "stop_token_ids_hidden", "an array of token ids", ids)
	stop(fMinTokens, "min_tokens", anyCount, count)
	stop(fIgnoreEOS, "ignore_eos", "true or false", flag)
	stop(fMaxThinking, "max_thinking_tokens", anyCount, count)

	sample := func(f field, name, want string, check func([]byte, jsonscan.Kind) bool) {
		def(samplingSection, "sampling_options.", f, name, want, check)
	}
	sample(fN, "n", "an integer from 1 to 128", integer(1, 128))
	sample(fBestOf, "best_of", "an integer from 1 to 128", integer(1, 128))
	sample(fPresence, "presence_penalty", "a number from -2 to 2", number(-2, 2, false))
	sample(fFrequency, "frequency_penalty", "a number from -2 to 2", number(-2, 2, false))
	sample(fRepetition, "repetition_penalty", "a number above 0, at most 10", number(0, 10, true))
	sample(fTemperature, "temperature", "a number from 0 to 100", number(0, 100, false))
	sample(fTopP, "top_p", "a number above 0, at most 1", number(0, 1, true))
	sample(fTopK, "top_k", "an integer from -1 on", integer(-1, limit))
	sample(fMinP, "min_p", "a number from 0 to 1", number(0, 1, false))
	sample(fBeam, "use_beam_search", "true or false", flag)
	sample(fLengthPenalty, "length_penalty", "a number", number(-math.MaxFloat64, math.MaxFloat64, false))
	sample(fSeed, "seed", "an integer of 64 bits", integer(math.MinInt64, math.MaxInt64))
	sample(fIncludeStop, "include_stop_str_in_output", "true or false", flag)
	sample(fGuided, "guided_decoding", "an object", object)

	output := func(f field, name, want string, check func([]byte, jsonscan.Kind) bool) {
		def(outputSection, "output_options.", f, name, want, check)
	}
	output(fLogprobs, "logprobs", "an integer from 0 to 128", integer(0, 128))
	output(fPromptLogprobs, "prompt_logprobs", "an integer from 0 to 128", integer(0, 128))
	output(fSkipSpecial, "skip_special_tokens", "true or false", flag)
	output(fFormattedPrompt, "formatted_prompt", "true or false", flag)
	output(fTokensAsIDs, "return_tokens_as_token_ids", "true or false", flag)
	output(fNoStopTrim, "no_stop_trim", "true or false", flag)

	const oneWorker = "a worker's id, as configured"
	route := func(f field, name, want string, check func([]byte, jsonscan.Kind) bool) {
		def(routingSection, "routing.", f, name, want, check)
	}
	route(fInstance, "backend_instance_id", oneWorker, workerID)
	route(fPrefillWorker, "prefill_worker_id", oneWorker, workerID)
	route(fDecodeWorker, "decode_worker_id", oneWorker, workerID)
	route(fRank, "dp_rank", "an integer from 0 to 65535", integer(0, 65535))
	route(fPrefillRank, "prefill_dp_rank", "an integer from 0 to 65535", integer(0, 65535))
	route(fExpected, "expected_output_tokens", anyCount, count)
	route(fLoRA, "lora_name", "a string", text)
	route(fCacheSalt, "cache_salt", "a string that is not empty", func(raw []byte, k jsonscan.Kind) bool { return k == jsonscan.String && len(raw) > 2 })
	route(fPriorityJump, "priority_jump", "a number", number(-math.MaxFloat64, math.MaxFloat64, false))
	route(fStrictPriority, "strict_priority", "an integer", integer(math.MinInt32, math.MaxInt32))
	route(fPriority, "priority", "an integer of 32 bits", integer(math.MinInt32, math.MaxInt32))
	route(fAllowed, "allowed_worker_ids", "an array of workers' ids, at least one", workerIDs)
	route(fConstraints, "routing_constraints", `an object with "labels", an array of workers' labels, and nothing else`, object)
	route(fSession, "session_id", "a string of visible ASCII, at most 256 characters", isHeaderValue)
	route(fPrefillOnly, "prefill_only", "true or false", flag)

	def(overrideSection, "router_config_override.", fOverlapWeight, "overlap_score_weight", "a number from 0 to 100", number(0, 100, false))
	def(overrideSection, "router_config_override.", fRouterTemperature, "router_temperature", "a number from 0 to 100", number(0, 100, false))

	def(resultSection, "prefill_result.", fResultParams, "disaggregated_params", "an object", object)
	def(resultSection, "prefill_result.", fPromptDetails, "prompt_tokens_details", "an object", object)

	def(bootstrapSection, "bootstrap_info.", fBootstrapHost, "bootstrap_host", "a string", text)
	def(bootstrapSection, "bootstrap_info.", fBootstrapPort, "bootstrap_port", "an integer from 1 to 65535", integer(1, 65535))
	def(bootstrapSection, "bootstrap_info.", fBootstrapRoom, "bootstrap_room", "an integer from 0 to 9223372036854775807", integer(0, math.MaxInt64))
	def(bootstrapSection, "bootstrap_info.", fHandoff, "handoff_id", "a string", text)

	def(mmSection, "mm_routing_info.", fRoutingTokens, "routing_token_ids", "an array of token ids", ids)
	def(mmSection, "mm_routing_info.", fBlockInfos, "block_mm_infos", "an array of null or objects, one a block", isKind(jsonscan.Array))
	def(mmSection, "mm_routing_info.", fExpandedLen, "expanded_prompt_len", anyCount, count)
	def(mmSection, "mm_routing_info.", fMMBlockSize, "block_size", "an integer from 1 to 4096", integer(1, 4096))
}

// quoteValue renders a value for an error: its beginning and its type.
func quoteValue(raw []byte, kind jsonscan.Kind) string {
	return fmt.Sprintf("%s (%s)", truncate(string(raw[:min(len(raw), 100)]), 60), kind)
}

// truncate returns at most most bytes of external text as valid UTF-8. A msgpack string may
// contain other bytes, and not every reader accepts items that do.
func truncate(text string, most int) string {
	if len(text) <= most {
		return strings.ToValidUTF8(text, "\ufffd")
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return strings.ToValidUTF8(text[:most], "\ufffd") + "…"
}

// appendText appends the text of a JSON string. It appends nothing if raw is not a string.
func appendText(dst, raw []byte) []byte {
	if len(raw) < 2 || raw[0] != '"' {
		return dst
	}
	return jsonscan.Unquote(dst, raw)
}
