#!/usr/bin/env bash
# Tests the packages in build/dist/ with the real tools: systemd-analyze for the units, dpkg and rpm in roots
# made of Debian packages for installation, upgrade from a package of an earlier version, removal and purge.
# Needs root and Debian's package registry; `make packages-test` builds the packages first.
set -euo pipefail
cd "$(dirname "$0")/.."

[ "$(id -u)" = 0 ] || { echo "packages-test: needs root, for chroot" >&2; exit 2; }
missing=()
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v rpm >/dev/null || missing+=(rpm)
command -v man >/dev/null || missing+=(man-db)
command -v groff >/dev/null || missing+=(groff-base)
[ -e /usr/share/bash-completion/bash_completion ] || missing+=(bash-completion)
command -v objdump >/dev/null || missing+=(binutils)
command -v zsh >/dev/null || missing+=(zsh)
command -v fish >/dev/null || missing+=(fish)
if [ ${#missing[@]} -gt 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >/dev/null
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1
fi

deb=$(ls -t build/dist/*.deb | head -1) rpm=$(ls -t build/dist/*.rpm | head -1)
work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-packages.XXXXXX")
root=$work/root
trap 'umount -q "$work"/*/proc 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
failed=0 skipped=
skip() { # skip WHAT WHY: says that a part is left out
  echo "skip  $1: $2"
  skipped=${skipped:+$skipped, }$1
}
check() { # check WHAT COMMAND...
  local what=$1
  shift
  if "$@" >"$work/out" 2>&1; then echo "ok    $what"; else
    echo "FAIL  $what"
    sed 's/^/      /' "$work/out"
    failed=1
  fi
}

# The root: Debian's minimal system, kept in the cache.
cache=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/debian-root.tar
if [ ! -f "$cache" ]; then
  echo "packages-test: making a Debian root (once)" >&2
  debootstrap --variant=minbase --include=systemd,ca-certificates bookworm "$work/base" >"$work/log" 2>&1 || { tail -20 "$work/log" >&2; exit 1; }
  mkdir -p "${cache%/*}"
  tar -C "$work/base" -cf "$cache.part" . && mv "$cache.part" "$cache"
  rm -rf "$work/base"
fi
make_root() { # make_root DIR
  mkdir "$1" && tar -C "$1" -xf "$cache"
  mount -t proc proc "$1/proc" 2>/dev/null || true
}
make_root "$root"
in_root() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }

# Units. `verify` looks up the programs that they start, so it sees those of the package.
units=$work/units
mkdir -p "$units"
dpkg-deb -x "$deb" "$work/files"
for unit in sluice.service sluice-sidecar.service sluice.socket sluice-sidecar.socket; do
  sed "s#/usr/bin/sluice#$work/files/usr/bin/sluice#" "$work/files/usr/lib/systemd/system/$unit" >"$units/$unit"
done
# Without --recursive-errors a wrong key is a warning, and the exit status 0.
verify() { systemd-analyze verify --man=no --recursive-errors=one "$@"; }
check "systemd-analyze verify" verify "$units"/*
mkdir "$work/wrong"
refuses_unit() { # refuses_unit UNIT EXPRESSION: the unit as sed changes it
  sed "$2" "$units/$1" >"$work/wrong/$1"
  ! cmp -s "$units/$1" "$work/wrong/$1" || { echo "$2 changes nothing"; return 1; }
  ! verify "$work/wrong/$1"
}
check "it refuses a key that does not exist" refuses_unit sluice.service 's/^LimitNOFILE=/LimitNOFIEL=/'
check "it refuses a wrong value" refuses_unit sluice-sidecar.service 's/^Type=notify$/Type=notifies/'
check "it refuses a program that does not exist" refuses_unit sluice-sidecar.service 's#^ExecStart=#&/nowhere#'
rm -r "$work/wrong"
# A sidecar reads no file, so a reload would report a success and change nothing.
check "sluice-sidecar has no reload" bash -c '! grep "^ExecReload=" "$1"' - "$units/sluice-sidecar.service"
for unit in sluice sluice-sidecar; do
  check "systemd-analyze security of $unit: at most 5.0" systemd-analyze security --offline=true --threshold=50 "$units/$unit.service"
done

# The binary links only the C library.
libraries() { [ "$(ldd "$1" | grep -c '=> ')" -le 1 ] || { ldd "$1"; return 1; }; }
check "the binary loads only the C library" libraries "$work/files/usr/bin/sluice"

# What the packages depend on is what the files need, as the loader sees it.
rpm -qp --nosignature --requires "$rpm" >"$work/rpm.requires"
needed=$(for file in "$work/files/usr/bin/sluice" $(ls "$work"/files/usr/lib/sluice/*.so 2>/dev/null); do objdump -p "$file"; done)
glibc=$(grep -o ' GLIBC_[0-9][0-9.]*$' <<<"$needed" | sed 's/.*_//' | sort -Vu | tail -1)
depends() { # depends DEB RPM: both packages have the dependency
  dpkg-deb -f "$deb" Depends | tr , '\n' | sed 's/^ *//' | grep -Fx -- "$1" && grep -Fx -- "$2" "$work/rpm.requires" ||
    { dpkg-deb -f "$deb" Depends; cat "$work/rpm.requires"; return 1; }
}
check "the packages depend on glibc $glibc or later, which the files need" depends "libc6 (>= $glibc)" "glibc >= $glibc"
for name in $(sed -n 's/^ *NEEDED *//p' <<<"$needed" | grep -Ev '^(libc\.so\.6|libm\.so\.6|ld-linux.*)$' | sort -u); do
  check "the packages depend on $name, which a file needs" depends "$([ "$name" != libgcc_s.so.1 ] || echo libgcc-s1)" "$name()(64bit)"
done
older() { # a system with an older C library does not configure the package
  local result=0
  cp "$deb" "$root/sluice.deb" && cp "$root/var/lib/dpkg/status" "$work/status"
  sed -i '/^Package: libc6$/,/^$/s/^Version: .*/Version: 2.31-13/' "$root/var/lib/dpkg/status"
  in_root dpkg -i /sluice.deb >"$work/older" 2>&1 || result=$?
  in_root dpkg -P sluice >/dev/null 2>&1
  cp "$work/status" "$root/var/lib/dpkg/status"
  cat "$work/older"
  [ "$result" != 0 ] && grep -q "depends on libc6 (>= $glibc)" "$work/older"
}
check "a system with glibc 2.31 refuses the package" older
if grep -qx VERSION_CODENAME=bookworm /etc/os-release; then
  check "docs/install.md names that version" grep -q "Built on Debian 12 they need glibc $glibc:" docs/install.md
fi

# The SBOM, compared with the binary's own list of modules, the licences and Cargo.lock.
sbom() {
  go version -m "$work/files/usr/bin/sluice" >"$work/modules"
  python3 - "$work/files/usr/share/doc/sluice" "$work/modules" "$([ ! -e "$work/files/usr/lib/sluice/libsluice_tokenizer.so" ] || echo native/tokenizer)" <<'PYTHON'
import json, os, re, subprocess, sys
folder, modules, crates = sys.argv[1:]
sbom = json.load(open(folder + "/sluice.cdx.json"))
assert sbom["bomFormat"] == "CycloneDX" and sbom["metadata"]["component"]["name"] == "sluice", sbom["metadata"]
components = {(c["name"], c["version"]): c for c in sbom["components"]}
refs = {c["bom-ref"] for c in sbom["components"]} | {sbom["metadata"]["component"]["bom-ref"]}
unknown = [r for d in sbom["dependencies"] for r in [d["ref"], *d.get("dependsOn", [])] if r not in refs]
assert not unknown, f"dependencies on what is not a component: {unknown}"
edges = {d["ref"]: d.get("dependsOn", []) for d in sbom["dependencies"]}
reached, todo = set(), [sbom["metadata"]["component"]["bom-ref"]]
while todo:
    ref = todo.pop()
    if ref not in reached:
        reached.add(ref)
        todo += edges.get(ref, [])
text = open(modules).read()
found = re.findall(r"^\tdep\t(\S+)\t(\S+)", text, re.MULTILINE) + [("std", re.search(r": (go\S+)", text)[1])]
assert len(found) > 20, found
missing = [m for m in found if m not in components]
assert not missing, f"modules of the binary that the SBOM lacks: {missing}"
# What is linked statically has a licence in the package.
libraries = [n for n in os.listdir(folder + "/licenses") if n != "libsluice_tokenizer"]
assert {"libzmq", "libsodium", "libstdc++"} <= set(libraries), libraries
versions = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version}\n"], capture_output=True, text=True, check=True).stdout.split("\n")
for name in libraries:
    c = [c for (n, _), c in components.items() if n == name]
    assert len(c) == 1 and c[0]["bom-ref"] in reached, f"{name}: {c}"
    assert c[0]["description"].split()[-1] + " " + c[0]["version"] in versions, c
if crates:
    lock = re.findall(r'\[\[package\]\]\nname = "(.*)"\nversion = "(.*)"\n', open(crates + "/Cargo.lock").read())
    assert len(lock) > 100, lock
    missing = [c for c in lock if not components.get(c, {}).get("purl", "").startswith("pkg:cargo/")]
    assert not missing, f"crates that the SBOM lacks: {missing}"
    for name in ("tokenizers", "fastokens", "minijinja"):
        c = [c for (n, _), c in components.items() if n == name]
        assert len(c) == 1 and c[0]["scope"] == "required" and c[0]["licenses"] and c[0]["hashes"] and c[0]["bom-ref"] in reached, c
print(len(components), "components")
PYTHON
}
check "the SBOM has the modules, the static libraries and the crates" sbom
check "it is the one beside the packages" cmp "$work/files/usr/share/doc/sluice/sluice.cdx.json" "$(ls -t build/dist/*.cdx.json | head -1)"

