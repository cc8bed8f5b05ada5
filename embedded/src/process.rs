//! Recognises the server of a cluster, even if a stale pid file names another process.
//! Invariant: a process is considered the server only if its working directory is the cluster's data directory.

use std::{fs, os::unix::fs::MetadataExt, path::Path, process::Command};

use super::Account;

/// Device and inode of a directory.
type Identity = (u64, u64);

/// Whether the process is running with this working directory. A zombie has none.
pub(super) fn works_in(account: Account, pid: u32, folder: &Path) -> bool {
    let Ok(ours) = fs::metadata(folder) else {
        return false;
    };
    let ours = (ours.dev(), ours.ino());
    if !Path::new("/proc/self/cwd").exists() {
        return by_lsof(pid) == Some(ours);
    }
    let place = format!("/proc/{pid}/cwd");
    match fs::metadata(&place) {
        Ok(found) => (found.dev(), found.ino()) == ours,
        // Root in a container may not inspect another account's processes; that account may.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && !account.is_ours() => {
            ask_as(account, &place) == Some(ours)
        }
        Err(_) => false,
    }
}

fn ask_as(account: Account, place: &str) -> Option<Identity> {
    let mut stat = account.command(Path::new("/bin/sh"), Path::new("/"));
    stat.args(["-c", "stat -L -c '%d %i' \"$1\"", "sh", place]);
    let output = String::from_utf8(stat.output().ok()?.stdout).ok()?;
    let (device, number) = output.trim().split_once(' ')?;
    Some((device.parse().ok()?, number.parse().ok()?))
}

/// For systems without `/proc`.
fn by_lsof(pid: u32) -> Option<Identity> {
    let mut lsof = Command::new("lsof");
    lsof.args(["-a", "-d", "cwd", "-Fn", "-p", &pid.to_string()]);
    let output = String::from_utf8(lsof.output().ok()?.stdout).ok()?;
    let path = output.lines().find_map(|line| line.strip_prefix('n'))?;
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_where_it_works_and_a_zombie_works_nowhere() {
        let account = Account::for_server().expect("an account");
        let (folder, other) = (
            tempfile::tempdir().expect("one"),
            tempfile::tempdir().expect("two"),
        );
        let mut child = Command::new("sleep")
            .arg("1000")
            .current_dir(folder.path())
            .spawn()
            .expect("sleep starts");
        assert!(works_in(account, child.id(), folder.path()));
        assert!(!works_in(account, child.id(), other.path()));
        child.kill().expect("killed");
        while works_in(account, child.id(), folder.path()) {
            std::thread::yield_now();
        }
        child.wait().expect("ended");
        assert!(!works_in(account, child.id(), folder.path()));
    }
}
