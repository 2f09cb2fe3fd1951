package textgen

import "github.com/zeebo/xxh3"

// Generator is the simulated model: the next token is a pure function of the
// model's name, the seed, the choice index and all token ids so far. Folding
// every token into the state is what makes a continuation elsewhere (prompt and
// output so far as the new prompt) give the same tokens as the undisturbed run.
// Its fields are Vocab and State, a hash of all that the next token depends on.
type Generator struct {
	Vocab *vocabulary
	State uint64
	last  uint32
}

// NewGenerator returns a generator whose context is the prompt.
func NewGenerator(model string, engineSeed uint64, seed int64, choice int, prompt []uint32) Generator {
	g := Generator{Vocab: Vocab(), State: xxh3.HashStringSeed(model, engineSeed)}
	g.State = Mix(g.State ^ uint64(seed)*0x9e3779b97f4a7c15 ^ uint64(choice)<<32)
	for _, t := range prompt {
		g.Fold(t)
	}
	return g
}

// Fold appends t to the context.
func (g *Generator) Fold(t uint32) {
	g.State = (g.State ^ uint64(t)) * 0x9e3779b97f4a7c15
	g.State ^= g.State >> 29
	g.last = t
}

// Next returns the token after the context and does not change the context. Sentences
// are about ten words long. If mayEnd is true, a text ends (EOS) after one sentence in
// eight.
func (g *Generator) Next(mayEnd bool) uint32 {
	const dot = ByteBase + '.'
	x := Mix(g.State)
	word := uint32(WordBase) + 4*uint32((x>>16)%uint64(g.Vocab.Words))
	switch {
	case g.last == dot && mayEnd && x&7 == 0:
		return EOS
	case g.last == dot:
		return word + 2
	case g.last >= WordBase && g.last < g.Vocab.triBase:
		if begins := (g.last-WordBase)%4 > 1; x%10 == 0 && !begins {
			return dot
		}
		return word
	default:
		return word + 3
	}
}

// Mix is the finalizer of SplitMix64, a hash of one word.
func Mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
