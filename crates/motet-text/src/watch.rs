//! Finds strings in a stream of bytes, a byte at a time.
//!
//! The automaton is Aho and Corasick's: a step takes the same time however many strings there are. It is built once and
//! shared; who watches a stream keeps a [`Place`] in it, which is a number and can be kept to go back to.

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::noncontiguous::NFA;

/// The strings that are watched for.
#[derive(Debug)]
pub struct Watch {
    /// None where there are no strings.
    automaton: Option<NFA>,
    /// By state: how many of the last bytes begin a string.
    depths: Vec<u32>,
    /// Bytes of each string.
    lengths: Vec<usize>,
}

/// How far a stream has come in the strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place(StateID);

impl Watch {
    /// Watches for these strings; an empty one is never found. `None` if they are too long for an automaton (2 GiB).
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Option<Watch> {
        let lengths = strings.iter().map(|string| string.as_ref().len()).collect();
        if strings.iter().all(|string| string.as_ref().is_empty()) {
            return Some(Watch { automaton: None, depths: Vec::new(), lengths });
        }
        let automaton = NFA::builder().build(strings.iter().map(AsRef::as_ref)).ok()?;
        let mut watch = Watch { automaton: Some(automaton), depths: Vec::new(), lengths };
        for string in strings {
            let mut place = watch.start();
            for (before, byte) in string.as_ref().bytes().enumerate() {
                place = watch.step(place, byte);
                let state = place.0.as_usize();
                if watch.depths.len() <= state {
                    watch.depths.resize(state + 1, 0);
                }
                watch.depths[state] = before as u32 + 1;
            }
        }
        Some(watch)
    }

    /// Before the first byte.
    pub fn start(&self) -> Place {
        let start = self.automaton.as_ref().and_then(|automaton| automaton.start_state(Anchored::No).ok());
        Place(start.unwrap_or(StateID::ZERO))
    }

    /// A byte further.
    #[inline]
    pub fn step(&self, place: Place, byte: u8) -> Place {
        match &self.automaton {
            Some(automaton) => Place(automaton.next_state(Anchored::No, place.0, byte)),
            None => place,
        }
    }

    /// How many of the last bytes may be the beginning of a string, at most.
    pub fn held(&self, place: Place) -> usize {
        self.depths.get(place.0.as_usize()).map_or(0, |&depth| depth as usize)
    }

    /// The string that ends here, the longest of them: its number.
    #[inline]
    pub fn found(&self, place: Place) -> Option<usize> {
        let automaton = self.automaton.as_ref().filter(|automaton| automaton.is_match(place.0))?;
        let strings =
            (0..automaton.match_len(place.0)).map(|i| automaton.match_pattern(place.0, i).as_usize());
        strings.filter(|&string| self.lengths[string] > 0).max_by_key(|&string| self.lengths[string])
    }

    /// Bytes of a string.
    pub fn length(&self, string: usize) -> usize {
        self.lengths[string]
    }
}
