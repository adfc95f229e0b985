//! Opens any bytes as a model file. Either they are refused, or everything in the model can be touched.

#![no_main]

use libfuzzer_sys::fuzz_target;
use motet_gguf::{Array, ModelFile, Strings, Value};

fuzz_target!(|bytes: &[u8]| {
    let Ok(model) = ModelFile::from_vec(bytes.to_vec()) else { return };
    for (key, value) in model.metadata().iter() {
        assert_eq!(model.metadata().get(key).map(|v| v.value_type()), Some(value.value_type()));
        assert!(!value.to_string().is_empty());
        if let Value::Array(array) = value {
            walk(array);
        }
        if let Ok(Some(strings)) = model.metadata().optional::<Strings<'_>>(key) {
            assert_eq!(strings.iter().map(str::len).sum::<usize>(), strings.total_bytes());
        }
    }
    for tensor in model.tensors() {
        assert_eq!(model.tensor(&tensor.name), Some(tensor));
        let bytes = model.bytes(tensor);
        assert_eq!(bytes.len(), tensor.rows() * tensor.row_bytes());
        let mut row = vec![0.0; tensor.row_len()];
        for bytes in bytes.chunks(tensor.row_bytes()) {
            tensor.format.dequantize(bytes, &mut row);
        }
        model.release(tensor);
    }
});

fn walk(array: Array<'_>) {
    assert!(array.iter().all(|element| element.value_type() == array.element_type()));
    for element in array.iter() {
        if let Value::Array(inner) = element {
            walk(inner);
        }
    }
}
