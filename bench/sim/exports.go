package sim

import (
	"sluice/bench/sim/core"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/options"
	"sluice/bench/sim/textgen"
)

// Names from the packages below sim that callers of Options and Engine use, so that
// they import sim alone.
type (
	// Options describes an engine and its behaviour.
	Options = options.Options
	// RankStats is the part of one rank in Stats.
	RankStats = core.RankStats
	// Cost is the linear time model of one rank.
	Cost = cost.Model
	// Fault is one thing to go wrong, and where.
	Fault = faults.Fault
	// FaultKind is what goes wrong.
	FaultKind = faults.Kind
)

// The kinds of faults; package faults describes each.
const (
	Refuse     = faults.Refuse
	Status     = faults.Status
	Stall      = faults.Stall
	Reset      = faults.Reset
	Truncate   = faults.Truncate
	StreamFail = faults.StreamFail
	Slow       = faults.Slow
	Malformed  = faults.Malformed
	Crash      = faults.Crash
	LoseEvents = faults.LoseEvents
	BadHandle  = faults.BadHandle
	NoHandle   = faults.NoHandle
)

// ParseFault reads a fault from "kind=status,path=/v1/,leg=prefill,n=3,status=503".
func ParseFault(s string) (Fault, error) { return faults.ParseFault(s) }

// PDFamilies returns the values of Options.PD.
func PDFamilies() []string { return options.Families() }

// Encodings returns the names that Options.Encoding accepts.
func Encodings() []string { return eventcodec.Encodings() }

// Tokenize returns the token ids of a text, as /tokenize of every simulated engine does.
func Tokenize(text string) []uint32 { return textgen.Tokenize(text) }

// Detokenize returns the text of token ids; unknown ids have none.
func Detokenize(ids []uint32) string { return textgen.Detokenize(ids) }

// VocabSize returns one more than the largest token id.
func VocabSize() int { return textgen.VocabSize() }