# Man pages and completion, with the real programs.
pages=$work/files/usr/share/man/man1
check "a man page for every command" bash -c '
  for name in $("$1/usr/bin/sluice" __complete "" 2>/dev/null | sed -n "s/^\([a-z][a-z-]*\)\t.*/\1/p"); do
    [ -s "$2/sluice-$name.1.gz" ] || { echo "no page of $name"; exit 1; }
    n=$((${n:-0} + 1))
  done
  [ "${n:-0}" -ge 15 ] || { echo "only ${n:-0} commands"; exit 1; }' - "$work/files" "$pages"
lint_pages() { # groff finds no fault in a page, and man shows it
  local page said
  for page in "$pages"/*.gz; do
    said=$(zcat "$page" | groff -man -ww -Wbreak -Tutf8 -z 2>&1)
    [ -z "$said" ] || { echo "${page##*/}: $said"; return 1; }
    man -l "$page" 2>/dev/null | grep -q EXAMPLE || { echo "${page##*/}: no examples"; return 1; }
  done
}
check "groff accepts the man pages" lint_pages
completes() { # completes SHELL COMMAND...: the shell's completion of "sluice dem" and of a flag's value
  local said
  said=$(PATH=$work/files/usr/bin:$PATH timeout 20 "$@" 2>&1)
  [[ $said == *demo* && $said == *round_robin* ]] || { echo "$said"; return 1; }
}
bash_completion='compopt() { :; }; source /usr/share/bash-completion/bash_completion; source "$0"
  complete_line() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMP_TYPE=9; __start_sluice; echo "${COMPREPLY[@]}"; }
  complete_line sluice dem; complete_line sluice serve --policy round'
