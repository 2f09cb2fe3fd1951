#!/usr/bin/env bash
# Builds the .deb and the .rpm of Sluice, a tar archive of the binary, their SBOM, and the wheels of the
# Python packages.
#
#   scripts/packages.sh [--out DIR] [--version VERSION] [--keep]
#
# With --keep it does nothing if it has built the packages of this commit already and nothing is changed.
#
# The binary is stripped and links libzmq statically where its archives allow
# (scripts/static-zmq.sh). NIXL, UCX and CUDA are opened at run time where a node has them, so
# no package depends on them. The packages contain the native tokenizer if cargo is installed
# where they are built. What they need of the system is read from the binaries. The tools are built from the Go module proxy, in versions named
# here, and kept in the cache.
set -euo pipefail
cd "$(dirname "$0")/.."

out=build/dist version= keep=
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift 2 ;;
    --version) version=$2; shift 2 ;;
    --keep) keep=1; shift ;;
    -h | --help) sed -n '2,14p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "packages: unknown argument \"$1\"; want --out DIR, --version VERSION or --keep" >&2; exit 2 ;;
  esac
done

cache=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/tools
tool() { # tool NAME MODULE@VERSION: prints the path of the built tool
  local path=$cache/${2##*@}/$1
  if [ ! -x "$path" ]; then
    echo "packages: building $2" >&2
    mkdir -p "${path%/*}"
    GOFLAGS='' GOBIN=${path%/*} go install "$2" >&2
  fi
  echo "$path"
}
nfpm=$(tool nfpm github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.0)
sbom=$(tool cyclonedx-gomod github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.9.0)

# Debian orders 0~git before any release.
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
date=$(git log -1 --format=%cI 2>/dev/null || date -u +%FT%TZ)
if [ -z "$version" ]; then
  version=$(git describe --tags --exact-match 2>/dev/null | sed 's/^v//' || true)
  version=${version:-0~git$(git log -1 --format=%cd --date=format:%Y%m%d 2>/dev/null || date +%Y%m%d).${commit:0:8}}
fi
ARCH=$(go env GOARCH)
export VERSION=$version ARCH

build=build/packages
# What was built is complete when the last step has written this file.
source="$commit $version $(go version)" built=$build/source
if [ -n "$keep" ] && [ "$(cat "$built" 2>/dev/null)" = "$source" ] && [ -e "$out/SHA256SUMS" ] && [ -z "$(git status --porcelain)" ]; then
  echo "packages: $out has the packages of this commit" >&2
  exit
fi
rm -rf "$build" && mkdir -p "$build" "$out"
flags=() parts=()
mkdir -p "$build/licenses"
if dir=$(scripts/static-zmq.sh "$build/licenses"); then
  export CGO_LDFLAGS="-O2 -g -L$dir"
  flags=(-extldflags '-static-libgcc')
  parts+=(--archives build/static-zmq/packages)
fi
echo "packages: building sluice $version" >&2
go build -trimpath \
  -ldflags "-s -w -X main.version=$version -X main.commit=$commit -X main.date=$date ${flags[*]@Q}" \
  -o "$build/sluice" ./cmd/sluice
mkdir -p "$build/lib"
scripts/tokenizer.sh "$build/lib/libsluice_tokenizer.so"
if [ -e "$build/lib/libsluice_tokenizer.so" ]; then
  cp native/tokenizer/NOTICE "$build/licenses/libsluice_tokenizer"
  parts+=(--crates)
fi
# Man pages, of a build with cobra/doc (see cmd/sluice/man.go), and completion scripts.
go run -tags mandoc -ldflags "-X main.version=$version -X main.date=$date" ./cmd/sluice man "$build/man"
gzip -9n "$build"/man/*.1
mkdir -p "$build/completion"
for shell in bash zsh fish; do "$build/sluice" completion "$shell" >"$build/completion/sluice.$shell"; done
# It reads the commit from the repository itself, and cannot do so in a linked work tree (git worktree).
"$sbom" app -json -std -licenses -main cmd/sluice -output "$build/sluice.cdx.json" . 2>"$build/sbom.log" || { tail -5 "$build/sbom.log" >&2; echo "packages: cannot write the SBOM" >&2; exit 1; }
scripts/sbom.py "$build/sluice.cdx.json" "${parts[@]}"
# What the packages depend on, for nfpm.yaml.
scripts/packaging/depends.sh "$build/sluice" $(ls "$build"/lib/*.so 2>/dev/null) >"$build/depends"
. "$build/depends"
for format in deb rpm; do
  "$nfpm" package --config scripts/packaging/nfpm.yaml --packager "$format" --target "$out/" >&2
done
tar -C "$build" --sort=name --owner=0 --group=0 --mtime="$date" --transform 's,^lib/,,' -czf "$out/sluice-$version-linux-$ARCH.tar.gz" sluice licenses man completion sluice.cdx.json $(cd "$build" && ls lib/*.so 2>/dev/null)
cp "$build/sluice.cdx.json" "$out/sluice-$version.cdx.json"
scripts/wheels.sh "$out"
(cd "$out" && sha256sum -- *"$version"* *.whl >"SHA256SUMS")
[ -n "$(git status --porcelain 2>/dev/null)" ] || echo "$source" >"$built"
ls -l "$out" >&2
