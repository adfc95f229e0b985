//! Stop strings, which may lie across any number of tokens.
//!
//! Text is held back only while it may still be the beginning of a stop string. Where several could hit, the one that
//! is complete first does, so that the cut does not depend on how the text arrives.

/// Watches a stream of text for stop strings.
#[derive(Debug, Clone)]
pub struct Stops {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Text handed out by the last call.
    out: String,
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
    pub fn new(stops: impl IntoIterator<Item = String>) -> Stops {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Stops { stops, held: String::new(), out: String::new() }
    }

    /// Takes the next text of the stream.
    pub fn push(&mut self, text: &str) -> UntilStop<'_> {
        self.held.push_str(text);
        self.out.clear();
        let hits = self.stops.iter().filter_map(|stop| self.held.find(stop).map(|start| (start, stop)));
        if let Some((start, stop)) = hits.min_by_key(|&(start, stop)| (start + stop.len(), start)) {
            self.out.push_str(&self.held[..start]);
            self.held.clear();
            return UntilStop { text: &self.out, hit: Some(stop) };
        }
        let safe = self.held.len() - self.possible_beginning();
        self.out.extend(self.held.drain(..safe));
        UntilStop { text: &self.out, hit: None }
    }

    /// What is left at the end of a stream without a hit.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.out.push_str(&self.held);
        self.held.clear();
        &self.out
    }

    /// Bytes of the longest end of `held` that begins a stop string.
    fn possible_beginning(&self) -> usize {
        let held = self.held.as_bytes();
        let longest = self.stops.iter().map(|stop| stop.len() - 1).max().unwrap_or(0).min(held.len());
        let begins = |end: &[u8]| self.stops.iter().any(|stop| stop.as_bytes().starts_with(end));
        (1..=longest).rev().find(|&length| begins(&held[held.len() - length..])).unwrap_or(0)
    }
}