check "completion in bash" completes bash -c "$bash_completion" "$work/files/usr/share/bash-completion/completions/sluice"
check "completion in fish" completes fish --no-config -c "source $work/files/usr/share/fish/vendor_completions.d/sluice.fish
  complete -C 'sluice dem'; complete -C 'sluice serve --policy round'"
# zsh completes in a terminal only: _describe, which shows the choices, is replaced by a print.
check "completion in zsh" completes zsh -f -c "autoload -Uz compinit && compinit -u -d $work/zcompdump
  source $work/files/usr/share/zsh/vendor-completions/_sluice
  _describe() { for last; do :; done; print -l -- \${(P)last}; }; compstate=()
  words=(sluice dem) CURRENT=2; _sluice; words=(sluice serve --policy round) CURRENT=4; _sluice"

# The same files as packages of an earlier version, from which to upgrade. Its sluice.yaml and its environment of
# the router differ from those of the package under test; its flags of the sidecar do not.
nfpm=$(ls -t "${cache%/*}"/tools/v*/nfpm | head -1)
mkdir "$work/earlier"
sed "s/^# All fields: .*/# A comment of the earlier version./" scripts/packaging/sluice.yaml >"$work/earlier/sluice.yaml"
{ cat scripts/packaging/default.sluice && echo "# A comment of the earlier version."; } >"$work/earlier/default.sluice"
sed -e "s#scripts/packaging/sluice.yaml#$work/earlier/sluice.yaml#" -e "s#scripts/packaging/default.sluice,#$work/earlier/default.sluice,#" scripts/packaging/nfpm.yaml >"$work/earlier/nfpm.yaml"
. build/packages/depends
for format in deb rpm; do VERSION=0~earlier ARCH=$(go env GOARCH) "$nfpm" package --config "$work/earlier/nfpm.yaml" --packager "$format" --target "$work/earlier/" >/dev/null; done

