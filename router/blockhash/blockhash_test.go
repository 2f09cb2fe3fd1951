package blockhash

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func counting(from, n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(from + i)
	}
	return t
}

// The values may never change: recorded sessions and other replicas hold them.
func TestGolden(t *testing.T) {
	if got, want := Locals(nil, counting(1, 12), 4), goldenLocals; !equal(got, want) {
		t.Errorf("Locals = %#x, want %#x", got, want)
	}
	if got, want := Seqs(nil, NewSalt("m", "", ""), counting(1, 12), 4), goldenSeqs; !equal(got, want) {
		t.Errorf("Seqs = %#x, want %#x", got, want)
	}
	if got := TextSeqs(nil, NewSalt("m", "a", "s"), []byte("The quick brown fox"), 8); !equal(got, goldenText) {
		t.Errorf("TextSeqs = %#x, want %#x", got, goldenText)
	}
	if got := Locals(nil, counting(0, 512), 512); !equal(got, goldenLong) {
		t.Errorf("Locals of one 512-token block = %#x, want %#x", got, goldenLong)
	}
	if got := Tagged(1, []byte("image-1")); got != goldenTagged {
		t.Errorf("Tagged = %#x, want %#x", got, goldenTagged)
	}
}

func equal[T comparable](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestPartialBlockIsNotHashed(t *testing.T) {
	for _, c := range []struct{ tokens, size, want int }{
		{0, 16, 0}, {15, 16, 0}, {16, 16, 1}, {31, 16, 1}, {32, 16, 2}, {5, 1, 5}, {5, 0, 0}, {5, -1, 0},
	} {
		tokens := counting(1, c.tokens)
		if got := len(Seqs(nil, 7, tokens, c.size)); got != c.want {
			t.Errorf("Seqs of %d tokens by %d: %d blocks, want %d", c.tokens, c.size, got, c.want)
		}
		if got := len(Locals(nil, tokens, c.size)); got != c.want {
			t.Errorf("Locals of %d tokens by %d: %d blocks, want %d", c.tokens, c.size, got, c.want)
		}
		if got := len(TextSeqs(nil, 7, make([]byte, c.tokens), c.size)); got != c.want {
			t.Errorf("TextSeqs of %d bytes by %d: %d blocks, want %d", c.tokens, c.size, got, c.want)
		}
	}
}

func TestSeqsEqualsLocalsChained(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		tokens := make([]uint32, rng.IntN(300))
		for i := range tokens {
			tokens[i] = rng.Uint32()
		}
		size, salt := 1+rng.IntN(130), Salt(rng.Uint64())
		var want []Seq
		for i, l := range Locals(nil, tokens, size) {
			if l != localPortable(tokens[i*size:(i+1)*size]) {
				t.Fatalf("block %d of size %d differs from its byte-order-free hash", i, size)
			}
			if i == 0 {
				want = append(want, First(salt, l))
			} else {
				want = append(want, Next(want[i-1], l))
			}
		}
		if got := Seqs([]Seq{9}, salt, tokens, size); got[0] != 9 || !equal(got[1:], want) {
			t.Fatalf("Seqs of %d tokens by %d = %x, want 9 and %x", len(tokens), size, got, want)
		}
	}
}

func TestSaltsDiffer(t *testing.T) {
	seen := map[Salt][3]string{}
	words := []string{"", "a", "b", "c", "ab", "bc", "abc", "\x00", "a\x00", "a/b"}
	for _, m := range words {
		for _, l := range words {
			for _, s := range words {
				salt := NewSalt(m, l, s)
				if old, ok := seen[salt]; ok {
					t.Errorf("NewSalt(%q, %q, %q) equals that of %q", m, l, s, old)
				}
				seen[salt] = [3]string{m, l, s}
			}
		}
	}
}

func TestTextAndTokensDiffer(t *testing.T) {
	tokens := counting('a', 4)
	plain := Locals(nil, tokens, 4)[0]
	text := TextSeqs(nil, 0, []byte("a\x00\x00\x00b\x00\x00\x00c\x00\x00\x00d\x00\x00\x00"), 16)[0]
	if text == First(0, plain) {
		t.Error("text and tokens of the same bytes share a hash")
	}
	a, b := []byte("a"), []byte("b")
	if plain == Tagged(plain, nil) || Tagged(plain, a) == Tagged(plain, b) {
		t.Error("tags do not tell blocks apart")
	}
	if Tagged(Tagged(plain, a), b) == Tagged(Tagged(plain, b), a) {
		t.Error("the order of two tags does not count")
	}
}

func TestNoAllocation(t *testing.T) {
	tokens, text := counting(1, 4096), make([]byte, 4096)
	locals, seqs := make([]Local, 0, 256), make([]Seq, 0, 256)
	if n := testing.AllocsPerRun(20, func() {
		locals = Locals(locals[:0], tokens, 16)
		seqs = Seqs(seqs[:0], NewSalt("model", "lora", "salt"), tokens, 16)
		seqs = TextSeqs(seqs[:0], 1, text, 64)
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// Blocks of 16 tokens have a hash of their own making; it is the same one.
func TestSixteenIsXXH3(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range 20_000 {
		var b [16]uint32
		switch i % 3 {
		case 0:
			for k := range b {
				b[k] = rng.Uint32()
			}
		case 1: // what token ids look like
			for k := range b {
				b[k] = rng.Uint32N(200_000)
			}
		case 2: // one bit
			b[i/3%16] = 1 << (i / 48 % 32)
		}
		if got, want := Seqs(nil, Salt(i), b[:], 16)[0], First(Salt(i), localPortable(b[:])); got != want {
			t.Fatalf("Seqs(%v) = %#x, want %#x", b, got, want)
		}
	}
}

// TestContinueSeqs: hashes that are continued from any block are those of all tokens.
func TestContinueSeqs(t *testing.T) {
	tokens := make([]uint32, 100)
	for i := range tokens {
		tokens[i] = uint32(i * i)
	}
	for _, size := range []int{1, 7, 16, 100, 101} {
		want := Seqs([]Seq{1, 2}, 3, tokens, size)
		for n := range len(want) - 1 {
			if got := ContinueSeqs(slices.Clone(want[:2+n]), 2, 3, tokens, size); !slices.Equal(got, want) {
				t.Errorf("blocks of %d from block %d: %x, want %x", size, n, got, want)
			}
		}
	}
}
