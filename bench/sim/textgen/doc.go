// Package textgen is the simulated model: a vocabulary with its tokenizer, and a
// generator of text.
//
// Vocab returns the vocabulary, which is the same for every simulated model. A
// Generator yields the next token as a pure function of the model's name, the seed, the
// choice index and all token ids so far, so that a resumed request continues the
// undisturbed output. Its caller is package sim. It has no state that changes and is
// safe for concurrent use; a Generator belongs to one goroutine.
package textgen