# A system that runs systemd, as the maintainer scripts see it: systemctl records how it is called. It knows the options
# of systemd 249 (Ubuntu 22.04).
fake_systemd() {
  mkdir -p "$root/run/systemd/system"
  mv "$root/usr/bin/systemctl" "$root/usr/bin/systemctl.real"
  cat >"$root/usr/bin/systemctl" <<'SH'
#!/bin/sh
echo "$*" >>/systemctl.calls
case "$*" in
  *--kill-whom*) echo "systemctl: unrecognized option" >&2; exit 1 ;;
  "kill "*) [ ! -e /systemctl.fails ] ;;
  "is-active --quiet "*) grep -qx "$3" /systemctl.active ;;
esac
SH
  chmod 0755 "$root/usr/bin/systemctl"
  : >"$root/systemctl.active"
}
real_systemd() { rm -r "$root/run/systemd/system" && mv "$root/usr/bin/systemctl.real" "$root/usr/bin/systemctl"; }
active() { rm -f "$root/systemctl.calls" "$root/systemctl.fails"; printf '%s\n' "$@" >"$root/systemctl.active"; }
calls() { # calls LINE...: systemctl was called in this way; daemon-reload, as often as scripts like, is among the calls
  grep -qx daemon-reload "$root/systemctl.calls" && diff <(printf '%s\n' "$@" | grep .) <(grep -vx daemon-reload "$root/systemctl.calls")
}
unit_calls() { # unit_calls PREFIX INSTALL UPGRADE REMOVE: the commands, as names of functions
  local prefix=$1
  check "${prefix}systemctl is replaced" fake_systemd
  active ''
  check "${prefix}with systemd: install" "$2"
  check "${prefix}with systemd: an installation starts and stops nothing" calls "is-active --quiet sluice" "is-active --quiet sluice-sidecar"
  active sluice sluice-sidecar
  check "${prefix}with systemd: upgrade" "$3"
  check "${prefix}with systemd: an upgrade replaces the router and the sidecar by a hot restart, and restarts nothing" calls \
    "is-active --quiet sluice" "kill --kill-who=main --signal=USR2 sluice" \
    "is-active --quiet sluice-sidecar" "kill --kill-who=main --signal=USR2 sluice-sidecar"
  active sluice
  touch "$root/systemctl.fails"
  check "${prefix}with systemd: upgrade where the signal cannot be sent" "$3"
  check "${prefix}with systemd: it restarts the router, which alone runs" calls \
    "is-active --quiet sluice" "kill --kill-who=main --signal=USR2 sluice" "restart sluice" "is-active --quiet sluice-sidecar"
  active sluice sluice-sidecar
  check "${prefix}with systemd: remove" "$4"
  check "${prefix}with systemd: a removal stops and disables every unit" calls \
    "disable --now sluice.socket sluice.service sluice-sidecar.socket sluice-sidecar.service"
  check "${prefix}systemctl is as before" real_systemd
}

