#!/usr/bin/env bash
# Prints the packages that the race detector checks: those with a goroutine, a lock or an atomic value
# in their code or their tests. The system tests are not among them, and neither is bench/placement: its
# simulations compute for minutes, and what is concurrent in them is tested in router/admission.
set -euo pipefail
cd "$(dirname "$0")/.."
go list -f '{{.ImportPath}} {{.Dir}}' ./dataplane/... ./router/... ./bench/... ./nixl/... | while read -r pkg dir; do
  case $pkg in */router/e2e/* | */bench/placement) continue ;; esac
  if grep -qE '\bgo [A-Za-z_.]+\(|\.Go\(|\bsync\.|\batomic\.' "$dir"/*.go; then echo "$pkg"; fi
done
