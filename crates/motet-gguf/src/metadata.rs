//! A model file's keys and values, read in place: strings and arrays stay in the mapping.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cursor::Cursor;
use crate::error::GgufError;
use crate::mapping::Mapping;

/// Arrays may hold arrays, this deep (real files: 1).
const MAX_NESTING: u32 = 4;

/// The type of a metadata value; the numbers are GGUF's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    fn from_number(number: u32) -> Option<ValueType> {
        ValueType::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Bytes of a value; `None` for strings and arrays, which say their own.
    fn size(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Takes `N` bytes off the front of bytes that `check` has accepted.
fn raw<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (head, tail) = bytes.split_first_chunk::<N>().expect("checked when the file was opened");
    *bytes = tail;
    *head
}

/// A metadata value, borrowed from the file.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F32(_) => ValueType::F32,
            Value::F64(_) => ValueType::F64,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
        }
    }

    /// An integer of any width; `None` for everything else.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// Takes one value off the front of bytes that `check` has accepted.
    fn decode(kind: ValueType, bytes: &mut &'a [u8]) -> Value<'a> {
        match kind {
            ValueType::U8 => Value::U8(u8::from_le_bytes(raw(bytes))),
            ValueType::I8 => Value::I8(i8::from_le_bytes(raw(bytes))),
            ValueType::U16 => Value::U16(u16::from_le_bytes(raw(bytes))),
            ValueType::I16 => Value::I16(i16::from_le_bytes(raw(bytes))),
            ValueType::U32 => Value::U32(u32::from_le_bytes(raw(bytes))),
            ValueType::I32 => Value::I32(i32::from_le_bytes(raw(bytes))),
            ValueType::U64 => Value::U64(u64::from_le_bytes(raw(bytes))),
            ValueType::I64 => Value::I64(i64::from_le_bytes(raw(bytes))),
            ValueType::F32 => Value::F32(f32::from_le_bytes(raw(bytes))),
            ValueType::F64 => Value::F64(f64::from_le_bytes(raw(bytes))),
            ValueType::Bool => Value::Bool(u8::from_le_bytes(raw(bytes)) != 0),
            ValueType::String => {
                let len = u64::from_le_bytes(raw(bytes)) as usize;
                let (text, rest) = bytes.split_at(len);
                *bytes = rest;
                Value::String(std::str::from_utf8(text).expect("checked when the file was opened"))
            }
            ValueType::Array => {
                let (kind, len) = Array::decode_head(bytes);
                let start = *bytes;
                match kind.size() {
                    Some(size) => *bytes = &bytes[len * size..],
                    None => (0..len).for_each(|_| {
                        Value::decode(kind, bytes);
                    }),
                }
                Value::Array(Array { kind, len, bytes: &start[..start.len() - bytes.len()] })
            }
        }
    }

    /// The value as the file stores it, without its type number.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Value::U8(v) => out.extend(v.to_le_bytes()),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push(v.into()),
            Value::String(text) => {
                out.extend((text.len() as u64).to_le_bytes());
                out.extend(text.as_bytes());
            }
            Value::Array(array) => {
                out.extend((array.kind as u32).to_le_bytes());
                out.extend((array.len as u64).to_le_bytes());
                out.extend(array.bytes);
            }
        }
    }
}

/// Says what was found, for messages: a type, and the value when it is short.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.value_type();
        match self {
            Value::F32(v) => write!(f, "{kind} {v}"),
            Value::F64(v) => write!(f, "{kind} {v}"),
            Value::Bool(v) => write!(f, "{kind} {v}"),
            Value::String(text) if text.len() <= 40 => write!(f, "{kind} {text:?}"),
            Value::String(text) => write!(f, "a {kind} of {} bytes", text.len()),
            Value::Array(array) => write!(f, "an array of {} values of type {}", array.len, array.kind),
            _ => write!(f, "{kind} {}", self.as_integer().unwrap_or_default()),
        }
    }
}

