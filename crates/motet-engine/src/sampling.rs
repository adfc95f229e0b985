//! How a client wants tokens chosen, and what a session must remember for it.
//!
//! The arithmetic of the choice is the device's last step; here options become that step's [`Sampling`] parameters,
//! with the tokens seen so far. Nothing here looks at logits.

use crate::request::SubmitError;

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
