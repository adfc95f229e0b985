//! Tokens that end an answer, and tokens that are shown although they are control tokens.
//!
//! Headers name one end-of-sequence token, while chat models end a turn with another. So tokens with well-known names
//! end an answer too, where the file itself makes them more than words: `</s>` is the end of Llama 2's answers, but in
//! Qwen's vocabulary it is learned from web pages, and ends what was struck through.

use crate::vocabulary::{Vocabulary, kind};

const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<turn|>",
    "<|tool_response>",
    // Padding and file borders of fill-in-the-middle training: nothing of an answer comes after them.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Control tokens that carry the structure of an answer: clients need to see them.
const SHOWN: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|constrain|>",
];

/// Finds the tokens that end an answer, ascending: those that the file names, and those of a well-known name that are
/// control tokens, or added ones. What ends an answer is a control token from here on, but for a word that the file
/// names as the end.
pub(crate) fn mark_ends(vocabulary: &mut Vocabulary<'_>) -> Vec<u32> {
    let has = |name: &str| vocabulary.tokens.contains(&name);
    // In these families "<|end|>" ends a message within an answer.
    let harmony =
        has("<|end|>") && ((has("<|return|>") && has("<|call|>")) || (has("<|flush|>") && has("<|calls|>")));

    let stated = [vocabulary.eos, vocabulary.eot, vocabulary.eom];
    let mut ends = Vec::new();
    for (id, &token) in (0..).zip(&vocabulary.tokens) {
        let kind = &mut vocabulary.types[id as usize];
        let known = ENDS.contains(&token) && !(token == "<|end|>" && harmony);
        let added = match *kind {
            kind::CONTROL => true,
            // A tag of web pages in Gemma 3.
            kind::USER_DEFINED => token != "</s>",
            _ => false,
        };
        let is_stated = stated.contains(&Some(id));
        if is_stated || (known && added) {
            if known || added {
                *kind = kind::CONTROL;
            }
            ends.push(id);
        }
    }
    ends
}

/// Whether a control or unknown token is shown in text all the same.
pub(crate) fn is_shown(token: &str) -> bool {
    SHOWN.contains(&token)
}
