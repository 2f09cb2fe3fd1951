package main

import (
	"fmt"
	"io"
	"strings"
)

// renamedFlag is a command's flag whose name changed from old to present. The old name is
// accepted for one release.
type renamedFlag struct{ command, old, present string }

var renamedFlags = []renamedFlag{
	{"sidecar", "prefill-most", "max-prefill-workers"},
	{"sidecar", "prefill-idle", "prefill-idle-timeout"},
	{"sidecar", "prefill-keys", "prefill-options"},
	{"doctor", "want", "require"},
	{"record", "for", "duration"},
}

// presentFlags returns args with the old names of a command's flags replaced by the present
// ones. It writes one warning for each renamed flag to stderr. Both names on one command line
// are an error.
func presentFlags(command string, args []string, stderr io.Writer) ([]string, error) {
	out := make([]string, 0, len(args))
	by := map[string]string{} // present name: name used on the command line
	for i, arg := range args {
		if arg == "--" {
			return append(out, args[i:]...), nil
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(arg, "-"), "-"), "=")
		for _, r := range renamedFlags {
			if r.command != command || !strings.HasPrefix(arg, "-") || name != r.old && name != r.present {
				continue
			}
			if before := by[r.present]; before != "" && before != name {
				return nil, fmt.Errorf("--%s and --%s are the same flag; want --%s alone", r.old, r.present, r.present)
			}
			if name == r.old && by[r.present] == "" {
				fmt.Fprintf(stderr, "sluice %s: --%s is now named --%s; the old name is accepted in this release only\n", command, r.old, r.present)
			}
			by[r.present] = name
			if arg = "--" + r.present; hasValue {
				arg += "=" + value
			}
			break
		}
		out = append(out, arg)
	}
	return out, nil
}
