#!/bin/sh
# Checks what is in deploy/ and that docs/operations.md tells the truth. What a missing program would check is passed over,
# and said so.
# usage: check.sh
# Backticks are Markdown's here, and not the shell's.
# shellcheck disable=SC2016
set -eu
cd "$(dirname "$0")/.."
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

# Every setting is in the table of settings, and no other.
settings=$(grep -o '"POSTRIDER_[A-Z_]*"' src/settings/environment.rs | tr -d '"' | grep -v '^POSTRIDER_$' | sort -u)
told=$(sed -n 's/^| `\(POSTRIDER_[A-Z_]*\)`.*/\1/p' docs/operations.md | sort -u)
[ "$settings" = "$told" ] || fail "docs/operations.md does not have the settings of src/settings/environment.rs"

# Every metric is in the table of metrics, and alerts and dashboards use no other.
# A call may be broken over lines.
metrics=$(find src dispatcher/src dashboard/src -name '*.rs' -exec cat {} + | tr -d ' \n' |
    grep -oE '(counter|gauge|histogram)!\("postrider_[a-z_]+' | sed 's/.*"//' | sort -u)
told=$(sed -n 's/^| `\(postrider_[a-z_]*\)[`{].*/\1/p' docs/operations.md | sort -u)
[ "$metrics" = "$told" ] || fail "docs/operations.md does not have the metrics that the code counts"
for used in $(grep -hoE '\bpostrider_[a-z_]+\{' deploy/prometheus/alerts.yaml deploy/grafana/postrider.json | tr -d '{' |
    sed -E 's/_(bucket|sum|count)$//' | sort -u); do
    echo "$metrics" | grep -qx "$used" || fail "deploy/ uses $used, which nothing counts"
done

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
exit $failed
