package main

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const repositoryRoot = "../.."

// packageLayers lists the top-level folders from the highest layer to the lowest. A package may
// import packages of its own layer and of lower ones.
var packageLayers = []string{"cmd", "router", "dataplane", "nixl", "native"}

// leafPackages import no other package of this module; their tests may import waitPackage.
var leafPackages = []string{
	"router/worker", "router/liveness", "router/networks", "router/sweeper",
	"dataplane/ascii", "dataplane/epoll", "dataplane/headerrules", "dataplane/objpool", "dataplane/monotime", "dataplane/rawsocket", "dataplane/memtuner", waitPackage,
}

// waitPackage waits for conditions in tests of every layer. Only tests and the harness import it.
const waitPackage = "bench/testwait"

// harnessPackage is shared by the system tests and imported by nothing else; as tests
// may, it imports the bench packages.
const harnessPackage = "router/e2e/harness"

// benchAllowedImports are the router packages that the simulated engine and the load generator may
// import. They must not depend on how the router decides.
var benchAllowedImports = []string{"sluice/router/blockhash", "sluice/router/kvevents"}

// directDependencies is the complete list of direct dependencies. A new one needs an entry with a
// reason here, so that it is seen in review.
var directDependencies = []string{
	"github.com/HdrHistogram/hdrhistogram-go", // latency histograms of sluice load
	"github.com/anishathalye/porcupine",       // tests only: linearizability of the KV index
	"github.com/dustin/go-humanize",           // numbers in tables for people
	"github.com/go-logr/logr",                 // the log of OpenTelemetry's libraries, without credentials
	"github.com/goccy/go-yaml",                // strict config with line and column
	"github.com/klauspost/compress",           // zstd of recordings and snapshots, and encoded bodies of clients
	"github.com/panjf2000/gnet/v2",            // event loops of the framed engine socket
	"github.com/pebbe/zmq4",                   // engines' side channels; the simulated engine
	"github.com/prometheus/client_golang",     // /metrics: collectors of the process and the Go runtime
	"github.com/prometheus/client_model",      // /metrics: the families of a scrape
	"github.com/prometheus/common",            // /metrics: the formats
	// tests only: validates files with the schema of the configuration
	"github.com/santhosh-tekuri/jsonschema/v6",
	"github.com/spf13/cobra",                                          // subcommands, completion and man pages of the command line
	"github.com/spf13/pflag",                                          // its GNU-style flags
	"github.com/tinylib/msgp",                                         // msgpack of side channels, notifications and the engine API
	"github.com/valyala/fasthttp",                                     // the HTTP front
	"github.com/zeebo/xxh3",                                           // block hashing
	"golang.org/x/net",                                                // DNS messages, for workers found by name
	"golang.org/x/sys",                                                // epoll for the client-gone watch
	"google.golang.org/protobuf",                                      // /metrics: time of an exemplar; tests: a collector of traces
	"go.opentelemetry.io/otel",                                        // attributes of traces
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace",               // export of traces
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc", // the same by gRPC
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp", // the same by HTTP
	"go.opentelemetry.io/otel/sdk",                                    // the resource of traces, as the environment describes it
	"go.opentelemetry.io/proto/otlp",                                  // messages of the same
	"google.golang.org/grpc",                                          // tests only: a collector
	"gopkg.in/natefinch/lumberjack.v2",                                // rotation of the access log
}

// uncheckedPools may use a sync.Pool. All other pools are checked by package objpool.
var uncheckedPools = map[string]string{
	"dataplane/objpool/pool.go":       "it is what checks",
	"dataplane/membudget/pool.go":     "it checks its buffers itself",
	"dataplane/compression/encode.go": "zstd encoders, whose memory is theirs",
	"router/tokenize/cache.go":        "hashers, which keep their key from one use to the next",
	"dataplane/objpool/pool_test.go":  "it is that package's test",
}

// TestPoolsUseObjpool: use of a pooled object after its release can put one client's bytes into
// another client's request, so every pool is an objpool, which can detect that.
func TestPoolsUseObjpool(t *testing.T) {
	forEachGoFile(t, func(path string, _ []string) {
		if layerOf(filepath.ToSlash(filepath.Dir(path))) < 0 || uncheckedPools[filepath.ToSlash(path)] != "" {
			return
		}
		text, err := os.ReadFile(filepath.Join(repositoryRoot, path))
		if err != nil {
			t.Fatal(err)
		}
		const pool = "sync" + ".Pool"
		if strings.Contains(string(text), pool+"{") || strings.Contains(string(text), pool+"\n") {
			t.Errorf("%s has a sync.Pool; use objpool.Pool, which tests check", path)
		}
	})
}

