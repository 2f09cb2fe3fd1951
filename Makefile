# Everything here is one of: set-up, build, try, test, measure. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := bin/sluice
TOKENIZER := bin/libsluice_tokenizer.so
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo dev)
COMMIT := $(shell git rev-parse HEAD 2>/dev/null)
COMMIT_DATE := $(shell git log -1 --format=%cI 2>/dev/null)
GO_SOURCES := $(shell find cmd router dataplane nixl native bench -name '*.go' -o -name '*.[ch]' -o -name '*.html' -o -name '*.js' -o -name '*.css' 2>/dev/null)
FUZZTIME ?= 5s
DEMO_SECONDS ?=

# go test's packages by kind: unit tests, system tests, and system tests that measure
# latency, CPU or memory and therefore run alone.
UNIT = $(shell go list ./... | grep -v '/router/e2e/')
SYSTEM = $(shell go list ./router/e2e/... | grep -v '/limits$$')
LIMITS := ./router/e2e/limits
# Most tests wait for timeouts rather than compute, so more of them run at once than there are cores.
AT_ONCE := -p 4 -parallel 8
# Lint vets every package, tests included, so `go test` need not do it again.
VETTED := -vet=off
# A test that fails runs again, alone, at most twice: tests that wait for real timeouts fail now and
# then on a machine that is busy with others. The summary names it, more than five failures at once or a
# data race are final, and a test that keeps failing fails the run.
GOTESTSUM := go run gotest.tools/gotestsum@v1.13.0 --format pkgname --format-hide-empty-pkg --hide-summary=skipped \
	--rerun-fails=2 --rerun-fails-max-failures=5 --rerun-fails-abort-on-data-race
# Unit tests of what is concurrent; they also run under the race detector, which computes rather than
# waits, so no more of them run at once than there are cores.
RACE = $(shell scripts/concurrent_packages.sh)

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*?## ' $(MAKEFILE_LIST) | sort | awk -F ':.*?## ' '{printf "  %-14s %s\n", $$1, $$2}'

.PHONY: bootstrap
bootstrap: ## install what the machine lacks (libzmq, pkg-config, cmake, a C compiler)
	@scripts/bootstrap.sh

.PHONY: build
build: bootstrap $(BIN) $(TOKENIZER) ## build bin/sluice, and the native tokenizer where cargo is installed

$(BIN): go.mod go.sum $(GO_SOURCES)
	@mkdir -p bin
	go build -ldflags '-X main.version=$(VERSION) -X main.commit=$(COMMIT) -X main.date=$(COMMIT_DATE)' -o $(BIN) ./cmd/sluice

