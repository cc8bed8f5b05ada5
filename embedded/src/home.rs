//! Where the cluster is: a folder that the server's account can reach, and a socket with a short path.
//! Invariant: a cluster outside the data directory belongs to one data directory, recorded in its folder. A copy of that
//! directory points to the same cluster, and is refused.

use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use super::{Account, EmbeddedError};

/// The limit of a socket's path, minus the names of the socket and its lock file.
const SOCKET_FOLDER_BYTES_MAX: usize = 80;

/// The folders of a cluster: its data, its socket and its log.
#[derive(Debug, Clone)]
pub struct Home {
    pub(super) folder: PathBuf,
    pub(super) sockets: PathBuf,
    pub(super) account: Account,
}

impl Home {
    /// In the data directory; or, if the server's account cannot reach that, in a separate folder that the data directory
    /// points to.
    pub fn below(data_dir: &Path) -> Result<Self, EmbeddedError> {
        let account = Account::for_server()?;
        let pointer = data_dir.join("pg-home");
        let folder = if let Ok(recorded) = fs::read_to_string(&pointer) {
            PathBuf::from(recorded.trim_end())
        } else if account.can_enter(data_dir) {
            return Self::at(data_dir.join("pg"), account);
        } else {
            // A new name each time: a data directory that was deleted and created again must not find its old database,
            // whose secrets are encrypted with a key that is gone.
            let name = HEXLOWER.encode(&rand::random::<[u8; 6]>());
            let folder = Path::new("/var/lib").join(format!("postrider-{name}"));
            fs::write(&pointer, format!("{}\n", folder.display())).map_err(EmbeddedError::at(&pointer))?;
            folder
        };
        let home = Self::at(folder, account)?;
        home.belong_to(data_dir)?;
        Ok(home)
    }

    /// Records the owner of the cluster, or refuses one that belongs to another data directory. A directory may be moved: it
    /// is identified by its inode, not its path.
    fn belong_to(&self, data_dir: &Path) -> Result<(), EmbeddedError> {
        let note = self.folder.join("data-dir");
        let found = fs::metadata(data_dir).map_err(EmbeddedError::at(data_dir))?;
        let identity = format!("{}:{}", found.dev(), found.ino());
        let noted = fs::read_to_string(&note).ok();
        let noted = noted.as_deref().and_then(|text| text.trim_end().split_once(' '));
        if let Some((owner, path)) = noted
            && owner != identity
        {
            return Err(EmbeddedError::OfAnother {
                data_dir: data_dir.to_owned(),
                cluster: self.folder.clone(),
                owner: PathBuf::from(path),
                note,
            });
        }
        let text = format!("{identity} {}\n", data_dir.display());
        fs::write(&note, text).map_err(EmbeddedError::at(&note))
    }

    /// In the given folder.
    pub fn at(folder: PathBuf, account: Account) -> Result<Self, EmbeddedError> {
        account.private_folder(&folder)?;
        let beside = folder.join("socket");
        let sockets = if beside.as_os_str().len() <= SOCKET_FOLDER_BYTES_MAX {
            beside
        } else {
            std::env::temp_dir().join(format!("postrider-{}", short_name(&folder)))
        };
        account.private_folder(&sockets)?;
        Ok(Self {
            folder,
            sockets,
            account,
        })
    }

    pub(super) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    pub fn log(&self) -> PathBuf {
        self.folder.join("postgres.log")
    }

    /// The folder of the socket, for `psql -h`.
    pub fn sockets(&self) -> &Path {
        &self.sockets
    }
}

/// The same at each start for the same folder.
fn short_name(folder: &Path) -> String {
    HEXLOWER.encode(&Sha256::digest(folder.as_os_str().as_bytes())[..6])
}
