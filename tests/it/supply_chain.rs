//! What we build on: every crate from the one registry, on terms that we allow, one TLS, and no `unsafe` of our own.
//! `cargo deny` asks the same and more where it is installed; this is asked everywhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
const CRATES: [&str; 6] = ["", "proto", "sender", "dispatcher", "dashboard", "client"];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_deployment_files_name_this_version_and_no_image_without_one() {
    let version = env!("CARGO_PKG_VERSION");
    for (file, text) in [
        ("deploy/Dockerfile", "ARG VERSION={}"),
        ("deploy/Dockerfile", "-t postrider:{} "),
        ("deploy/README.md", "-t postrider:{} "),
        ("deploy/compose.yaml", "image: postrider:${POSTRIDER_VERSION:-{}}"),
        ("deploy/kubernetes/base/kustomization.yaml", "newTag: {}"),
        ("deploy/kubernetes/example/kustomization.yaml", "newTag: {}"),
    ] {
        let expected = text.replace("{}", version);
        assert!(read(file).contains(&expected), "{file}: no {expected}");
    }
    let images = [read("deploy/compose.yaml"), read("deploy/Dockerfile")].concat();
    let images: Vec<&str> = images
        .lines()
        .filter_map(|line| {
            let line = line.trim();
            line.strip_prefix("image: ").or_else(|| {
                line.strip_prefix("ARG ")?
                    .split_once("_IMAGE=")
                    .map(|(_, image)| image)
            })
        })
        .collect();
    assert_eq!(images.len(), 4, "{images:?}");
    for image in images {
        let tag = image.split_once(':').map(|(_, tag)| tag).unwrap_or_default();
        assert!(tag.contains('.'), "{image} has no full version");
    }
}

#[test]
fn every_crate_comes_from_the_registry_with_its_checksum() {
    let lock = read("Cargo.lock");
    let mut count = 0;
    for package in lock.split("[[package]]").skip(1) {
        let fields: BTreeMap<&str, &str> = package
            .lines()
            .filter_map(|line| line.split_once(" = "))
            .map(|(name, value)| (name, value.trim_matches('"')))
            .collect();
        let name = fields["name"];
        if name == "postrider" || name.starts_with("postrider-") {
            continue;
        }
        assert_eq!(fields.get("source"), Some(&REGISTRY), "{name}");
        assert_eq!(fields.get("checksum").map(|sum| sum.len()), Some(64), "{name}");
        count += 1;
    }
    assert!(count > 200, "{count}");
}

#[test]
fn the_licence_that_the_manifest_names_is_there_in_full() {
    assert!(read("Cargo.toml").contains("license = \"Apache-2.0\""));
    let text = read("LICENSE");
    for part in [
        "Apache License",
        "Version 2.0, January 2004",
        "END OF TERMS AND CONDITIONS",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn unsafe_code_is_forbidden_in_every_crate() {
    assert!(read("Cargo.toml").contains("unsafe_code = \"forbid\""));
    for name in CRATES {
        let manifest = read(format!("{name}/Cargo.toml").trim_start_matches('/'));
        assert!(manifest.contains("[lints]\nworkspace = true"), "{name}");
    }
}

/// The texts in quotes of a list in `deny.toml`.
fn listed(text: &str, list: &str) -> Vec<String> {
    let start = text.split_once(&format!("\n{list} = [\n")).expect("the list").1;
    let inner = start.split_once("\n]").expect("its end").0;
    let quoted = |line: &str| line.split('"').nth(1).map(ToOwned::to_owned);
    inner
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .filter_map(quoted)
        .collect()
}

/// What the programs are built of on this machine, tests aside: each crate's name, version and licence. `cargo tree` and not
/// `cargo metadata`, which also names crates that only a feature nobody asks for would bring.
fn built_of() -> BTreeSet<(String, String, Option<String>)> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--workspace", "--locked", "--offline"])
        .args(["--edges", "no-dev", "--prefix", "none", "--format", "{p}\t{l}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let tree = String::from_utf8(output.stdout).expect("text");
    tree.lines()
        .filter_map(|line| line.trim_end_matches(" (*)").split_once('\t'))
        .filter(|(package, _)| !package.starts_with("postrider"))
        .map(|(package, licence)| {
            let mut words = package.split(' ');
            let mut next = || words.next().unwrap_or_default().to_owned();
            let licence = licence.trim();
            (next(), next(), (!licence.is_empty()).then(|| licence.to_owned()))
        })
        .collect()
}

/// Whether an expression like `(MIT OR Apache-2.0) AND Unicode-3.0` is met by what is allowed.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let expression = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = expression.split_whitespace().collect();
    let mut at = 0;
    let met = any_of(&words, &mut at, allowed);
    assert_eq!(at, words.len(), "{expression}");
    met
}

fn any_of(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut met = all_of(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= all_of(words, at, allowed);
    }
    met
}

fn all_of(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut met = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one(words, at, allowed);
    }
    met
}

fn one(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut name = words[*at].to_owned();
    *at += 1;
    if name == "(" {
        let met = any_of(words, at, allowed);
        assert_eq!(words.get(*at), Some(&")"));
        *at += 1;
        return met;
    }
    if words.get(*at) == Some(&"WITH") {
        name = format!("{name} WITH {}", words[*at + 1]);
        *at += 2;
    }
    allowed.contains(&name)
}

#[test]
fn each_crate_is_there_on_terms_that_we_allow_and_none_that_is_banned() {
    let rules = read("deny.toml");
    let (allowed, banned) = (listed(&rules, "allow"), listed(&rules, "deny"));
    assert!(
        allowed.len() > 5 && banned.contains(&"openssl".to_owned()),
        "{allowed:?} {banned:?}"
    );
    let built_of = built_of();
    assert!(built_of.len() > 200, "{}", built_of.len());
    let mut wrong = Vec::new();
    for (name, version, licence) in &built_of {
        if banned.contains(name) {
            wrong.push(format!("{name} {version} is banned"));
        }
        // What has no licence by name is named in the rules, with the one that was read.
        let is_allowed = match licence {
            Some(licence) => is_met(licence, &allowed),
            None => rules.contains(&format!("\ncrate = \"{name}\"\nexpression = \"MIT\"")),
        };
        if !is_allowed {
            wrong.push(format!("{name} {version}: {licence:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_expression_of_licences_is_read_as_it_is_meant() {
    let allowed = ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(ToOwned::to_owned);
    for (expression, met) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("MIT OR GPL-3.0", true),
        ("MIT/GPL-3.0", true),
        ("MIT AND GPL-3.0", false),
        ("GPL-3.0 OR MIT AND ISC", true),
        ("(GPL-3.0 OR MIT) AND ISC", true),
        ("(GPL-3.0 OR AGPL-3.0) AND ISC", false),
        ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", true),
        ("Apache-2.0", false),
    ] {
        assert_eq!(is_met(expression, &allowed), met, "{expression}");
    }
}
