//! What we build on: every crate from the one registry, one TLS, and no `unsafe` of our own.

use std::{collections::BTreeMap, fs, path::Path};

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
const CRATES: [&str; 5] = ["", "proto", "sender", "dispatcher", "dashboard"];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
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
        for other in ["openssl", "openssl-sys", "native-tls", "boring"] {
            assert_ne!(name, other, "rustls is the one TLS");
        }
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
