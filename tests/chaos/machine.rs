//! What a run needs of the machine: a small disk that can be filled, and a clock that is wrong.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A disk of its own for the database. Unmounted when this process ends, in whichever way.
pub(crate) struct SmallDisk {
    folder: PathBuf,
    _watcher: Child,
}

impl SmallDisk {
    /// None where mounting is not permitted.
    pub(crate) fn mount(megabytes: u32) -> Option<Self> {
        let folder = std::env::temp_dir().join(format!("postrider-disk-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&folder).expect("a folder");
        let mounted = Command::new("mount")
            .args([
                "-t",
                "tmpfs",
                "-o",
                &format!("size={megabytes}m,mode=0755"),
                "tmpfs",
            ])
            .arg(&folder)
            .stderr(Stdio::null())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            let _ = std::fs::remove_dir(&folder);
            return None;
        }
        // Detached at once, gone when the server that writes to it is.
        let script = "cat > /dev/null; umount -l \"$1\"; rmdir \"$1\"";
        let mut watcher = Command::new("/bin/sh");
        watcher
            .args(["-c", script, "sh"])
            .arg(&folder)
            .stdin(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut watcher, 0);
        let watcher = watcher.spawn().expect("sh starts");
        // The account of the database server makes its folder in here.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&folder, open).expect("permitted");
        Some(Self {
            folder,
            _watcher: watcher,
        })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn ballast(&self) -> PathBuf {
        self.folder.join("ballast")
    }

    /// Until nothing can be written any more.
    pub(crate) fn fill(&self) {
        let mut file = std::fs::File::create(self.ballast()).expect("a file");
        let megabyte = vec![1_u8; 1024 * 1024];
        use std::io::Write;
        while file.write_all(&megabyte).is_ok() {}
    }

    pub(crate) fn empty(&self) {
        let _ = std::fs::remove_file(self.ballast());
    }
}

/// A library that sets a process's clock of the day off by `SKEW_SECONDS`. None without a C compiler.
pub(crate) fn skewed_clock(folder: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chaos/skewed_clock.c");
    let library = folder.join("skewed_clock.so");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    built.is_ok_and(|status| status.success()).then_some(library)
}
