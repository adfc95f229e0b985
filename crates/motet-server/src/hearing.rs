//! From tokens to what they say: whole characters, up to a stop string, thinking and calls told apart from the text.
//!
//! The front end hears each answer so, and where there are stop strings the engine's thread does as well, to end the
//! answer with the same token. What is heard depends on the tokens only.

use std::sync::Arc;

use motet_engine::{Cut, CutMaker};
use motet_text::{Detokenizer, Stops, Tokenizer};

use crate::reader::{AnswerReader, Said};

/// Listens to one choice.
#[derive(Debug, Clone)]
pub(crate) struct Hearing {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: Stops,
    reader: AnswerReader,
    /// Tokens that must come before a stop string counts.
    deaf: usize,
    /// Whether a stop string that was hit is part of the answer.
    show_stop: bool,
    /// Text so far in bytes and characters, held back or not; and what of it passed the stop strings, in bytes.
    bytes: usize,
    chars: usize,
    passed: usize,
    /// The stop string that was hit.
    hit: Option<String>,
}

impl Hearing {
    /// Hears an answer to its end.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, reader: AnswerReader) -> Hearing {
        Hearing {
            tokenizer: tokenizer.clone(),
            detokenizer: tokenizer.stream(),
            stops: Stops::new([]),
            reader,
            deaf: 0,
            show_stop: false,
            bytes: 0,
            chars: 0,
            passed: 0,
            hit: None,
        }
    }

    /// Hears it up to any of `stops` only, which count in text and thinking, not in calls, and not within the first
    /// `deaf` tokens. What is hit is heard as well if it is to be shown.
    pub(crate) fn until(self, stops: Stops, deaf: usize, show_stop: bool) -> Hearing {
        Hearing { stops, deaf, show_stop, ..self }
    }

    /// Takes a token. After a hit nothing is heard any more.
    pub(crate) fn push(&mut self, token: u32, said: &mut Vec<Said>) {
        if self.hit.is_some() {
            return;
        }
        let watched = self.deaf == 0 && !self.reader.in_call();
        self.deaf = self.deaf.saturating_sub(1);
        if self.reader.wants(token) {
            // No text goes on in a token that is a marker, so nothing needs to be held back any longer.
            self.let_go(said);
            let name = String::from_utf8_lossy(self.tokenizer.piece(token)).into_owned();
            self.reader.push_special(token, &name, said);
            return;
        }
        let text = self.detokenizer.push(token).to_owned();
        if watched {
            self.read_until_stop(&text, said);
        } else {
            self.count(&text);
            self.passed += text.len();
            self.reader.push(&text, said);
        }
    }

    /// What was held back at the end of the answer.
    pub(crate) fn finish(&mut self, said: &mut Vec<Said>) {
        if self.hit.is_none() {
            self.let_go(said);
        }
        self.reader.finish(said);
    }

    /// Reads what was held back for the rest of a character or of a stop string.
    fn let_go(&mut self, said: &mut Vec<Said>) {
        let rest = self.detokenizer.finish().to_owned();
        self.read_until_stop(&rest, said);
        if self.hit.is_none() {
            let rest = self.stops.finish();
            self.passed += rest.len();
            self.reader.push(rest, said);
        }
    }

    fn read_until_stop(&mut self, text: &str, said: &mut Vec<Said>) {
        self.count(text);
        let until = self.stops.push(text);
        self.passed += until.text.len();
        self.reader.push(until.text, said);
        self.hit = until.hit.map(str::to_owned);
        if let Some(hit) = self.hit.as_ref().filter(|_| self.show_stop) {
            self.passed += hit.len();
            self.reader.push(hit, said);
        }
    }

    fn count(&mut self, text: &str) {
        self.bytes += text.len();
        self.chars += text.chars().count();
    }

    /// Bytes of the text so far, held back or not.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Characters of the text so far, held back or not.
    pub(crate) fn chars(&self) -> usize {
        self.chars
    }

    /// Bytes of the text that are no part of a stop string.
    pub(crate) fn passed(&self) -> usize {
        self.passed
    }

    /// The stop string that ended the answer.
    pub(crate) fn hit(&self) -> Option<&str> {
        self.hit.as_deref()
    }

    /// How many calls have begun.
    pub(crate) fn calls(&self) -> u32 {
        self.reader.calls()
    }

    /// Makes what ends an answer with the token that completes a stop string.
    pub(crate) fn cut(&self) -> CutMaker {
        let hearing = self.clone();
        Box::new(move || Box::new(StopCut { hearing: hearing.clone(), said: Vec::new() }))
    }
}

/// Hears an answer for the engine.
struct StopCut {
    hearing: Hearing,
    said: Vec<Said>,
}

impl Cut for StopCut {
    fn push(&mut self, token: u32) -> bool {
        self.said.clear();
        self.hearing.push(token, &mut self.said);
        self.hearing.hit.is_some()
    }
}
