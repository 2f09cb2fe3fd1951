package nixl

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"sluice/native/dl"
	nativenixl "sluice/native/nixl"
	"sluice/native/ucx"
)

// LibraryVariable is the environment variable that names libnixl_capi: a file, or its
// directory.
const LibraryVariable = "SLUICE_NIXL_LIBRARY"

// Search is where to look for NIXL.
type Search struct {
	Path   string   // from the configuration: a file or a directory; if set, nothing else is tried
	Python []string // prefixes of Python environments (an engine's venv), best first
}

// Attempt is one place that was tried.
type Attempt struct {
	Path   string
	Code   dl.LoadCode
	Reason string
}

// Library is the NIXL of this process.
type Library struct {
	Path     string // the resolved file
	NIXL     string // version of the wheel that contains it; "unknown" otherwise; "" for UCX alone
	UCX      string // version of the UCX that it loaded; "not loaded" before the first backend
	Attempts []Attempt
}

// String returns the versions of NIXL and UCX and the path. A nil Library is the fake.
func (l *Library) String() string {
	switch {
	case l == nil:
		return "the fake"
	case l.NIXL == "":
		return fmt.Sprintf("UCX %s, %s", l.UCX, l.Path)
	}
	return fmt.Sprintf("NIXL %s, UCX %s, %s", l.NIXL, l.UCX, l.Path)
}

// LoadError is the reason why there is no NIXL: every place that was tried, and what
// was wrong with it.
type LoadError struct {
	Library  string // "NIXL" or "UCX"; "" is NIXL
	Attempts []Attempt
	Hung     bool // the last one did not return in time
}

// Error lists the files that could not be loaded and why. Files that do not exist come last.
func (e *LoadError) Error() string {
	s := "nixl: no " + cmp.Or(e.Library, "NIXL")
	if len(e.Attempts) == 0 {
		return s + ": no place to look in"
	}
	var absent []string
	var rest []string
	for _, a := range e.Attempts {
		if a.Code == dl.LoadAbsent {
			absent = append(absent, cmp.Or(a.Path, "(in this process)"))
		} else {
			rest = append(rest, fmt.Sprintf("%s: %s: %s", a.Path, a.Code, a.Reason))
		}
	}
	if len(rest) > 0 {
		s += ": " + strings.Join(rest, "; ")
	}
	if len(absent) > 0 {
		s += ": not at " + strings.Join(absent, ", ")
	}
	return s
}

// Unwrap returns ErrHung if a library did not return from its constructors.
func (e *LoadError) Unwrap() error {
	if e.Hung {
		return ErrHung
	}
	return nil
}

var capiNames = []string{"libnixl_capi.so.0", "libnixl_capi.so"}

// Candidates returns the places to try, best first: the configured path alone, or else
// the environment's, the engines' Python environments (an engine's own wheel has the
// matching version), the loader's path, NIXL's prefix, and the Python environments
// found near this process.
func (s Search) Candidates() []string {
	if s.Path != "" {
		return resolvePath(s.Path)
	}
	var c []string
	if v := os.Getenv(LibraryVariable); v != "" {
		return resolvePath(v)
	}
	for _, p := range s.Python {
		c = append(c, wheels(p)...)
	}
	c = append(c, capiNames...)
	for _, dir := range []string{"lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"} {
		for _, n := range capiNames {
			if p := filepath.Join("/opt/nvidia/nvda_nixl", dir, n); exists(p) {
				c = append(c, p)
			}
		}
	}
	for _, p := range []string{os.Getenv("VIRTUAL_ENV"), os.Getenv("CONDA_PREFIX"), "/usr/local", "/usr"} {
		if p != "" {
			c = append(c, wheels(p)...)
		}
	}
	return c
}

// resolvePath returns a file as it is; in a directory, also that of an unpacked wheel,
// it looks for both names.
func resolvePath(path string) []string {
	if i, err := os.Stat(path); err != nil || !i.IsDir() {
		return []string{path}
	}
	var c []string
	for _, pattern := range []string{"", ".nixl_cu1[23].mesonpy.libs"} {
		for _, n := range capiNames {
			m, _ := filepath.Glob(filepath.Join(path, pattern, n))
			c = append(c, m...)
		}
	}
	if len(c) == 0 {
		c = []string{filepath.Join(path, capiNames[1])}
	}
	return c
}

