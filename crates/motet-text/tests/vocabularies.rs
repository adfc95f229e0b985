//! Real vocabularies, each with the cases that llama.cpp's own tests have for it: texts, and the ids that the model's
//! own tokenizer makes of them.
//!
//! They lie in llama.cpp's source package, `models/ggml-vocab-*.gguf` with `.inp` and `.out`.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

mod common;

use std::path::PathBuf;

use motet_gguf::ModelFile;
use motet_text::{Special, Tokenizer};

/// The vocabularies with cases, and how many.
const CASES: [(&str, usize); 12] = [
    ("bert-bge", 46),
    ("command-r", 46),
    ("deepseek-coder", 46),
    ("gpt-2", 46),
    ("llama-bpe", 46),
    ("llama-spm", 46),
    ("mpt", 46),
    ("phi-3", 46),
    ("qwen2", 46),
    ("qwen35", 50),
    ("refact", 46),
    ("starcoder", 46),
];

/// Those without.
const LOADED: [&str; 3] = ["aquila", "baichuan", "gpt-neox"];

fn folder() -> PathBuf {
    common::llama_cpp().join("models")
}

fn tokenizer(name: &str) -> Tokenizer {
    let model = ModelFile::open(&folder().join(format!("ggml-vocab-{name}.gguf"))).unwrap();
    Tokenizer::from_gguf(model.metadata()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The texts of a vocabulary's cases and their ids.
fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let read =
        |what| std::fs::read_to_string(folder().join(format!("ggml-vocab-{name}.gguf.{what}"))).unwrap();
    let (texts, ids) = (read("inp"), read("out"));
    let ids = ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    let texts: Vec<&str> = texts.split_terminator("\n__ggml_vocab_test__\n").collect();
    assert_eq!(ids.clone().count(), texts.len(), "{name}");
    texts.into_iter().map(str::to_owned).zip(ids).collect()
}

#[test]
fn ids_are_those_of_the_models_tokenizers() {
    let mut wrong = Vec::new();
    for (name, count) in CASES {
        let tokenizer = tokenizer(name);
        let cases = cases(name);
        assert_eq!(cases.len(), count, "{name}");
        for (text, expected) in cases {
            let found = tokenizer.encode(&text, Special::AsText);
            if found != expected {
                wrong.push(format!("{name}: {text:?}\n  {found:?}, expected\n  {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn vocabularies_without_cases_give_texts_back() {
    for name in LOADED {
        let tokenizer = tokenizer(name);
        for text in ["Hello world", "Die Tür ist  offen: 3,5 m\n", "def f(x):\n    return x", "你好，世界 🎉"]
        {
            let ids = tokenizer.encode(text, Special::AsText);
            assert!(ids.len() > 1, "{name}: {ids:?}");
            assert_eq!(tokenizer.decode(&ids), text, "{name}");
        }
    }
}

#[test]
fn answers_end_where_the_file_says() {
    for (name, expected) in [
        ("qwen2", &["<|endoftext|>", "<|im_end|>"][..]),
        ("llama-bpe", &["<|end_of_text|>", "<|eot_id|>"]),
        ("llama-spm", &["</s>"]),
        ("phi-3", &["<|endoftext|>", "<|end|>"]),
        ("command-r", &["<PAD>", "<|END_OF_TURN_TOKEN|>"]),
        ("deepseek-coder", &["<｜end▁of▁sentence｜>"]),
        // What file borders of fill-in-the-middle training are made of ends an answer as in llama.cpp.
        ("refact", &["<|endoftext|>", "<fim_pad>", "<reponame>"]),
    ] {
        let tokenizer = tokenizer(name);
        let ends = tokenizer.ends().iter().map(|&id| std::str::from_utf8(tokenizer.piece(id)).unwrap());
        assert_eq!(ends.collect::<Vec<_>>(), expected, "{name}");
    }
    // A word of Qwen's, that a merge makes and no text.
    let (qwen, tag) = (tokenizer("qwen2"), 128_247);
    assert_eq!(qwen.piece(tag), b"</s>");
    assert!(!qwen.is_end(tag) && !qwen.is_control(tag));
    assert_eq!(qwen.decode(&[tag]), "</s>");
    assert_eq!(qwen.encode("</s>", Special::Parse), [522, 82, 29]);
}
