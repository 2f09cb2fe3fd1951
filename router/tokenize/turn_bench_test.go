package tokenize_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/native/tokenizer"
	"sluice/router/tokenize"
	"sluice/router/tokenize/chatinput"
)

// counter is a text in the first new message of a benchmark's turn; each iteration writes its number
// there, so that no turn is the repetition of another.
const counter = "Turn 0000000000."

func number(text []byte, at, i int) {
	copy(text[at+len("Turn "):], fmt.Sprintf("%010d", i))
}

// reportCPU reports the process's CPU time of an iteration, which means something on a busy machine too.
func reportCPU(b *testing.B, began time.Duration) {
	b.ReportMetric(float64((cpuTime()-began).Microseconds())/float64(b.N), "cpu-µs/op")
}

// BenchmarkTurn measures the parts of a chat request: the next turn of a long conversation, and a
// short chat. It needs the vocabularies of scripts/tokenizer_golden.py.
func BenchmarkTurn(b *testing.B) {
	library, err := tokenizer.Open("")
	if err != nil {
		b.Skip(err)
	}
	paragraphs := corpus(b)
	l := load(b, library, "qwen2", "")
	rng := rand.New(rand.NewPCG(3, 4))
	base := l.agent(b, rng, paragraphs, oldTokens)
	turn := append([]message{}, base...)
	for n := 0; n < newTokens-100; n = l.count(b, turn[len(base):]) {
		text := prose(rng, paragraphs, 1200)
		if n == 0 {
			text = counter + text
		}
		turn = append(turn, message{[]string{"user", "assistant"}[len(turn)%2], text})
	}
	short := []message{{"system", "You are a helpful assistant."}, {"user", counter + prose(rng, paragraphs, 1000)}}
	for _, c := range []struct {
		name           string
		before, asking []message
	}{{"70000+1500", base, turn}, {"1KB", nil, short}} {
		doc := body(c.asking)
		at := bytes.Index(doc.Body, []byte(counter))
		b.Run(c.name+"/prompt", func(b *testing.B) {
			to := l.tokenizer(b, tokenize.Options{CacheBytes: cacheBytes})
			var p tokenize.Prompt
			ask := func(d *jsonscan.Doc) {
				if !to.PromptInProcess(&p, &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: d, Scope: 1}) {
					b.Fatal("a turn was not tokenized")
				}
			}
			if c.before != nil {
				ask(body(c.before))
			}
			b.ReportAllocs()
			defer reportCPU(b, cpuTime())
			for i := 0; b.Loop(); i++ {
				number(doc.Body, at, i)
				ask(doc)
			}
		})
		b.Run(c.name+"/convert", func(b *testing.B) {
			var in chatinput.Input
			defer reportCPU(b, cpuTime())
			for b.Loop() {
				if reason := in.Read(chatinput.Chat, doc.Body, &l.settings); reason != "" {
					b.Fatal(reason)
				}
			}
		})
		b.Run(c.name+"/render", func(b *testing.B) {
			number(doc.Body, at, 0)
			input := l.input(b, doc)
			at := bytes.Index(input, []byte(counter))
			defer reportCPU(b, cpuTime())
			for i := 0; b.Loop(); i++ {
				number(input, at, i)
				if _, err := l.model.Prompt(nil, "", input, false, func([]byte) []byte { return nil }); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
