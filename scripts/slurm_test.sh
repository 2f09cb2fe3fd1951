#!/usr/bin/env bash
# Runs docs/slurm.md on a real Slurm of one node: the page's configuration and its batch script are taken from
# the page as they are, and a simulated engine stands in for `vllm serve`.
#
# Slurm comes from Debian's packages into a root of its own (kept in the cache), and runs in a network
# namespace that has the page's addresses. Needs root, and the Debian root of `make packages-test`.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "slurm_test: needs root, for chroot" >&2; exit 2; }
[ -x bin/sluice ] || { echo "slurm_test: bin/sluice is not built; run: make build" >&2; exit 1; }

cache=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}
base=$cache/debian-root.tar
[ -f "$base" ] || { echo "slurm_test: no Debian root in the cache; run make packages-test once" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-slurm.XXXXXX")
root=$work/root
namespace=
cleanup() {
  [ -z "$namespace" ] || kill -KILL "$namespace" 2>/dev/null || true # with it all processes of its PID namespace
  wait 2>/dev/null || true
  umount -q "$root/proc" 2>/dev/null || true
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT
mkdir "$root"
slurm=$cache/slurm-root.tar
if [ ! -f "$slurm" ]; then
  echo "slurm_test: installing Slurm in a Debian root (once)" >&2
  tar -C "$root" -xf "$base"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  mount -t proc proc "$root/proc"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" && chmod +x "$root/usr/sbin/policy-rc.d" # starts no service
  chroot "$root" env DEBIAN_FRONTEND=noninteractive sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge curl openssl iproute2 libzmq5 && apt-get clean' >"$work/log" 2>&1 || { tail -20 "$work/log" >&2; exit 1; }
  umount "$root/proc"
  tar -C "$root" -cf "$slurm.part" . && mv "$slurm.part" "$slurm"
else
  tar -C "$root" -xf "$slurm"
fi

# The page's blocks: the configuration and the script.
block() { # block FIRST-LINE: the block of the page that begins with this line
  awk -v first="$1" '/^```/ { inside = 0 } inside || ($0 == first && fenced) { inside = 1; print } { fenced = /^```/ }' docs/slurm.md
}
block '# sluice.yaml' >"$root/root/sluice.yaml"
block '#!/bin/bash' >"$root/root/engine.sbatch"
[ -s "$root/root/sluice.yaml" ] && [ -s "$root/root/engine.sbatch" ] || { echo "slurm_test: docs/slurm.md has no such blocks" >&2; exit 1; }
bash -n "$root/root/engine.sbatch"
cp bin/sluice "$root/usr/bin/sluice"
# What the page's script passes to vLLM, given to a simulated engine.
cat >"$root/usr/bin/vllm" <<'VLLM'
#!/bin/bash
set -euo pipefail
value() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" <<<"$2"; }
[ "$1" = serve ]
model=$2 host= port= transfer= events=
shift 2
while [ $# -gt 0 ]; do
  case $1 in
    --host) host=$2 ;; --port) port=$2 ;; --kv-transfer-config) transfer=$2 ;; --kv-events-config) events=$2 ;;
    *) echo "vllm: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
case $(value kv_role "$transfer") in kv_producer) role=prefill ;; kv_consumer) role=decode ;; esac
exec sluice sim --listen "$host:$port" --role "$role" --model "$model" --speed 5 --kv-events "$(value endpoint "$events")" --kv-replay "$(value replay_endpoint "$events")"
VLLM
chmod +x "$root/usr/bin/vllm"
mkdir -p "$root/etc/slurm" "$root/var/spool/slurmctld" "$root/var/spool/slurmd" "$root/run/munge" "$root/var/log/munge"
cat >"$root/etc/slurm/slurm.conf" <<'CONF'
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=node1 CPUs=2 CoresPerSocket=2 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
touch "$root/var/lib/gpu0" "$root/var/lib/gpu1" # Slurm wants the devices' files, and does not open them
echo 'NodeName=node1 Name=gpu File=/var/lib/gpu[0-1]' >"$root/etc/slurm/gres.conf"
printf '127.0.0.1 localhost\n10.0.0.9 node1\n' >"$root/etc/hosts"

