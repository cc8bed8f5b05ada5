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
check promtool promtool test rules deploy/prometheus/outages_test.yaml
for rules in alerts slo; do
    check promtool promtool check rules "deploy/prometheus/$rules.yaml"
    check promtool promtool test rules "deploy/prometheus/${rules}_test.yaml"
done
sed -n 's|.*runbook_url: .*\(docs/runbooks/[A-Za-z]*.md\).*|\1|p' deploy/prometheus/*.yaml | sort -u |
    while read -r page; do
        [ -e "$page" ] || { fail "$page does not exist" && exit 1; }
    done || failed=1
# Fragments of Kustomize are not cluster resources, and a PodMonitor needs the operator's CRDs.
find deploy/kubernetes -name '*.yaml' ! -name kustomization.yaml ! -name pod-monitor.yaml | sort |
    while read -r file; do
        check kubernetes-validate kubernetes-validate --strict --quiet "$file"
        [ "$failed" = 0 ] || exit 1
    done || failed=1

# kustomization COMPONENT…: writes an overlay of the base with these components.
overlay=$PWD/target/deploy-check
kustomization() {
    mkdir -p "$overlay"
    {
        printf 'resources: [../../deploy/kubernetes/base]\ncomponents:\n'
        printf -- '  - ../../deploy/kubernetes/components/%s\n' "$@"
    } >"$overlay/kustomization.yaml"
}
build() {
    if command -v kustomize >/dev/null; then
        kustomize build "$1"
    elif command -v kubectl >/dev/null; then
        kubectl kustomize "$1"
    else
        echo "check.sh: neither kustomize nor kubectl is installed: skipped" >&2
        return 3
    fi
}
# built DIRECTORY: builds it and validates what comes out.
built() {
    code=0
    build "$1" >"$overlay/built.yaml" || code=$?
    case $code in
    0) check kubernetes-validate kubernetes-validate --strict --quiet "$overlay/built.yaml" ;;
    3) ;;
    *) fail "building $1 failed" ;;
    esac
}
kustomization ingress grpc autoscaling egress-proxy
built deploy/kubernetes/base
built deploy/kubernetes/example
built "$overlay"
kustomization prometheus-operator
build "$overlay" >/dev/null || [ $? = 3 ] || fail "building with prometheus-operator failed"

check python3 python3 -m json.tool deploy/grafana/postrider.json /dev/null
for file in deploy/systemd/*.service; do
    check systemd-analyze systemd-analyze security --offline=yes --threshold=20 "$file"
done
check openapi-generator-cli openapi-generator-cli validate --recommend -i docs/openapi.json
exit $failed
