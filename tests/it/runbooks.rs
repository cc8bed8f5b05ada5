//! Each alert has a page that says what it means, how to look and what to do.

use std::{collections::BTreeSet, fs};

use crate::statements::root;

const FOLDER: &str = "docs/runbooks";
const SECTIONS: [&str; 3] = ["## What it means", "## How to look", "## What to do"];

#[test]
fn each_alert_has_its_runbook_and_each_runbook_its_alert() {
    let rules = ["alerts", "slo"].map(|name| {
        let file = root().join(format!("deploy/prometheus/{name}.yaml"));
        fs::read_to_string(file).expect("the rules")
    });
    let rules = rules.concat();
    let mut alerts = BTreeSet::new();
    for rule in rules.split("- alert: ").skip(1) {
        let name = rule.lines().next().expect("a name").trim();
        let page = format!("{FOLDER}/{name}.md");
        assert!(
            rule.lines()
                .any(|line| line.trim() == format!("runbook_url: {page}")),
            "{name} does not name {page}"
        );
        let text = fs::read_to_string(root().join(&page)).unwrap_or_else(|_| panic!("{page} is missing"));
        assert!(text.starts_with(&format!("# {name}\n")), "{page}");
        for section in SECTIONS {
            assert!(text.contains(section), "{page} has no section {section:?}");
        }
        alerts.insert(format!("{name}.md"));
    }
    assert!(alerts.len() > 20, "the scan found only {}", alerts.len());
    let index = fs::read_to_string(root().join(FOLDER).join("README.md")).expect("an index");
    for entry in fs::read_dir(root().join(FOLDER)).expect("the folder") {
        let name = entry
            .expect("an entry")
            .file_name()
            .to_string_lossy()
            .into_owned();
        if name != "README.md" {
            assert!(alerts.contains(&name), "no alert leads to {name}");
            assert!(index.contains(&format!("({name})")), "{name} is not in the index");
        }
    }
}
