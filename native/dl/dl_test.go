package dl

import "testing"

func TestResident(t *testing.T) {
	if ABI() == 0 {
		t.Skip("built without cgo: there is no C code to test")
	}
	if !Resident("libc.so.6") {
		t.Error("libc.so.6 is mapped into every process, but was not found")
	}
	for _, name := range []string{"", "libsluice-no-such.so.9", "../../etc/passwd"} {
		if Resident(name) {
			t.Errorf("Resident(%q) = true; no such library was loaded", name)
		}
	}
}
