#!/usr/bin/env bash
# Checks the Helm chart and the plain manifests of scripts/packaging with helm and kubeconform.
#
#   scripts/charts-test.sh            runs the checks
#   scripts/charts-test.sh --write    writes scripts/packaging/kubernetes/router.yaml from the chart
#
# The tools and the documents from which the schemas are made come from the Go module proxy, in the versions
# named here, and are kept in the cache. Building helm takes some minutes, and once. No cluster is needed.
# Configurations are checked with $SLUICE, which is bin/sluice by default.
set -euo pipefail
cd "$(dirname "$0")/.."

helm=v3.18.6 kubeconform=v0.7.0 kubernetes=v1.33.3 operator=v0.85.0
cache=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/tools
tool() { # tool NAME MODULE@VERSION: prints the path of the built tool
  local path=$cache/${2##*@}/$1
  if [ ! -x "$path" ]; then
    echo "charts-test: building $2" >&2
    mkdir -p "${path%/*}"
    GOFLAGS='' GOBIN=${path%/*} go install -trimpath "$2" >&2
  fi
  echo "$path"
}
document() { # document MODULE@VERSION PATH: prints the path of a copy of a file of the module
  local copy=$cache/${1##*@}/${2##*/}
  if [ ! -f "$copy" ]; then
    local work
    work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-module.XXXXXX")
    echo "charts-test: reading $2 of $1" >&2
    (cd "$work" && GOFLAGS=-modcacherw GOMODCACHE=$work/mod go mod download -json "$1" >/dev/null)
    mkdir -p "${copy%/*}"
    cp "$work/mod/$1/$2" "$copy.part" && mv "$copy.part" "$copy"
    rm -rf "$work"
  fi
  echo "$copy"
}

export HELM=$(tool helm helm.sh/helm/v3/cmd/helm@$helm)
export KUBECONFORM=$(tool kubeconform github.com/yannh/kubeconform/cmd/kubeconform@$kubeconform)
export KUBERNETES_OPENAPI=$(document k8s.io/kubernetes@$kubernetes api/openapi-spec/swagger.json)
export KUBERNETES_VERSION=${kubernetes#v}
export SERVICE_MONITOR=$(document github.com/prometheus-operator/prometheus-operator@$operator example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml)

# PyYAML, of this Python or of an environment in the cache.
python=python3
if ! python3 -c 'import yaml' 2>/dev/null; then
  python=$cache/pyyaml/bin/python
  if [ ! -x "$python" ] || ! "$python" -c 'import yaml' 2>/dev/null; then
    python3 -m venv "$cache/pyyaml"
    "$python" -m pip install -q --disable-pip-version-check pyyaml==6.0.3
  fi
fi
exec "$python" scripts/charts_test.py "$@"
