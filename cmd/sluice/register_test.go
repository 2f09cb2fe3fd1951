package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestRegistrationToken: the old name of the variable is accepted with a warning, and the new
// one has precedence.
func TestRegistrationToken(t *testing.T) {
	for _, k := range []struct{ present, old, want, warning string }{
		{"a", "", "a", ""}, {"", "b", "b", "SLUICE_REGISTRATION_TOKEN"}, {"a", "b", "a", ""}, {"", "", "", ""},
	} {
		var warnings bytes.Buffer
		env := map[string]string{"SLUICE_REGISTRATION_TOKEN": k.present, "SLUICE_REGISTER_TOKEN": k.old}
		got := registrationToken(func(name string) string { return env[name] }, &warnings)
		if got != k.want || strings.Contains(warnings.String(), "SLUICE_REGISTRATION_TOKEN") != (k.warning != "") {
			t.Errorf("%q and %q: %q with %q; want %q", k.present, k.old, got, warnings.String(), k.want)
		}
	}
}
