package compression

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/membudget"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		in   string
		want Algorithm
		ok   bool
	}{
		{"", Identity, true},
		{"identity", Identity, true},
		{"gzip", Gzip, true},
		{" GZip\t", Gzip, true},
		{"x-gzip", Gzip, true},
		{"zstd", Zstd, true},
		{"br", Identity, false},
		{"deflate", Identity, false},
		{"gzip, zstd", Identity, false},
		{"gzip,", Identity, false},
	} {
		got, ok := Parse([]byte(c.in))
		if got != c.want || ok != c.ok {
			t.Errorf("Of(%q) = %v, %v; want %v, %v", c.in, got, ok, c.want, c.ok)
		}
	}
}

func TestNegotiate(t *testing.T) {
	for in, want := range map[string]Algorithm{
		"":                                    Identity,
		"gzip":                                Gzip,
		"gzip, deflate":                       Gzip, // httpx without extras
		"gzip, deflate, br, zstd":             Zstd, // browsers
		"zstd;q=0.5, gzip":                    Gzip,
		"zstd;q=0, gzip;q=0":                  Identity,
		"gzip;q=0.5, identity;q=1":            Identity,
		"gzip;q=0.5, identity;q=0.2":          Gzip,
		"*":                                   Zstd,
		"*;q=0":                               Identity,
		"*;q=0.1, zstd;q=0":                   Gzip,
		"br":                                  Identity,
		"identity":                            Identity,
		"gzip ; q=0.001":                      Gzip,
		"gzip;q=1.5":                          Identity,
		"gzip;q=abc":                          Identity,
		"gzip;level=9":                        Identity,
		"gzip;q=0.0001":                       Identity,
		"GZIP":                                Gzip,
		"x-gzip":                              Gzip,
		strings.Repeat("br, ", 1000) + "zstd": Zstd,
	} {
		if got := Negotiate([]byte(in)); got != want {
			t.Errorf("Accepted(%.60q) = %v, want %v", in, got, want)
		}
	}
}

