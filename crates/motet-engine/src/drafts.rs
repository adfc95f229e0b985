//! Drafts: tokens that a session may choose next, proposed so that one step can check several of them.
//!
//! A draft is never more than a proposal. The network runs it as a row like any other, and it counts only if it is the
//! token that was chosen anyway; so what proposes may be as simple or as wrong as it likes, and nothing here can
//! change an answer.

use motet_model::DeviceError;
use std::fmt;
use std::str::FromStr;

/// The most tokens drafted for a session and a step.
pub const MAX_DRAFTS: usize = 16;

/// How many tokens are drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Drafts {
    /// None.
    #[default]
    Off,
    /// As many as pay, by what was measured.
    Auto,
    /// So many, 1 to [`MAX_DRAFTS`], wherever there is room and the answer is long enough.
    Exactly(usize),
}

impl Drafts {
    /// The most for a session and a step, if the network's own head drafts, or if they are looked up.
    pub(crate) fn most(self, head: bool) -> usize {
        match self {
            Drafts::Off => 0,
            Drafts::Auto if head => 4,
            Drafts::Auto => 8,
            Drafts::Exactly(count) => count,
        }
    }
}

/// Why drafts could not be switched. Everything runs on as before.
#[derive(Debug, thiserror::Error)]
pub enum DraftsError {
    /// More than can be drafted.
    #[error("{0} drafts to a step are too many; at most {MAX_DRAFTS}")]
    TooMany(usize),
    /// The network's draft head was not loaded with it, and a session's pages have no room for what it remembers.
    #[error(
        "the model's draft head is not loaded; start with drafts (--drafts auto), after which they can be switched off \
         and on, or take drafts that are looked up"
    )]
    HeadNotLoaded,
    /// The plan has no room for it.
    #[error("{needed} bytes are needed for {drafts} drafts to a step, {missing} more than the plan leaves")]
    Memory {
        /// The drafts asked for.
        drafts: usize,
        /// Bytes that they take beyond what there is.
        needed: u64,
        /// Bytes that are missing.
        missing: u64,
    },
    /// The system had no memory, or the device can't.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine is closed.
    #[error("the engine is closed")]
    Closed,
}

/// Not a number of drafts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown number of drafts {found:?}: expected off, auto or 0 to {MAX_DRAFTS}")]
pub struct UnknownDrafts {
    /// What was given.
    pub found: String,
}

impl FromStr for Drafts {
    type Err = UnknownDrafts;

    fn from_str(text: &str) -> Result<Self, UnknownDrafts> {
        match (text, text.parse()) {
            ("off", _) | (_, Ok(0)) => Ok(Drafts::Off),
            ("auto", _) => Ok(Drafts::Auto),
            (_, Ok(count)) if count <= MAX_DRAFTS => Ok(Drafts::Exactly(count)),
            _ => Err(UnknownDrafts { found: text.to_owned() }),
        }
    }
}

impl fmt::Display for Drafts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Drafts::Off => f.write_str("off"),
            Drafts::Auto => f.write_str("auto"),
            Drafts::Exactly(count) => write!(f, "{count}"),
        }
    }
}

/// Where drafts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The network's own head.
    Head,
    /// The session's own tokens.
    LookUp,
}

/// Proposes tokens.
pub(crate) trait Drafter: Send {
    /// Appends at most `most` tokens that may follow a session's `tokens`, where it knows any at once.
    fn know(&self, tokens: &[u32], most: usize, out: &mut Vec<u32>);

    /// Whether it ever knows any.
    fn looks_up(&self) -> bool;

    /// Whether the network's head drafts, for those of whom nothing is known or where it is the better one.
    fn has_head(&self) -> bool;
}

/// The network's own head.
pub(crate) struct Head;

impl Drafter for Head {
    fn know(&self, _tokens: &[u32], _most: usize, _out: &mut Vec<u32>) {}

    fn looks_up(&self) -> bool {
        false
    }

    fn has_head(&self) -> bool {
        true
    }
}

/// Looks up what the session's last tokens were followed by before.
pub(crate) struct LookUp {
    /// The network's head drafts as well.
    pub(crate) or_head: bool,
}

impl Drafter for LookUp {
    fn know(&self, tokens: &[u32], most: usize, out: &mut Vec<u32>) {
        continuation(tokens, most, out);
    }

    fn looks_up(&self) -> bool {
        true
    }

    fn has_head(&self) -> bool {
        self.or_head
    }
}

/// The longest run of last tokens that is looked up.
const LONGEST: usize = 3;

/// Appends `most` tokens: those behind the latest earlier place where the last three tokens stand, or else the last
/// two, or the last one. Where the text ends before, it goes on with what was appended: a text that repeats itself is
/// expected to do so again. Nothing if even the last token is new.
fn continuation(tokens: &[u32], most: usize, out: &mut Vec<u32>) {
    let Some((last, before)) = tokens.split_last() else { return };
    let len = tokens.len();
    // How long the run is, and where what follows it begins.
    let (mut longest, mut from) = (0, len);
    for at in (0..before.len()).rev().filter(|&at| before[at] == *last) {
        let same = |&n: &usize| n <= at && before[at - n] == tokens[len - 1 - n];
        let run = 1 + (1..LONGEST).take_while(same).count();
        if run > longest {
            (longest, from) = (run, at + 1);
        }
        if run == LONGEST {
            break;
        }
    }
    let appended = out.len();
    for at in from..if longest > 0 { from + most } else { from } {
        out.push(if at < len { tokens[at] } else { out[appended + at - len] });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for drafts in [Drafts::Off, Drafts::Auto, Drafts::Exactly(1), Drafts::Exactly(16)] {
            assert_eq!(drafts.to_string().parse(), Ok(drafts));
        }
        assert_eq!("0".parse(), Ok(Drafts::Off));
        for unknown in ["17", "-1", "on", ""] {
            assert_eq!(unknown.parse::<Drafts>(), Err(UnknownDrafts { found: unknown.into() }));
        }
    }

    fn drafts(tokens: &[u32], most: usize) -> Vec<u32> {
        let mut out = vec![99];
        continuation(tokens, most, &mut out);
        assert_eq!(out.remove(0), 99);
        out
    }

    #[test]
    fn the_longest_run_counts_and_of_its_places_the_latest() {
        assert_eq!(drafts(&[1, 2, 3, 4, 5, 9, 3, 7, 1, 2, 3], 2), [4, 5]);
        assert_eq!(drafts(&[2, 3, 4, 2, 3, 5, 8, 2, 3], 1), [5]);
        assert_eq!(drafts(&[6, 1, 6, 2, 7, 6], 3), [2, 7, 6]);
    }

    #[test]
    fn a_text_that_repeats_itself_goes_on() {
        assert_eq!(drafts(&[8, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
        assert_eq!(drafts(&[7, 7], 3), [7, 7, 7]);
    }

    #[test]
    fn nothing_follows_a_new_token() {
        assert_eq!(drafts(&[1, 2, 3], 4), []);
        assert_eq!(drafts(&[1], 4), []);
        assert_eq!(drafts(&[1, 1], 0), []);
    }
}
