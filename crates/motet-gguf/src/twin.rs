//! Twins: an F32 model file rewritten with its matrices in another format, for fixtures.

use crate::error::GgufError;
use crate::format::Format;
use crate::model_file::ModelFile;
use crate::writer::Writer;

/// Whether a tensor stays F32 in a twin: vectors, convolutions, routers, and rows that aren't multiples of 32.
pub fn stays_f32(name: &str, shape: &[u64]) -> bool {
    shape.len() == 1
        || name.contains("conv1d")
        || name.contains("ffn_gate_inp")
        || !shape[0].is_multiple_of(32)
}

/// Rewrites a model with its F32 tensors in `format`, but for those that [`stays_f32`] names; other tensors and all keys
/// stay as they are.
///
/// # Errors
/// A format that can't be made ([`Format::quantize`]), or whose blocks don't divide a row.
pub fn twin(model: &ModelFile, format: Format) -> Result<Vec<u8>, GgufError> {
    let mut file = Writer::new();
    file.put_all(model.metadata())?;
    for tensor in model.tensors() {
        let bytes = model.bytes(tensor);
        if tensor.format != Format::F32 || stays_f32(&tensor.name, &tensor.shape) {
            file.tensor(&tensor.name, &tensor.shape, tensor.format, bytes)?;
            continue;
        }
        let mut values = vec![0.0; bytes.len() / 4];
        Format::F32.dequantize(bytes, &mut values);
        let mut quantized = Vec::new();
        format.quantize(&values, &mut quantized)?;
        file.tensor(&tensor.name, &tensor.shape, format, quantized)?;
    }
    Ok(file.to_bytes())
}
