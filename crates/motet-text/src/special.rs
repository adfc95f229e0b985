//! Cutting special tokens out of a prompt.
//!
//! A prompt is what a template wrote around what came with the request. The name of a control token counts only where
//! the template wrote all of it: nobody who writes a message can end it and begin another one. User-defined tokens are
//! words, and found wherever they stand.

use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, Input, MatchKind};

use crate::TextError;
use crate::vocabulary::Vocabulary;

/// The names of some of a vocabulary's tokens.
#[derive(Debug)]
pub(crate) struct Names {
    finder: Option<AhoCorasick>,
    ids: Vec<u32>,
    /// Bytes of the longest name.
    longest: usize,
}

/// A name in a prompt, and the token it stands for.
#[derive(Debug, Clone)]
struct Found {
    range: Range<usize>,
    id: u32,
}

impl Names {
    /// Of the tokens of these types.
    pub(crate) fn new(vocabulary: &Vocabulary<'_>, kinds: &[i32]) -> Result<Names, TextError> {
        let (mut names, mut ids) = (Vec::new(), Vec::new());
        for (id, (&token, kind)) in (0..).zip(vocabulary.tokens.iter().zip(&vocabulary.types)) {
            if kinds.contains(kind) && !token.is_empty() {
                names.push(token);
                ids.push(id);
            }
        }
        let longest = names.iter().map(|name| name.len()).max().unwrap_or(0);
        if ids.is_empty() {
            return Ok(Names { finder: None, ids, longest });
        }
        let mut builder = AhoCorasick::builder();
        builder.match_kind(MatchKind::LeftmostLongest).kind(Some(AhoCorasickKind::ContiguousNFA));
        let finder = builder.build(&names).map_err(|_| TextError::TooLarge {
            bytes: names.iter().map(|name| name.len()).sum(),
            tokens: names.len(),
        })?;
        Ok(Names { finder: Some(finder), ids, longest })
    }

    /// The leftmost of them in a stretch of the prompt, and of those that begin there the longest.
    fn find(&self, prompt: &str, stretch: Range<usize>) -> Option<Found> {
        let found = self.finder.as_ref()?.find(Input::new(prompt).span(stretch))?;
        Some(Found { range: found.range(), id: self.ids[found.pattern().as_usize()] })
    }
}

/// Calls `part` for each special token of a prompt and each stretch between them, in order. `control` are found outside
/// of `text` only, `words` everywhere; of all the leftmost, and of those that begin there the longest.
pub(crate) fn cut(
    control: &Names,
    words: &Names,
    prompt: &str,
    text: &[Range<usize>],
    mut part: impl FnMut(Range<usize>, Option<u32>),
) {
    let mut done = 0;
    for (stretch, is_text) in stretches(prompt.len(), text) {
        // A word may reach beyond the stretch in which it begins.
        let reach = prompt.len().min(stretch.end + words.longest.saturating_sub(1));
        let find_word = |from| words.find(prompt, from..reach).filter(|word| word.range.start < stretch.end);
        let find_control = |from| if is_text { None } else { control.find(prompt, from..stretch.end) };

        let mut from = done.max(stretch.start);
        if from >= stretch.end {
            continue;
        }
        let (mut word, mut name) = (find_word(from), find_control(from));
        loop {
            let found = match (&word, &name) {
                (Some(word), Some(name)) if begins_before(name, word) => name,
                (Some(found), _) | (None, Some(found)) => found,
                (None, None) => break,
            };
            let Found { range, id } = found.clone();
            if done < range.start {
                part(done..range.start, None);
            }
            part(range.clone(), Some(id));
            (done, from) = (range.end, range.end);
            if from >= stretch.end {
                break;
            }
            // What was found behind is still the next; only what has been passed is looked for again.
            if word.as_ref().is_some_and(|word| word.range.start < from) {
                word = find_word(from);
            }
            if name.as_ref().is_some_and(|name| name.range.start < from) {
                name = find_control(from);
            }
        }
    }
    if done < prompt.len() {
        part(done..prompt.len(), None);
    }
}

fn begins_before(a: &Found, b: &Found) -> bool {
    (a.range.start, b.range.end) < (b.range.start, a.range.end)
}

/// A prompt of so many bytes in stretches that are `text` (true) or not, in order, none of them empty.
fn stretches(bytes: usize, text: &[Range<usize>]) -> impl Iterator<Item = (Range<usize>, bool)> {
    let mut end = 0;
    let pairs = text.iter().cloned().chain(std::iter::once(bytes..bytes)).flat_map(move |range| {
        let range = range.start.clamp(end, bytes)..range.end.clamp(end, bytes);
        let range = range.start..range.end.max(range.start);
        let between = end..range.start;
        end = range.end;
        [(between, false), (range, true)]
    });
    pairs.filter(|(stretch, _)| !stretch.is_empty())
}
