package nixl

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/native/dl"
	"sluice/native/ucx"
)

func touch(t *testing.T, path string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSearchOrder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(LibraryVariable, "")
	t.Setenv("VIRTUAL_ENV", filepath.Join(dir, "active"))
	engine12 := touch(t, filepath.Join(dir, "engine/lib/python3.12/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so"))
	engine13 := touch(t, filepath.Join(dir, "engine/lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl_capi.so"))
	active := touch(t, filepath.Join(dir, "active/lib/python3.11/dist-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so"))
	got := Search{Python: []string{filepath.Join(dir, "engine"), filepath.Join(dir, "none")}}.Candidates()
	if want := []string{engine13, engine12, "libnixl_capi.so.0", "libnixl_capi.so"}; !slices.Equal(got[:4], want) {
		t.Errorf("first %v\n want %v", got[:4], want)
	}
	if !slices.Contains(got[4:], active) {
		t.Errorf("the active Python environment is not among %v", got)
	}

	wheel := filepath.Dir(filepath.Dir(engine12))
	for name, c := range map[string]struct {
		search Search
		env    string
		want   []string
	}{
		"a configured file, alone":     {Search{Path: "/x/y.so", Python: []string{dir}}, engine12, []string{"/x/y.so"}},
		"a configured folder":          {Search{Path: filepath.Dir(engine12)}, "", []string{engine12}},
		"a folder with a wheel in it":  {Search{Path: wheel}, "", []string{engine12, engine13}},
		"a folder without a library":   {Search{Path: dir}, "", []string{filepath.Join(dir, "libnixl_capi.so")}},
		"the environment, before rest": {Search{Python: []string{filepath.Join(dir, "engine")}}, active, []string{active}},
	} {
		t.Setenv(LibraryVariable, c.env)
		if got := c.search.Candidates(); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestLoadErrorListsAttempts(t *testing.T) {
	if dl.ABI() == 0 {
		t.Skip("built without cgo")
	}
	file := touch(t, filepath.Join(t.TempDir(), "libnixl_capi.so"))
	_, err := Load(Search{Path: file}, 10*time.Second)
	var e *LoadError
	if !errors.As(err, &e) || len(e.Attempts) != 1 || e.Attempts[0].Code == dl.LoadOK || e.Attempts[0].Path != file {
		t.Errorf("%v", err)
	}
	_, err = Load(Search{Path: "/does/not/exist.so"}, 10*time.Second)
	if err == nil || !strings.Contains(err.Error(), "not at /does/not/exist.so") {
		t.Errorf("%v", err)
	}
}

func TestLoadErrorNamesEveryPlace(t *testing.T) {
	e := &LoadError{Library: "UCX", Attempts: []Attempt{{"", dl.LoadAbsent, ""}, {"/a.so", dl.LoadBroken, "too short"}, {"libucp.so.0", dl.LoadAbsent, ""}}}
	if got, want := e.Error(), "nixl: no UCX: /a.so: broken: too short: not at (in this process), libucp.so.0"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A router that ends while a library is stuck in its constructors does not wait for it,
// nor does the tier that waits for its turn.
func TestLoadEndsWithItsContext(t *testing.T) {
	stuck, begun := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() {
		_, _, err := loadFirst(ctx, "NIXL", []string{"a", "b"}, time.Hour, func(string) (dl.LoadCode, string) {
			close(begun)
			<-stuck
			return dl.LoadBroken, ""
		})
		ended <- err
	}()
	<-begun
	second := func(string) (dl.LoadCode, string) { return dl.LoadOK, "c" }
	go func() {
		_, _, err := loadFirst(ctx, "UCX", []string{"c"}, time.Hour, second)
		ended <- err
	}()
	cancel()
	for range 2 {
		var missing *LoadError
		if err := <-ended; !errors.Is(err, context.Canceled) || errors.As(err, &missing) {
			t.Errorf("%v; want that nobody waits any more", err)
		}
	}
	close(stuck)
	if file, _, err := loadFirst(t.Context(), "UCX", []string{"c"}, time.Hour, second); err != nil || file != "c" {
		t.Errorf("after the stuck load has come back: %q, %v", file, err)
	}
}

func TestEnvironmentOfUCX(t *testing.T) {
	if dl.ABI() == 0 {
		t.Skip("built without cgo")
	}
	ucx.SetEnvironment()
	for name, want := range map[string]string{"UCX_DEBUG_SIGNO": "0", "UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"} {
		if got, _ := dl.Environment(name); got != want {
			t.Errorf("%s is %q in the C environment, want %q", name, got, want)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no name":          {},
		"a NUL in it":      {Name: "a\x00b"},
		"a ring of 100":    {Name: "a", Commands: 100},
		"a ring of 8":      {Name: "a", Events: 8},
		"an empty key":     {Name: "a", Parameters: map[string]string{"": "x"}},
		"a NUL in a value": {Name: "a", Parameters: map[string]string{"x": "\x00"}},
	} {
		if _, err := NewFake().Open(t.Context(), cfg); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