// wheels returns the NIXL wheels of a Python prefix, the newest CUDA first.
func wheels(prefix string) []string {
	var c []string
	for _, n := range capiNames {
		m, _ := filepath.Glob(filepath.Join(prefix, "lib/python3*/*-packages/.nixl_cu1[23].mesonpy.libs", n))
		slices.Sort(m)
		slices.Reverse(m)
		c = append(c, m...)
	}
	return c
}

func exists(p string) bool { _, err := os.Stat(p); return err == nil }

// Load finds NIXL and loads it, once per process; a second call returns the loaded one.
// It sets UCX's environment first (docs/nixl.md). limit is for all places together: a
// library that hangs in its constructors is abandoned, and the error says so.
func Load(s Search, limit time.Duration) (*Library, error) {
	return load(context.Background(), s, limit)
}

func load(ctx context.Context, s Search, limit time.Duration) (*Library, error) {
	path, attempts, err := loadFirst(ctx, "NIXL", s.Candidates(), limit, nativenixl.Load)
	if err != nil {
		return nil, err
	}
	return &Library{Path: path, NIXL: wheelVersion(path), UCX: ucxVersion(), Attempts: attempts}, nil
}

var loading sync.Mutex

// loadFirst loads the first usable candidate and returns its file. When ctx ends, it
// returns ctx's error at once: a load cannot be stopped, only abandoned.
func loadFirst(ctx context.Context, what string, candidates []string, limit time.Duration, load func(string) (dl.LoadCode, string)) (string, []Attempt, error) {
	deadline := time.Now().Add(limit)
	for !loading.TryLock() { // held by a load that hangs
		if errors.Is(ctx.Err(), context.Canceled) {
			return "", nil, abandonedLoadError(ctx, what)
		}
		if time.Now().After(deadline) {
			return "", nil, &LoadError{Library: what, Hung: true, Attempts: []Attempt{{Path: "(another load)", Code: dl.LoadBroken, Reason: "has not returned"}}}
		}
		time.Sleep(time.Millisecond)
	}
	var attempts []Attempt
	for _, path := range candidates {
		type outcome struct {
			code dl.LoadCode
			why  string
		}
		done := make(chan outcome, 1)
		go func() {
			code, why := load(path)
			done <- outcome{code, why}
		}()
		timer := time.NewTimer(time.Until(deadline))
		select {
		case o := <-done:
			timer.Stop()
			attempts = append(attempts, Attempt{path, o.code, o.why})
			if o.code == dl.LoadOK {
				loading.Unlock()
				return o.why, attempts, nil
			}
			continue
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		go func() { <-done; loading.Unlock() }()
		if errors.Is(ctx.Err(), context.Canceled) {
			return "", nil, abandonedLoadError(ctx, what)
		}
		attempts = append(attempts, Attempt{path, dl.LoadBroken, fmt.Sprintf("did not return within %s", limit)})
		return "", nil, &LoadError{Library: what, Attempts: attempts, Hung: true}
	}
	loading.Unlock()
	return "", nil, &LoadError{Library: what, Attempts: attempts}
}

func abandonedLoadError(ctx context.Context, what string) error {
	return fmt.Errorf("nixl: stopped waiting until %s is loaded: %w", what, ctx.Err())
}

// wheelVersion reads the version from the wheel's metadata, because the C API does not
// report it.
func wheelVersion(library string) string {
	m, _ := filepath.Glob(filepath.Join(filepath.Dir(library), "../nixl_cu1[23]-*.dist-info"))
	for _, dir := range m {
		_, v, ok := strings.Cut(strings.TrimSuffix(filepath.Base(dir), ".dist-info"), "-")
		if ok && strings.Contains(filepath.Dir(library), strings.SplitN(filepath.Base(dir), "-", 2)[0]) {
			return v
		}
	}
	return "unknown"
}

// ResidentUCX returns the file of the libucp that is mapped into this process, or "".
// Two copies are a fault: they hang or crash.
func ResidentUCX() []string {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil
	}
	defer f.Close()
	var found []string
	for s := bufio.NewScanner(f); s.Scan(); {
		i := strings.IndexByte(s.Text(), '/')
		if i < 0 || !strings.HasPrefix(filepath.Base(s.Text()[i:]), "libucp") {
			continue
		}
		if p := s.Text()[i:]; !slices.Contains(found, p) {
			found = append(found, p)
		}
	}
	return found
}

func ucxVersion() string {
	for _, p := range ResidentUCX() {
		if a, b, c, ok := ucx.Version(p); ok {
			return fmt.Sprintf("%d.%d.%d", a, b, c)
		}
	}
	return "not loaded"
}
