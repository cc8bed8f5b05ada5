#!/bin/sh
# Checks the files in deploy/, and that clients can be generated from the OpenAPI document. Checks whose tool is missing are
# skipped with a message. (Documented settings and metrics, and runbooks, are checked by src/settings/tests.rs,
# tests/it/figures.rs and tests/it/runbooks.rs.)
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
# check NAME COMMAND…: runs the command if the program NAME is installed.
check() {
    name=$1
    shift
    if ! command -v "$name" >/dev/null; then
        echo "check.sh: $name is not installed: skipped" >&2
    elif ! output=$("$@" 2>&1); then
        fail "$*"
        echo "$output" >&2
    fi
}

# The tools come from PyPI. promtool comes from Debian's package, which is only unpacked: installing it would start a service.
get_tools() {
    [ ! -e "$tools/installed" ] || return 0
    mkdir -p "$tools/prometheus"
    if ! python3 -m venv "$tools" || ! "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
        --requirement deploy/requirements.txt; then
        echo "check.sh: could not install the tools in deploy/requirements.txt" >&2
        return 0
    fi
    if ! command -v promtool >/dev/null; then
        (cd "$tools" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb) ||
            { echo "check.sh: could not download promtool" >&2 && return 0; }
    fi
    touch "$tools/installed"
}
get_tools

check shellcheck shellcheck deploy/check.sh deploy/install.sh
check hadolint hadolint deploy/Dockerfile
check yamllint yamllint -s -c deploy/.yamllint deploy
check promtool promtool check rules deploy/prometheus/alerts.yaml
check promtool promtool test rules deploy/prometheus/alerts_test.yaml deploy/prometheus/outages_test.yaml
for file in deploy/kubernetes/*.yaml; do
    case $file in
    # kustomization.yaml is not a cluster resource, and migrate.yaml uses generateName.
    */kustomization.yaml | */migrate.yaml) ;;
    *) check kubernetes-validate kubernetes-validate --strict --quiet "$file" ;;
    esac
done
for file in deploy/systemd/*.service; do
    check systemd-analyze systemd-analyze security --offline=yes --threshold=20 "$file"
done
check openapi-generator-cli openapi-generator-cli validate --recommend -i docs/openapi.json
exit $failed
