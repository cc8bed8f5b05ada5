//! Finds the PostgreSQL server programs. On Debian and Red Hat they are not in PATH.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::EmbeddedError;

const MAJOR_MIN: u32 = 14;

/// Where distributions install one folder per version: parent, prefix of the child, rest of the path.
const VERSIONED: [(&str, &str, &str); 7] = [
    ("/usr/lib/postgresql", "", "bin"),
    ("/usr", "pgsql-", "bin"),
    ("/usr/libexec", "postgresql", ""),
    ("/usr/lib", "postgresql", "bin"),
    ("/opt/homebrew/opt", "postgresql", "bin"),
    ("/usr/local/opt", "postgresql", "bin"),
    ("/usr/local", "pgsql", "bin"),
];

/// The programs of one server version.
#[derive(Debug, Clone)]
pub struct Programs {
    folder: PathBuf,
    pub major: u32,
}

impl Programs {
    /// The newest server, or the given major version: only that can read its data.
    #[expect(clippy::disallowed_methods, reason = "where the programs of Postgres are")]
    pub fn find(major: Option<u32>) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
        for (parent, begins, then) in VERSIONED {
            let Ok(entries) = std::fs::read_dir(parent) else {
                continue;
            };
            let children = entries
                .flatten()
                .filter(|e| e.file_name().to_string_lossy().starts_with(begins));
            folders.extend(children.map(|child| child.path().join(then)));
        }
        folders
            .into_iter()
            .filter_map(Self::in_folder)
            .filter(|found| found.major >= MAJOR_MIN && major.is_none_or(|major| found.major == major))
            .max_by_key(|found| found.major)
    }

    fn in_folder(folder: PathBuf) -> Option<Self> {
        let complete = ["initdb", "pg_ctl", "postgres"]
            .iter()
            .all(|name| folder.join(name).is_file());
        if !complete {
            return None;
        }
        let output = Command::new(folder.join("postgres"))
            .arg("--version")
            .output()
            .ok()?;
        let major = parse_major(&String::from_utf8_lossy(&output.stdout))?;
        Some(Self { folder, major })
    }

    pub fn path(&self, program: &str) -> PathBuf {
        self.folder.join(program)
    }

    /// The programs for a cluster that may already exist.
    pub(super) fn for_data(data: &Path) -> Result<Self, EmbeddedError> {
        let Ok(version) = std::fs::read_to_string(data.join("PG_VERSION")) else {
            return Self::find(None).ok_or(EmbeddedError::NoServer);
        };
        let major = version.trim().parse().ok();
        let found = major.and_then(|major| Self::find(Some(major)));
        found.ok_or_else(|| EmbeddedError::OtherVersion {
            directory: data.to_owned(),
            found: version.trim().to_owned(),
        })
    }
}

/// `postgres (PostgreSQL) 15.3 (Debian …)`, `postgres (PostgreSQL) 18beta1`
fn parse_major(output: &str) -> Option<u32> {
    let version = output.split("(PostgreSQL) ").nth(1)?;
    let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parse_major;

    #[test]
    fn the_major_version_is_read_from_what_the_server_says() {
        for (output, major) in [
            ("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n", Some(15)),
            ("postgres (PostgreSQL) 18beta1\n", Some(18)),
            ("postgres (PostgreSQL) 9.6.24\n", Some(9)),
            ("something else\n", None),
        ] {
            assert_eq!(parse_major(output), major, "{output}");
        }
    }
}
