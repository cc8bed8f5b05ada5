//! Every setting with its default and its meaning. The one list: `postrider settings` prints it, docs/operations.md has it,
//! and a variable that is not in it is told of as unknown.

use std::fmt::Write;

use serde_json::{Value, json};

struct Section {
    title: &'static str,
    settings: &'static [Setting],
    /// What else is to be said of them.
    note: &'static str,
}

pub(super) struct Setting {
    pub(super) name: &'static str,
    /// No flag, and may come from a file.
    pub(super) secret: bool,
    default: &'static str,
    means: &'static str,
}

const fn open(name: &'static str, default: &'static str, means: &'static str) -> Setting {
    Setting {
        name,
        secret: false,
        default,
        means,
    }
}

const fn secret(name: &'static str, default: &'static str, means: &'static str) -> Setting {
    Setting {
        name,
        secret: true,
        default,
        means,
    }
}

const SECTIONS: [Section; 7] = [
    Section {
        title: "Database",
        settings: &[
            secret(
                "POSTRIDER_DATABASE_URL",
                "none: `up` starts a Postgres of its own; the other roles refuse",
                "`postgresql://user:password@host:5432/database`",
            ),
            secret(
                "POSTRIDER_DATABASE_URL_DIRECT",
                "the one above",
                "for `dispatcher`, `migrate` and `rotate-master-key`, when the one above leads through PgBouncer",
            ),
            secret(
                "POSTRIDER_DATABASE_URL_READ",
                "none",
                "a streaming replica that [pages and lists are read from](#read-replicas)",
            ),
            secret(
                "POSTRIDER_SOURCES",
                "none",
                "producers' own databases to relay from, with commas or line ends between them: [outbox](outbox.md)",
            ),
            open(
                "POSTRIDER_DATA_DIR",
                "`.postrider`",
                "where `up` keeps its Postgres and the keys it made",
            ),
        ],
        note: "",
    },
    Section {
        title: "Addresses",
        settings: &[
            open("POSTRIDER_LISTEN", "`127.0.0.1:8080`", "API and dashboard"),
            open(
                "POSTRIDER_METRICS_LISTEN",
                "none",
                "health, readiness and metrics without a key. A dispatcher serves them only here",
            ),
            open("POSTRIDER_GRPC_LISTEN", "none", "gRPC, by `dashboard` and `up`"),
            open(
                "POSTRIDER_PUBLIC_URL",
                "made from the address that is listened on",
                "base of links for customers. With https here, cookies are for https only. No endpoint may be there",
            ),
        ],
        note: "",
    },
    Section {
        title: "Secrets",
        settings: &[
            secret(
                "POSTRIDER_MASTER_KEY",
                "`up` makes one in the data directory; the other roles need it",
                "32 bytes in base64. Encrypts secrets at rest. Several with commas between them [rotate it](rotation.md#the-master-key): the first encrypts",
            ),
            secret(
                "POSTRIDER_ADMIN_API_KEY",
                "one is made and shown once",
                "an admin key that always works; at least 16 characters",
            ),
            secret(
                "POSTRIDER_ADMIN_PASSWORD",
                "one is made and shown once",
                "the password of the login `admin`; at least 8 characters",
            ),
        ],
        note: "",
    },
    Section {
        title: "Sending",
        settings: &[
            open(
                "POSTRIDER_RETRY_SCHEDULE",
                "`0s,1m,5m,30m,2h,10h,24h`",
                "the wait before each attempt, counted from the one before: up to 50, each at most 30 days. Units `ms`, `s`, `m`, `h`, `d`",
            ),
            open(
                "POSTRIDER_RETRY_JITTER",
                "`0.2`",
                "each wait is stretched by a random factor between 1 and 1 + this; from 0 to 1",
            ),
            open(
                "POSTRIDER_TIMEOUT",
                "`10s`",
                "for one attempt, from connecting to the last byte needed; `100ms` to `60s`",
            ),
            open(
                "POSTRIDER_ENDPOINT_CONCURRENCY",
                "`16`",
                "requests in flight to one endpoint, over all dispatchers; 1 to 1,024",
            ),
            open(
                "POSTRIDER_MAX_IN_FLIGHT",
                "`4096`",
                "requests in flight of one dispatcher; 1 to 1,000,000. It is lowered to four fifths of the limit of open files less 256",
            ),
            open(
                "POSTRIDER_RETENTION",
                "`30d`",
                "how long events, attempts and dead letters are kept; `10s` to `3650d`: [retention](retention.md)",
            ),
        ],
        note: "An endpoint may have a schedule, a time limit and a concurrency of its own.",
    },
    Section {
        title: "Where requests may go",
        settings: &[
            open(
                "POSTRIDER_ALLOW_NETWORKS",
                "none; `up` on its own database: loopback",
                "networks that endpoints may be in although they are not public",
            ),
            open(
                "POSTRIDER_DENY_NETWORKS",
                "none",
                "networks that endpoints may not be in",
            ),
            open(
                "POSTRIDER_DENY_PORTS",
                "the Fetch standard's bad ports and the usual database ports",
                "ports that endpoints may not use",
            ),
            open(
                "POSTRIDER_ALLOW_HTTP",
                "`false`; `up` on its own database: `true`",
                "plain http endpoints. `true`, `1`, `yes`, `false`, `0`, `no`",
            ),
            open(
                "POSTRIDER_EGRESS_PROXY",
                "none",
                "`http://user:password@proxy:3128`: every request goes through it. A flag too, so give it as a variable if it has a password",
            ),
        ],
        note: "Dashboards need these as well: they check URLs when they are saved, and send test events and probes.",
    },
    Section {
        title: "API and log",
        settings: &[
            open(
                "POSTRIDER_REQUEST_RATE",
                "`10000`",
                "requests a second that an admin or producer key may make, counted by each process; 1 to 1,000,000",
            ),
            open(
                "POSTRIDER_TENANT_REQUEST_RATE",
                "`200`",
                "the same for a tenant key",
            ),
            open(
                "POSTRIDER_TRUSTED_PROXIES",
                "none",
                "proxies in front of the API, as networks or addresses with commas between them: of requests that come from them, the client's address is taken from `X-Forwarded-For`. [Failed sign-ins](#behind-a-proxy) and connections are counted by it",
            ),
            open(
                "POSTRIDER_LOG",
                "`info,apalis_core=warn,sqlx::postgres::notice=warn`",
                "what is logged: `warn`, or `info,postrider_dispatcher=debug`",
            ),
            open("POSTRIDER_LOG_FORMAT", "`text`", "`text` or `json`"),
            open(
                "POSTRIDER_OTLP_ENDPOINT",
                "none",
                "a collector that [traces](traces.md) are sent to: `http://collector:4318`",
            ),
            secret(
                "POSTRIDER_OTLP_HEADERS",
                "none",
                "headers for it: `name=value`, with commas between them",
            ),
            open(
                "POSTRIDER_OTLP_SAMPLE",
                "`1`",
                "the share of the traces that begin here which are sent, from 0 to 1",
            ),
        ],
        note: "",
    },
    Section {
        title: "Of the tools",
        settings: &[
            open("POSTRIDER_URL", "`http://127.0.0.1:8080`", "where the API is"),
            secret(
                "POSTRIDER_API_KEY",
                "the one in the data directory of `up`",
                "the key",
            ),
            open("POSTRIDER_TENANT", "the only one there is", "the tenant"),
            secret(
                "POSTRIDER_ENDPOINT_SECRET",
                "none",
                "of `verify`, `listen` and `secrets rotate`: an endpoint's secret",
            ),
        ],
        note: "",
    },
];

