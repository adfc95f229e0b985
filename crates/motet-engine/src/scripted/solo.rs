//! The sequential definition.

use super::arithmetic::{
    CLEAR, Context, Memory, head_entry, hidden, logprob, mix, next_state, random_token, somewhere, written,
};
use super::{Script, Sketch};
use motet_model::batch::{Sampling, Seen};

/// One conversation alone, without pages, slots or batches: the definition of what a scripted network answers.
pub struct Solo {
    sketch: Sketch,
    script: Script,
    tokens: Vec<u32>,
    /// What each position wrote, by kind of attention: (window, digests).
    layers: Vec<(Option<u32>, Vec<u64>)>,
    /// What the draft head's layer left at each position, if there is one.
    heads: Vec<u64>,
    state: u64,
    hidden: u64,
}

impl Solo {
    /// A conversation before its first token.
    pub fn new(sketch: Sketch, script: Script) -> Self {
        let full = sketch.full.then_some((None, Vec::new()));
        let sliding = sketch.window.map(|w| (Some(w), Vec::new()));
        let layers = full.into_iter().chain(sliding).collect();
        let (tokens, heads) = (Vec::new(), Vec::new());
        Self { sketch, script, tokens, layers, heads, state: CLEAR.state, hidden: 0 }
    }

    /// The same, with room for so many tokens.
    pub(super) fn with_capacity(sketch: Sketch, script: Script, tokens: usize) -> Self {
        let mut solo = Self::new(sketch, script);
        solo.tokens.reserve(tokens);
        solo.heads.reserve(tokens);
        solo.layers.iter_mut().for_each(|(_, layer)| layer.reserve(tokens));
        solo
    }

    /// Reads a token.
    pub fn push(&mut self, token: u32) {
        let position = self.tokens.len();
        self.heads.push(head_entry(token, position, self.hidden));
        if self.sketch.recurrent {
            self.state = next_state(self.state, token, position);
        }
        for (window, layer) in &mut self.layers {
            let sees_one_before = position > 0 && *window != Some(1);
            let before = if sees_one_before { layer[position - 1] } else { 0 };
            let anywhere = layer.get(somewhere(position, *window)).copied().unwrap_or(0);
            layer.push(written(token, position, self.state, before, anywhere));
            if self.sketch.head {
                self.hidden = hidden(layer[position], self.state);
            }
        }
        self.tokens.push(token);
    }

    /// What is chosen after the tokens read so far. `seen`: as in the batch.
    pub fn next(&self, sampling: &Sampling, seen: &[Seen], bias: &[(u32, f32)]) -> u32 {
        self.next_allowed(sampling, seen, bias, &[])
    }

    /// The same among the tokens that may be chosen, a set as in the batch.
    pub fn next_allowed(
        &self,
        sampling: &Sampling,
        seen: &[Seen],
        bias: &[(u32, f32)],
        allowed: &[u64],
    ) -> u32 {
        match &self.script {
            Script::Random { end, mean } => {
                let context = Context { seen, bias, vocab: self.sketch.vocab, allowed };
                random_token(self.digest(), sampling, context, *end, *mean)
            }
            Script::Answers(answer) => answer(&self.tokens, sampling),
        }
    }

    /// The log-probability of a token after those read so far.
    pub fn logprob(&self, token: u32) -> f32 {
        logprob(self.digest(), token)
    }

    /// The digest that an `Ask` would report.
    pub fn digest(&self) -> u64 {
        let seen = |window: &Option<u32>, layer: &Vec<u64>| {
            let from = window.map_or(0, |w| layer.len().saturating_sub(w as usize));
            from..layer.len()
        };
        self.layers.iter().fold(self.state, |digest, (window, layer)| {
            layer[seen(window, layer)].iter().fold(digest, |d, &cell| mix(d, cell))
        })
    }

    /// Forgets everything but its memory's size.
    pub(super) fn begin_again(&mut self) {
        self.tokens.clear();
        self.heads.clear();
        self.layers.iter_mut().for_each(|(_, layer)| layer.clear());
        (self.state, self.hidden) = (CLEAR.state, 0);
    }

    /// Whether the draft head finds, behind the tokens read so far, what it must: the last hidden row, and what its own
    /// layer left at each position.
    pub(super) fn agrees(&self, memory: &Memory, mut head_at: impl FnMut(usize) -> u64) -> bool {
        (memory.state, memory.hidden_before(self.tokens.len())) == (self.state, self.hidden)
            && self.heads.iter().enumerate().all(|(at, &head)| at == 0 || head_at(at) == head)
    }
}
