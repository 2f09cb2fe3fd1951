package tokenize

import "testing"

// Engines' JSON readers take the last of two members of a name.
func TestLastTypeOfPartCounts(t *testing.T) {
	for part, want := range map[string]bool{
		`{"type":"text","text":"a"}`: true,
		`{"text":"a"}`:               true,
		`{"type":"image_url","image_url":{"url":"data:,"}}`:        false,
		`{"type":"image_url","type":"text","text":"a"}`:            true,
		`{"type":"text","text":"a","type":"image_url"}`:            false,
		`{"type":"text","type":"input_audio","input_audio":"a"}`:   false,
		`{"type":"video_url","text":"a"}`:                          false,
		`{"type":"text","type":"unknown","type":"refusal","a":""}`: true,
	} {
		if got := isText([]byte(part)); got != want {
			t.Errorf("isText(%s) = %v", part, got)
		}
	}
}