func gzipped(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out) // the standard library's, to be checked by another
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// zstded writes a frame that does not say how long its content is.
func zstded(t *testing.T, b []byte, opts ...zstd.EOption) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := zstd.NewWriter(&out, opts...)
	if err != nil {
		t.Fatal(err)
	}
	for len(b) > 0 {
		n := min(len(b), 10_000)
		if _, err := w.Write(b[:n]); err != nil {
			t.Fatal(err)
		}
		b = b[n:]
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func window(n int) zstd.EOption { return zstd.WithWindowSize(n) }

func TestDecode(t *testing.T) {
	const limit = 1 << 20
	budget := membudget.NewBudget(64 << 20)
	text := []byte(strings.Repeat(`{"messages":[{"role":"user"}]}`, 1000))
	whole, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer whole.Close()
	zeros := func(n int) []byte { return make([]byte, n) }
	for name, c := range map[string]struct {
		coding Algorithm
		src    []byte
		want   []byte
		err    error
		says   string
	}{
		"gzip":                        {Gzip, gzipped(t, text), text, nil, ""},
		"gzip, two members":           {Gzip, append(gzipped(t, text), gzipped(t, text)...), append(text[:len(text):len(text)], text...), nil, ""},
		"gzip of nothing":             {Gzip, gzipped(t, nil), []byte{}, nil, ""},
		"gzip, exactly the bound":     {Gzip, gzipped(t, zeros(limit)), zeros(limit), nil, ""},
		"gzip, one over":              {Gzip, gzipped(t, zeros(limit+1)), nil, ErrTooLarge, ""},
		"gzip bomb":                   {Gzip, gzipped(t, zeros(20<<20)), nil, ErrTooLarge, ""},
		"gzip, cut":                   {Gzip, gzipped(t, text)[:60], nil, nil, "the gzip body is truncated"},
		"gzip, bytes behind":          {Gzip, append(gzipped(t, text), "garbage garbage"...), nil, nil, "the gzip body has data after its end"},
		"gzip, a byte behind":         {Gzip, append(gzipped(t, text), "g"...), nil, nil, "the gzip body has data after its end"},
		"gzip, 0x1f behind":           {Gzip, append(gzipped(t, text), 0x1f), nil, nil, "the gzip body has data after its end"},
		"gzip, half a member":         {Gzip, append(gzipped(t, text), gzipped(t, text)[:60]...), nil, nil, "the gzip body is truncated"},
		"gzip, half a head":           {Gzip, append(gzipped(t, text), gzipped(t, text)[:6]...), nil, nil, "the gzip body is truncated"},
		"gzip, empty members":         {Gzip, bytes.Repeat(gzipped(t, nil), 1000), []byte{}, nil, ""},
		"gzip, no gzip":               {Gzip, text, nil, nil, "is not valid gzip"},
		"gzip, no bytes":              {Gzip, nil, nil, nil, "the gzip body is truncated"},
		"zstd":                        {Zstd, whole.EncodeAll(text, nil), text, nil, ""},
		"zstd of unknown length":      {Zstd, zstded(t, text), text, nil, ""},
		"zstd, two frames":            {Zstd, append(zstded(t, text), whole.EncodeAll(text, nil)...), append(text[:len(text):len(text)], text...), nil, ""},
		"zstd, a longer frame behind": {Zstd, append(whole.EncodeAll(text[:1000], nil), whole.EncodeAll(bytes.Repeat(text, 10), nil)...), append(text[:1000:1000], bytes.Repeat(text, 10)...), nil, ""},
		"zstd, exactly the bound":     {Zstd, zstded(t, zeros(limit)), zeros(limit), nil, ""},
		"zstd, one over":              {Zstd, zstded(t, zeros(limit+1)), nil, ErrTooLarge, ""},
		"zstd bomb that says so":      {Zstd, whole.EncodeAll(zeros(20<<20), nil), nil, ErrTooLarge, ""},
		"zstd bomb that does not":     {Zstd, zstded(t, zeros(20<<20)), nil, ErrTooLarge, ""},
		"zstd, a window of 64 MiB":    {Zstd, zstded(t, text, zstd.WithWindowSize(64<<20)), nil, nil, "window of more than 8 MiB"},
		"zstd, bytes behind":          {Zstd, append(zstded(t, text), "garbage garbage"...), nil, nil, "the zstd body has data after its end"},
		"zstd, cut":                   {Zstd, zstded(t, text)[:40], nil, nil, "the zstd body is truncated"},
		"zstd, no zstd":               {Zstd, text, nil, nil, "is not valid zstd"},
		"zstd, another coding":        {Zstd, gzipped(t, text), nil, nil, "is not valid zstd"},
		"no coding to be taken off":   {Identity, text, nil, nil, "cannot decode identity"},
	} {
		t.Run(name, func(t *testing.T) {
			var room membudget.Lease
			got, err := c.coding.Decode(c.src, &room, budget, limit)
			switch {
			case c.want != nil && err != nil:
				t.Error(err)
			case c.want != nil && !bytes.Equal(got, c.want):
				t.Errorf("%d bytes, not the %d that were encoded", len(got), len(c.want))
			case c.err != nil && !errors.Is(err, c.err):
				t.Errorf("error %v, want %v", err, c.err)
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
				t.Errorf("error %v, want one that says %q", err, c.says)
			}
			if held := room.Size(); held > 4*limit {
				t.Errorf("%d bytes are held for a bound of %d", held, limit)
			}
			room.Release()
		})
	}
	if budget.Used() != 0 {
		t.Errorf("%d bytes of the budget were not given back", budget.Used())
	}
	if most := int64(4*limit + maxWindow + windowOverhead); budget.Peak() > most {
		t.Errorf("%d bytes were held at once, over %d, for a bound of %d", budget.Peak(), most, limit)
	}
}

func TestDecodeWithoutMemory(t *testing.T) {
	for _, c := range []struct {
		coding Algorithm
		src    []byte
	}{{Gzip, gzipped(t, make([]byte, 100<<10))}, {Zstd, zstded(t, make([]byte, 100<<10))}} {
		for _, have := range []int64{0, 8 << 10} {
			budget := membudget.NewBudget(have)
			var room membudget.Lease
			if _, err := c.coding.Decode(c.src, &room, budget, 1<<20); !errors.Is(err, ErrBudget) {
				t.Errorf("%v with %d bytes: error %v, want %v", c.coding, have, err, ErrBudget)
			}
			room.Release()
			if budget.Used() != 0 {
				t.Errorf("%v with %d bytes: %d not given back", c.coding, have, budget.Used())
			}
		}
	}
}

func decoded(t *testing.T, c Algorithm, b []byte) string {
	t.Helper()
	var r io.Reader
	var err error
	switch c {
	case Gzip:
		r, err = gzip.NewReader(bytes.NewReader(b))
	case Zstd:
		r, err = zstd.NewReader(bytes.NewReader(b))
	default:
		return string(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("after %d bytes: %v", len(out), err)
	}
	return string(out)
}

func TestAppend(t *testing.T) {
	text := strings.Repeat(`{"id":"chatcmpl-1"}`, 500)
	for _, c := range []Algorithm{Identity, Gzip, Zstd} {
		for range 3 { // encoders are used again
			got := c.Append([]byte("before"), []byte(text))
			if string(got[:6]) != "before" || decoded(t, c, got[6:]) != text {
				t.Fatalf("%v: what was encoded does not come back", c)
			}
			if c != Identity && len(got) > len(text)/4 {
				t.Errorf("%v: %d of %d bytes are left", c, len(got), len(text))
			}
		}
	}
}

// TestStream decodes what has come after each piece: nothing may be held back.
func TestStream(t *testing.T) {
	for _, c := range []Algorithm{Gzip, Zstd} {
		for range 3 { // encoders are used again, also after a stream that was left
			s, err := c.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			sent, coded := "", make(chan []byte, 1)
			pr, pw := io.Pipe()
			go func() {
				for b := range coded {
					_, _ = pw.Write(b)
				}
				_ = pw.Close()
			}()
			var r io.Reader
			for i := range 50 {
				event := `data: {"choices":[{"delta":{"content":"` + strings.Repeat("x", i) + "\"}}]}\n\n"
				b, err := s.Append(nil, []byte(event))
				if err != nil {
					t.Fatal(err)
				}
				sent += event
				coded <- b
				if r == nil {
					if c == Gzip {
						r, err = gzip.NewReader(pr)
					} else {
						r, err = zstd.NewReader(pr, zstd.WithDecoderConcurrency(1))
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				got := make([]byte, len(event))
				if _, err := io.ReadFull(r, got); err != nil || string(got) != event {
					t.Fatalf("%v: event %d: %q, %v", c, i, got, err)
				}
			}
			end, err := s.Close(nil)
			if err != nil {
				t.Fatal(err)
			}
			coded <- end
			close(coded)
			if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
				t.Errorf("%v: behind the last event: %q, %v", c, rest, err)
			}
			left, err := c.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := left.Append(nil, []byte("never seen again")); err != nil {
				t.Fatal(err)
			}
			if _, err := left.Close(nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := Identity.NewStream(); err == nil {
		t.Error("a stream without a coding was made")
	}
}

// text gives n bytes that compress by about ratio.
func text(rng *rand.Rand, n, ratio int) []byte {
	b := make([]byte, n)
	for i := range b {
		if i < 64 || rng.IntN(ratio) == 0 {
			b[i] = byte(rng.IntN(256))
		} else {
			b[i] = b[i-1-rng.IntN(64)]
		}
	}
	return b
}

// TestDecodeContent compares every byte of decoded bodies, of sizes at which their buffer
// grows once and several times, with what was encoded, over buffers that were used before.
func TestDecodeContent(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	budget := membudget.NewBudget(64 << 20)
	sizes := []int{0, 1, 255, 256, 257, 4095, 4096, 4097, 8191, 8192, 8193, 9247, 16384, 32768, 65536, 1 << 20}
	for range 100 {
		sizes = append(sizes, rng.IntN(1<<rng.IntN(20)+1))
	}
	for _, n := range sizes {
		want := text(rng, n, 1+rng.IntN(200))
		for c, src := range map[Algorithm][]byte{Gzip: gzipped(t, want), Zstd: zstded(t, want)} {
			var room membudget.Lease
			got, err := c.Decode(src, &room, budget, 2<<20)
			if err != nil {
				t.Fatalf("%v of %d bytes from %d: %v", c, n, len(src), err)
			}
			if at := firstDifference(got, want); at >= 0 {
				t.Fatalf("%v of %d bytes from %d: byte %d of %d differs: %.60q, not %.60q",
					c, n, len(src), at, len(got), got[min(at, len(got)):], want[min(at, n):])
			}
			room.Release()
		}
	}
}

// firstDifference is the index of the first byte that differs, -1 for none.
func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	return -1
}

// reference decodes as Decode is specified, by io.ReadAll; false where it fails.
func reference(c Algorithm, src []byte, limit int64) ([]byte, bool) {
	var r io.Reader
	switch c {
	case Gzip:
		z, err := gzip.NewReader(bytes.NewReader(src))
		if err != nil {
			return nil, false
		}
		r = z
	default:
		z, err := zstd.NewReader(bytes.NewReader(src), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(8<<20))
		if err != nil {
			return nil, false
		}
		defer z.Close()
		r = z
	}
	out, err := io.ReadAll(io.LimitReader(r, limit+1))
	return out, err == nil && int64(len(out)) <= limit
}

func FuzzDecode(f *testing.F) {
	f.Add(true, []byte{0x1f, 0x8b, 8, 0})
	f.Add(false, []byte{0x28, 0xb5, 0x2f, 0xfd})
	var small bytes.Buffer
	w := gzip.NewWriter(&small)
	_, _ = w.Write(bytes.Repeat([]byte("0123456789abcdef\n"), 544))
	_ = w.Close()
	f.Add(true, small.Bytes())
	f.Fuzz(func(t *testing.T, isGzip bool, src []byte) {
		c := Zstd
		if isGzip {
			c = Gzip
		}
		budget := membudget.NewBudget(1 << 20)
		var room membudget.Lease
		out, err := c.Decode(src, &room, budget, 64<<10)
		want, ok := reference(c, src, 64<<10)
		switch {
		case err == nil && !ok:
			t.Fatalf("%v: %d bytes of a body that the reference refuses", c, len(out))
		case err == nil && !bytes.Equal(out, want):
			t.Fatalf("%v: byte %d differs", c, firstDifference(out, want))
		case err != nil && ok && !errors.Is(err, ErrBudget):
			t.Fatalf("%v: %v, and the reference decodes %d bytes", c, err, len(want))
		}
		room.Release()
		if budget.Used() != 0 {
			t.Fatalf("%d bytes kept", budget.Used())
		}
	})
}
