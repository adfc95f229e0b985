//! Reading forward through bytes that nobody vouches for: every step is checked against what is left.

use crate::error::GgufError;

/// A position in a file's bytes.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    /// Bytes from the start of the file.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// The next `n` bytes.
    pub(crate) fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8], GgufError> {
        let left = self.bytes.len() - self.at;
        let Some(n) = usize::try_from(n).ok().filter(|n| *n <= left) else {
            let (at, left) = (self.at as u64, left as u64);
            return Err(GgufError::Truncated { what: what.to_owned(), at, needed: n, left });
        };
        let taken = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(taken)
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        let mut raw = [0; 4];
        raw.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_le_bytes(raw))
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        let mut raw = [0; 8];
        raw.copy_from_slice(self.take(8, what)?);
        Ok(u64::from_le_bytes(raw))
    }

    /// A string: its length in 8 bytes, then UTF-8.
    pub(crate) fn string(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let at = self.at as u64;
        let len = self.u64(what)?;
        let raw = self.take(len, what)?;
        std::str::from_utf8(raw).map_err(|_| GgufError::NotUtf8 { what: what.to_owned(), at })
    }
}
