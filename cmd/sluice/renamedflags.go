package main

// renamedFlag is a command's flag whose name changed from old to present. The old name is
// accepted for one release, with a warning.
type renamedFlag struct{ command, old, present string }

var renamedFlags = []renamedFlag{
	{"sidecar", "prefill-most", "max-prefill-workers"},
	{"sidecar", "prefill-idle", "prefill-idle-timeout"},
	{"sidecar", "prefill-keys", "prefill-options"},
	{"doctor", "want", "require"},
	{"record", "for", "duration"},
}

// presentName returns the present name of a command's flag.
func presentName(command, name string) string {
	for _, r := range renamedFlags {
		if r.command == command && r.old == name {
			return r.present
		}
	}
	return name
}
