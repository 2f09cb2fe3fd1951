#!/usr/bin/env bash
# Downloads the NIXL wheel that the tests use, checks its hash, and extracts the part
# that works without a GPU (about 45 MB) to ${SLUICE_CACHE:-~/.cache/sluice}/nixl-VERSION.
# Does nothing if that folder is complete.
#
#   scripts/nixl-wheel.sh [VERSION]      default 1.5.1; 1.3.2 is for the tests of mixed versions
set -euo pipefail

version=${1:-1.5.1}
case "$(uname -m) $version" in
  "x86_64 1.5.1") sha=341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a ;;
  "x86_64 1.3.2") sha=65ff05fff79c98af18651e60928475509bdf90818dde54dbbb4fdf8f79aae0ad ;;
  *)
    echo "nixl-wheel: no pinned wheel of nixl-cu12 $version for $(uname -m); the tests with the real NIXL are skipped" >&2
    exit 0
    ;;
esac

cache=${SLUICE_CACHE:-$HOME/.cache/sluice}
dest=$cache/nixl-$version
if [ -e "$dest/.complete" ]; then
  exit 0
fi
mkdir -p "$cache"
work=$(mktemp -d "$cache/.nixl-XXXXXX")
trap 'rm -rf "$work"' EXIT

if python3 -m pip --version >/dev/null 2>&1; then
  pip=(python3 -m pip)
else
  python3 -m venv "$work/venv"
  pip=("$work/venv/bin/pip")
fi
echo "nixl-wheel: downloading nixl-cu12 $version"
# One wheel serves every Python: its libraries do not depend on the interpreter.
"${pip[@]}" -q download --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
  --platform manylinux_2_28_x86_64 -d "$work" "nixl-cu12==$version"
python3 - "$work" "$sha" <<'EOF'
import hashlib, os, re, sys, zipfile
work, want = sys.argv[1:]
wheel = [os.path.join(work, f) for f in os.listdir(work) if f.endswith(".whl")]
if len(wheel) != 1:
    sys.exit(f"nixl-wheel: downloaded {len(wheel)} wheels, want 1")
have = hashlib.sha256(open(wheel[0], "rb").read()).hexdigest()
if have != want:
    sys.exit(f"nixl-wheel: {os.path.basename(wheel[0])} has sha256 {have}, want {want}")
# Skipped: storage plugins and the libraries that only they use, Python, headers, examples.
skip = re.compile(r"plugins/libplugin_(?!UCX)|libtelemetry|libaws|libazure|libgusli|libcurl|libxml2|libs2n|libzstd"
                  r"|^nixl_(ep_)?cu12/|\.data/|\.scripts/|\.libs/nixl/|sboms/|\.la$")
out = os.path.join(work, "tree")
with zipfile.ZipFile(wheel[0]) as z:
    for i in z.infolist():
        if not i.is_dir() and not skip.search(i.filename):
            z.extract(i, out)
EOF
touch "$work/tree/.complete"
rm -rf "$dest"
mv "$work/tree" "$dest"
echo "nixl-wheel: $dest ($(du -sh "$dest" | cut -f1))"
