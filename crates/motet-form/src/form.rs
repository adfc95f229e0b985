//! The constraint of one answer: a matcher that is asleep until the grammar begins.
//!
//! Every token's step can be taken back, as many as a step of the engine has drafts: beside the matcher, which can go
//! back itself, a ring holds where the answer was before. The tokens that end an answer never reach the matcher: they
//! may come where the grammar is complete.

use std::collections::VecDeque;
use std::sync::Arc;

use llguidance::Matcher;
use motet_engine::{Advance, Broken, Constraint, MAX_DRAFTS};
use motet_text::{Begins, Marker, Place, Tokenizer};
use parking_lot::Mutex;
use toktrie::TokEnv;

use crate::FormError;
use crate::markers::Markers;

/// A grammar that was compiled: what all answers that keep to it have in common.
pub(crate) struct Compiled {
    /// As it is before the first token; answers have clones of it.
    matcher: Mutex<Matcher>,
    begins: Beginning,
    env: TokEnv,
    tokenizer: Arc<Tokenizer>,
}

/// From where on it counts.
enum Beginning {
    AtOnce,
    AfterThinking { open: Option<Marker>, close: Markers },
    Behind(Markers),
}

/// Where an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Everything may come until there is a marker.
    Asleep(Place),
    /// The grammar counts, or the marker that opens the thinking comes, of which there are so many bytes; `both`: what
    /// there is may be either.
    Opening { bytes: usize, both: bool },
    /// The grammar counts.
    Awake,
}

/// What a token did.
struct Undo {
    before: State,
    /// Tokens that the matcher was given for it.
    fed: usize,
    /// The matcher before, if another one has begun with it, and the tokens that it was given.
    other: Option<(Box<Matcher>, Vec<u32>)>,
}

/// Tokens that the matcher was given, and the one before if another one has begun.
type Done = (usize, Option<(Box<Matcher>, Vec<u32>)>);

/// The constraint.
pub(crate) struct Form {
    compiled: Arc<Compiled>,
    matcher: Box<Matcher>,
    /// Tokens that the matcher was given.
    fed: Vec<u32>,
    state: State,
    undo: VecDeque<Undo>,
}

impl Compiled {
    pub(crate) fn new(
        mut matcher: Matcher,
        begins: &Begins,
        env: TokEnv,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Compiled, FormError> {
        let begins = match begins {
            Begins::AtOnce => Beginning::AtOnce,
            Begins::AfterThinking { open, close, opened } => Beginning::AfterThinking {
                open: (!opened).then(|| open.clone()),
                close: Markers::new(std::slice::from_ref(close))?,
            },
            Begins::Behind(markers) => Beginning::Behind(Markers::new(markers)?),
        };
        // What the first mask needs is there when the first answer begins.
        matcher.compute_mask_or_eos().map_err(|error| FormError::Grammar { what: one_line(&error) })?;
        Ok(Compiled { matcher: Mutex::new(matcher), begins, env, tokenizer })
    }

    /// A matcher before its first token.
    fn matcher(&self) -> Box<Matcher> {
        Box::new(self.matcher.lock().deep_clone())
    }
}

/// What llguidance says of an error, without what it found in the answer.
pub(crate) fn one_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "<non-verbose/>");
    lines.collect::<Vec<_>>().join("; ")
}

impl Form {
    pub(crate) fn new(compiled: &Arc<Compiled>) -> Form {
        let state = match &compiled.begins {
            Beginning::AtOnce => State::Awake,
            Beginning::AfterThinking { open: Some(_), .. } => State::Opening { bytes: 0, both: true },
            Beginning::AfterThinking { open: None, close } => State::Asleep(close.start()),
            Beginning::Behind(markers) => State::Asleep(markers.start()),
        };
        Form {
            matcher: compiled.matcher(),
            fed: Vec::new(),
            state,
            undo: VecDeque::with_capacity(MAX_DRAFTS + 1),
            compiled: compiled.clone(),
        }
    }