cat >"$root/root/run.sh" <<'RUN'
#!/bin/bash
set -euo pipefail
cd /root
export HOME=/root
fail() { echo "FAIL  $*"; tail -n 20 /root/router.log /root/slurm-*.out /var/log/slurm*.log 2>/dev/null | sed 's/^/      /'; exit 1; }
within() { # within SECONDS WHAT COMMAND...: runs the command until it succeeds
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/root/said 2>&1; do
    [ $SECONDS -lt $end ] || { cat /root/said; fail "$what"; }
    sleep 0.2
  done
  echo "ok    $what"
}
ip link set lo up
ip address add 10.0.0.9/16 dev lo
dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
chown -R munge: /etc/munge /run/munge /var/log/munge /var/lib/munge && chmod 0400 /etc/munge/munge.key && chmod 0711 /run/munge
setpriv --reuid munge --regid munge --clear-groups munged
slurmctld && slurmd -N node1 || fail "slurmctld or slurmd does not start"
within 30 "Slurm $(sinfo --version | cut -d' ' -f2) has an idle node with GPUs" bash -c '[ "$(sinfo -h -o "%T %G")" = "idle gpu:2" ]'

export SLUICE_REGISTRATION_TOKEN=$(openssl rand -hex 16)
(umask 077 && echo "$SLUICE_REGISTRATION_TOKEN" >"$HOME/.sluice-token")
sluice check --config sluice.yaml >/dev/null || fail "sluice check refuses the page's configuration"
sluice serve --config sluice.yaml >router.log 2>&1 &
unset SLUICE_REGISTRATION_TOKEN # the jobs read the file

for role in prefill decode; do
  sbatch --test-only --export=ALL,ROLE=$role engine.sbatch 2>&1 | grep -q 'to start at' || fail "sbatch --test-only of $role"
done
echo "ok    sbatch --test-only accepts the script in both roles"
prefill=$(sbatch --parsable --export=ALL,ROLE=prefill engine.sbatch) decode=$(sbatch --parsable --export=ALL,ROLE=decode engine.sbatch)
within 30 "two jobs run on the node" bash -c '[ "$(squeue -h -t R | wc -l)" = 2 ]'
within 30 "the router is ready" curl -fsS http://10.0.0.9:8080/readyz
model=$(sed -n 's/^model=//p' engine.sbatch)
ask() { curl -sS --max-time 20 -D - -o answer -H 'Content-Type: application/json' -d "{\"model\": \"$model\", \"max_tokens\": 8, \"messages\": [{\"role\": \"user\", \"content\": \"$(seq -s ' ' 1 600)\"}]}" http://10.0.0.9:8080/v1/chat/completions | tr -d '\r'; }
head=$(ask)
grep -q '^HTTP/1.1 200' <<<"$head" && grep -qi "^x-sluice-prefill-worker: prefill-$prefill$" <<<"$head" && grep -qi "^x-sluice-worker: decode-$decode$" <<<"$head" || fail "a request: $head $(cat answer)"
echo "ok    a request is computed by prefill-$prefill and answered by decode-$decode"
sees() { [ "$(sluice workers --json | grep -o "\"$1\"" | sort -u | wc -l)" = "$2" ]; }
within 10 "sluice workers shows both" bash -c "$(declare -f sees); sees prefill-$prefill 1 && sees decode-$decode 1"

# What --signal=B:TERM@120 does two minutes before the end of the job.
scancel --batch --signal=TERM "$decode"
within 20 "at SIGTERM of the batch script its worker leaves the router" bash -c "$(declare -f sees); sees decode-$decode 0"
[ "$(squeue -h -j "$decode" -o %T)" = RUNNING ] || fail "the job ended before its streams had time to move"
curl -fsS "http://10.0.0.9:$((20000 + decode % 10000))/health" >/dev/null || fail "the engine stopped before its streams had time to move"
echo "ok    the job and its engine go on for the streams that move"

began=$SECONDS
scancel --signal=KILL --full "$prefill"
within 60 "a job that is killed leaves when its lease ends" bash -c "$(declare -f sees); sees prefill-$prefill 0"
RUN
chmod +x "$root/root/run.sh"
mkdir -p "$root/dev/pts"
status=0
unshare --net --uts --pid --mount --fork --kill-child bash -c '
  hostname node1
  mount -t proc proc "$1/proc"; mount --bind /dev "$1/dev"; mount --rbind /sys "$1/sys"
  exec chroot "$1" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 timeout 240 /root/run.sh' - "$root" &
namespace=$!
wait "$namespace" || status=$?
namespace=
[ "$status" = 0 ] || { echo "slurm_test: failed" >&2; exit 1; }
echo "slurm_test: all checks passed"
