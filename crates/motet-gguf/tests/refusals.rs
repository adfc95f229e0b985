//! Files that are refused, and the words with which they are.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

use motet_gguf::{Format, ModelFile, Value, Writer};

/// A file put together by hand: what the writer would refuse to write.
#[derive(Default)]
struct Raw {
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: usize,
}

impl Raw {
    fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Raw {
        self.keys.push([&string(key), &kind.to_le_bytes()[..], value].concat());
        self
    }

    fn tensor(mut self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Raw {
        let dims = shape.iter().flat_map(|dim| dim.to_le_bytes());
        let mut raw = [string(name), (shape.len() as u32).to_le_bytes().to_vec()].concat();
        raw.extend(dims);
        raw.extend(kind.to_le_bytes());
        raw.extend(offset.to_le_bytes());
        self.tensors.push(raw);
        self
    }

    fn data(mut self, bytes: usize) -> Raw {
        self.data = bytes;
        self
    }

    /// The file, announcing as many keys and tensors as it has.
    fn bytes(&self) -> Vec<u8> {
        self.announcing(3, self.tensors.len() as u64, self.keys.len() as u64)
    }

    fn announcing(&self, version: u32, tensors: u64, keys: u64) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(version.to_le_bytes());
        file.extend(tensors.to_le_bytes());
        file.extend(keys.to_le_bytes());
        file.extend(self.keys.concat());
        file.extend(self.tensors.concat());
        file.resize(file.len().next_multiple_of(32) + self.data, 0);
        file
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The message with which a file is refused.
#[track_caller]
fn refusal(bytes: Vec<u8>) -> String {
    ModelFile::from_vec(bytes).expect_err("the file should be refused").to_string()
}

/// Asserts that a file is refused with a message that has all these words.
#[track_caller]
fn refused(bytes: Vec<u8>, words: &[&str]) {
    let message = refusal(bytes);
    for word in words {
        assert!(message.contains(word), "{word:?} is missing in: {message}");
    }
}

const F32: u32 = 0;

#[test]
fn what_is_well_formed_is_read() {
    let file = Raw::default().key("a", 4, &7u32.to_le_bytes()).tensor("t", &[4, 2], F32, 0).data(32);
    for version in [2, 3] {
        let model = ModelFile::from_vec(file.announcing(version, 1, 1)).unwrap();
        assert_eq!(model.metadata().required::<u32>("a").unwrap(), 7);
        let tensor = model.tensor("t").unwrap();
        assert_eq!((tensor.row_len(), tensor.rows(), tensor.byte_len()), (4, 2, 32));
        assert_eq!(model.bytes(tensor), [0; 32]);
    }
}

#[test]
fn other_files_and_versions() {
    refused(b"PK\x03\x04 and so on".to_vec(), &["not a GGUF file", "begins with \"PK\\x03\\x04\""]);
    refused(Vec::new(), &["not a GGUF file", "it is empty"]);
    let empty = Raw::default();
    refused(empty.announcing(1, 0, 0), &["version 1", "2 and 3"]);
    refused(empty.announcing(4, 0, 0), &["version 4", "2 and 3"]);
    refused(empty.announcing(0, 0, 0), &["version 0", "2 and 3"]);
    refused(empty.announcing(3u32.swap_bytes(), 0, 0), &["big-endian", "version 3", "little-endian"]);
}

#[test]
fn numbers_that_promise_more_than_there_is() {
    let one = Raw::default().key("general.name", 8, &string("x"));
    refused(one.announcing(3, 0, u64::MAX), &["truncated"]);
    refused(one.announcing(3, u64::MAX, 1), &["truncated"]);
    // A string, an array of numbers, an array of strings and an array of bools, all endless; 2⁶¹ · 8 overflows to 0.
    for huge in [u64::MAX, 1 << 61, 1 << 40] {
        let array = |kind: u32| [&kind.to_le_bytes()[..], &huge.to_le_bytes()].concat();
        refused(Raw::default().key("the.key", 8, &huge.to_le_bytes()).bytes(), &["truncated", "the.key"]);
        for element in [0, 4, 7, 8, 10] {
            refused(Raw::default().key("the.key", 9, &array(element)).bytes(), &["the.key"]);
        }
        refused(Raw::default().tensor("t", &[huge], F32, 0).bytes(), &["\"t\""]);
        refused(
            Raw::default().tensor("t", &[huge, huge, huge, huge], F32, 0).bytes(),
            &["\"t\"", "larger than any"],
        );
    }
}

#[test]
fn keys() {
    let seven = 7u32.to_le_bytes();
    refused(Raw::default().key("k", 4, &seven).key("k", 5, &seven).bytes(), &["\"k\" appears twice"]);
    refused(Raw::default().key("k", 13, &seven).bytes(), &["\"k\"", "type 13"]);
    refused(
        Raw::default().key("k", 9, &[13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).bytes(),
        &["\"k\"", "type 13"],
    );
    refused(Raw::default().key("k", 7, &[2]).bytes(), &["\"k\"", "bool", "value 2"]);
    refused(Raw::default().key("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).bytes(), &["k", "UTF-8"]);

    // An array that holds one array, and so on: four deep is read, five is not.
    let nested = |depth: usize| {
        let level = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
        let innermost = [&0u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
        Raw::default().key("k", 9, &[level.repeat(depth - 1), innermost].concat()).bytes()
    };
    assert!(ModelFile::from_vec(nested(4)).is_ok());
    refused(nested(5), &["\"k\"", "nests arrays"]);
}

#[test]
fn alignments() {
    let aligned = |alignment: u32| {
        Raw::default()
            .key("general.alignment", 4, &alignment.to_le_bytes())
            .tensor("t", &[4], F32, 0)
            .data(4096)
    };
    for good in [8, 32, 64, 1024] {
        assert!(ModelFile::from_vec(aligned(good).bytes()).is_ok(), "{good}");
    }
    for bad in [0, 1, 4, 24, u32::MAX] {
        refused(aligned(bad).bytes(), &["general.alignment", &bad.to_string(), "power of two"]);
    }
    refused(aligned(1 << 31).bytes(), &["\"t\"", "truncated"]);
    refused(
        Raw::default().key("general.alignment", 8, &string("x")).bytes(),
        &["general.alignment", "integer"],
    );
}

#[test]
fn tensors() {
    let file = |t: Raw| t.data(4096).bytes();
    let t = |shape: &[u64], kind, offset| Raw::default().tensor("blk.0.t", shape, kind, offset);

    // 16 is IQ2_XXS, 99 nothing at all.
    let message = refusal(file(t(&[256], 16, 0)));
    for word in ["\"blk.0.t\"", "type 16", "IQ2_XXS"].into_iter().chain(Format::ALL.map(Format::name)) {
        assert!(message.contains(word), "{word} is missing in: {message}");
    }
    refused(file(t(&[256], 99, 0)), &["\"blk.0.t\"", "type 99", "unknown"]);

    refused(file(t(&[], F32, 0)), &["\"blk.0.t\"", "0 dimensions"]);
    refused(file(t(&[1, 1, 1, 1, 1], F32, 0)), &["\"blk.0.t\"", "5 dimensions"]);
    refused(file(t(&[4, 0], F32, 0)), &["\"blk.0.t\"", "no elements"]);
    refused(file(t(&[48, 2], 8, 0)), &["\"blk.0.t\"", "48", "Q8_0", "32"]);

    refused(file(t(&[4], F32, 16)), &["\"blk.0.t\"", "offset 16", "alignment 32"]);
    refused(file(t(&[1025], F32, 0)), &["\"blk.0.t\"", "4100 bytes", "4096 are left"]);
    refused(file(t(&[4], F32, 4096)), &["\"blk.0.t\"", "0 are left"]);
    refused(file(t(&[4], F32, u64::MAX - 31)), &["\"blk.0.t\"", "truncated"]);

    let two = |a: &str, b: &str, offset| Raw::default().tensor(b, &[4], F32, offset).tensor(a, &[16], F32, 0);
    refused(file(two("a", "b", 32)), &["\"a\"", "\"b\"", "overlap"]);
    refused(file(two("a", "a", 64)), &["\"a\" appears twice"]);
    assert!(ModelFile::from_vec(file(two("a", "b", 64))).is_ok());
}

#[test]
fn values_of_the_wrong_type_are_told_with_key_and_types() {
    let mut file = Writer::new();
    file.put("name", Value::String("x")).unwrap();
    file.put("small", Value::I32(-1)).unwrap();
    file.put("long", Value::U64(1 << 32)).unwrap();
    file.put("double", Value::F64(0.1)).unwrap();
    file.put_strings("words", ["a", "", "ö"]).unwrap();
    let model = ModelFile::from_vec(file.to_bytes()).unwrap();
    let metadata = model.metadata();

    assert_eq!(metadata.required::<u64>("long").unwrap(), 1 << 32);
    assert_eq!(metadata.required::<i32>("small").unwrap(), -1);
    assert_eq!(metadata.required::<f32>("double").unwrap(), 0.1);
    let words: motet_gguf::Strings<'_> = metadata.required("words").unwrap();
    assert_eq!(words.iter().collect::<Vec<_>>(), ["a", "", "ö"]);
    assert_eq!((words.len(), words.total_bytes()), (3, 3));
    assert_eq!(metadata.optional::<u32>("absent").unwrap(), None);

    let message = |error: motet_gguf::GgufError| error.to_string();
    let told = [
        (message(metadata.required::<u32>("absent").unwrap_err()), ["\"absent\"", "missing", "an integer"]),
        (message(metadata.optional::<u32>("name").unwrap_err()), ["\"name\"", "string \"x\"", "an integer"]),
        (message(metadata.optional::<u32>("small").unwrap_err()), ["\"small\"", "i32 -1", "from 0"]),
        (
            message(metadata.optional::<u32>("long").unwrap_err()),
            ["\"long\"", "u64 4294967296", "to 4294967295"],
        ),
        (message(metadata.optional::<f32>("long").unwrap_err()), ["\"long\"", "u64", "a float"]),
        (message(metadata.optional::<Vec<f32>>("words").unwrap_err()), ["\"words\"", "3 values", "floats"]),
    ];
    for (message, words) in told {
        assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
    }
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut file = Writer::new();
    file.put("k", Value::Bool(true)).unwrap();
    assert!(file.put("k", Value::Bool(true)).is_err());
    assert!(file.put("general.alignment", Value::U32(12)).is_err());
    assert!(file.put_array("mixed", motet_gguf::ValueType::U8, [Value::U8(1), Value::I8(1)]).is_err());
    file.tensor("t", &[2], Format::F32, vec![0; 8]).unwrap();
    assert!(file.tensor("t", &[2], Format::F32, vec![0; 8]).is_err());
    assert!(file.tensor("short", &[2], Format::F32, vec![0; 7]).is_err());
    assert!(file.tensor("ragged", &[33], Format::Q8_0, vec![0; 34]).is_err());
    assert!(file.tensor("flat", &[], Format::F32, vec![0; 4]).is_err());
    // What was refused has left no trace.
    let model = ModelFile::from_vec(file.to_bytes()).unwrap();
    assert_eq!((model.metadata().len(), model.tensors().len()), (1, 1));
}
