//! Writing a GGUF file (version 3), for tests and tools.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};

use crate::error::GgufError;
use crate::format::Format;
use crate::header::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, byte_len};
use crate::metadata::{Metadata, Value, ValueType};

/// A model file in the making: keys and tensors in the order in which they are put.
///
/// ```
/// use motet_gguf::{Format, ModelFile, Value, Writer};
///
/// let mut file = Writer::new();
/// file.put("general.architecture", Value::String("llama"))?;
/// file.put_strings("tokenizer.ggml.tokens", ["a", "b"])?;
/// file.tensor("output_norm.weight", &[2], Format::F32, 1f32.to_le_bytes().repeat(2))?;
/// let model = ModelFile::from_vec(file.to_bytes())?;
/// assert_eq!(model.metadata().required::<&str>("general.architecture")?, "llama");
/// # Ok::<(), motet_gguf::GgufError>(())
/// ```
#[derive(Debug)]
pub struct Writer<'a> {
    names: HashSet<String>,
    keys: Vec<u8>,
    key_count: u64,
    table: Vec<u8>,
    tensors: Vec<Cow<'a, [u8]>>,
    data_len: u64,
    alignment: u32,
}

impl Default for Writer<'_> {
    fn default() -> Self {
        Writer::new()
    }
}

impl<'a> Writer<'a> {
    /// An empty file.
    pub fn new() -> Self {
        Writer {
            names: HashSet::new(),
            keys: Vec::new(),
            key_count: 0,
            table: Vec::new(),
            tensors: Vec::new(),
            data_len: 0,
            alignment: DEFAULT_ALIGNMENT,
        }
    }

    /// Adds a key. `general.alignment` (a U32) must come before the first tensor.
    ///
    /// # Errors
    /// A key put twice, or an alignment that a reader would refuse.
    pub fn put(&mut self, key: &str, value: Value<'_>) -> Result<(), GgufError> {
        if key == ALIGNMENT_KEY {
            match value {
                Value::U32(n) if n.is_power_of_two() && n >= 8 && self.tensors.is_empty() => {
                    self.alignment = n
                }
                _ => {
                    return Err(GgufError::KeyType {
                        key: key.to_owned(),
                        expected: "a u32, a power of two, at least 8, put before the first tensor",
                        found: value.to_string(),
                    });
                }
            }
        }
        self.key(key, value.value_type())?;
        value.encode(&mut self.keys);
        Ok(())
    }

    /// Adds an array of strings.
    ///
    /// # Errors
    /// A key put twice.
    pub fn put_strings<'s>(
        &mut self,
        key: &str,
        strings: impl IntoIterator<Item = &'s str, IntoIter: ExactSizeIterator>,
    ) -> Result<(), GgufError> {
        self.put_array(key, ValueType::String, strings.into_iter().map(Value::String))
    }

    /// Adds an array: `file.put_array("llama.rope.dimensions", ValueType::I32, dims.iter().map(|d| Value::I32(*d)))`.
    ///
    /// # Errors
    /// A key put twice, or a value that is not of type `element`.
    pub fn put_array<'s>(
        &mut self,
        key: &str,
        element: ValueType,
        values: impl IntoIterator<Item = Value<'s>, IntoIter: ExactSizeIterator>,
    ) -> Result<(), GgufError> {
        let values = values.into_iter();
        let mut encoded = Vec::new();
        encoded.extend((element as u32).to_le_bytes());
        encoded.extend((values.len() as u64).to_le_bytes());
        for value in values {
            if value.value_type() != element {
                let found = value.to_string();
                return Err(GgufError::KeyType {
                    key: key.to_owned(),
                    expected: "values of one type",
                    found,
                });
            }
            value.encode(&mut encoded);
        }
        self.key(key, ValueType::Array)?;
        self.keys.extend(encoded);
        Ok(())
    }

    fn key(&mut self, key: &str, kind: ValueType) -> Result<(), GgufError> {
        // Keys and tensors share one set: no tensor is called like a key with a NUL in front.
        if !self.names.insert(format!("\0{key}")) {
            return Err(GgufError::DuplicateKey { key: key.to_owned() });
        }
        self.key_count += 1;
        Value::String(key).encode(&mut self.keys);
        self.keys.extend((kind as u32).to_le_bytes());
        Ok(())
    }

    /// Adds all keys of another file, as they are.
    ///
    /// # Errors
    /// A key put twice.
    pub fn put_all(&mut self, metadata: &Metadata) -> Result<(), GgufError> {
        metadata.iter().try_for_each(|(key, value)| self.put(key, value))
    }

    /// Adds a tensor, `shape` as in [`crate::TensorInfo::shape`].
    ///
    /// # Errors
    /// A name that is taken, a shape that does not suit the format or the number of bytes.
    pub fn tensor(
        &mut self,
        name: &str,
        shape: &[u64],
        format: Format,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<(), GgufError> {
        let bytes = bytes.into();
        let invalid = |reason| GgufError::TensorShape { tensor: name.to_owned(), reason };
        if shape.is_empty() || shape.len() > 4 {
            return Err(invalid(format!("it has {} dimensions, expected 1 to 4", shape.len())));
        }
        let expected = byte_len(shape, format).map_err(invalid)?;
        if bytes.len() as u64 != expected {
            return Err(invalid(format!(
                "{} bytes given, {shape:?} of {format} takes {expected}",
                bytes.len()
            )));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(GgufError::DuplicateTensor { tensor: name.to_owned() });
        }
        Value::String(name).encode(&mut self.table);
        self.table.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|dim| self.table.extend(dim.to_le_bytes()));
        self.table.extend(format.ggml_type().to_le_bytes());
        self.table.extend(self.data_len.to_le_bytes());
        self.data_len += expected.next_multiple_of(self.alignment.into());
        self.tensors.push(bytes);
        Ok(())
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(3u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend(self.key_count.to_le_bytes());
        for section in [&header, &self.keys, &self.table] {
            out.write_all(section)?;
        }
        let padding = |len: usize| vec![0; len.next_multiple_of(self.alignment as usize) - len];
        out.write_all(&padding(header.len() + self.keys.len() + self.table.len()))?;
        for tensor in &self.tensors {
            out.write_all(tensor)?;
            out.write_all(&padding(tensor.len()))?;
        }
        Ok(())
    }

    /// The file as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes).expect("a Vec takes everything");
        bytes
    }
}
