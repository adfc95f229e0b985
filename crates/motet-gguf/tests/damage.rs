//! Damaged files: whatever a byte flip or a cut makes of a file, it is refused or read, never worse.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

use motet_gguf::{Format, GgufError, ModelFile, Strings, Value, ValueType, Writer};

/// A small file with every type of value, nested arrays included, and a few tensors.
fn specimen() -> Vec<u8> {
    let mut file = Writer::new();
    let inner = ModelFile::from_vec({
        let mut file = Writer::new();
        file.put_strings("words", ["one", "two"]).unwrap();
        file.to_bytes()
    })
    .unwrap();
    let words = inner.metadata().get("words").unwrap();
    file.put("general.architecture", Value::String("llama")).unwrap();
    file.put("general.alignment", Value::U32(16)).unwrap();
    file.put_array("nested", ValueType::Array, [words, words]).unwrap();
    file.put_strings("tokenizer.ggml.tokens", ["a", "ö", "", "<|end|>"]).unwrap();
    file.put_array("floats", ValueType::F32, [0.5, -1.0].map(Value::F32)).unwrap();
    file.put_array("flags", ValueType::Bool, [true, false].map(Value::Bool)).unwrap();
    file.put("long", Value::I64(-5)).unwrap();
    file.put("double", Value::F64(2.5)).unwrap();
    file.put("flag", Value::Bool(true)).unwrap();
    file.tensor("norm", &[3], Format::F32, vec![1; 12]).unwrap();
    file.tensor("matrix", &[64, 2], Format::Q8_0, vec![2; 136]).unwrap();
    file.tensor("experts", &[256, 1, 2], Format::Q4K, vec![3; 288]).unwrap();
    file.to_bytes()
}

/// Opens and touches everything.
fn read(bytes: Vec<u8>) -> Result<usize, GgufError> {
    let model = ModelFile::from_vec(bytes)?;
    let mut touched = 0;
    for (key, value) in model.metadata().iter() {
        touched += key.len() + value.to_string().len();
        assert_eq!(model.metadata().get(key).map(|v| v.value_type()), Some(value.value_type()));
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
        if let Ok(Some(strings)) = model.metadata().optional::<Strings<'_>>(key) {
            assert_eq!(strings.iter().map(str::len).sum::<usize>(), strings.total_bytes());
        }
    }
    for tensor in model.tensors() {
        let bytes = model.bytes(tensor);
        assert_eq!(bytes.len(), tensor.rows() * tensor.row_bytes());
        let mut row = vec![0.0; tensor.row_len()];
        bytes.chunks(tensor.row_bytes()).for_each(|bytes| tensor.format.dequantize(bytes, &mut row));
        touched += bytes.len();
    }
    Ok(touched)
}

#[test]
fn every_cut_is_noticed() {
    let whole = specimen();
    read(whole.clone()).unwrap();
    // The last tensor ends on the alignment, so every byte counts.
    assert_eq!(whole.len() % 16, 0);
    for len in 0..whole.len() {
        assert!(read(whole[..len].to_vec()).is_err(), "cut to {len} of {} bytes", whole.len());
    }
}

#[test]
fn every_byte_may_have_any_value() {
    let whole = specimen();
    let mut refused = 0;
    for at in 0..whole.len() - 288 {
        for value in 0..=255 {
            let mut damaged = whole.clone();
            damaged[at] = value;
            refused += usize::from(read(damaged).is_err());
        }
    }
    assert!(refused > 100_000, "only {refused} of {} were refused", (whole.len() - 288) * 256);
}

#[test]
fn many_bytes_at_once() {
    let whole = specimen();
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let mut next = || {
        // xorshift64 (Marsaglia 2003)
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize
    };
    let mut outcomes = [0; 2];
    for _ in 0..50_000 {
        let mut damaged = whole.clone();
        for _ in 0..1 + next() % 6 {
            let at = next() % damaged.len();
            // Small and huge numbers do more harm than others.
            damaged[at] = [0, 1, 0x7f, 0x80, 0xff, next() as u8][next() % 6];
        }
        damaged.truncate(if next() % 4 == 0 { next() % whole.len() } else { whole.len() });
        outcomes[usize::from(read(damaged).is_ok())] += 1;
    }
    assert!(outcomes.iter().all(|count| *count > 1000), "{outcomes:?}");
}