/// A metadata array, borrowed from the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    kind: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Takes the element type and the number of elements off the front of bytes that `check` has accepted.
    fn decode_head(bytes: &mut &[u8]) -> (ValueType, usize) {
        let kind = ValueType::from_number(u32::from_le_bytes(raw(bytes)));
        (kind.expect("checked when the file was opened"), u64::from_le_bytes(raw(bytes)) as usize)
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.kind
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Value<'a>> + use<'a> {
        let Array { kind, mut bytes, len } = *self;
        (0..len).map(move |_| Value::decode(kind, &mut bytes))
    }
}

/// An array of strings, read in place: a token list has a quarter of a million entries, and none is copied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Strings<'a>(Array<'a>);

impl<'a> Strings<'a> {
    /// How many strings.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Bytes of all strings together: what a copy of them would take.
    pub fn total_bytes(&self) -> usize {
        self.0.bytes.len() - 8 * self.0.len
    }

    /// The strings in order; each points into the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a str> + use<'a> {
        self.0.iter().map(|value| match value {
            Value::String(text) => text,
            _ => "",
        })
    }
}

/// What a metadata value can be read as; see [`Metadata::required`].
pub trait FromValue<'a>: Sized {
    /// How messages call it.
    const EXPECTED: &'static str;
    /// `None` if the value is something else.
    fn from_value(value: Value<'a>) -> Option<Self>;
}

impl<'a> FromValue<'a> for Value<'a> {
    const EXPECTED: &'static str = "any value";
    fn from_value(value: Value<'a>) -> Option<Self> {
        Some(value)
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: Value<'a>) -> Option<Self> {
        if let Value::String(text) = value { Some(text) } else { None }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: Value<'_>) -> Option<Self> {
        if let Value::Bool(v) = value { Some(v) } else { None }
    }
}

/// An F64 is rounded to F32.
impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

macro_rules! from_any_integer {
    ($($type:ty: $expected:literal),*) => {$(
        impl FromValue<'_> for $type {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: Value<'_>) -> Option<Self> {
                value.as_integer()?.try_into().ok()
            }
        }
    )*};
}
from_any_integer!(
    u32: "an integer from 0 to 4294967295",
    u64: "an integer from 0 to 18446744073709551615",
    i32: "an integer from -2147483648 to 2147483647"
);

impl<'a> FromValue<'a> for Array<'a> {
    const EXPECTED: &'static str = "an array";
    fn from_value(value: Value<'a>) -> Option<Self> {
        if let Value::Array(array) = value { Some(array) } else { None }
    }
}

impl<'a> FromValue<'a> for Strings<'a> {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: Value<'a>) -> Option<Self> {
        Array::from_value(value).filter(|a| a.kind == ValueType::String).map(Strings)
    }
}

macro_rules! from_array {
    ($($type:ty: $expected:literal),*) => {$(
        impl FromValue<'_> for Vec<$type> {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: Value<'_>) -> Option<Self> {
                Array::from_value(value)?.iter().map(<$type>::from_value).collect()
            }
        }
    )*};
}
from_array!(
    bool: "an array of bools",
    f32: "an array of floats",
    u32: "an array of integers from 0 to 4294967295",
    u64: "an array of integers from 0 to 18446744073709551615",
    i32: "an array of integers from -2147483648 to 2147483647"
);

/// Where a key and its value lie in the file.
#[derive(Debug, Clone)]
struct Entry {
    key: Range<usize>,
    kind: ValueType,
    value: Range<usize>,
}

/// A model file's metadata: keys with values, in the file's order. Cheap to clone; keeps the file mapped.
#[derive(Debug, Clone)]
pub struct Metadata {
    file: Arc<Mapping>,
    entries: Arc<[Entry]>,
    /// Entry numbers, by key.
    sorted: Arc<[u32]>,
}

