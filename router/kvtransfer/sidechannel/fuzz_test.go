package sidechannel

import (
	"bytes"
	"errors"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// FuzzReadAnswer: any answer of an engine yields non-empty metadata that is part of the answer,
// or an error.
func FuzzReadAnswer(f *testing.F) {
	body := msgp.AppendMapHeader(nil, 3)
	body = msgp.AppendString(msgp.AppendString(body, "engine_id"), "e")
	body = msgp.AppendBytes(msgp.AppendString(body, "agent_metadata"), []byte("SLUCX"))
	body = msgp.AppendArrayHeader(msgp.AppendString(body, "block_lens"), 0)
	whole := msgp.AppendBytes(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "agent_metadata_bytes"), body)
	if engine, metadata, err := readAnswer(whole); engine != "e" || string(metadata) != "SLUCX" || err != nil {
		f.Fatalf("%q, %q, %v", engine, metadata, err)
	}
	f.Add(whole)
	f.Add(body)
	f.Add(bytes.Repeat([]byte{0x91}, 1000))
	f.Fuzz(func(t *testing.T, frame []byte) {
		_, metadata, err := readAnswer(frame)
		switch {
		case err != nil && metadata != nil:
			t.Errorf("%v, and yet %d bytes", err, len(metadata))
		case err != nil && !errors.Is(err, errAnswer):
			t.Errorf("%v is not an errAnswer", err)
		case err == nil && (len(metadata) == 0 || !bytes.Contains(frame, metadata)):
			t.Errorf("metadata of %d bytes that is not there", len(metadata))
		}
	})
}
