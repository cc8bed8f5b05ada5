//! Valid and invalid values of each setting, and the error for an invalid one.

use clap::{CommandFactory, FromArgMatches, Parser};

use super::*;

#[derive(Parser)]
struct Alone {
    #[command(flatten)]
    flags: Flags,
}

fn read(flags: &[&str], variables: &[(&str, &str)]) -> Result<Settings, SettingError> {
    // The tester's own variables must not be read.
    let command = Alone::command().mut_args(|arg| arg.env(None::<&str>));
    let arguments = std::iter::once("postrider").chain(flags.iter().copied());
    let matches = command.try_get_matches_from(arguments).expect("known flags");
    let flags = Alone::from_arg_matches(&matches).expect("known flags").flags;
    let environment = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Settings::read(&flags, &environment.collect())
}

fn refusal(flags: &[&str], variables: &[(&str, &str)]) -> String {
    match read(flags, variables) {
        Ok(_) => panic!("{flags:?} {variables:?} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn nothing_set_is_the_contract_s_defaults() {
    let settings = read(&[], &[]).expect("defaults");
    let defaults = postrider_dispatcher::Settings::default();
    assert_eq!(settings.dispatcher.schedule, defaults.schedule);
    assert_eq!(settings.dispatcher.jitter, defaults.jitter);
    assert_eq!(settings.dispatcher.timeout, defaults.timeout);
    assert_eq!(settings.dispatcher.retention, defaults.retention);
    assert_eq!(
        settings.values.request_rate,
        postrider_dashboard::REQUEST_RATE_DEFAULT
    );
    assert_eq!(
        settings.values.tenant_request_rate,
        postrider_dashboard::TENANT_REQUEST_RATE_DEFAULT
    );
    assert!(settings.database.is_none());
    assert_eq!(settings.values.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(settings.dispatcher.concurrency, 16);
    assert_eq!(settings.dispatcher.max_in_flight, 4096);
    assert!(settings.guard(&[]).allow_http);
    assert!(settings.guard(&[]).allows([127, 0, 0, 1].into()));
    assert!(!settings.guard(&[]).allows([10, 0, 0, 1].into()));
}

#[test]
fn with_a_database_of_its_own_nothing_private_may_be_called() {
    let settings = read(&[], &[("POSTRIDER_DATABASE_URL", "postgres://u:p@db/x")]).expect("a URL");
    assert!(!settings.guard(&[]).allow_http);
    assert!(!settings.guard(&[]).allows([127, 0, 0, 1].into()));
}

#[test]
fn our_own_listeners_and_names_are_no_endpoints_and_a_proxy_hides_its_password() {
    let flags = [
        "--public-url",
        "https://hooks.example.com",
        "--egress-proxy",
        "http://u:hunter2@proxy:3128",
    ];
    let settings = read(&flags, &[]).expect("settings");
    let guard = settings.guard(&["127.0.0.1:8080".parse().expect("an address")]);
    for ours in [
        "http://127.0.0.1:8080/x",
        "https://hooks.example.com/",
        "https://HOOKS.example.com.:443/",
    ] {
        let refusal = guard.check_url(ours).expect_err(ours);
        assert!(refusal.to_string().ends_with(" is Postrider itself"), "{refusal}");
    }
    assert!(guard.check_url("http://127.0.0.1:8081/x").is_ok());
    assert!(guard.check_url("https://hooks.example.com:8443/").is_ok());
    assert!(!format!("{guard:?}").contains("hunter2"));
}

#[test]
fn an_empty_value_is_not_set() {
    assert!(read(&["--retry-jitter", " "], &[("POSTRIDER_DATABASE_URL", "")]).is_ok());
}

#[test]
fn a_bad_value_is_refused_by_name() {
    for (flag, value, name) in [
        ("--listen", "8080", "POSTRIDER_LISTEN"),
        ("--metrics-listen", "here", "POSTRIDER_METRICS_LISTEN"),
        ("--public-url", "hooks.example.com", "POSTRIDER_PUBLIC_URL"),
        ("--retry-schedule", "0s,soon", "POSTRIDER_RETRY_SCHEDULE"),
        ("--retry-jitter", "2", "POSTRIDER_RETRY_JITTER"),
        ("--retry-jitter", "NaN", "POSTRIDER_RETRY_JITTER"),
        ("--timeout", "0s", "POSTRIDER_TIMEOUT"),
        ("--timeout", "10", "POSTRIDER_TIMEOUT"),
        ("--drain-delay", "61s", "POSTRIDER_DRAIN_DELAY"),
        ("--drain-delay", "soon", "POSTRIDER_DRAIN_DELAY"),
        ("--endpoint-concurrency", "0", "POSTRIDER_ENDPOINT_CONCURRENCY"),
        ("--max-in-flight", "-1", "POSTRIDER_MAX_IN_FLIGHT"),
        ("--allow-networks", "10.0.0.0/33", "POSTRIDER_ALLOW_NETWORKS"),
        ("--deny-networks", "all", "POSTRIDER_DENY_NETWORKS"),
        ("--deny-ports", "0", "POSTRIDER_DENY_PORTS"),
        ("--egress-proxy", "socks5://proxy:1", "POSTRIDER_EGRESS_PROXY"),
        ("--request-rate", "0", "POSTRIDER_REQUEST_RATE"),
        ("--tenant-request-rate", "many", "POSTRIDER_TENANT_REQUEST_RATE"),
        ("--allow-http", "maybe", "POSTRIDER_ALLOW_HTTP"),
        ("--log", "info,=x=", "POSTRIDER_LOG"),
        ("--log-format", "xml", "POSTRIDER_LOG_FORMAT"),
        ("--otlp-endpoint", "collector:4318", "POSTRIDER_OTLP_ENDPOINT"),
        ("--otlp-endpoint", "grpc://collector", "POSTRIDER_OTLP_ENDPOINT"),
        ("--otlp-sample", "1.5", "POSTRIDER_OTLP_SAMPLE"),
        ("--otlp-sample", "NaN", "POSTRIDER_OTLP_SAMPLE"),
    ] {
        let argument = format!("{flag}={value}");
        let sentence = refusal(&[&argument], &[]);
        assert!(
            sentence.starts_with(&format!("{name} is invalid: ")),
            "{sentence}"
        );
        assert!(!sentence.contains('\n'), "{sentence}");
        let is_private = ["POSTRIDER_EGRESS_PROXY", "POSTRIDER_OTLP_ENDPOINT"].contains(&name);
        assert_eq!(
            sentence.ends_with(&format!(", got `{value}`")),
            !is_private,
            "{sentence}"
        );
    }
}

#[test]
fn a_bad_secret_is_refused_by_name_and_not_repeated() {
    for (name, value) in [
        ("POSTRIDER_DATABASE_URL", "hunter2hunter2"),
        ("POSTRIDER_DATABASE_URL", "mysql://hunter2@x/y"),
        ("POSTRIDER_MASTER_KEY", "hunter2"),
        ("POSTRIDER_ADMIN_API_KEY", "hunter2"),
        ("POSTRIDER_ADMIN_PASSWORD", "hunter2"),
        ("POSTRIDER_MASTER_KEY_FILE", "/nowhere/at/all"),
        ("POSTRIDER_OTLP_HEADERS", "authorization: hunter2"),
        ("POSTRIDER_OTLP_HEADERS", "a=b,hun ter=hunter2"),
    ] {
        let sentence = refusal(&[], &[(name, value)]);
        assert!(sentence.starts_with(name), "{sentence}");
        assert!(!sentence.contains("hunter2"), "{sentence}");
    }
}

#[test]
fn a_database_url_may_have_several_hosts() {
    let several = "postgresql://u:hunter2@a:5433,b,[::1]/x?target_session_attrs=read-write";
    let two = format!("{several},\npostgresql://u:hunter2@c,d/y , postgres://u@e/z\n");
    let settings = read(
        &[],
        &[
            ("POSTRIDER_DATABASE_URL", several),
            (
                "POSTRIDER_DATABASE_URL_DIRECT",
                "postgresql://u:hunter2@a,b/x?target_session_attrs=primary",
            ),
            (
                "POSTRIDER_DATABASE_URL_READ",
                "postgresql://u:hunter2@a,b/x?target_session_attrs=prefer-standby",
            ),
            ("POSTRIDER_SOURCES", &two),
        ],
    )
    .expect("URLs");
    let database = settings.require_database().expect("set");
    let shown = format!("{database:?} {:?}", settings.values.sources);
    for hosts in [
        r#"["a:5433", "b:5432", "[::1]:5432"]"#,
        r#"["a:5432", "b:5432"]"#,
        r#"[["a:5433", "b:5432", "[::1]:5432"], ["c:5432", "d:5432"], ["e:5432"]]"#,
    ] {
        assert!(shown.contains(hosts), "{shown}");
    }
    assert!(!shown.contains("hunter2"), "{shown}");
    for (name, value, expected) in [
        (
            "POSTRIDER_DATABASE_URL",
            "postgresql://u:hunter2@a,b/x?target_session_attrs=master",
            "\"master\"",
        ),
        (
            "POSTRIDER_DATABASE_URL_DIRECT",
            "postgresql://u:hunter2@a,b/x?target_session_attrs=standby",
            "read-write",
        ),
        (
            "POSTRIDER_SOURCES",
            "postgresql://u:hunter2@a,b/x?port=1,2,3",
            "3 ports for 2 hosts",
        ),
    ] {
        let url = ("POSTRIDER_DATABASE_URL", "postgresql://u@a/x");
        let given = if name == url.0 {
            vec![(name, value)]
        } else {
            vec![url, (name, value)]
        };
        let sentence = refusal(&[], &given);
        assert!(
            sentence.starts_with(name) && sentence.contains(expected),
            "{sentence}"
        );
        assert!(!sentence.contains("hunter2"), "{sentence}");
    }
}

#[test]
fn the_url_of_a_cell_is_kept_as_it_was_written() {
    let url = "postgresql://u:hunter2@a,b/x?target_session_attrs=read-write";
    let settings = read(&[], &[("POSTRIDER_CELL_DATABASE_URL", url)]).expect("a URL");
    assert_eq!(settings.values.cell_database_url.expect("set").text, url);
    for good in ["postgresql://u@a/x", "host=a dbname=x passfile=/run/pass"] {
        let settings = read(&[], &[("POSTRIDER_REPLICATION_URL", good)]).expect("a connection string");
        assert_eq!(settings.values.replication_url.as_deref(), Some(good));
    }
    for (name, bad) in [
        ("POSTRIDER_CELL_DATABASE_URL", "hunter2@a/x"),
        ("POSTRIDER_CELL_SUPERUSER_URL", "mysql://u:hunter2@a/x"),
        ("POSTRIDER_REPLICATION_URL", "hunter2"),
        ("POSTRIDER_HOME_DATABASE_URL", "hunter2"),
    ] {
        let sentence = refusal(&[], &[(name, bad)]);
        assert!(
            sentence.starts_with(name) && !sentence.contains("hunter2"),
            "{sentence}"
        );
    }
}

#[test]
fn a_secret_comes_from_its_variable_or_its_file_and_not_both() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "postgres://u:p@db/x\n").expect("written");
    let path = file.path().to_str().expect("a plain path");
    let settings = read(&[], &[("POSTRIDER_DATABASE_URL_FILE", path)]).expect("a URL in a file");
    let database = settings.require_database().expect("set");
    assert_eq!(format!("{:?}", database.pooled), r#"["db:5432"]"#);
    let both = [
        ("POSTRIDER_DATABASE_URL_FILE", path),
        ("POSTRIDER_DATABASE_URL", "postgres://u@db/x"),
    ];
    assert!(refusal(&[], &both).contains("both set"));
}

#[test]
fn a_collector_is_a_base_or_the_whole_url() {
    for (given, url) in [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        (
            "https://traces.example.com/otlp/",
            "https://traces.example.com/otlp/v1/traces",
        ),
        (
            "http://collector:4318/v1/traces",
            "http://collector:4318/v1/traces",
        ),
    ] {
        let settings = read(
            &["--otlp-endpoint", given],
            &[(
                "POSTRIDER_OTLP_HEADERS",
                "Authorization=Basic YWJj=, x-team = hooks",
            )],
        );
        let collector = settings.expect("valid").collector.expect("set");
        assert_eq!(collector.url.as_str(), url);
        let headers: Vec<(&str, &str)> = collector
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().expect("plain")))
            .collect();
        assert_eq!(headers, [("authorization", "Basic YWJj="), ("x-team", "hooks")]);
    }
    assert!(read(&[], &[]).expect("defaults").collector.is_none());
}

