package api

import "slices"

// structuredOutputs are the members of vLLM's structured_outputs that the engine obeys.
type structuredOutputs struct {
	Choice []string `json:"choice"`
}

// constrainedText returns the output of an engine that must produce one of several
// texts (vLLM's guided_choice and structured_outputs): the last in sort order. An
// engine that receives part of a text, and the rests of the texts that start with that
// part, therefore produces the same output. No other grammar is supported.
func (b *Body) constrainedText() (text string, ok bool) {
	texts := b.GuidedChoice
	for _, held := range [...]*sampling{&b.sampling, b.Sampling} {
		if held != nil && held.Structured != nil && len(held.Structured.Choice) > 0 {
			texts = held.Structured.Choice
		}
	}
	if len(texts) == 0 {
		return "", false
	}
	return slices.Max(texts), true
}
