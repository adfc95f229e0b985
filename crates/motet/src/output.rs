//! What a command prints: for people and programs on standard output, about itself on standard error.
//!
//! A reader that has seen enough (`| head`) ends the command quietly; anything else that keeps output from being written
//! is an error. `println!` would panic in both cases, and `eprintln!` where standard error is closed.

use std::fmt;
use std::io::{self, Write};

/// Standard output could not be written to.
#[derive(Debug, thiserror::Error)]
#[error("standard output: {0}")]
pub(crate) struct OutputError(io::Error);

impl OutputError {
    /// Whether the reader has closed the pipe.
    pub(crate) fn reader_left(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints, at once.
///
/// # Errors
/// The reader has left; the disk is full.
pub(crate) fn print(what: fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    out.write_fmt(what).and_then(|()| out.flush()).map_err(OutputError)
}

/// Prints, as `print!` does, but tells when that fails.
macro_rules! say {
    ($($what:tt)*) => { $crate::output::print(format_args!($($what)*)) };
}
pub(crate) use say;

/// Says something about the command itself on standard error, if anybody listens.
macro_rules! note {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($what)*);
    }};
}
pub(crate) use note;
