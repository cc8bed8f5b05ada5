#!/bin/sh
# Checks what is in deploy/, and that the API's description is one that clients can be made from. What a missing program would check is passed over, and said so. (Whether what is told of
# settings and metrics is true is a test: src/settings/tests.rs, tests/it/figures.rs.)
# usage: check.sh
set -eu
cd "$(dirname "$0")/.."
tools=$PWD/target/deploy-tools
PATH=$tools/bin:$tools/prometheus/usr/bin:$PATH
failed=0
fail() {
    echo "check.sh: $*" >&2
    failed=1
}
# check NAME COMMAND…: runs it where there is a program of this name.
check() {
    name=$1
    shift
    if ! command -v "$name" >/dev/null; then
        echo "check.sh: $name is not installed: passed over" >&2
    elif ! output=$("$@" 2>&1); then
        fail "$*"
        echo "$output" >&2
    fi
}

# What checks comes from PyPI, and promtool from Debian's package, unpacked and not installed: it would start a service.
get_tools() {
    [ ! -e "$tools/installed" ] || return 0
    mkdir -p "$tools/prometheus"
    if ! python3 -m venv "$tools" || ! "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
        --requirement deploy/requirements.txt; then
        echo "check.sh: the tools of deploy/requirements.txt can't be had" >&2
        return 0
    fi
    if ! command -v promtool >/dev/null; then
        (cd "$tools" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb) ||
            { echo "check.sh: promtool can't be had" >&2 && return 0; }
    fi
    touch "$tools/installed"
}
get_tools

check shellcheck shellcheck deploy/check.sh deploy/install.sh
check hadolint hadolint deploy/Dockerfile
check yamllint yamllint -s -c deploy/.yamllint deploy
check promtool promtool check rules deploy/prometheus/alerts.yaml
check promtool promtool test rules deploy/prometheus/alerts_test.yaml
for file in deploy/kubernetes/*.yaml; do
    case $file in
    # One has no kind that the cluster knows, the other gets its name only there.
    */kustomization.yaml | */migrate.yaml) ;;
    *) check kubernetes-validate kubernetes-validate --strict --quiet "$file" ;;
    esac
done
for file in deploy/systemd/*.service; do
    check systemd-analyze systemd-analyze security --offline=yes --threshold=20 "$file"
done
check openapi-generator-cli openapi-generator-cli validate --recommend -i docs/openapi.json
exit $failed
