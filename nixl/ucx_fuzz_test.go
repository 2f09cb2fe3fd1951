package nixl

import (
	"bytes"
	"testing"
)

// FuzzUCXAddress: metadata comes from engines; whatever it is, what is taken out of it lies
// in it, and an error takes nothing.
func FuzzUCXAddress(f *testing.F) {
	for _, seed := range []string{"", "SLUCX\x01\x01\x17\x01aworker", "SLUCX\x01\x01\x17\x00worker", "SLUCX\x01\x01\x17\xffa", "SLUCX\x02\x01\x17\x01aworker", "nixl"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, metadata []byte) {
		address, version, err := UCXAddress(metadata)
		if err != nil {
			if address != nil || version != "" {
				t.Errorf("%v, and yet %q, %q", err, address, version)
			}
			return
		}
		if !bytes.HasSuffix(metadata, address) || len(address) == 0 || len(address) > len(metadata) || version == "" {
			t.Errorf("of %d bytes: an address of %d, version %q", len(metadata), len(address), version)
		}
	})
}