$(TOKENIZER): $(wildcard native/tokenizer/src/*.rs) native/tokenizer/Cargo.toml native/tokenizer/Cargo.lock
	@scripts/tokenizer.sh $@

.PHONY: demo
demo: bootstrap $(BIN) ## run the demo: simulated engines, the router, traffic, a page (DEMO_SECONDS=20 ends by itself)
	$(BIN) demo $(if $(DEMO_SECONDS),--duration $(DEMO_SECONDS)s)

.PHONY: check
check: build ## before a commit: build, lint, and short unit tests of what has changed since the last check
	@$(MAKE) --no-print-directory -j 2 --output-sync=line check-lint check-tests

.PHONY: check-lint
check-lint:
	@scripts/lint.sh

# Without -shuffle, go test does not run again what has not changed. `make test` shuffles.
.PHONY: check-tests
check-tests:
	go test -short $(VETTED) $(AT_ONCE) $(filter-out %/cmd/sluice,$(UNIT))
	go test -short $(VETTED) -run 'Test(ImportDirection|DirectDependencies|PoolsUseObjpool|TopLevelFolders|ReliabilityNamesTests|Vocabulary|LogKeys|FreeStandingSleeps|Readme.*|EnginesDoc|CommandsDoc|CLIDoc.*|ClientGoneTable|LockTable|ReloadTable)$$' ./cmd/sluice

.PHONY: test
test: ## set up everything; native, lint, unit and system tests, packages, and the demo (7 minutes on two quiet cores, 15 the first time)
	@scripts/test.sh

.PHONY: test-tools
test-tools: build ## tests with heavy real tools: connectors, clients, a browser, the image
	@scripts/test.sh --tools

.PHONY: unit
unit: build ## unit tests only
	$(GOTESTSUM) --packages="$(UNIT)" -- $(VETTED) -shuffle=on $(AT_ONCE)

.PHONY: system
system: build ## system tests: a whole router over simulated engines, by topic
	$(GOTESTSUM) --packages="$(SYSTEM)" -- $(VETTED) -shuffle=on -timeout 15m $(AT_ONCE)

.PHONY: limits
limits: build ## system tests that measure latency, CPU or memory, alone
	$(GOTESTSUM) --packages="$(LIMITS)" -- $(VETTED) -shuffle=on -timeout 15m

.PHONY: race
race: build ## unit tests of what is concurrent, under the race detector (7 minutes)
	$(GOTESTSUM) --packages="$(RACE)" -- $(VETTED) -race -short -shuffle=on -timeout 15m

.PHONY: lint
lint: build ## gofmt, vet, staticcheck, links and names of documents, NOTICE
	@scripts/lint.sh

.PHONY: fuzz
fuzz: build ## run every fuzz target for FUZZTIME (default 5s each), and the longest random test for minutes
	@scripts/fuzz.sh $(FUZZTIME)
	SLUICE_LONG=1 go test -count=1 -run 'TestChurn$$' ./router/kvevents

EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

.PHONY: soak
soak: build ## the long figures: many seeds, long fuzzing, long soaks
	@scripts/reliability.py --soak
	SLUICE_SOAK=1 SLUICE_TOKENIZERS='$(subst $(SPACE),:,$(wildcard $(or $(SLUICE_CACHE),$(HOME)/.cache/sluice)/tokenizer/vocab/*))' go test -count=1 -timeout 4h -run EqualsFullEncode ./router/tokenize/incremental
	SLUICE_SOAK=1 go test -timeout 4h -count=1 $(filter sluice/router/% sluice/dataplane/% sluice/bench/%,$(UNIT))
	SLUICE_SOAK=1 go test -v -timeout 4h -count=1 -run 'AbortSoak' ./router/e2e/abort
	SLUICE_SOAK=1 go test -v -timeout 4h -count=1 -run 'TestSoakWithFullQueue$$|TestPreemptionsLeaveNoState$$' ./router/e2e/admission ./router/e2e/migration
	SLUICE_SOAK=1 go test -race -v -timeout 4h -count=1 -run 'TestMetamorphicSoak$$' ./router/kvindex
	@scripts/fuzz.sh 5m

.PHONY: reliability
reliability: build ## what the router survives, point by point, with the tests' figures: RELIABILITY.md
	@scripts/reliability.py

.PHONY: native
native: ## build native/ with cmake, warnings as errors
	cmake -S . -B build/native && cmake --build build/native -j 2

# The thread sanitizer wants its own address layout; setarch gives it where that is allowed.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: native-compile
native-compile: native ## compile what native-test runs
	cmake -S . -B build/native-address -DSLUICE_SANITIZE=address,undefined >/dev/null && cmake --build build/native-address -j 2
	cmake -S . -B build/native-thread -DSLUICE_SANITIZE=thread >/dev/null && cmake --build build/native-thread -j 2

.PHONY: native-test
native-test: native-compile tokenizer-test ## C tests of native/: plain, under the address and undefined-behaviour, and the thread sanitizer; the tokenizer's under the address sanitizer
	ctest --test-dir build/native --output-on-failure
	ctest --test-dir build/native-address --output-on-failure
	$(NO_ASLR) ctest --test-dir build/native-thread --output-on-failure

.PHONY: tokenizer-test
tokenizer-test: ## tests of the tokenizer in Rust under the address sanitizer
	@if command -v cargo >/dev/null; then scripts/tokenizer_check.sh; else echo 'tokenizer-test: cargo is not installed; the tests of the tokenizer in Rust do not run'; fi

.PHONY: bench
bench: build ## figures: Go benchmarks, then the router beside nginx and haproxy
	@scripts/bootstrap.sh --bench
	@scripts/bench.sh

.PHONY: bench-families
bench-families: build ## what a prefill/decode request costs, family by family: docs/pd-cost.md
	@scripts/bench_families.py --calls --report docs/pd-cost.md

.PHONY: bench-relay
bench-relay: build ## what a relayed stream costs beside nginx, haproxy, a raw relay in C and net/http: docs/relay.md
	@scripts/bootstrap.sh --bench
	@scripts/bench_relay.py --sluice "sluice on event loops=SLUICE_RELAY_DRIVER=loop"

.PHONY: bench-streams
bench-streams: build ## what a running stream costs the whole router in memory: docs/relay-cost.md
	@scripts/bench_streams.py
	@scripts/bench_streams.py --streams 9000 --only ids

.PHONY: bench-engineapi bench-routed
bench-routed: bench-engineapi # former name
bench-engineapi: build ## what an item costs over the framed socket, HTTP and gRPC: docs/engine-api.md
	@scripts/bench_engineapi.py --report docs/engine-api.md

.PHONY: bench-tokens
bench-tokens: build ## native tokenization beside its goals, HF's tokenizers and /tokenize: docs/tokens.md (some minutes, on a quiet box; needs scripts/tokenizer_golden.py ids and templates once)
	@scripts/bench_tokens.py --report docs/tokens.md

.PHONY: bench-index
bench-index: ## the KV index's figures beside their targets
	@scripts/bench_index.py

.PHONY: bench-nixl
bench-nixl: ## figures of the tiers that report KV transfers, each beside its target
	@scripts/bench_nixl.sh

.PHONY: compare
compare: build ## Sluice beside haproxy, nginx, vllm-router, sglang-router and smg: docs/compare.md (18 minutes, two quiet cores; QUICK=1: 3)
	@scripts/bootstrap.sh --bench
	@scripts/compare.py $(if $(QUICK),--quick,--report docs/compare.md)

.PHONY: policies
policies: build ## policies compared on modelled engines, then on a simulated fleet: docs/placement.md, docs/policies.md (half an hour, on a quiet box); with TRACE=file: that trace on modelled engines only; SEEDS=1: one seed of ties instead of five
	go test ./bench/placement -timeout 2h -run TestPolicies -policies $(if $(SEEDS),-seeds $(SEEDS)) $(if $(TRACE),-v -mooncake $(abspath $(TRACE)),-write $(abspath docs/placement.md))
ifndef TRACE
	scripts/policies.py
endif

.PHONY: overload
overload: build ## more load than a simulated fleet can serve, through Sluice, haproxy and sglang-router: docs/overload.md (40 minutes, on a quiet box; OVERLOAD=--quick: 3 minutes, OVERLOAD=sessions: agents)
	@scripts/bootstrap.sh --bench
	@scripts/overload.py $(OVERLOAD)

.PHONY: e2e-vllm
e2e-vllm: build ## real vLLM on the CPU through the router (heavy: about 6 GB and 20 minutes)
	scripts/e2e-vllm.sh

.PHONY: packages
packages: bootstrap ## build the .deb, the .rpm, a tar archive, the SBOM and the wheels into build/dist/
	@scripts/packages.sh

.PHONY: packages-test
packages-test: packages ## check the units, and install, upgrade, remove and purge the .deb and the .rpm in Debian roots
	@scripts/packages-test.sh

.PHONY: image
image: packages ## build the container image, an OCI archive, into build/dist/; needs Debian's package registry
	@scripts/image.py

.PHONY: image-test
image-test: image ## check the image, and run it with a read-only root file system (as root)
	@scripts/image_test.py

.PHONY: charts-test
charts-test: build ## check the Helm chart and the manifests with helm and kubeconform (builds them once, some minutes)
	@scripts/charts-test.sh

.PHONY: observability-test
observability-test: build ## check metrics, rules and dashboards with the real promtool and Prometheus (builds them once, 2 minutes)
	@scripts/observability_test.py "$$(scripts/prometheus.sh)"

.PHONY: acceptance
acceptance: build ## install, observe, operate and documentation with the real tools; prints what passed and what cannot run (15 minutes warm)
	@scripts/acceptance.py

.PHONY: traces-test
traces-test: build ## check traces with the real OpenTelemetry collector over gRPC and HTTP (builds it once, 2 minutes of CPU)
	@scripts/traces_test.py

.PHONY: docs
docs: ## build the documentation as a site in build/site; broken links and missing pages are errors
	@scripts/docs.sh

.PHONY: clean
clean: ## remove what was built
	rm -rf bin build
