//! GGUF model files: parse, check, map; and write, for tests and tools.
//!
//! ```text
//! path ──> mapping ──> header (cursor: every read checked) ──> ModelFile ──> metadata, tensors, bytes
//! ```
//!
//! This crate knows formats and no networks: whether an architecture is supported, or a tensor has the shape that
//! a network wants, is decided elsewhere. A file is checked as a whole when it is opened; afterwards every accessor is
//! infallible and in bounds. Nothing here may panic on, read past the end of, or allocate by an unchecked number of,
//! a file from outside.
//!
//! Source of the layout: the GGUF specification, `docs/gguf.md` of the ggml project.

mod cursor;
mod dequantize;
mod error;
mod format;
mod header;
mod mapping;
mod metadata;
mod model_file;
mod quantize;
mod twin;
mod writer;

pub use error::GgufError;
pub use format::Format;
pub use metadata::{Array, FromValue, Metadata, Strings, Value, ValueType};
pub use model_file::{ModelFile, TensorInfo};
pub use twin::{stays_f32, twin};
pub use writer::Writer;