#[test]
fn settings_that_differ_from_their_defaults_are_listed_without_secrets() {
    let flags = [
        "--retry-jitter=0.2",
        "--timeout=5s",
        "--egress-proxy=http://u:hunter2@proxy:3128",
    ];
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "postgres://u:hunter2@db/x").expect("written");
    let path = file.path().to_str().expect("a plain path");
    let variables = [
        ("POSTRIDER_DATABASE_URL_FILE", path),
        ("POSTRIDER_ADMIN_PASSWORD", "hunter2hunter2"),
    ];
    let settings = read(&flags, &variables).expect("valid");
    assert_eq!(
        settings.changed,
        [
            "POSTRIDER_DATABASE_URL=[hidden]",
            "POSTRIDER_ADMIN_PASSWORD=[hidden]",
            "POSTRIDER_TIMEOUT=5s",
            "POSTRIDER_EGRESS_PROXY=[hidden]",
        ]
    );
    assert!(read(&[], &[]).expect("defaults").changed.is_empty());
}

#[test]
fn unknown_variables_are_reported() {
    let settings = read(
        &[],
        &[
            ("POSTRIDER_LISTN", "x"),
            ("POSTRIDER_LISTEN", "x"),
            ("OTHER", "x"),
        ],
    )
    .expect("valid");
    assert_eq!(settings.unknown_variables, ["POSTRIDER_LISTN"]);
}

