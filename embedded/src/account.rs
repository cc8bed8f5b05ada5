//! The account that runs the server: our own, or an unprivileged one if we are root, which PostgreSQL refuses.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

use super::EmbeddedError;

/// In order of preference. The last one exists on every system.
const PREFERRED: [&str; 3] = ["postgres", "_postgres", "nobody"];

/// None: our own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account(Option<Ids>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ids {
    uid: u32,
    gid: u32,
}

impl Account {
    pub fn for_server() -> Result<Self, EmbeddedError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self(None));
        }
        let passwd = fs::read_to_string("/etc/passwd").map_err(EmbeddedError::at("/etc/passwd"))?;
        let ids = PREFERRED.iter().find_map(|login| find(&passwd, login));
        ids.map(|ids| Self(Some(ids))).ok_or(EmbeddedError::NoAccount)
    }

    pub fn is_ours(self) -> bool {
        self.0.is_none()
    }

    pub(super) fn uid(self) -> u32 {
        self.0
            .map_or_else(|| rustix::process::geteuid().as_raw(), |ids| ids.uid)
    }

    /// The command runs as this account, without our PG… variables, and is not interrupted by the terminal's Ctrl-C.
    pub fn command(self, program: &Path, folder: &Path) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PG") {
                command.env_remove(name);
            }
        }
        command
            .current_dir(folder)
            .env("LC_ALL", "C")
            .process_group(0)
            .stdin(Stdio::null());
        if let Some(ids) = self.0 {
            command.uid(ids.uid).gid(ids.gid);
        }
        command
    }

    /// Creates a folder that only this account and root can enter, or checks that it is one.
    pub(super) fn private_folder(self, folder: &Path) -> Result<(), EmbeddedError> {
        use std::os::unix::fs::MetadataExt;
        match fs::create_dir(folder) {
            Ok(()) => {
                fs::set_permissions(folder, fs::Permissions::from_mode(0o700))
                    .map_err(EmbeddedError::at(folder))?;
                if let Some(ids) = self.0 {
                    std::os::unix::fs::chown(folder, Some(ids.uid), Some(ids.gid))
                        .map_err(EmbeddedError::at(folder))?;
                }
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                // Links are not followed: in a shared temporary folder anyone can create one.
                let found = fs::symlink_metadata(folder).map_err(EmbeddedError::at(folder))?;
                let private = found.is_dir() && found.uid() == self.uid() && found.mode() & 0o077 == 0;
                if private {
                    Ok(())
                } else {
                    Err(EmbeddedError::Foreign(folder.to_owned()))
                }
            }
            Err(error) => Err(EmbeddedError::at(folder)(error)),
        }
    }

    /// Whether this account can reach a folder. The system itself checks, because it knows about groups and access lists.
    pub(super) fn can_enter(self, folder: &Path) -> bool {
        if self.is_ours() {
            return true;
        }
        let mut command = self.command(Path::new("/bin/sh"), Path::new("/"));
        command.args(["-c", "cd \"$1\"", "sh"]).arg(folder);
        let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }
}

fn find(passwd: &str, login: &str) -> Option<Ids> {
    let line = passwd
        .lines()
        .find(|line| line.split(':').next() == Some(login))?;
    let fields: Vec<&str> = line.split(':').collect();
    let ids = Ids {
        uid: fields.get(2)?.parse().ok()?,
        gid: fields.get(3)?.parse().ok()?,
    };
    (ids.uid != 0).then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_read_from_the_passwd_file_and_root_is_none() {
        let passwd = "root:x:0:0::/root:/bin/sh\npostgres:x:101:104:,,,:/x:/bin/sh\nodd:x:0:1::/:\nbroken\n";
        assert_eq!(find(passwd, "postgres"), Some(Ids { uid: 101, gid: 104 }));
        for none in ["root", "odd", "broken", "nobody", "post"] {
            assert_eq!(find(passwd, none), None, "{none}");
        }
    }
}
