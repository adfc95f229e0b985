//! Stop strings, which may lie across any number of tokens.
//!
//! Text is held back only while it may still be the beginning of a stop string. Where several could hit, the one that
//! is complete first does, so that the cut does not depend on how the text arrives. Whatever the stop strings are, the
//! time that a piece of text takes depends on its length only.

use std::sync::Arc;

use crate::watch::{Place, Watch};

/// Watches a stream of text for stop strings. Clones share what was built for the strings.
#[derive(Debug, Clone)]
pub struct Stops {
    strings: Arc<Strings>,
    place: Place,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Text handed out by the last call.
    out: String,
}

#[derive(Debug)]
struct Strings {
    stops: Vec<String>,
    watch: Watch,
}

/// What [`Stops::push`] lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UntilStop<'a> {
    /// Text that is safe to emit. With a hit, the text before the stop string.
    pub text: &'a str,
    /// The stop string that was hit; the stream is over then.
    pub hit: Option<&'a str>,
}

impl Stops {
    /// Watches for these strings. Empty ones are ignored.
    ///
    /// # Panics
    /// If they have 2 GiB or more.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Stops {
        let stops: Vec<String> = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        let watch = Watch::new(&stops).expect("stop strings of less than 2 GiB");
        let place = watch.start();
        Stops { strings: Arc::new(Strings { stops, watch }), place, held: String::new(), out: String::new() }
    }

    /// Takes the next text of the stream.
    pub fn push(&mut self, text: &str) -> UntilStop<'_> {
        self.out.clear();
        let Strings { stops, watch } = &*self.strings;
        for (at, byte) in text.bytes().enumerate() {
            self.place = watch.step(self.place, byte);
            if let Some(hit) = watch.found(self.place) {
                self.held.push_str(text.get(..=at).expect("a stop string ends with a character"));
                self.held.truncate(self.held.len() - watch.length(hit));
                std::mem::swap(&mut self.held, &mut self.out);
                self.place = watch.start();
                return UntilStop { text: &self.out, hit: Some(&stops[hit]) };
            }
        }
        self.held.push_str(text);
        let safe = self.held.len() - watch.held(self.place);
        self.out.extend(self.held.drain(..safe));
        UntilStop { text: &self.out, hit: None }
    }

    /// Takes the next text of the stream where only a hit matters; nothing is held then. True if there is one.
    pub fn hits(&mut self, text: &str) -> bool {
        let watch = &self.strings.watch;
        text.bytes().any(|byte| {
            self.place = watch.step(self.place, byte);
            watch.found(self.place).is_some()
        })
    }

    /// What is left at the end of a stream without a hit.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.out.push_str(&self.held);
        self.held.clear();
        self.place = self.strings.watch.start();
        &self.out
    }
}
