//! An opened model: one file, or all parts of a split one, mapped and checked.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::GgufError;
use crate::format::Format;
use crate::header::Header;
use crate::mapping::Mapping;
use crate::metadata::Metadata;

/// One tensor of a [`ModelFile`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Elements per dimension, the contiguous one first: a matrix of `rows × inputs` is `[inputs, rows]`.
    pub shape: Vec<u64>,
    /// How the elements are stored.
    pub format: Format,
    /// The file it lies in, from 0.
    pub(crate) part: usize,
    /// Where, in bytes from the start of that file.
    pub(crate) offset: u64,
    /// How many bytes.
    pub(crate) len: u64,
}

impl TensorInfo {
    /// Elements per row: the first dimension.
    pub fn row_len(&self) -> usize {
        self.shape[0] as usize
    }

    /// Rows: the product of all dimensions but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }

    /// All elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_len() / self.format.block_len() * self.format.block_bytes()
    }

    /// Bytes of the whole tensor.
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    fn range(&self) -> Range<usize> {
        self.offset as usize..(self.offset + self.len) as usize
    }
}

/// An opened model. Everything in it has been checked; the weights are still in the file and are read by touching
/// [`ModelFile::bytes`].
#[derive(Debug)]
pub struct ModelFile {
    parts: Vec<Arc<Mapping>>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Tensor numbers, by name.
    sorted: Vec<u32>,
}

impl ModelFile {
    /// Opens and maps a model file. For a split model (`…-00001-of-0000N.gguf`) the path is that of the first part, and
    /// all parts are opened.
    ///
    /// The file must not be shortened or rewritten while it is open: the operating system would end the process
    /// (`SIGBUS`) or show the new bytes. Replacing it by a new file of the same name is fine.
    ///
    /// # Errors
    /// A file that can't be read, is no GGUF of version 2 or 3, is damaged anywhere in its header, whose tensors reach
    /// past its end, overlap, or have a type that is not in [`Format::ALL`].
    pub fn open(path: &Path) -> Result<ModelFile, GgufError> {
        let first = open_part(path)?;
        let header = Header::read(&first, 0).map_err(|e| e.in_file(path))?;
        let paths = split_paths(path, &header.metadata).map_err(|e| e.in_file(path))?;

        let mut model = ModelFile {
            parts: vec![first],
            metadata: header.metadata,
            tensors: header.tensors,
            sorted: Vec::new(),
        };
        for (part, path) in paths.iter().enumerate().skip(1) {
            let mapping = open_part(path)?;
            let header = Header::read(&mapping, part).map_err(|e| e.in_file(path))?;
            check_split(&header.metadata, part, paths.len()).map_err(|e| e.in_file(path))?;
            model.tensors.extend(header.tensors);
            model.parts.push(mapping);
        }
        if paths.len() > 1 {
            let expected: Option<u64> =
                model.metadata.optional(SPLIT_TENSORS).map_err(|e| e.in_file(path))?;
            let found = model.tensors.len() as u64;
            if let Some(expected) = expected.filter(|expected| *expected != found) {
                let message = format!("the parts hold {found} tensors, {SPLIT_TENSORS} says {expected}");
                return Err(GgufError::Split(message).in_file(path));
            }
        }
        model.sort_names().map_err(|e| e.in_file(path))
    }

    /// Opens a model that is part of the binary.
    ///
    /// # Errors
    /// As [`ModelFile::open`]; a split model is refused.
    pub fn from_static(bytes: &'static [u8]) -> Result<ModelFile, GgufError> {
        ModelFile::from_memory(Cow::Borrowed(bytes))
    }

    /// Opens a model from bytes on the heap.
    ///
    /// # Errors
    /// As [`ModelFile::open`]; a split model is refused.
    pub fn from_vec(bytes: Vec<u8>) -> Result<ModelFile, GgufError> {
        ModelFile::from_memory(Cow::Owned(bytes))
    }

    fn from_memory(bytes: Cow<'static, [u8]>) -> Result<ModelFile, GgufError> {
        let part = Arc::new(Mapping::Memory(bytes));
        let Header { metadata, tensors } = Header::read(&part, 0)?;
        if let Some(count) = metadata.optional::<u64>(SPLIT_COUNT)?.filter(|count| *count > 1) {
            return Err(GgufError::Split(format!(
                "this is one of {count} parts of a split model; a model in memory has to be whole"
            )));
        }
        ModelFile { parts: vec![part], metadata, tensors, sorted: Vec::new() }.sort_names()
    }