#[test]
fn every_flag_is_a_known_variable_and_no_secret_is_a_flag() {
    for argument in Alone::command().get_arguments() {
        let Some(variable) = argument.get_env().and_then(|name| name.to_str()) else {
            continue;
        };
        let environment: Environment = [(variable.to_owned(), "x".to_owned())].into_iter().collect();
        assert!(table::unknown_variables(&environment).is_empty(), "{variable}");
        assert!(
            !["KEY", "PASSWORD", "DATABASE_URL"]
                .iter()
                .any(|word| variable.contains(word)),
            "{variable}"
        );
    }
}

/// The variables of the flags of all commands.
fn flags_of(command: &clap::Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(|argument| argument.get_env());
    let own = own.map(|name| name.to_string_lossy().into_owned());
    own.chain(command.get_subcommands().flat_map(flags_of)).collect()
}

#[test]
fn the_list_of_settings_is_that_of_the_flags_and_that_of_the_docs() {
    let flags = flags_of(&crate::command_line::command());
    let is_known = |variable: &str| table::all().any(|setting| setting.is_set_by(variable));
    for setting in table::all() {
        assert_eq!(
            flags.iter().any(|flag| flag == setting.variable),
            !setting.is_secret(),
            "{} is a flag, or a secret",
            setting.variable
        );
    }
    for flag in &flags {
        assert!(is_known(flag), "{flag} is not in the table");
    }
    let docs = include_str!("../../docs/operations.md");
    assert!(
        docs.contains(&reference::markdown()),
        "docs/operations.md does not contain the output of `postrider settings`"
    );
    assert!(is_known("POSTRIDER_MASTER_KEY_FILE"));
    assert!(!is_known("POSTRIDER_LISTEN_FILE"));
}
