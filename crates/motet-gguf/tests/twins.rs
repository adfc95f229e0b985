//! F16 and Q8_0 twins of the tiny models are the files that the PyPI package `gguf` wrote, byte for byte.

use std::path::PathBuf;

use motet_gguf::{Format, ModelFile, twin};
use sha2::{Digest, Sha256};

/// SHA-256 of the files written by `gguf` 0.19 from the same weights (`GGUFWriter`, `quants.quantize`).
const WRITTEN_BY_PYTHON: [(&str, Format, &str); 8] = [
    ("gemma3", Format::F16, "d9acf0be7257bcf658ef9ebc50f57669682e4ed0e53f2dbc5915283c6aa21c62"),
    ("gemma3", Format::Q8_0, "4789f095857296d4f615787fac8ed84a7b31a7a8c61a4958f94bde4dcdb4914c"),
    ("llama", Format::F16, "ccf0606a99fc7e8c1307215700a4ffa45660f802ed91a6ed2b8ec9e7cf321d68"),
    ("llama", Format::Q8_0, "3215d0766e94ee758567af013be28e865f4734aefab660220d7b48535125d435"),
    ("qwen35", Format::F16, "0fd2cb8148eb2ee9881b93f540bae4756c0de1139c7158eaa09e63ae666847b3"),
    ("qwen35", Format::Q8_0, "d740005f4faefb962bd3c3f5b14fd4ee3a0aa4873d197dffd7303c119fb6110d"),
    ("qwen3moe", Format::F16, "7802b5806bc4fd76af842838dbb8b56930dc5b2f77a823667bf006bc7979355b"),
    ("qwen3moe", Format::Q8_0, "4887ade60e4e755973eafd092ef750c6a65c2f56d8fbc7a3de2aef71cae73cdc"),
];

#[test]
fn twins_are_the_files_that_python_writes() {
    for (name, format, expected) in WRITTEN_BY_PYTHON {
        let model = ModelFile::open(&tiny(name)).unwrap();
        let bytes = twin(&model, format).unwrap();
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, expected, "{name} in {format}");
    }
}

#[test]
fn an_f32_twin_is_the_file_itself() {
    for name in ["llama", "qwen3moe", "gemma3", "qwen35", "glm4moe"] {
        let model = ModelFile::open(&tiny(name)).unwrap();
        assert_eq!(twin(&model, Format::F32).unwrap(), std::fs::read(tiny(name)).unwrap(), "{name}");
    }
}

fn tiny(name: &str) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny");
    PathBuf::from(format!("{root}/tiny-{name}-f32.gguf"))
}
