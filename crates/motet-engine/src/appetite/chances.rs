//! How likely a draft is to be chosen, by its number in its step: what was expected before, and what was seen since.

use crate::drafts::MAX_DRAFTS;

/// What is expected before weighs as much as so many drafts.
const WEIGHT: f64 = 8.0;

/// How often drafts were chosen that had a chance to be, by their number in their step; old ones count less and less.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chances {
    chosen: [f64; MAX_DRAFTS],
    trials: [f64; MAX_DRAFTS],
    /// About how many drafts back it remembers.
    memory: f64,
}

impl Chances {
    /// Of one session.
    pub(crate) fn of_session() -> Self {
        Self::new(200.0)
    }

    /// That remembers about so many drafts.
    pub(super) fn new(memory: f64) -> Self {
        Self { chosen: [0.0; MAX_DRAFTS], trials: [0.0; MAX_DRAFTS], memory }
    }

    /// Of `drafts` drafts the first `accepted` were chosen; those behind the first refusal had no chance.
    pub(crate) fn learn(&mut self, drafts: usize, accepted: usize) {
        let kept = 1.0 - 1.0 / self.memory;
        for depth in 0..drafts.min(accepted + 1) {
            let chosen = f64::from(u8::from(depth < accepted));
            self.chosen[depth] = kept * self.chosen[depth] + chosen;
            self.trials[depth] = kept * self.trials[depth] + 1.0;
        }
    }

    /// The probability that a draft with a chance is chosen, if `before` was expected before all trials; and `hope`
    /// standard deviations more.
    pub(super) fn of(&self, depth: usize, before: f64, hope: f64) -> f64 {
        let trials = self.trials[depth] + WEIGHT;
        let mean = (self.chosen[depth] + WEIGHT * before) / trials;
        (mean + hope * (mean * (1.0 - mean) / trials).sqrt()).min(1.0)
    }
}