impl Metadata {
    /// Reads and checks `count` keys with their values.
    pub(crate) fn read(
        file: &Arc<Mapping>,
        cursor: &mut Cursor<'_>,
        count: u64,
    ) -> Result<Metadata, GgufError> {
        let mut entries = Vec::new(); // grows with what is really there: `count` is only a claim
        for _ in 0..count {
            let text = cursor.string("a metadata key")?;
            let key = cursor.at() - text.len()..cursor.at();
            let number = cursor.u32(text)?;
            let kind = ValueType::from_number(number)
                .ok_or_else(|| GgufError::ValueType { key: text.to_owned(), found: number })?;
            let start = cursor.at();
            check(cursor, text, kind, 0)?;
            entries.push(Entry { key, kind, value: start..cursor.at() });
        }
        let bytes = file.bytes();
        let mut sorted: Vec<u32> = (0..entries.len() as u32).collect();
        let key = |i: u32| &bytes[entries[i as usize].key.clone()];
        sorted.sort_unstable_by_key(|i| key(*i));
        if let Some(pair) = sorted.windows(2).find(|pair| key(pair[0]) == key(pair[1])) {
            return Err(GgufError::DuplicateKey { key: String::from_utf8_lossy(key(pair[0])).into_owned() });
        }
        Ok(Metadata { file: file.clone(), entries: entries.into(), sorted: sorted.into() })
    }

    /// How many keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys with their values, in the file's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, Value<'_>)> {
        self.entries.iter().map(|entry| (self.key(entry), self.value(entry)))
    }

    /// The value of a key, whatever its type.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let found = self.sorted.binary_search_by_key(&key, |i| self.key(&self.entries[*i as usize])).ok()?;
        Some(self.value(&self.entries[self.sorted[found] as usize]))
    }

    /// The value of a key that may be absent: `metadata.optional::<f32>("llama.rope.scaling.factor")?`.
    ///
    /// Integers are read from any integer type that holds a number in range.
    ///
    /// # Errors
    /// [`GgufError::KeyType`] if the key is there but holds something else.
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(read) => Ok(Some(read)),
            None => Err(GgufError::KeyType {
                key: key.to_owned(),
                expected: T::EXPECTED,
                found: value.to_string(),
            }),
        }
    }

    /// The value of a key that has to be there: `metadata.required::<&str>("general.architecture")?`.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], or [`GgufError::KeyType`] if it holds something else.
    pub fn required<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.optional(key)?
            .ok_or_else(|| GgufError::MissingKey { key: key.to_owned(), expected: T::EXPECTED })
    }

    fn key(&self, entry: &Entry) -> &str {
        std::str::from_utf8(&self.file.bytes()[entry.key.clone()]).expect("checked when the file was opened")
    }

    fn value(&self, entry: &Entry) -> Value<'_> {
        let mut bytes = &self.file.bytes()[entry.value.clone()];
        if entry.kind == ValueType::Array {
            // Where it ends is known: no walk over a quarter of a million strings.
            let (kind, len) = Array::decode_head(&mut bytes);
            return Value::Array(Array { kind, len, bytes });
        }
        Value::decode(entry.kind, &mut bytes)
    }
}

/// Moves past one value of type `kind`, checking everything that [`Value::decode`] relies on.
fn check(cursor: &mut Cursor<'_>, key: &str, kind: ValueType, depth: u32) -> Result<(), GgufError> {
    match kind {
        ValueType::Bool => match cursor.take(1, key)?[0] {
            0 | 1 => Ok(()),
            found => Err(GgufError::Bool { key: key.to_owned(), found }),
        },
        ValueType::String => cursor.string(key).map(drop),
        ValueType::Array => {
            if depth == MAX_NESTING {
                return Err(GgufError::Nesting { key: key.to_owned(), limit: MAX_NESTING });
            }
            let number = cursor.u32(key)?;
            let element = ValueType::from_number(number)
                .ok_or_else(|| GgufError::ValueType { key: key.to_owned(), found: number })?;
            let len = cursor.u64(key)?;
            match element.size() {
                Some(size) if element != ValueType::Bool => {
                    // Saturating: a number that overflows is more than any file has left.
                    cursor.take(len.saturating_mul(size as u64), key).map(drop)
                }
                // Every element takes at least a byte, so the loop ends with the file.
                _ => (0..len).try_for_each(|_| check(cursor, key, element, depth + 1)),
            }
        }
        _ => cursor.take(kind.size().unwrap_or_default() as u64, key).map(drop),
    }
}
