#!/bin/sh
# Installs what a development machine lacks, with the system's own package manager.
# usage: install.sh [postgres] [pgbouncer] [python] [curl] [jq] [openssl] [namespaces] [strace] [browser] [patroni]
# Does nothing, and needs no network, if everything is present. Starts no service and creates no system cluster.
set -eu

postgres_major_min=14

# Prints the major version of the newest installed server, if any.
postgres_major() {
    for program in "$(command -v postgres || true)" /usr/lib/postgresql/*/bin/postgres /usr/pgsql-*/bin/postgres \
        /usr/libexec/postgresql*/postgres /usr/lib/postgresql*/bin/postgres /opt/homebrew/opt/postgresql*/bin/postgres \
        /usr/local/opt/postgresql*/bin/postgres /usr/local/pgsql/bin/postgres; do
        # Some systems ship hstore in a separate package.
        [ -x "$program" ] && has_hstore "$program" && "$program" --version
    done 2>/dev/null | sed -n 's/.*(PostgreSQL) \([0-9]*\).*/\1/p' | sort -n | tail -n 1
}

has_hstore() {
    folder=$(dirname "$(readlink -f "$1")")
    [ ! -x "$folder/pg_config" ] || [ -e "$("$folder/pg_config" --sharedir)/extension/hstore.control" ]
}

# Prints the programs that are not installed. On Debian some are not in the PATH of non-root users.
absent() {
    for program in "$@"; do
        command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || echo "$program"
    done
}

has() {
    case $1 in
    postgres)
        major=$(postgres_major)
        [ -n "$major" ] && [ "$major" -ge $postgres_major_min ]
        ;;
    # On Debian it is not in the PATH of non-root users.
    pgbouncer) [ -x /usr/sbin/pgbouncer ] || command -v pgbouncer >/dev/null ;;
    python) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    curl | jq | openssl) command -v "$1" >/dev/null ;;
    # Some tests create a network namespace, which only Linux has.
    namespaces) [ "$(uname)" != Linux ] || { command -v ip && command -v unshare; } >/dev/null ;;
    # A test watches outgoing connections with it. Linux only.
    strace) [ "$(uname)" != Linux ] || command -v strace >/dev/null ;;
    # For a cluster whose primary changes.
    patroni) [ -z "$(absent patroni etcd etcdctl haproxy)" ] ;;
    browser) command -v chromium >/dev/null && command -v chromedriver >/dev/null ;;
    *) echo "install.sh: don't know how to install $1" >&2 && exit 2 ;;
    esac
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "install.sh: run this as root or install sudo: $*" >&2
        exit 1
    fi
}

# Package names by package manager.
packages() {
    case $1-$2 in
    apt-postgres) echo postgresql ;;
    apt-python) echo python3 python3-venv ;;
    apt-patroni) echo patroni etcd-server etcd-client haproxy ;;
    dnf-postgres | zypper-postgres) echo postgresql-server postgresql-contrib postgresql ;;
    apk-postgres) echo postgresql postgresql-contrib postgresql-client ;;
    pacman-postgres) echo postgresql ;;
    pacman-python) echo python ;;
    brew-postgres) echo postgresql@17 ;;
    apt-browser) echo chromium chromium-driver ;;
    apk-browser) echo chromium chromium-chromedriver ;;
    pacman-browser) echo chromium ;;
    *-browser) echo chromium chromedriver ;;
    *-pgbouncer) echo pgbouncer ;;
    *-python) echo python3 ;;
    *-curl | *-jq | *-openssl | *-strace) echo "$2" ;;
    dnf-namespaces) echo iproute util-linux ;;
    *-namespaces) echo iproute2 util-linux ;;
    esac
}

install_apt() {
    # Debian creates and starts a cluster when the server is installed, unless this file says not to.
    settings=/etc/postgresql-common/createcluster.conf
    if ! grep -qs '^create_main_cluster *= *false' $settings; then
        as_root mkdir -p /etc/postgresql-common
        echo 'create_main_cluster = false' | as_root tee -a $settings >/dev/null
    fi
    # It also starts services it installs, unless policy-rc.d forbids it.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null
        as_root chmod 755 $policy
        trap 'as_root rm -f $policy' EXIT
    fi
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        -o Dpkg::Options::=--force-confold "$@"
    # Nor at the next start of the machine.
    for unit in $new_units; do
        as_root systemctl disable --quiet "$unit" 2>/dev/null || true
    done
}

missing=
for thing in "$@"; do
    has "$thing" || missing="$missing $thing"
done
manager=
for candidate in apt-get dnf yum apk pacman zypper brew; do
    if command -v $candidate >/dev/null; then
        manager=$candidate
        break
    fi
done
family=$manager
case $manager in
apt-get) family=apt ;;
yum) family=dnf ;;
esac

# Only Debian and its relatives package all of it.
case $missing in
*patroni*)
    if [ "$family" != apt ]; then
        missing=${missing% patroni}
        echo "install.sh: no package of Patroni is known here: make failover needs it" >&2
    fi
    ;;
esac
[ -n "$missing" ] || exit 0
echo "Installing:$missing"
# Services that were not there before.
new_units=$(absent patroni etcd haproxy)

names=
for thing in $missing; do
    names="$names $(packages "$family" "$thing")"
done
# Word splitting is intended: each name is one argument.
# shellcheck disable=SC2086
case $manager in
apt-get) install_apt $names ;;
dnf | yum) as_root $manager install -y $names ;;
apk) as_root apk add --no-progress $names ;;
pacman) as_root pacman -Sy --noconfirm --needed $names ;;
zypper) as_root zypper --non-interactive install $names ;;
brew) brew install $names ;;
*)
    echo "install.sh: no supported package manager found. Install these and try again:" >&2
    for thing in $missing; do
        case $thing in
        postgres) echo "  PostgreSQL $postgres_major_min or newer: server and contrib modules" >&2 ;;
        python) echo "  Python 3 with venv" >&2 ;;
        browser) echo "  Chromium and chromedriver" >&2 ;;
        *) echo "  $thing" >&2 ;;
        esac
    done
    exit 1
    ;;
esac

for thing in $missing; do
    if ! has "$thing"; then
        echo "install.sh: $thing was installed, but is too old or not in a known location." >&2
        [ "$thing" != postgres ] || echo "PostgreSQL $postgres_major_min or newer is required." >&2
        exit 1
    fi
done
