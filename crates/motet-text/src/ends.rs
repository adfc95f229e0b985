//! Tokens that end an answer, and tokens that are shown although they are control tokens.
//!
//! Headers name one end-of-sequence token, while chat models end a turn with another. As in llama.cpp, tokens with
//! well-known names end an answer too, and count as control tokens whatever the file says of them.

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

/// Finds the tokens that end an answer, ascending, and gives them the type of control tokens.
pub(crate) fn mark_ends(vocabulary: &mut Vocabulary<'_>) -> Vec<u32> {
    let has = |name: &str| vocabulary.tokens.contains(&name);
    // In these families "<|end|>" ends a message within an answer, "</s>" is a word.
    let harmony =
        has("<|end|>") && ((has("<|return|>") && has("<|call|>")) || (has("<|flush|>") && has("<|calls|>")));
    let plain_s = has("<|tool_response>") || has("<|plamo:eos|>");

    let mut ends: Vec<u32> = [vocabulary.eos, vocabulary.eot, vocabulary.eom].into_iter().flatten().collect();
    for (id, &token) in (0..).zip(&vocabulary.tokens) {
        let excepted = (token == "<|end|>" && harmony) || (token == "</s>" && plain_s);
        if ENDS.contains(&token) && !excepted {
            vocabulary.types[id as usize] = kind::CONTROL;
            ends.push(id);
        }
    }
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Whether a control or unknown token is shown in text all the same.
pub(crate) fn is_shown(token: &str) -> bool {
    SHOWN.contains(&token)
}
