//! Every format against the PyPI package `gguf`: `fixtures/quants.gguf` is made by `tools/quant_vectors.py`.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

use std::path::Path;

use motet_gguf::{Format, ModelFile};

/// Formats that can be made.
const MADE: [Format; 8] = [
    Format::F32,
    Format::F16,
    Format::BF16,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
];

#[test]
fn dequantizing_gives_the_bits_of_python() {
    let vectors = vectors();
    for format in Format::ALL {
        let stored = vectors.tensor(format.name()).unwrap();
        assert_eq!((stored.format, stored.elements()), (format, 5120));
        let mut values = vec![f32::NAN; 5120];
        format.dequantize(vectors.bytes(stored), &mut values);
        let expected = floats(&vectors, &format!("{format}.values"));
        for (i, (found, expected)) in values.iter().zip(&expected).enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "{format}, element {i}: {found}, not {expected}");
        }
    }
}

#[test]
fn quantizing_gives_the_bytes_of_python() {
    let vectors = vectors();
    let source = floats(&vectors, "source");
    for format in MADE {
        let expected = vectors.bytes(vectors.tensor(&format!("source.{format}")).unwrap());
        for (row, (values, expected)) in
            source.chunks(256).zip(expected.chunks(expected.len() / (source.len() / 256))).enumerate()
        {
            let mut found = Vec::new();
            format.quantize(values, &mut found).unwrap();
            assert_eq!(found, expected, "{format}, row {row}");
        }
    }
}

#[test]
fn formats_that_cannot_be_made_say_so() {
    let error = Format::Q4K.quantize(&[0.0; 256], &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("Q4_K") && MADE.iter().all(|f| error.contains(f.name())), "{error}");
}

fn vectors() -> ModelFile {
    ModelFile::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/quants.gguf"))).unwrap()
}

fn floats(vectors: &ModelFile, name: &str) -> Vec<f32> {
    let tensor = vectors.tensor(name).unwrap();
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.format.dequantize(vectors.bytes(tensor), &mut values);
    values
}