func TestImportDirection(t *testing.T) {
	forEachGoFile(t, func(path string, imports []string) {
		dir := filepath.ToSlash(filepath.Dir(path))
		for _, imp := range imports {
			if imp == "C" && !strings.HasPrefix(dir, "native") {
				t.Errorf("%s imports \"C\": only native/ may", path)
			}
			rest, ours := strings.CutPrefix(imp, "sluice/")
			if !ours {
				continue
			}
			if slices.Contains(leafPackages, dir) && !(rest == waitPackage && strings.HasSuffix(path, "_test.go")) {
				t.Errorf("%s imports %s: %s is a leaf and imports no package of this module", path, imp, dir)
			}
			if strings.HasPrefix(dir, "bench/sim") || strings.HasPrefix(dir, "bench/load") {
				if strings.HasPrefix(imp, "sluice/router") && !slices.Contains(benchAllowedImports, imp) {
					t.Errorf("%s imports %s: of the router, %s may use only %v", path, imp, dir, benchAllowedImports)
				}
			}
			from, to := layerOf(dir), layerOf(rest)
			if from >= 0 && to >= 0 && to < from {
				t.Errorf("%s imports %s: arrows go %s", path, imp, strings.Join(packageLayers, " -> "))
			}
			if strings.HasPrefix(rest, harnessPackage) && !strings.HasSuffix(path, "_test.go") {
				t.Errorf("%s imports %s: only tests may", path, imp)
			}
			if rest == waitPackage && !strings.HasSuffix(path, "_test.go") && dir != harnessPackage {
				t.Errorf("%s imports %s: only tests may", path, imp)
			}
			if from > 0 && strings.HasPrefix(rest, "bench/") && !strings.HasSuffix(path, "_test.go") && dir != harnessPackage {
				t.Errorf("%s imports %s: only cmd and tests use the bench packages", path, imp)
			}
		}
	})
}

func layerOf(dir string) int {
	top, _, _ := strings.Cut(dir, "/")
	return slices.Index(packageLayers, top)
}

func TestDirectDependencies(t *testing.T) {
	mod, err := os.ReadFile(filepath.Join(repositoryRoot, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	var direct []string
	for line := range strings.Lines(string(mod)) {
		f := strings.Fields(line)
		if len(f) == 2 && strings.Contains(f[0], ".") && strings.HasPrefix(f[1], "v") {
			direct = append(direct, f[0])
			if f[0] == "github.com/valyala/fasthttp" && f[1] != "v1.74.0" {
				t.Errorf("fasthttp must be v1.74.0, go.mod has %s: the guard's cases must be checked again first", f[1])
			}
		}
	}
	slices.Sort(direct)
	want := slices.Clone(directDependencies)
	slices.Sort(want)
	if !slices.Equal(direct, want) {
		t.Errorf("direct dependencies are\n  %s\nwant\n  %s\na new one needs a line with its reason in directDependencies",
			strings.Join(direct, "\n  "), strings.Join(want, "\n  "))
	}
}

func TestTopLevelFolders(t *testing.T) {
	allowed := []string{"bench", "bin", "build", "cmd", "dataplane", "docs", "native", "nixl", "router", "scripts"}
	entries, err := os.ReadDir(repositoryRoot)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") && !slices.Contains(allowed, e.Name()) {
			t.Errorf("top-level folder %q is not part of the house; want one of %v", e.Name(), allowed)
		}
	}
}

// forEachGoFile calls f for every Go file of the module, including tests, with its path from the root
// and its imports.
func forEachGoFile(t *testing.T, f func(path string, imports []string)) {
	t.Helper()
	fset := token.NewFileSet()
	seen := 0
	err := filepath.WalkDir(repositoryRoot, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && (name == "testdata" || name == "node_modules" || name == "build" || strings.HasPrefix(name, ".") && len(name) > 2) {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		file, err := parser.ParseFile(fset, p, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		var imports []string
		for _, i := range file.Imports {
			path, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			imports = append(imports, path)
		}
		rel, err := filepath.Rel(repositoryRoot, p)
		if err != nil {
			return err
		}
		seen++
		f(filepath.ToSlash(rel), imports)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 20 {
		t.Fatalf("saw only %d Go files: the walk did not start at the root", seen)
	}
}
