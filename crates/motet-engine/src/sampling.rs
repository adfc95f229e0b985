//! How a client wants tokens chosen, and what a session must remember for it.
//!
//! The arithmetic of the choice is the device's last step; here options become that step's [`Sampling`] parameters,
//! with the tokens seen so far. Nothing here looks at logits.

use crate::request::SubmitError;
use motet_model::Batch;
use motet_model::batch::{Sampling, Seen};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

/// The most logit biases a request may carry.
pub const MAX_BIAS: usize = 1024;

/// Sampling as a client asks for it.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingOptions {
    /// Key of the noise; `None`: a random one, reported with `Event::Started`.
    pub seed: Option<u64>,
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Candidates kept by cumulated probability; 1 keeps all.
    pub top_p: f32,
    /// Candidates kept whose probability is at least this share of the greatest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt and answer; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit once per occurrence in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurs in the answer; 0 is off.
    pub presence_penalty: f32,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            seed: None,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplingOptions {
    /// The most likely token each time.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether the tokens seen so far matter.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Checks ranges.
    ///
    /// # Errors
    /// [`SubmitError::Invalid`] with the field's name in OpenAI's API and the range.
    pub fn check(&self, vocab: usize) -> Result<(), SubmitError> {
        let within = |field, value: f32, least: f32, most: f32| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(SubmitError::Invalid { field, what: format!("{value} is not between {least} and {most}") })
        };
        within("temperature", self.temperature, 0.0, 100.0)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        if self.logit_bias.len() > MAX_BIAS {
            let what = format!("{} entries, at most {MAX_BIAS} can be had", self.logit_bias.len());
            return Err(SubmitError::Invalid { field: "logit_bias", what });
        }
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab {
                let what = format!("token {token} is outside the vocabulary of {vocab}");
                return Err(SubmitError::Invalid { field: "logit_bias", what });
            }
            within("logit_bias", bias, -100.0, 100.0)?;
        }
        Ok(())
    }
}

/// One choice's way of choosing tokens, and the tokens it has seen.
pub(crate) struct Sampler {
    options: Arc<SamplingOptions>,
    seed: u64,
    choice: u32,
    /// By token, ascending; kept only if a penalty is set.
    seen: Vec<Seen>,
}

impl Sampler {
    /// `answer`: tokens that will be learned at most.
    pub(crate) fn new(
        options: Arc<SamplingOptions>,
        seed: u64,
        choice: u32,
        prompt: &[u32],
        answer: usize,
    ) -> Self {
        let mut seen = Vec::new();
        if options.has_penalties() {
            seen.reserve_exact(prompt.len() + answer);
            seen.extend(prompt.iter().map(|&token| Seen { token, generated: 0 }));
            seen.sort_unstable_by_key(|s: &Seen| s.token);
            seen.dedup();
        }
        Self { options, seed, choice, seen }
    }

    /// Key of the noise.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// A token was chosen.
    pub(crate) fn learn(&mut self, token: u32) {
        if !self.options.has_penalties() {
            return;
        }
        match self.seen.binary_search_by_key(&token, |s| s.token) {
            Ok(at) => self.seen[at].generated += 1,
            Err(at) => self.seen.insert(at, Seen { token, generated: 1 }),
        }
    }

    /// The parameters of the next choice, with what was seen laid into the batch.
    pub(crate) fn parameters(&self, batch: &mut Batch) -> Sampling {
        let seen_from = batch.seen.len() as u32;
        batch.seen.extend_from_slice(&self.seen);
        let bias_from = batch.bias.len() as u32;
        batch.bias.extend_from_slice(&self.options.logit_bias);
        let o = &self.options;
        Sampling {
            seed: self.seed,
            choice: self.choice,
            temperature: o.temperature,
            top_k: o.top_k,
            top_p: o.top_p,
            min_p: o.min_p,
            repetition_penalty: o.repetition_penalty,
            frequency_penalty: o.frequency_penalty,
            presence_penalty: o.presence_penalty,
            seen: seen_from..batch.seen.len() as u32,
            bias: bias_from..batch.bias.len() as u32,
            allowed: 0..0,
        }
    }
}

/// A seed nobody can foresee: the standard library keys its hashers from the system's randomness.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}
