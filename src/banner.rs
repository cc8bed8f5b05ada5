//! What `up` prints when it is ready: addresses, credentials and what to try next.
//! Invariant: a generated secret is printed at the start that generated it, and never again.

use std::fmt::Write;

use postrider_embedded::Cluster;

use crate::{data_dir::Kept, demo};

/// A secret and where the operator finds it.
pub(crate) struct Shown {
    pub(crate) value: String,
    from: From,
}

enum From {
    Variable(&'static str),
    File { path: String, fresh: bool },
}

impl Shown {
    pub(crate) fn set_or_kept(
        set: &Option<String>,
        variable: &'static str,
        keep: impl FnOnce() -> anyhow::Result<Kept>,
    ) -> anyhow::Result<Self> {
        if let Some(value) = set {
            return Ok(Self {
                value: value.clone(),
                from: From::Variable(variable),
            });
        }
        let kept = keep()?;
        let path = kept.path.display().to_string();
        Ok(Self {
            value: kept.value,
            from: From::File {
                path,
                fresh: kept.fresh,
            },
        })
    }

    fn for_people(&self) -> String {
        match &self.from {
            From::Variable(name) => format!("set by {name}"),
            From::File { path, fresh: true } => format!("{}   (saved in {path})", self.value),
            From::File { path, fresh: false } => format!("in {path}"),
        }
    }

    /// A shell expression with this value, so that a printed command can be pasted and run.
    fn for_shell(&self) -> String {
        match &self.from {
            From::Variable(name) => format!("\"Authorization: Bearer ${name}\""),
            From::File { path, .. } => format!("\"Authorization: Bearer $(cat {})\"", quote(path)),
        }
    }
}

pub(crate) struct Banner {
    pub(crate) public_url: String,
    pub(crate) api_url: String,
    pub(crate) api_key: Shown,
    pub(crate) password: Shown,
    pub(crate) cluster: Option<Cluster>,
}

impl Banner {
    pub(crate) fn print(&self, with_demo: bool) {
        println!("{}", self.text(with_demo));
    }

    fn text(&self, with_demo: bool) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text, with_demo);
        text
    }

    fn write(&self, out: &mut String, with_demo: bool) -> std::fmt::Result {
        writeln!(out, "\nPostrider is ready.\n")?;
        writeln!(out, "  Dashboard   {}", self.public_url)?;
        writeln!(out, "  Login       admin")?;
        writeln!(out, "  Password    {}", self.password.for_people())?;
        writeln!(out, "  API key     {}", self.api_key.for_people())?;
        if !with_demo {
            return Ok(());
        }
        let (tenant, event_type) = (demo::TENANT, demo::PAID);
        writeln!(out, "\nEmit an event over HTTP:\n")?;
        writeln!(out, "  curl -sS {}/v1/tenants/{tenant}/events \\", self.api_url)?;
        writeln!(out, "    -H {} \\", self.api_key.for_shell())?;
        writeln!(out, "    -H 'Content-Type: application/json' \\")?;
        writeln!(
            out,
            r#"    -d '{{"type":"{event_type}","data":{{"object":"invoice","id":"inv_2","amount":4200}}}}'"#
        )?;
        if let Some(cluster) = &self.cluster {
            let sockets = quote(&cluster.home().sockets().display().to_string());
            writeln!(out, "\nOr from SQL, inside your own transaction:\n")?;
            let psql = quote(&cluster.psql().display().to_string());
            writeln!(out, "  {psql} -h {sockets} -U postrider postrider \\")?;
            writeln!(
                out,
                r#"    -c "select postrider.emit(tenant => '{tenant}', type => '{event_type}', data => '{{\"object\":\"invoice\",\"id\":\"inv_3\",\"amount\":7}}')""#
            )?;
        }
        writeln!(
            out,
            "\nPress Ctrl-C to stop. Data and keys are kept for the next start."
        )
    }
}

/// A path as one word of a shell command.
fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::quote;

    #[test]
    fn a_path_is_one_word_for_the_shell() {
        for (path, word) in [
            ("/a/b-c_d.e", "/a/b-c_d.e"),
            ("/a b", "'/a b'"),
            ("/it's", r"'/it'\''s'"),
        ] {
            assert_eq!(quote(path), word);
        }
    }
}
