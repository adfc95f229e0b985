//! The markers behind which a grammar begins, in text or as tokens of their own.

use motet_text::{Marker, Place, Tokenizer, Watch};

use crate::FormError;

/// Several markers, found in a stream of tokens.
#[derive(Debug)]
pub(crate) struct Markers {
    /// Those that are spelled.
    watch: Watch,
    /// Those that are a token.
    tokens: Vec<u32>,
}

impl Markers {
    pub(crate) fn new(markers: &[Marker]) -> Result<Markers, FormError> {
        let spelled: Vec<&str> =
            markers.iter().filter(|marker| marker.token.is_none()).map(|marker| &*marker.text).collect();
        let tokens = markers.iter().filter_map(|marker| marker.token).collect();
        let watch = Watch::new(&spelled)
            .ok_or_else(|| FormError::Grammar { what: "its markers are too long".to_owned() })?;
        Ok(Markers { watch, tokens })
    }

    /// Before the first token.
    pub(crate) fn start(&self) -> Place {
        self.watch.start()
    }

    /// A token further. With a marker in it, the first one, also how many of its bytes come after that.
    pub(crate) fn step(&self, place: &mut Place, token: u32, tokenizer: &Tokenizer) -> Option<usize> {
        if self.tokens.contains(&token) {
            *place = self.watch.start();
            return Some(0);
        }
        if tokenizer.is_hidden(token) {
            return None;
        }
        self.step_over(place, tokenizer.piece(token))
    }

    /// The same for bytes.
    pub(crate) fn step_over(&self, place: &mut Place, bytes: &[u8]) -> Option<usize> {
        let mut behind = None;
        for (at, &byte) in bytes.iter().enumerate() {
            *place = self.watch.step(*place, byte);
            if behind.is_none() && self.watch.found(*place).is_some() {
                behind = Some(bytes.len() - at - 1);
            }
        }
        behind
    }
}