    /// Gives the matcher tokens: all or, if it refuses one, none.
    fn feed(&mut self, tokens: &[u32]) -> bool {
        let taken = self.matcher.try_consume_tokens(tokens);
        if taken.as_ref().is_ok_and(|&taken| taken == tokens.len()) {
            self.fed.extend_from_slice(tokens);
            return true;
        }
        if taken.and_then(|taken| self.matcher.rollback(taken)).is_err() {
            self.mend();
        }
        false
    }

    /// Takes the last tokens from the matcher again.
    fn take_back(&mut self, tokens: usize) {
        self.fed.truncate(self.fed.len() - tokens);
        if tokens > 0 && self.matcher.rollback(tokens).is_err() {
            self.mend();
        }
    }

    /// The matcher failed over tokens that do not come: another one takes its place.
    fn mend(&mut self) {
        self.matcher = self.compiled.matcher();
        // If this fails, so does the next mask.
        let _ = self.matcher.consume_tokens(&self.fed);
    }

    /// The grammar begins behind this token, of which so many last bytes belong to it already.
    fn wake(&mut self, token: u32, behind: usize) -> Done {
        let other = (!self.fed.is_empty()).then(|| {
            let matcher = std::mem::replace(&mut self.matcher, self.compiled.matcher());
            (matcher, std::mem::take(&mut self.fed))
        });
        let compiled = self.compiled.clone();
        let piece = compiled.tokenizer.piece(token);
        let rest = &piece[piece.len() - behind..];
        let tokens = |bytes: &[u8]| compiled.env.tok_trie().greedy_tokenize(bytes);
        match &compiled.begins {
            Beginning::Behind(_) if !self.feed(&tokens(rest)) => {}
            Beginning::Behind(markers) => self.state = self.behind(markers),
            _ => {
                // What stands between the thinking and the answer is a space or two.
                let _ = self.feed(&tokens(rest)) || self.feed(&tokens(rest.trim_ascii_start()));
                self.state = State::Awake;
            }
        }
        (self.fed.len(), other)
    }

    /// Where the answer is after a token of the grammar: where that is complete, everything may come.
    fn behind(&mut self, markers: &Markers) -> State {
        if self.accepts() { State::Asleep(markers.start()) } else { State::Awake }
    }

    /// A token while everything may come.
    fn pass(&mut self, mut place: Place, token: u32) -> Done {
        let compiled = self.compiled.clone();
        let markers = match &compiled.begins {
            Beginning::AfterThinking { close, .. } => close,
            Beginning::Behind(markers) => markers,
            Beginning::AtOnce => return (0, None),
        };
        let behind = markers.step(&mut place, token, &compiled.tokenizer);
        self.state = State::Asleep(place);
        behind.map_or((0, None), |behind| self.wake(token, behind))
    }

    /// A token where the thinking may be opened; `None` if it may not stand here.
    fn open(&mut self, bytes: usize, both: bool, token: u32) -> Option<Done> {
        let compiled = self.compiled.clone();
        let Beginning::AfterThinking { open: Some(open), close } = &compiled.begins else { return None };
        let piece = compiled.tokenizer.piece(token);
        let left = &open.text.as_bytes()[bytes..];
        let opened = match open.token {
            Some(id) => (id == token).then_some(piece.len()),
            None if compiled.tokenizer.is_hidden(token) => None,
            None => piece.starts_with(left).then_some(left.len()),
        };
        if let Some(opened) = opened {
            let mut place = close.start();
            let behind = close.step_over(&mut place, &piece[opened..]);
            self.state = State::Asleep(place);
            return Some(behind.map_or((0, None), |behind| self.wake(token, behind)));
        }
        let opens = open.token.is_none() && !piece.is_empty() && left.starts_with(piece);
        let fed = both && self.feed(&[token]);
        self.state = match (opens, fed) {
            (true, both) => State::Opening { bytes: bytes + piece.len(), both },
            (false, true) => State::Awake,
            (false, false) => return None,
        };
        Some((usize::from(fed), None))
    }

