//! Words are those that the models' own regular expressions cut, as the `tokenizers` crate runs them.

use proptest::prelude::*;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
};

use super::{FAMILIES, PreTokenizer};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// The expressions of each family, by one of its names.
const EXPRESSIONS: &[(&str, &[&str])] = &[
    ("gpt-2", &[GPT2]),
    ("smollm", &[r"\p{N}", GPT2]),
    ("llama-bpe", &[LLAMA3]),
    ("chatglm-bpe", &[LLAMA3]),
    ("glm4", &[LLAMA3]),
    ("qwen2", &[QWEN2]),
    ("qwen35", &[QWEN35]),
    ("gpt-4o", &[GPT4O]),
    ("tekken", &[TEKKEN]),
    ("deepseek-v3", &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
    ("deepseek-coder", &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
    ("default", &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
];

fn by_expressions(passes: &[Split], text: &str) -> Vec<String> {
    let mut words = PreTokenizedString::from(text);
    for pass in passes {
        pass.pre_tokenize(&mut words).unwrap();
    }
    let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
    words.into_iter().map(|(word, _, _)| word.to_owned()).collect()
}

fn by_rules(pre: &PreTokenizer, text: &str) -> Vec<String> {
    let mut words = Vec::new();
    pre.split(text, &mut |word| words.push(word.to_owned()));
    words
}

fn families() -> Vec<(&'static PreTokenizer, Vec<Split>)> {
    let split = |expression: &&str| {
        let pattern = SplitPattern::Regex((*expression).to_owned());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap()
    };
    EXPRESSIONS
        .iter()
        .map(|(name, passes)| (PreTokenizer::named(name).unwrap(), passes.iter().map(split).collect()))
        .collect()
}

#[test]
fn every_family_is_compared() {
    let compared = families();
    for family in FAMILIES {
        assert!(compared.iter().any(|(pre, _)| std::ptr::eq(*pre, family)), "{:?}", family.names);
    }
}

/// Characters that the rules tell apart, in runs.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-zA-Z]{1,4}",
        2 => "[ ]{1,3}",
        2 => r"[\r\n\t ]{1,4}",
        2 => "[0-9]{1,5}",
        2 => r"[!-/:-@\[-`{-~]{1,3}",
        1 => "'(s|S|t|re|rE|VE|ll|d|M|ſ|l|x)",
        1 => r"\p{Lu}{1,2}\p{Ll}{0,2}",
        1 => r"\p{Lo}{1,3}",
        1 => r"[\p{Lm}\p{Lt}]{1,2}",
        1 => r"\p{M}{1,3}",
        1 => r"[\p{Nl}\p{No}\p{Nd}]{1,2}",
        1 => r"[\p{Z}\x{0b}\x{0c}\x{85}]{1,2}",
        1 => r"[\p{P}\p{S}]{1,2}",
        1 => r"[一-龥ぁ-ヿ가-힣]{1,3}",
        1 => r"\p{C}{1,2}",
        1 => r"\PC{1,3}",
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

#[test]
fn words_are_those_of_the_expressions() {
    let families = families();
    proptest!(ProptestConfig::with_cases(1500), |(text in text())| {
        for (pre, passes) in &families {
            prop_assert_eq!(by_rules(pre, &text), by_expressions(passes, &text), "{:?}", pre.names);
        }
    });
}

#[test]
fn long_runs_take_linear_time() {
    // A quadratic rule would need hours for these.
    for unit in ["a", "A", " ", "\n", "\u{301}", "一", "!", "1", "\u{1}", "' ", "ǅ"] {
        let text = unit.repeat(1_000_000 / unit.len());
        for family in FAMILIES {
            let mut length = 0;
            family.split(&text, &mut |word| length += word.len());
            assert_eq!(length, text.len());
        }
    }
}

#[test]
fn unknown_names_are_refused_by_name() {
    let message = PreTokenizer::named("kimi-k2").unwrap_err().to_string();
    assert!(
        message.starts_with("pre-tokenizer 'kimi-k2' is not supported; supported are gpt-2, "),
        "{message}"
    );
    assert!(message.contains("qwen35") && message.contains("llama-bpe"), "{message}");
}
