//! Ids are those of Hugging Face's `tokenizers` crate, on the texts and on random ones.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

mod common;

use std::collections::HashSet;

use motet_gguf::ModelFile;
use motet_text::{Special, Tokenizer, Vocabulary};
use proptest::prelude::*;
use tokenizers::models::bpe::BPE;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A pre-tokenizer by GGUF's name, what it cuts by before GPT-2's rules or instead of them, and whether whole words go
/// before merges.
const CASES: [(&str, Option<&str>, bool, bool); 4] = [
    ("gpt-2", None, true, false),
    ("smollm", Some(r"\p{N}"), true, false),
    ("qwen35", Some(QWEN35), false, false),
    ("glm4", Some(LLAMA3), false, true),
];

/// SmolLM2's vocabulary, and tokens for the bytes that it lacks: the crate drops such a byte before it merges, llama.cpp
/// after.
fn vocabulary<'a>(model: &'a ModelFile, missing: &'a [String], pre: &'static str) -> Vocabulary<'a> {
    let mut vocabulary = Vocabulary::from_gguf(model.metadata()).unwrap();
    vocabulary.tokens.extend(missing.iter().map(String::as_str));
    vocabulary.types.resize(vocabulary.tokens.len(), 1);
    vocabulary.pre = Some(pre);
    vocabulary
}

fn missing_bytes(model: &ModelFile) -> Vec<String> {
    let vocabulary = Vocabulary::from_gguf(model.metadata()).unwrap();
    let alphabet = ByteLevel::alphabet().into_iter().map(|c| c.to_string());
    alphabet.filter(|byte| !vocabulary.tokens.contains(&byte.as_str())).collect()
}

fn pairs() -> Vec<(&'static str, Tokenizer, tokenizers::Tokenizer)> {
    let model = common::model("smollm2");
    let missing = missing_bytes(&model);
    let pair = |&(pre, expression, gpt2_rules, whole_words): &(&'static str, Option<&str>, bool, bool)| {
        let ours = vocabulary(&model, &missing, pre);
        let vocab = (0..).zip(&ours.tokens).map(|(id, token)| (token.to_string(), id)).collect::<Vec<_>>();
        let merges = ours.merges.iter().map(|rule| {
            let (left, right) = rule.split_once(' ').unwrap();
            (left.to_owned(), right.to_owned())
        });
        let bpe = BPE::builder()
            .vocab_and_merges(vocab.into_iter().collect::<ahash::AHashMap<_, _>>(), merges.collect())
            .ignore_merges(whole_words)
            .build()
            .unwrap();
        let mut theirs = tokenizers::Tokenizer::new(bpe);
        let split = expression.map(|expression| {
            let pattern = SplitPattern::Regex(expression.to_owned());
            PreTokenizerWrapper::Split(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap())
        });
        let bytes = PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, gpt2_rules));
        theirs.with_pre_tokenizer(Some(Sequence::new(split.into_iter().chain([bytes]).collect())));
        (pre, Tokenizer::new(ours).unwrap(), theirs)
    };
    CASES.iter().map(pair).collect()
}

#[test]
fn ids_are_those_of_the_tokenizers_crate() {
    let pairs = pairs();
    for text in common::texts() {
        // Special tokens are not this test's matter.
        let text = text.replace("<|", "<");
        for (pre, ours, theirs) in &pairs {
            let expected = theirs.encode(text.as_str(), false).unwrap();
            assert_eq!(ours.encode(&text, Special::AsText), expected.get_ids(), "{pre}: {text:?}");
        }
    }
    let words = r"( ?[a-zA-Z']{1,9}|[0-9 ]{1,5}|[\n\t ]{1,3}|\PC{1,4}|[éüßñ漢字かな🎉]{1,4}){0,24}";
    proptest!(ProptestConfig::with_cases(1000), |(text in words)| {
        for (pre, ours, theirs) in &pairs {
            let expected = theirs.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(ours.encode(&text, Special::AsText), expected.get_ids(), "{}: {:?}", pre, text);
        }
    });
}

/// The WordPiece vocabulary of a real model (BGE), as its files have it: "##" before what goes on.
fn wordpiece(lower_case: bool, strip_accents: bool) -> (Tokenizer, tokenizers::Tokenizer) {
    let file = ModelFile::open(&common::llama_cpp().join("models/ggml-vocab-bert-bge.gguf")).unwrap();
    let mut vocabulary = Vocabulary::from_gguf(file.metadata()).unwrap();
    (vocabulary.lower_case, vocabulary.strip_accents) = (Some(lower_case), Some(strip_accents));
    let tokens = vocabulary.tokens.iter().zip(&vocabulary.types).map(|(&token, &kind)| {
        match token.strip_prefix('▁') {
            Some(begins_word) => begins_word.to_owned(),
            None if kind == 3 => token.to_owned(),
            None => format!("##{token}"),
        }
    });
    let tokens = tokens.zip(0..).collect::<ahash::AHashMap<_, _>>();
    let model = WordPiece::builder().vocab(tokens).unk_token("[UNK]".into()).build().unwrap();
    let mut theirs = tokenizers::Tokenizer::new(model);
    theirs.with_normalizer(Some(BertNormalizer::new(true, true, Some(strip_accents), lower_case)));
    theirs.with_pre_tokenizer(Some(BertPreTokenizer));
    (Tokenizer::new(vocabulary).unwrap(), theirs)
}

#[test]
fn wordpieces_are_those_of_the_tokenizers_crate() {
    for (lower_case, strip_accents) in [(true, true), (true, false), (false, false)] {
        let (ours, theirs) = wordpiece(lower_case, strip_accents);
        // The crate's tables of characters are from 2016: what is punctuation or a mark since then is none to it.
        let alike = |c: &char| {
            let text = format!("a{c}a");
            let alike =
                ours.encode(&text, Special::AsText) == theirs.encode(&*text, false).unwrap().get_ids();
            assert!(alike || *c > '\u{600}', "{c:?}");
            alike
        };
        let same = |text: &str| {
            let text: String = text.chars().filter(alike).collect();
            let expected = theirs.encode(&*text, false).unwrap();
            assert_eq!(
                ours.encode(&text, Special::AsText),
                expected.get_ids(),
                "{lower_case} {strip_accents}: {text:?}"
            );
        };
        let left_out: HashSet<char> = common::texts().iter().flat_map(|text| text.chars()).collect();
        let left_out = left_out.into_iter().filter(|c| !alike(c)).count();
        assert!(left_out < 200, "{left_out} characters");
        common::texts().iter().step_by(3).for_each(|text| same(text));
        for length in [99, 100, 101] {
            same(&"é".repeat(length));
        }
        let words = r"( ?[a-zA-Z']{1,9}|[0-9 ]{1,5}|[\n\t ]{1,3}|\PC{1,4}|[éüßñ漢字かな🎉İǅﬁ]{1,4}|\p{M}|\p{P}){0,24}";
        proptest!(ProptestConfig::with_cases(300), |(text in words)| { same(&text); });
    }
}
