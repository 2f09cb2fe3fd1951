package placement

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"sluice/router/blockhash"
)

// generatedBlock is the number of tokens per block of the generated traces.
const generatedBlock = 64

// Shapes are the generated traces by name.
var Shapes = []struct {
	Name, Text string
	KVTokens   int // of each engine, for a fleet of eight
	Generate   func(requests int, seed uint64) *Trace
}{
	{"chats", "conversations of 5 turns on average under one of 12 system prompts of 512 to 2,560 tokens", 50_000, chats},
	{"trees", "24 prefix trees of 5 levels with up to 4 branches each, 256 to 1,024 tokens a level, and a short question", 200_000, trees},
	{"families", "documents of 1,000 to 6,000 tokens with 2 to 8 questions each within minutes", 100_000, families},
	{"agents", "agents of 8 kinds with 4,000 to 8,000 tokens of instructions and tools, which make 20 to 60 calls with 100 to 1,500 new tokens each", 100_000, agents},
}

// builder makes the requests of a generated trace. Its times have no unit: a run scales them to its
// load.
type builder struct {
	rng   *rand.Rand
	next  uint64
	trace Trace
}

func newBuilder(name string, seed uint64) *builder {
	return &builder{rng: rand.New(rand.NewPCG(seed, 0x91ace)), trace: Trace{Name: name, BlockTokens: generatedBlock}}
}

// prompt is a prompt that grows.
type prompt struct {
	blocks []blockhash.Seq
	tokens int
}

// grow appends new tokens to a prompt.
func (b *builder) grow(p prompt, tokens int) prompt {
	p.tokens += tokens
	p.blocks = slices.Clone(p.blocks)
	for len(p.blocks) < p.tokens/generatedBlock {
		b.next++
		p.blocks = append(p.blocks, blockhash.Seq(mix(b.next)))
	}
	return p
}

// add adds a request at a time in seconds and returns its prompt with its output, with which a
// conversation continues.
func (b *builder) add(at float64, p prompt, output int) prompt {
	all := b.grow(p, output)
	b.trace.Requests = append(b.trace.Requests, Request{At: time.Duration(at * float64(time.Second)), Prompt: p.tokens, Output: output,
		Blocks: p.blocks, Generated: all.blocks[len(p.blocks):]})
	return all
}

// finish returns the trace without its first quarter, in which the number of sessions still grows.
func (b *builder) finish(requests int) *Trace {
	t := &b.trace
	slices.SortStableFunc(t.Requests, func(x, y Request) int { return int(x.At - y.At) })
	from := max(0, min(requests/3, len(t.Requests)-requests))
	t.Requests = t.Requests[from:min(len(t.Requests), from+requests)]
	return t
}

func (b *builder) between(low, high int) int         { return low + b.rng.IntN(high-low+1) }
func (b *builder) exponential(mean float64) float64  { return b.rng.ExpFloat64() * mean }
func (b *builder) enough(requests int) bool          { return len(b.trace.Requests) >= requests*2 }
func (b *builder) zipf(n int, exponent float64) int  { return zipf(b.rng, n, exponent) }
func (b *builder) output(mean float64, most int) int { return 16 + min(most, int(b.exponential(mean))) }

// zipf draws 0 to n-1 with weight 1/(i+1)^exponent.
func zipf(rng *rand.Rand, n int, exponent float64) int {
	sum := 0.0
	for i := range n {
		sum += math.Pow(float64(i+1), -exponent)
	}
	x := rng.Float64() * sum
	for i := range n {
		if x -= math.Pow(float64(i+1), -exponent); x < 0 {
			return i
		}
	}
	return n - 1
}

func chats(requests int, seed uint64) *Trace {
	b := newBuilder("chats", seed)
	var systems []prompt
	for range 12 {
		systems = append(systems, b.grow(prompt{}, 512*b.between(1, 5)))
	}
	for at := 0.0; !b.enough(requests); at += b.exponential(5) {
		p, when := systems[b.zipf(len(systems), 1.2)], at
		for range 1 + min(int(b.exponential(4)), 30) {
			p = b.grow(p, 60+min(2000, int(b.exponential(220))))
			p = b.add(when, p, b.output(80, 600))
			when += 4 + b.exponential(26)
		}
	}
	return b.finish(requests)
}

func trees(requests int, seed uint64) *Trace {
	b := newBuilder("trees", seed)
	type node struct {
		p        prompt
		children []*node
	}
	var build func(p prompt, levels int) *node
	build = func(p prompt, levels int) *node {
		n := &node{p: b.grow(p, b.between(256, 1024))}
		if levels > 1 {
			for range b.between(2, 4) {
				n.children = append(n.children, build(n.p, levels-1))
			}
		}
		return n
	}
	var roots []*node
	for range 24 {
		roots = append(roots, build(prompt{}, 5))
	}
	for at := 0.0; !b.enough(requests); at += b.exponential(1) {
		n := roots[b.zipf(len(roots), 0.8)]
		for len(n.children) > 0 {
			n = n.children[b.zipf(len(n.children), 0.7)]
		}
		b.add(at, b.grow(n.p, b.between(32, 400)), b.output(80, 400))
	}
	return b.finish(requests)
}

func families(requests int, seed uint64) *Trace {
	b := newBuilder("families", seed)
	for at := 0.0; !b.enough(requests); at += b.exponential(5) {
		document, when := b.grow(prompt{}, b.between(1000, 6000)), at
		for range b.between(2, 8) {
			b.add(when, b.grow(document, b.between(20, 200)), b.output(120, 500))
			when += 1 + b.exponential(20)
		}
	}
	return b.finish(requests)
}

func agents(requests int, seed uint64) *Trace {
	b := newBuilder("agents", seed)
	var kinds []prompt
	for range 8 {
		kinds = append(kinds, b.grow(prompt{}, b.between(4000, 8000)))
	}
	for at := 0.0; !b.enough(requests); at += b.exponential(40) {
		p, when := kinds[b.zipf(len(kinds), 0.8)], at
		for range b.between(20, 60) {
			p = b.grow(p, b.between(100, 1500))
			p = b.add(when, p, b.output(100, 800))
			// Most tools answer at once; some run tests or ask a person.
			if when += 1 + b.exponential(4); b.rng.IntN(8) == 0 {
				when += b.exponential(40)
			}
		}
	}
	return b.finish(requests)
}