# Installation.
cp "$deb" "$root/sluice.deb"
cp "$work"/earlier/*.deb "$root/earlier.deb"
check "install" in_root dpkg -i /earlier.deb
check "the program runs and knows its version" in_root sluice version
check "the schema that the configuration names is there" in_root test -s /usr/share/sluice/sluice.schema.json
check "it is the program's" bash -c 'cmp <(chroot "$1" /usr/bin/sluice config schema) "$1/usr/share/sluice/sluice.schema.json"' - "$root"
check "the configuration works unchanged" in_root sluice check --config /etc/sluice/sluice.yaml
check_as_user() { # what the unit runs before it reloads the service
  local line
  line=$(sed -n "s/^ExecReload=.bin.sh -c '\(.*\)'$/\1/p" "$root/usr/lib/systemd/system/sluice.service")
  [ -n "$line" ] && in_root setpriv --reuid sluice --regid sluice --clear-groups sh -c "$line"
}
check "the unit's reload accepts the configuration" check_as_user
break_configuration() { cp -a "$root/etc/sluice/sluice.yaml" "$work/sluice.yaml" && echo 'lissten: 1' >>"$root/etc/sluice/sluice.yaml"; }
refuses() { ! check_as_user && in_root grep -q lissten /etc/sluice/sluice.yaml; }
check "a field that does not exist is added" break_configuration
check "the unit's reload refuses it" refuses
check "the configuration is as before" cp -a "$work/sluice.yaml" "$root/etc/sluice/sluice.yaml"
owner() { [ "$(in_root stat -c '%U:%G %a' "$1")" = "$2" ] || { in_root stat "$1"; return 1; }; }
check "the configuration is readable by the service only" owner /etc/sluice/sluice.yaml "root:sluice 640"
check "the state directory" owner /var/lib/sluice "sluice:sluice 750"
as_sluice() { in_root XDG_RUNTIME_DIR=/run/sluice setpriv --reuid sluice --regid sluice --clear-groups "$@"; }
in_root install -d -m 0700 -o sluice -g sluice /run/sluice # RuntimeDirectory= of the unit
serves() { # the service's command, as its user, answers /livez; the commands of docs/install.md find it
  local result=1
  as_sluice timeout 20 sluice serve --config /etc/sluice/sluice.yaml --listen 127.0.0.1:18080 --admin 127.0.0.1:19901 >"$work/serve" 2>&1 &
  for _ in $(seq 100); do
    curl -fsS http://127.0.0.1:18080/livez >/dev/null 2>&1 && { result=0; break; }
    sleep 0.1
  done
  [ "$result" = 0 ] && { as_sluice sluice reload --dry-run || result=1; }
  kill %1
  wait
  [ "$result" = 0 ] || cat "$work/serve"
  return "$result"
}
check "it serves as user sluice, who can reload it" serves

# Upgrade. A file that only the operator has edited stays, one that only the package has changed is replaced, and
# of one that both have changed the operator's version stays and the package's is written beside it.
packaged=(/etc/sluice/sluice.yaml /etc/default/sluice)
differ() { # the earlier package's files are not those of the package under test
  local file
  for file in "${packaged[@]}"; do
    grep -q "A comment of the earlier version" "$root$file" || { echo "$file is not the earlier version's"; return 1; }
    ! cmp -s "$root$file" "$work/files$file" || { echo "$file is the same in both packages"; return 1; }
  done
  cmp "$root/etc/default/sluice-sidecar" "$work/files/etc/default/sluice-sidecar"
}
edit() { local file; for file in /etc/sluice/sluice.yaml /etc/default/sluice-sidecar; do echo "# edited" >>"$root$file"; done; }
stays() { in_root grep -q "# edited" "$1" && { [ "$1" != /etc/sluice/sluice.yaml ] || in_root grep -q "A comment of the earlier version" "$1"; }; }
beside() { # beside FILE [SUFFIX]: the package's version is at FILE.SUFFIX; without SUFFIX there is none
  local found
  found=$(cd "$root" && ls ".$1".* 2>/dev/null || true)
  [ "$found" = "${2:+.$1.$2}" ] || { echo "found $found"; return 1; }
  [ -z "${2:-}" ] || cmp "$root$1.$2" "$work/files$1"
}
upgraded() { # upgraded NAME SUFFIX
  check "$1a configuration that the operator and the package have changed is the operator's" stays /etc/sluice/sluice.yaml
  check "$1the package's version of it is beside it, as .$2" beside /etc/sluice/sluice.yaml "$2"
  check "$1a file that only the operator has edited stays" stays /etc/default/sluice-sidecar
  check "$1nothing is beside that" beside /etc/default/sluice-sidecar
  check "$1a file that only the package has changed is replaced" cmp "$root/etc/default/sluice" "$work/files/etc/default/sluice"
  check "$1nothing is beside that either" beside /etc/default/sluice
  check "$1the new program accepts the configuration that stayed" check_as_user
}
check "the earlier version has other configuration files" differ
edit
check "upgrade" in_root dpkg -i --force-confdef --force-confold /sluice.deb
check "the version is the later one" bash -c 'dpkg --compare-versions "$1" gt 0~earlier && [ "$1" = "$2" ]' - "$(in_root dpkg-query -W -f '${Version}' sluice)" "$(dpkg-deb -f "$deb" Version)"
upgraded "" dpkg-dist
check "its owner stays" owner /etc/sluice/sluice.yaml "root:sluice 640"

# Removal and purge.
check "remove" in_root dpkg -r sluice
check "the program is gone" in_root test ! -e /usr/bin/sluice
check "the configuration stays" in_root test -e /etc/sluice/sluice.yaml
check "purge" in_root dpkg -P sluice
for path in /etc/sluice /etc/default/sluice /etc/default/sluice-sidecar /var/lib/sluice /var/log/sluice /usr/lib/systemd/system/sluice.service; do
  check "$path is gone" in_root test ! -e "$path"
done

install_deb() { in_root dpkg -i /earlier.deb; }
upgrade_deb() { in_root dpkg -i --force-confdef --force-confold /sluice.deb; }
remove_deb() { in_root dpkg -r sluice; }
unit_calls "" install_deb upgrade_deb remove_deb
check "purge again" in_root dpkg -P sluice

# The .rpm.
root=$work/rpm-root
make_root "$root"
# Debian's packages are not in rpm's database, so rpm cannot find what the package depends on.
in_rpm() { rpm --root "$root" --dbpath /var/lib/rpm --nosignature "$@"; }
in_rpm --initdb
check ".rpm: install" in_rpm -i --nodeps "$work"/earlier/*.rpm
check ".rpm: the program runs and knows its version" in_root sluice version
check ".rpm: every file is as in the package" in_rpm -V --nodeps --nouser --nogroup --nomode sluice
check ".rpm: the script made the user" in_root getent passwd sluice
check ".rpm: the configuration is readable by the service only" owner /etc/sluice/sluice.yaml "root:sluice 640"
check ".rpm: the state directory" owner /var/lib/sluice "sluice:sluice 750"
check ".rpm: the unit's reload accepts the configuration" check_as_user
check ".rpm: the earlier version has other configuration files" differ
edit
check ".rpm: upgrade" in_rpm -U --nodeps "$rpm"
check ".rpm: the version is the later one" [ "$(in_rpm -q --qf '%{VERSION}-%{RELEASE}' sluice)" = "$(rpm -qp --nosignature --qf '%{VERSION}-%{RELEASE}' "$rpm")" ]
upgraded ".rpm: " rpmnew
check ".rpm: its owner stays" owner /etc/sluice/sluice.yaml "root:sluice 640"
check ".rpm: remove" in_rpm -e sluice
check ".rpm: the program and the units are gone" in_root sh -c '! [ -e /usr/bin/sluice ] && ! ls /usr/lib/systemd/system/sluice*'
check ".rpm: the edited configuration is kept aside" in_root grep -q '# edited' /etc/sluice/sluice.yaml.rpmsave
check ".rpm: the state stays" in_root test -d /var/lib/sluice
check ".rpm: install again" in_rpm -i --nodeps "$rpm"
check ".rpm: it has the packaged configuration" in_root sh -c 'sluice check --config /etc/sluice/sluice.yaml && ! grep "# edited" /etc/sluice/sluice.yaml'
check ".rpm: remove again" in_rpm -e sluice
check ".rpm: an unedited configuration goes with it" in_root test ! -e /etc/sluice/sluice.yaml
install_rpm() { in_rpm -i --nodeps "$work"/earlier/*.rpm; }
upgrade_rpm() { in_rpm -U --nodeps --replacepkgs "$rpm"; }
remove_rpm() { in_rpm -e sluice; }
unit_calls ".rpm: " install_rpm upgrade_rpm remove_rpm
rpm -qpl --nosignature "$rpm" | sort >"$work/rpm.list"
for unit in sluice.service sluice.socket sluice-sidecar.service sluice-sidecar.socket; do
  check "the .rpm has $unit" grep -qx "/usr/lib/systemd/system/$unit" "$work/rpm.list"
done
dpkg-deb -c "$deb" | awk '$1 !~ /^d/ {print substr($6, 2)}' | sed 's#/usr/share/zsh/vendor-completions/#/usr/share/zsh/site-functions/#' | sort >"$work/deb.list"
observability() { # the dashboards and the rules of the tree, without the rules' tests, are in the package
  local file there count=0
  for file in $(git ls-files docs/observability/dashboards docs/observability/rules | grep -v '/tests.yaml$'); do
    there=/usr/share/sluice/${file#docs/observability/} count=$((count + 1))
    cmp "$file" "$work/files$there" && grep -qx "$there" "$work/rpm.list" || { echo "$there"; return 1; }
  done
  [ "$count" -ge 7 ] || { echo "only $count files"; return 1; }
}
check "the dashboards and the rules are under /usr/share/sluice" observability
check "the licences of the static libraries are in the package" test -s "$work/files/usr/share/doc/sluice/licenses/libzmq"
if command -v cargo >/dev/null; then
  check "the native tokenizer is in the package" grep -qx /usr/lib/sluice/libsluice_tokenizer.so "$work/deb.list"
  check "the licences of its crates are in the package" test -s "$work/files/usr/share/doc/sluice/licenses/libsluice_tokenizer"
else
  skip "the native tokenizer" "no cargo"
fi
check "both packages have the same files" bash -c "comm -3 '$work/deb.list' <(grep -Fxf '$work/deb.list' '$work/rpm.list') | tee /dev/stderr | wc -l | grep -qx 0"

# The wheels, in an environment of their own.
wheels() {
  python3 -m venv "$work/venv" && "$work/venv/bin/python" -m pip install -q --disable-pip-version-check build/dist/sluice_engineapi-*.whl build/dist/sluice_connector-*.whl
}
check "both wheels can be installed, with what they depend on" wheels
imports() ( # in an empty folder, so that nothing of the repository is found
  mkdir -p "$work/empty" && cd "$work/empty" && "$work/venv/bin/python" -W error::DeprecationWarning - <<'PYTHON'
import importlib.metadata, pathlib
import sluice_connector, sluice_connector.reporter, sluice_connector.settings
from sluice_engineapi import Context, EngineClient, Request
assert Request(token_ids=[1], model="m").model == "m"
for module, name in ((sluice_connector, "sluice-connector"), (importlib.import_module("sluice_engineapi"), "sluice-engineapi")):
    assert "site-packages" in module.__file__, module.__file__
    about = importlib.metadata.metadata(name)
    assert about["Version"] == "0.1.0" and about["License-Expression"] == "Apache-2.0" and about["Summary"] and about["Requires-Python"], about
    licences = [f for f in importlib.metadata.files(name) if f.name == "LICENSE"]
    assert len(licences) == 1 and "Apache License" in licences[0].read_text(), licences
assert sluice_connector.__version__ == importlib.metadata.version("sluice-connector")
assert (pathlib.Path(importlib.import_module("sluice_engineapi").__file__).parent / "py.typed").exists()
PYTHON
)
check "the wheels: modules, metadata, licence, types" imports
again() { # the same commit gives the same bytes
  scripts/wheels.sh "$work/again" && for wheel in "$work"/again/*.whl; do cmp "$wheel" "build/dist/${wheel##*/}" || return 1; done
}
check "a second build of the wheels has the same bytes" again

[ "$failed" = 0 ] || { echo "packages-test: some checks failed" >&2; exit 1; }
echo "packages-test: all checks passed${skipped:+ but skipped: $skipped}"
