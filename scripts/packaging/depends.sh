#!/usr/bin/env bash
# Prints, as exported variables for nfpm.yaml, what binaries need of the system: the highest version of the symbols
# of glibc, and other shared libraries.
#
#   scripts/packaging/depends.sh FILE...
#
# A library whose package it does not know is an error, because the package would install where the file cannot
# be loaded.
set -euo pipefail

glibc=$(readelf -V --wide "$@" | grep -o 'Name: GLIBC_[0-9][0-9.]*' | sed 's/.*_//' | sort -Vu | tail -1)
[ -n "$glibc" ] || { echo "depends: no file needs a version of glibc: $*" >&2; exit 1; }
echo "export GLIBC=$glibc"
for name in $(readelf -d --wide "$@" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u); do
  case $name in
    libc.so.6 | libm.so.6 | libpthread.so.0 | libdl.so.2 | librt.so.1 | libresolv.so.2 | ld-linux*) ;; # glibc
    # The names of RPM packages differ between distributions; what they provide does not.
    libgcc_s.so.1) echo "export DEB_LIBGCC=libgcc-s1 RPM_LIBGCC='$name()(64bit)'" ;;
    libzmq.so.5) echo "export DEB_LIBZMQ=libzmq5 RPM_LIBZMQ='$name()(64bit)'" ;;
    *) echo "depends: no package is known that has $name" >&2; exit 1 ;;
  esac
done
