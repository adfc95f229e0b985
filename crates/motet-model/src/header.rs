//! The model header: typed keys of one architecture, and tensors with the shapes that a network expects.
//!
//! Everything read here comes from outside and is checked before it is used as a size.

use motet_gguf::{ModelFile, TensorInfo};

/// Why a model can't become a network.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// An architecture that motet does not know.
    #[error("architecture {found:?} is not supported; supported: {supported}")]
    Architecture {
        /// What the file says.
        found: String,
        /// What would do.
        supported: String,
    },
    /// A key that the architecture needs.
    #[error("the model has no key {0}, which its architecture needs")]
    MissingKey(String),
    /// A key of the wrong type.
    #[error(transparent)]
    Key(#[from] motet_gguf::GgufError),
    /// A value outside of what can be run.
    #[error("{key} = {found}: expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A tensor that the architecture needs.
    #[error("the model has no tensor {0}, which its architecture needs")]
    MissingTensor(String),
    /// A tensor of the wrong shape.
    #[error("tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// Found, input dimension first.
        found: Vec<u64>,
        /// Expected.
        expected: Vec<usize>,
    },
}

/// Greatest value accepted for any dimension of a network: a header can't make motet compute with absurd sizes.
const MAX_DIMENSION: u64 = 1 << 24;

/// A model file seen by the architecture it names.
pub struct Header<'a> {
    file: &'a ModelFile,
    architecture: &'a str,
}

impl<'a> Header<'a> {
    /// The header of `file`.
    ///
    /// # Errors
    /// If the file names no architecture.
    pub fn new(file: &'a ModelFile) -> Result<Self, ModelError> {
        let architecture = file.metadata().required::<&str>("general.architecture")?;
        Ok(Self { file, architecture })
    }

    /// The architecture's name.
    pub fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// The file.
    pub fn file(&self) -> &'a ModelFile {
        self.file
    }

    /// The full name of a key of this architecture.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A dimension, if the key is there: 0 … 2²⁴.
    ///
    /// # Errors
    /// Another type or a greater value.
    pub fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let key = self.key(key);
        match self.file.metadata().optional::<u64>(&key)? {
            Some(v) if v > MAX_DIMENSION => Err(ModelError::Value {
                key,
                found: v.to_string(),
                expected: format!("at most {MAX_DIMENSION}"),
            }),
            v => Ok(v.map(|v| v as usize)),
        }
    }

    /// A dimension that must be there and at least 1.
    ///
    /// # Errors
    /// If it is absent, 0, too great or of another type.
    pub fn needed(&self, key: &str) -> Result<usize, ModelError> {
        match self.size(key)? {
            None => Err(ModelError::MissingKey(self.key(key))),
            Some(0) => Err(ModelError::Value {
                key: self.key(key),
                found: "0".into(),
                expected: "at least 1".into(),
            }),
            Some(v) => Ok(v),
        }
    }

    /// A dimension by layer: one number for all or an array with one per layer.
    ///
    /// # Errors
    /// As for [`Header::needed`], or an array of the wrong length.
    pub fn by_layer(&self, key: &str, layers: usize) -> Result<Vec<usize>, ModelError> {
        let full = self.key(key);
        let wrong = |found: String| ModelError::Value {
            key: full.clone(),
            found,
            expected: format!("a number or {layers} numbers of at most {MAX_DIMENSION}"),
        };
        let Some(array) = self.file.metadata().optional::<Vec<u64>>(&full).ok().flatten() else {
            return Ok(vec![self.needed(key)?; layers]);
        };
        if array.len() != layers || array.iter().any(|&v| v > MAX_DIMENSION) {
            return Err(wrong(format!("{array:?}")));
        }
        Ok(array.iter().map(|&v| v as usize).collect())
    }

    /// A number, if the key is there.
    ///
    /// # Errors
    /// Another type, or not finite.
    pub fn number(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let key = self.key(key);
        match self.file.metadata().optional::<f32>(&key)? {
            Some(v) if !v.is_finite() => {
                Err(ModelError::Value { key, found: v.to_string(), expected: "a finite number".into() })
            }
            v => Ok(v),
        }
    }

    /// A string, if the key is there.
    ///
    /// # Errors
    /// Another type.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        Ok(self.file.metadata().optional::<&str>(&self.key(key))?)
    }

    /// A list of flags, if the key is there.
    ///
    /// # Errors
    /// Another type.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, ModelError> {
        Ok(self.file.metadata().optional::<Vec<bool>>(&self.key(key))?)
    }

    /// A truth value, if the key is there.
    ///
    /// # Errors
    /// Another type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.file.metadata().optional::<bool>(&self.key(key))?)
    }

    /// A tensor, if it is there, with the shape that the network expects (input dimension first).
    ///
    /// # Errors
    /// Another shape. Dimensions of 1 at the end don't count.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<&'a TensorInfo>, ModelError> {
        let Some(info) = self.file.tensor(name) else { return Ok(None) };
        let dimensions = info.shape.len().max(shape.len());
        let found = info.shape.iter().copied().chain(std::iter::repeat(1)).take(dimensions);
        let expected = shape.iter().map(|&e| e as u64).chain(std::iter::repeat(1)).take(dimensions);
        if !found.eq(expected) {
            let (name, found) = (name.to_string(), info.shape.clone());
            return Err(ModelError::Shape { name, found, expected: shape.to_vec() });
        }
        Ok(Some(info))
    }
}
