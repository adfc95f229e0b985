//! One file's header: magic, version, metadata and the table of tensors, checked against the bytes that are there.

use std::sync::Arc;

use crate::cursor::Cursor;
use crate::error::GgufError;
use crate::format::Format;
use crate::mapping::Mapping;
use crate::metadata::Metadata;
use crate::model_file::TensorInfo;

/// The most dimensions a tensor may have (`GGML_MAX_DIMS`).
const MAX_DIMS: u32 = 4;
/// The alignment of a file that doesn't say (`GGUF_DEFAULT_ALIGNMENT`).
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
/// The key that says it.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
/// The first bytes of every file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// What one file says of itself.
pub(crate) struct Header {
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads and checks the header of one file, which is part `part` (from 0) of its model.
    pub(crate) fn read(file: &Arc<Mapping>, part: usize) -> Result<Header, GgufError> {
        let bytes = file.bytes();
        if !bytes.starts_with(MAGIC) {
            return Err(GgufError::NotGguf { found: bytes[..bytes.len().min(4)].to_vec() });
        }
        let mut cursor = Cursor::new(bytes);
        cursor.take(4, "the magic number")?;
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            _ if version & 0xffff == 0 && version != 0 => {
                return Err(GgufError::BigEndian { version: version.swap_bytes() });
            }
            _ => return Err(GgufError::Version { found: version }),
        }
        let tensor_count = cursor.u64("the number of tensors")?;
        let key_count = cursor.u64("the number of keys")?;

        let metadata = Metadata::read(file, &mut cursor, key_count)?;
        let alignment = metadata.optional::<u32>(ALIGNMENT_KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment < 8 {
            return Err(GgufError::Alignment { found: alignment });
        }

        let mut tensors = Vec::new(); // grows with what is really there: `tensor_count` is only a claim
        for _ in 0..tensor_count {
            tensors.push(read_tensor(&mut cursor, alignment, part)?);
        }
        // The data begin at the next multiple of the alignment; offsets so far count from there.
        let data = (cursor.at() as u64).next_multiple_of(alignment.into());
        place_tensors(&mut tensors, data, bytes.len() as u64)?;
        Ok(Header { metadata, tensors })
    }
}

/// One line of the table of tensors. The offset still counts from the start of the data.
fn read_tensor(cursor: &mut Cursor<'_>, alignment: u32, part: usize) -> Result<TensorInfo, GgufError> {
    let name = cursor.string("a tensor's name")?;
    let invalid = |reason: String| GgufError::TensorShape { tensor: name.to_owned(), reason };

    let dims = cursor.u32(name)?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(invalid(format!("it has {dims} dimensions, expected 1 to {MAX_DIMS}")));
    }
    let mut shape = Vec::with_capacity(MAX_DIMS as usize);
    for _ in 0..dims {
        shape.push(cursor.u64(name)?);
    }
    let number = cursor.u32(name)?;
    let format = Format::from_ggml_type(number)
        .ok_or_else(|| GgufError::TensorType { tensor: name.to_owned(), found: number })?;
    let offset = cursor.u64(name)?;
    if !offset.is_multiple_of(alignment.into()) {
        return Err(GgufError::Misaligned { tensor: name.to_owned(), offset, alignment });
    }
    let len = byte_len(&shape, format).map_err(invalid)?;
    Ok(TensorInfo { name: name.to_owned(), shape, format, part, offset, len })
}

/// Bytes of a tensor, or what is wrong with its shape.
pub(crate) fn byte_len(shape: &[u64], format: Format) -> Result<u64, String> {
    if shape.contains(&0) {
        return Err(format!("its shape {shape:?} holds no elements"));
    }
    let block = format.block_len() as u64;
    if !shape[0].is_multiple_of(block) {
        return Err(format!("its rows of {} elements are no multiple of {format}'s {block}", shape[0]));
    }
    shape
        .iter()
        .try_fold(1u64, |product, dim| product.checked_mul(*dim))
        .and_then(|elements| format.bytes_for(elements))
        .filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(|| format!("its shape {shape:?} is larger than any file"))
}

/// Makes offsets count from the start of the file, and checks that no tensor leaves it or overlaps another.
fn place_tensors(tensors: &mut [TensorInfo], data: u64, file_len: u64) -> Result<(), GgufError> {
    for t in tensors.iter_mut() {
        let start = data.checked_add(t.offset);
        if start.and_then(|start| start.checked_add(t.len)).is_none_or(|end| end > file_len) {
            return Err(GgufError::Truncated {
                what: format!("tensor {:?}", t.name),
                at: data.saturating_add(t.offset),
                needed: t.len,
                left: file_len.saturating_sub(data.saturating_add(t.offset)),
            });
        }
        t.offset += data;
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_by_key(|t| t.offset);
    match by_offset.windows(2).find(|pair| pair[0].offset + pair[0].len > pair[1].offset) {
        Some(pair) => Err(GgufError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() }),
        None => Ok(()),
    }
}