    /// Fills `sorted`, refusing a name that appears twice.
    fn sort_names(mut self) -> Result<ModelFile, GgufError> {
        let name = |i: &u32| self.tensors[*i as usize].name.as_str();
        let mut sorted: Vec<u32> = (0..self.tensors.len() as u32).collect();
        sorted.sort_unstable_by_key(|i| name(i));
        if let Some(pair) = sorted.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
            return Err(GgufError::DuplicateTensor { tensor: name(&pair[0]).to_owned() });
        }
        self.sorted = sorted;
        Ok(self)
    }

    /// The metadata (of a split model: the first part's, which is the model's).
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.sorted.binary_search_by_key(&name, |i| &self.tensors[*i as usize].name).ok()?;
        Some(&self.tensors[self.sorted[found] as usize])
    }

    /// The bytes of one of this model's tensors: [`TensorInfo::rows`] rows of [`TensorInfo::row_bytes`] bytes. Mapped
    /// bytes are aligned to the file's alignment (at least 8); those of a model in memory may not be aligned at all.
    ///
    /// # Panics
    /// If `tensor` is one of another, larger model.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.parts[tensor.part].bytes()[tensor.range()]
    }

    /// Gives the memory of one of this model's tensors back to the system, whole pages at a time, after it was copied
    /// elsewhere. Touching it again reads it again from the file. Does nothing for a model in memory.
    pub fn release(&self, tensor: &TensorInfo) {
        self.parts[tensor.part].release(tensor.range());
    }

    /// [`ModelFile::release`] for some bytes of a tensor.
    ///
    /// # Panics
    /// If the tensor has no such bytes.
    pub fn release_part(&self, tensor: &TensorInfo, bytes: Range<usize>) {
        let whole = tensor.range();
        assert!(bytes.start <= bytes.end && bytes.end <= whole.len(), "bytes {bytes:?} of {}", tensor.name);
        self.parts[tensor.part].release(whole.start + bytes.start..whole.start + bytes.end);
    }

    /// [`ModelFile::release`] for whole files, headers included: for after loading.
    pub fn release_all(&self) {
        self.parts.iter().for_each(|part| part.release(0..part.bytes().len()));
    }

    /// Bytes of all parts together.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes().len() as u64).sum()
    }
}

const SPLIT_COUNT: &str = "split.count";
const SPLIT_NUMBER: &str = "split.no";
const SPLIT_TENSORS: &str = "split.tensors.count";

fn open_part(path: &Path) -> Result<Arc<Mapping>, GgufError> {
    let mapping = Mapping::open(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
    Ok(Arc::new(mapping))
}

/// The paths of all parts of the model whose first part is `path`; only `path` if the model isn't split.
fn split_paths(path: &Path, metadata: &Metadata) -> Result<Vec<PathBuf>, GgufError> {
    let count = metadata.optional::<u64>(SPLIT_COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![path.to_owned()]);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = metadata.optional::<u64>(SPLIT_NUMBER)?.unwrap_or(0);
    // `number` is any u64 here; the name below is five digits as llama.cpp writes it.
    let ending = format!("-{:05}-of-{count:05}.gguf", number.saturating_add(1));
    let Some(stem) = name.strip_suffix(&ending).filter(|_| count <= 99_999) else {
        return Err(GgufError::Split(format!(
            "part {} of {count} of a split model, but the file name does not end in {ending}",
            number.saturating_add(1)
        )));
    };
    let part = |k: u64| path.with_file_name(format!("{stem}-{k:05}-of-{count:05}.gguf"));
    if number != 0 {
        return Err(GgufError::Split(format!(
            "part {} of {count} of a split model; open the first part, {}",
            number.saturating_add(1),
            part(1).display()
        )));
    }
    Ok((1..=count).map(part).collect())
}

/// Checks that a file is the part that its name says.
fn check_split(metadata: &Metadata, part: usize, count: usize) -> Result<(), GgufError> {
    let found: (u64, u64) = (metadata.required(SPLIT_NUMBER)?, metadata.required(SPLIT_COUNT)?);
    if found != (part as u64, count as u64) {
        return Err(GgufError::Split(format!(
            "says that it is part {} of {}, expected part {} of {count}",
            found.0.saturating_add(1),
            found.1,
            part + 1
        )));
    }
    Ok(())
}
