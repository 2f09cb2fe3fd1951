#!/usr/bin/env bash
# Prepares a static link of libzmq and prints the directory for CGO_LDFLAGS=-L….
#
#   scripts/static-zmq.sh [LICENSES]    LICENSES is a folder for the licences of what is linked statically
#
# With LICENSES it also writes build/static-zmq/packages: for each library its name and the package, version and
# architecture that it comes from. libgcc is among them, because -static-libgcc goes with these archives.
#
# Debian's libzmq.so loads 17 shared libraries, most of them for transports and mechanisms that
# Sluice does not use: PGM, NORM and GSSAPI. The directory has a linker script under the name
# libzmq.so. The linker finds it first and reads static archives instead; the functions of those
# three are stubs (scripts/packaging/zmq_stubs.c).
#
# Prints nothing and exits with 1 where an archive is missing; then link libzmq.so as usual.
set -euo pipefail
cd "$(dirname "$0")/.."
cc=${CC:-cc}
out=$PWD/build/static-zmq
archives=()
for name in zmq sodium bsd md stdc++; do
  file=$("$cc" -print-file-name="lib$name.a")
  if [ "$file" = "lib$name.a" ]; then
    echo "static-zmq: no static archive lib$name.a; libzmq is linked dynamically" >&2
    exit 1
  fi
  archives+=("$(realpath "$file")")
done
if [ $# -gt 0 ]; then
  mkdir -p "$1" "$out"
  : >"$out/packages"
  for archive in "${archives[@]}" "$(realpath "$("$cc" -print-file-name=libgcc.a)")"; do
    # Where /lib is a link, dpkg knows the file by the other path.
    package=$({ dpkg -S "$archive" || dpkg -S "${archive#/usr}"; } 2>/dev/null | head -1 | cut -d: -f1)
    [ -n "$package" ] || { echo "static-zmq: no package has $archive, so its licence is not known; libzmq is linked dynamically" >&2; exit 1; }
    name=${archive##*/}
    cp "/usr/share/doc/$package/copyright" "$1/${name%.a}"
    dpkg-query -W -f "${name%.a} \${Package} \${Version} \${Architecture}\n" "$package:$(dpkg --print-architecture)" >>"$out/packages"
  done
fi
mkdir -p "$out"
"$cc" -O2 -fPIC -Wall -Wextra -Werror -c scripts/packaging/zmq_stubs.c -o "$out/stubs.o"
ar rcs "$out/libzmq_stubs.a" "$out/stubs.o"
# A change of the archives must reach Go's linker, whose cache sees only the flags.
key=$(cat "${archives[@]}" "$out/libzmq_stubs.a" | sha256sum | cut -c1-12)
mkdir -p "$out/$key"
printf 'GROUP ( %s %s AS_NEEDED ( -lm ) )\n' "${archives[*]}" "$out/libzmq_stubs.a" >"$out/$key/libzmq.so"
echo "$out/$key"
