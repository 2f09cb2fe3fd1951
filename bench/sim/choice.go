package sim

import "slices"

// structuredOutputs is what the simulated engine minds of vLLM's structured_outputs.
type structuredOutputs struct {
	Choice []string `json:"choice"`
}

// constrainedText is what an engine says that is held to one of several texts (vLLM's
// guided_choice and structured_outputs): the one that sorts last. So an engine that is
// given a part of it, and the ends of the texts that begin with that part, says the same.
// No other grammar is looked at.
func (b *body) constrainedText() (text string, ok bool) {
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
