//! A file on its way: `NAME.part`, hashed as it grows, that becomes `NAME` when it is complete.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::PullError;

/// Bytes read at a time.
const PIECE: usize = 1 << 18;

/// See the module.
pub(super) struct Part {
    path: PathBuf,
    file: File,
    hash: Sha256,
    len: u64,
}

impl Part {
    /// `NAME.part` of `NAME`.
    pub(super) fn path_of(target: &Path) -> PathBuf {
        let mut name = target.as_os_str().to_owned();
        name.push(".part");
        name.into()
    }

    /// An empty file.
    pub(super) fn create(target: &Path) -> Result<Self, PullError> {
        let path = Self::path_of(target);
        let file = File::create(&path).map_err(PullError::file(&path))?;
        Ok(Self { path, file, hash: Sha256::new(), len: 0 })
    }

    /// What an earlier attempt left, to be written behind it.
    pub(super) fn resume(target: &Path) -> Result<Self, PullError> {
        let path = Self::path_of(target);
        let at = PullError::file(&path);
        let mut file = File::options().read(true).append(true).create(true).open(&path).map_err(&at)?;
        let (mut hash, mut len) = (Sha256::new(), 0);
        let mut piece = vec![0; PIECE];
        loop {
            let read = file.read(&mut piece).map_err(&at)?;
            if read == 0 {
                break;
            }
            hash.update(&piece[..read]);
            len += read as u64;
        }
        drop(at);
        Ok(Self { path, file, hash, len })
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Appends all that `from` gives; the inner result is how the reading ended, and what came before it is kept.
    pub(super) fn append(
        &mut self,
        from: &mut dyn Read,
        mut progress: impl FnMut(u64),
    ) -> Result<std::io::Result<()>, PullError> {
        let mut piece = vec![0; PIECE];
        loop {
            let read = match from.read(&mut piece) {
                Ok(0) => return Ok(Ok(())),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Err(error)),
            };
            self.file.write_all(&piece[..read]).map_err(PullError::file(&self.path))?;
            self.hash.update(&piece[..read]);
            self.len += read as u64;
            progress(self.len);
        }
    }

    /// Checks the file and gives it its name; a file that fails the check is removed.
    pub(super) fn finish(self, target: &Path, sha256: Option<&str>) -> Result<(), PullError> {
        let found: String = self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if let Some(expected) = sha256.filter(|expected| **expected != found) {
            std::fs::remove_file(&self.path).map_err(PullError::file(&self.path))?;
            return Err(PullError::Checksum { found, expected: expected.into() });
        }
        self.file.sync_all().map_err(PullError::file(&self.path))?;
        std::fs::rename(&self.path, target).map_err(PullError::file(target))
    }
}