pub(super) fn all() -> impl Iterator<Item = &'static Setting> {
    SECTIONS.iter().flat_map(|section| section.settings)
}

/// Of a setting, or of the file that a secret is in.
pub(super) fn is_known(variable: &str) -> bool {
    let file_of = variable.strip_suffix("_FILE");
    all().any(|one| one.name == variable || (one.secret && file_of == Some(one.name)))
}

/// As docs/operations.md has it.
pub fn markdown() -> String {
    let mut text = String::new();
    for section in &SECTIONS {
        // Writing to a text does not fail.
        let _ = write!(
            text,
            "### {}\n\n| variable | default | means |\n|---|---|---|\n",
            section.title
        );
        for one in section.settings {
            let lock = if one.secret { " 🔒" } else { "" };
            let _ = writeln!(text, "| `{}`{lock} | {} | {} |", one.name, one.default, one.means);
        }
        if !section.note.is_empty() {
            let _ = write!(text, "\n{}\n", section.note);
        }
        text.push('\n');
    }
    text
}

/// For programs.
pub fn document() -> Value {
    let written = |one: &Setting| {
        json!({
            "variable": one.name,
            "secret": one.secret,
            "default": one.default,
            "means": one.means,
        })
    };
    json!(all().map(written).collect::<Vec<_>>())
}
