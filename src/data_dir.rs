//! The data directory: the embedded database and the keys that `up` generates.
//! Invariant: one process at a time uses it, and only its owner can read the secrets in it.

use std::{
    fs::{self, File, OpenOptions, Permissions, TryLockError},
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};

pub(crate) struct DataDir {
    folder: PathBuf,
    /// Held until the process exits.
    _lock: File,
}

/// A secret in the data directory.
pub(crate) struct Kept {
    pub(crate) value: String,
    pub(crate) path: PathBuf,
    /// Generated just now: the only time it is shown.
    pub(crate) fresh: bool,
}

impl DataDir {
    pub(crate) fn open(folder: &Path) -> anyhow::Result<Self> {
        let is_new = !folder.exists();
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let folder = fs::canonicalize(folder).with_context(|| format!("cannot open {}", folder.display()))?;
        // An existing directory keeps its permissions. As root, the server runs under another account, which must be able
        // to traverse the directory but not to list it.
        if is_new {
            let mode = if rustix::process::geteuid().is_root() {
                0o711
            } else {
                0o700
            };
            fs::set_permissions(&folder, Permissions::from_mode(mode))
                .with_context(|| format!("cannot set the permissions of {}", folder.display()))?;
        }
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(folder.join("lock"))
            .with_context(|| format!("cannot write to {}", folder.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { folder, _lock: lock }),
            Err(TryLockError::WouldBlock) => bail!(
                "another `postrider up` is running on {}: stop it, or set POSTRIDER_DATA_DIR to another directory",
                folder.display()
            ),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", folder.display()))
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    /// Reads a secret, or generates it at the first start.
    pub(crate) fn keep(&self, name: &str, make: impl FnOnce() -> String) -> anyhow::Result<Kept> {
        let kept = self.read(name)?;
        let fresh = kept.is_none();
        let value = kept.unwrap_or_else(make);
        if fresh {
            self.write(name, &value)?;
        }
        let path = self.folder.join(name);
        Ok(Kept { value, path, fresh })
    }

    pub(crate) fn read(&self, name: &str) -> anyhow::Result<Option<String>> {
        let path = self.folder.join(name);
        match fs::read_to_string(&path) {
            Ok(text) if text.trim().is_empty() => bail!("{} is empty: delete it", path.display()),
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Atomically: a key truncated by a crash would lock the operator out.
    pub(crate) fn write(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let path = self.folder.join(name);
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
            writeln!(file, "{value}")?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            File::open(&self.folder)?.sync_all()
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_secret_is_made_once_and_only_its_owner_reads_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let data_dir = DataDir::open(&folder.path().join("new")).expect("opened");
        let first = data_dir.keep("key", || "one".to_owned()).expect("made");
        let second = data_dir.keep("key", || "two".to_owned()).expect("read");
        assert_eq!((first.value.as_str(), first.fresh), ("one", true));
        assert_eq!((second.value.as_str(), second.fresh), ("one", false));
        let mode = fs::metadata(second.path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_second_process_is_told_to_go_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let _first = DataDir::open(folder.path()).expect("opened");
        let told = DataDir::open(folder.path()).err().expect("refused").to_string();
        assert!(told.starts_with("another `postrider up` is running"), "{told}");
    }
}
