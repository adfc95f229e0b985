//! JSON written as Python writes it, for templates that expect it.

use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// `json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)`.
pub(crate) fn to_json(value: &Json, indent: Option<usize>, separators: Option<(&str, &str)>) -> String {
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent);
            value.serialize(&mut Serializer::with_formatter(
                &mut bytes,
                PrettyFormatter::with_indent(spaces.as_bytes()),
            ))
        }
        None => {
            let (comma, colon) = separators.unwrap_or((", ", ": "));
            value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced { comma, colon }))
        }
    };
    debug_assert!(written.is_ok(), "a JSON value always has a JSON text");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `ensure_ascii=True`: characters beyond ASCII as `\u` and their UTF-16.
pub(crate) fn escape_beyond_ascii(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            out.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    out
}

/// On one line, with separators of choice.
struct Spaced<'a> {
    comma: &'a str,
    colon: &'a str,
}

impl Formatter for Spaced<'_> {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.comma.as_bytes()) }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.comma.as_bytes()) }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(self.colon.as_bytes())
    }
}
