package worker

import (
	"slices"
	"strings"
)

// Host returns the host of the rank's URL, for IPv6 with brackets.
func (r *Rank) Host() string {
	_, rest, _ := strings.Cut(r.URL, "://")
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		rest = rest[:i]
	}
	if i := strings.LastIndexByte(rest, ':'); i > strings.LastIndexByte(rest, ']') {
		rest = rest[:i]
	}
	return rest
}

// Option returns the value of one of the worker's Options for this rank. A single value applies to
// all ranks; otherwise the values are in the order of the ranks. It returns "" if there is none.
func (r *Rank) Option(key string) string {
	values := r.Worker.Spec.Options[key]
	switch {
	case len(values) == 0:
		return ""
	case len(values) == 1:
		return values[0]
	}
	for i, other := range r.Worker.Ranks {
		if other == r && i < len(values) {
			return values[i]
		}
	}
	return ""
}

// VersionAtLeast reports whether the rank's engine is known to have release major.minor.patch or
// later. It works on nil and then returns false.
func (r *Rank) VersionAtLeast(major, minor, patch int) bool {
	return r != nil && VersionAtLeast(r.Worker.Info().Version, major, minor, patch)
}

// VersionBefore reports whether the rank's engine is known to have a release before
// major.minor.patch.
func (r *Rank) VersionBefore(major, minor, patch int) bool {
	return r.Worker.Info().Version != "" && !r.VersionAtLeast(major, minor, patch)
}

// VersionAtLeast reports whether an engine's version is at least major.minor.patch. It returns
// false for an unknown version.
func VersionAtLeast(version string, major, minor, patch int) bool {
	parsed := parseVersion(version)
	return slices.Compare(parsed[:], []int{major, minor, patch}) >= 0
}

// parseVersion returns the leading numbers of versions such as "0.32.0+cpu", "v0.5.10.post1" and
// "0.26.0rc1", and {-1} if version does not start with a number.
func parseVersion(version string) (v [3]int) {
	s := strings.TrimPrefix(version, "v")
	for i := range v {
		n, digits := 0, 0
		for digits < len(s) && digits < 6 && s[digits]-'0' <= 9 {
			n = n*10 + int(s[digits]-'0')
			digits++
		}
		if digits == 0 {
			if i == 0 {
				v[0] = -1
			}
			return v
		}
		v[i] = n
		if s = s[digits:]; len(s) == 0 || s[0] != '.' {
			return v
		}
		s = s[1:]
	}
	return v
}
