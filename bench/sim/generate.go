package sim

import "github.com/zeebo/xxh3"

// generator is the simulated model: the next token is a pure function of the
// model's name, the seed, the choice index and all token ids so far. Folding
// every token into the state is what makes a continuation elsewhere (prompt and
// output so far as the new prompt) give the same tokens as the undisturbed run.
type generator struct {
	v     *vocabulary
	state uint64
	last  uint32
}

func newGenerator(model string, engineSeed uint64, seed int64, choice int, prompt []uint32) generator {
	g := generator{v: vocab(), state: xxh3.HashStringSeed(model, engineSeed)}
	g.state = mix(g.state ^ uint64(seed)*0x9e3779b97f4a7c15 ^ uint64(choice)<<32)
	for _, t := range prompt {
		g.fold(t)
	}
	return g
}

// fold makes t the newest token of the context.
func (g *generator) fold(t uint32) {
	g.state = (g.state ^ uint64(t)) * 0x9e3779b97f4a7c15
	g.state ^= g.state >> 29
	g.last = t
}

// next is the token after the context, which it does not change. Sentences are
// about ten words; a text ends (tokEOS, only where mayEnd) after one in eight.
func (g *generator) next(mayEnd bool) uint32 {
	const dot = byteBase + '.'
	x := mix(g.state)
	word := uint32(wordBase) + 4*uint32((x>>16)%uint64(g.v.words))
	switch {
	case g.last == dot && mayEnd && x&7 == 0:
		return tokEOS
	case g.last == dot:
		return word + 2
	case g.last >= wordBase && g.last < g.v.triBase:
		if begins := (g.last-wordBase)%4 > 1; x%10 == 0 && !begins {
			return dot
		}
		return word
	default:
		return word + 3
	}
}

// mix is the finisher of SplitMix64.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
