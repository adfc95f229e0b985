//! The bytes of one file: mapped, built in, or owned. The only room of this crate with `unsafe` in it.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Bytes that stay where they are while this lives.
#[derive(Debug)]
pub(crate) enum Mapping {
    /// A file mapped read-only.
    File(memmap2::Mmap),
    /// Bytes in the binary or on the heap.
    Memory(Cow<'static, [u8]>),
}

impl Mapping {
    /// Maps a whole file, read-only.
    pub(crate) fn open(path: &Path) -> io::Result<Mapping> {
        // Looked at before it is opened: opening a pipe waits for somebody to write to it.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // SAFETY: the mapping is read-only and shared. That no other process shortens or rewrites a model file while
        // it is in use is a condition of this crate, stated at `ModelFile::open`; the same holds for every mapped
        // reader, since no system offers a mapping that is immune.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Mapping::File(map))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Mapping::File(map) => map,
            Mapping::Memory(bytes) => bytes,
        }
    }

    /// Tells the system that the pages of this range aren't needed for now. They are read again when touched.
    /// Advice: a system that refuses changes nothing.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Mapping::File(map) = self
            && !range.is_empty()
        {
            // SAFETY: `DontNeed` is unsafe where it drops what was written; this mapping is of a file, shared and
            // read-only, so the same bytes come back from the file.
            let _ = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
