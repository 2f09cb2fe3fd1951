package worker

import "testing"

func TestPrintable(t *testing.T) {
	for _, s := range []string{"", "meta-llama/Llama-3.1-8B", "with space", "模型-é", "emoji 🙂", "אב"} {
		if !Printable(s) {
			t.Errorf("%q is not printable; want it is", s)
		}
	}
	for name, s := range map[string]string{
		"C0": "a\x1bb", "newline": "a\nb", "delete": "a\x7fb", "C1": "a\u009bb", "bidi override": "a\u202eb", "bidi isolate": "a\u2066b", "bidi mark": "a\u200fb",
		"zero width space": "a\u200bb", "word joiner": "a\u2060b", "byte order mark": "\ufeffa", "line separator": "a\u2028b", "no-break space": "a\u00a0b",
		"soft hyphen": "a\u00adb", "Hangul filler": "a\u3164b", "variation selector": "a\ufe0fb", "tag": "a\U000e0041b", "private use": "a\ue000b",
		"replacement": "a\ufffdb", "not UTF-8": "a\xffb",
	} {
		if Printable(s) {
			t.Errorf("%s: %+q is printable; want it is not", name, s)
		}
	}
}
