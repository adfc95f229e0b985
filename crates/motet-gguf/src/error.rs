//! What can be wrong with a model file, in words that help the person who has it.

use std::path::PathBuf;

use crate::format::Format;

/// Why a model file can't be used, a key can't be read, or a file can't be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Something is wrong inside this file.
    #[error("{path}: {source}", path = path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<GgufError>,
    },
    /// The first four bytes aren't `GGUF`.
    #[error("not a GGUF file: it {}, expected to begin with \"GGUF\"", begins(found))]
    NotGguf {
        /// The first bytes, at most four.
        found: Vec<u8>,
    },
    /// A file for big-endian machines.
    #[error("a big-endian GGUF file (version {version}); only little-endian files are supported: convert it")]
    BigEndian {
        /// The version, read the other way round.
        version: u32,
    },
    /// A version that this reader does not know.
    #[error("GGUF version {found}; supported are versions 2 and 3")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The file ends before something that it announces.
    #[error(
        "truncated or corrupted: {what} at byte {at} needs {needed} bytes, but {left} are left; \
         the file may be an incomplete download"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where, in bytes from the start of the file.
        at: u64,
        /// How many bytes it would take.
        needed: u64,
        /// How many there are.
        left: u64,
    },
    /// A string isn't UTF-8.
    #[error("{what} at byte {at} is not valid UTF-8")]
    NotUtf8 {
        /// Which string.
        what: String,
        /// Where, in bytes from the start of the file.
        at: u64,
    },
    /// A metadata value of a type that GGUF does not have.
    #[error("key {key:?} has value type {found}; known are 0 (u8) to 12 (f64)")]
    ValueType {
        /// The key.
        key: String,
        /// The type number in the file.
        found: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("key {key:?} holds a bool with the value {found}; expected 0 or 1")]
    Bool {
        /// The key.
        key: String,
        /// The byte in the file.
        found: u8,
    },
    /// Arrays in arrays in arrays.
    #[error("key {key:?} nests arrays more than {limit} deep")]
    Nesting {
        /// The key.
        key: String,
        /// The deepest nesting allowed.
        limit: u32,
    },
    /// A key appears twice.
    #[error("key {key:?} appears twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `general.alignment` is no alignment.
    #[error("general.alignment is {found}; expected a power of two, at least 8")]
    Alignment {
        /// The value in the file.
        found: u32,
    },
    /// Two tensors have one name (also in different parts of a split model).
    #[error("tensor {tensor:?} appears twice")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor is stored in a format that this reader doesn't know.
    #[error("tensor {tensor:?} has type {found} ({name}); supported are {list}", name = crate::format::ggml_name(*found), list = Format::list())]
    TensorType {
        /// The tensor.
        tensor: String,
        /// Its ggml type number.
        found: u32,
    },
    /// A tensor's shape makes no sense, or does not suit its format.
    #[error("tensor {tensor:?}: {reason}")]
    TensorShape {
        /// The tensor.
        tensor: String,
        /// What was expected and found.
        reason: String,
    },
    /// A tensor does not start on the file's alignment.
    #[error("tensor {tensor:?} starts at offset {offset}, not a multiple of the alignment {alignment}")]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset within the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u32,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts inside it.
        second: String,
    },
    /// The parts of a split model don't belong together.
    #[error("{0}")]
    Split(String),
    /// A key that is needed isn't there.
    #[error("key {key:?} is missing (expected {expected})")]
    MissingKey {
        /// The key.
        key: String,
        /// The type that it should have.
        expected: &'static str,
    },
    /// A key holds something else than what is needed.
    #[error("key {key:?} holds {found}, expected {expected}")]
    KeyType {
        /// The key.
        key: String,
        /// What was asked for.
        expected: &'static str,
        /// What the file has.
        found: String,
    },
    /// This format can be read but not made.
    #[error(
        "quantising to {format} is not implemented; possible are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"
    )]
    NoQuantizer {
        /// The format.
        format: Format,
    },
}

impl GgufError {
    /// The same error, told with the file it is in.
    pub(crate) fn in_file(self, path: &std::path::Path) -> GgufError {
        GgufError::InFile { path: path.to_owned(), source: Box::new(self) }
    }
}

/// `begins with "\x89PNG"`
fn begins(found: &[u8]) -> String {
    if found.is_empty() { "is empty".into() } else { format!("begins with \"{}\"", found.escape_ascii()) }
}