    /// A token where the grammar counts; `None` if it may not stand here.
    fn keep(&mut self, token: u32) -> Option<Done> {
        if !self.feed(&[token]) {
            return None;
        }
        let compiled = self.compiled.clone();
        self.state = match &compiled.begins {
            Beginning::Behind(markers) => self.behind(markers),
            _ => State::Awake,
        };
        Some((1, None))
    }

    /// Whether the grammar is complete.
    fn accepts(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether the answer may end here.
    fn may_end(&mut self) -> bool {
        !matches!(self.state, State::Opening { both: false, .. }) && self.accepts()
    }

    fn grammar_mask(&mut self, allowed: &mut [u64]) -> Result<(), Broken> {
        let mask = self.matcher.compute_mask_or_eos();
        let mask = mask.map_err(|error| Broken { what: one_line(&error) })?;
        for (word, halves) in allowed.iter_mut().zip(mask.as_slice().chunks(2)) {
            let high = halves.get(1).map_or(0, |&high| u64::from(high) << 32);
            *word |= u64::from(halves[0]) | high;
        }
        Ok(())
    }
}

impl Constraint for Form {
    fn asleep(&self) -> bool {
        matches!(self.state, State::Asleep(_))
    }

    fn mask(&mut self, allowed: &mut [u64]) -> Result<(), Broken> {
        match self.state {
            State::Asleep(_) => allowed.fill(u64::MAX),
            State::Awake => self.grammar_mask(allowed)?,
            State::Opening { bytes, both } => {
                if both {
                    self.grammar_mask(allowed)?;
                }
                if let Beginning::AfterThinking { open: Some(open), .. } = &self.compiled.begins {
                    let left = &open.text.as_bytes()[bytes..];
                    let tokens = match open.token {
                        Some(token) => vec![token],
                        None => self.compiled.env.tok_trie().all_prefixes(left),
                    };
                    for token in tokens {
                        if let Some(word) = allowed.get_mut(token as usize / 64) {
                            *word |= 1 << (token % 64);
                        }
                    }
                }
            }
        }
        if allowed.iter().all(|&word| word == 0) {
            return Err(Broken { what: "no token can come next".to_owned() });
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Advance {
        let before = self.state;
        let done = match before {
            State::Asleep(place) => Some(self.pass(place, token)),
            // What ends the answer is no part of the grammar.
            _ if self.compiled.tokenizer.is_end(token) => self.may_end().then_some((0, None)),
            State::Opening { bytes, both } => self.open(bytes, both, token),
            State::Awake => self.keep(token),
        };
        let Some((fed, other)) = done else { return Advance::Refused };
        if self.undo.len() == MAX_DRAFTS {
            self.undo.pop_front();
        }
        self.undo.push_back(Undo { before, fed, other });
        let ends = self.state == State::Awake
            && (self.matcher.is_stopped() || self.compiled.tokenizer.is_end(token));
        if ends && !self.matcher.is_error() { Advance::Ends } else { Advance::GoesOn }
    }

    fn forced(&mut self, most: usize, out: &mut Vec<u32>) {
        if self.state == State::Awake && most > 0 && !self.matcher.is_stopped() {
            out.extend(self.matcher.compute_ff_tokens().into_iter().take(most));
        }
    }

    fn roll_back(&mut self, tokens: usize) {
        let mut fed = 0;
        for undo in self.undo.drain(self.undo.len().saturating_sub(tokens)..).rev() {
            self.state = undo.before;
            match undo.other {
                // What came after it was another one's.
                Some((matcher, given)) => {
                    (self.matcher, self.fed) = (matcher, given);
                    fed = 0;
                }
                None => fed += undo.fed,
            }
        }
        self.take_back(fed);
    }
}
