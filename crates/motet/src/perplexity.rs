//! `motet perplexity`: how surprised a model is by a text. The measure of what a format of weights or of keys and
//! values costs.
//!
//! llama.cpp's method, so that numbers can be compared: chunks are read one by one without what was before them, and
//! of each the second half is scored, where every token has at least half a chunk before it.

use clap::Args;
use motet_model::{Device, KvFormat};
use serde_json::json;

use crate::Outcome;
use crate::corpus::{self, CorpusArgs};
use crate::model::{self, Model};
use crate::options::ModelArgs;
use crate::output::say;

/// Chunks read at once.
const AT_ONCE: usize = 4;

/// Arguments of `motet perplexity`.
#[derive(Debug, Args)]
pub(crate) struct Perplexity {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    corpus: CorpusArgs,
    /// Format of keys and values: f16, f32 or q8_0
    #[arg(long, default_value_t = KvFormat::F16, value_name = "FORMAT")]
    kv: KvFormat,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Perplexity {
    pub(crate) fn run(&self) -> Outcome {
        let model = Model::open(self.model.model.as_deref())?;
        let chunks = self.corpus.chunks(&model.tokenizer)?;
        let count = chunks.len();
        let device = model::device(self.model.threads())?;
        let name = device.name();
        let options = self.corpus.options(AT_ONCE, self.kv);
        let plan = model::plan(&model.weights.network, &options, &device)?;
        let engine = model.weights.start(plan, device);
        engine.wait_until_loaded()?;

        let mut surprise = Surprise::default();
        let mut done = 0;
        corpus::read(&engine, chunks, AT_ONCE, |logprobs| {
            surprise.chunk(logprobs);
            done += 1;
            if !self.json {
                say!("[{done}]{:.4},", surprise.perplexity())?;
            }
            Ok(())
        })?;
        if self.json {
            let out = json!({
                "model": model.name,
                "device": name,
                "kv": self.kv.name(),
                "ctx": self.corpus.ctx,
                "chunks": count,
                "scored_tokens": surprise.count,
                "perplexity": surprise.perplexity(),
                "standard_error": surprise.standard_error(),
            });
            say!("{out:#}\n")?;
        } else {
            say!("\n{surprise}\n")?;
        }
        Ok(())
    }
}

/// Negative log-likelihoods of scored tokens, summed.
#[derive(Debug, Default)]
pub(crate) struct Surprise {
    sum: f64,
    sum_of_squares: f64,
    count: usize,
}

impl Surprise {
    /// Scores the second half of a chunk of n tokens: `logprobs` are those of its tokens 1 … n − 1, and tokens
    /// n/2 + 1 … n − 1 count.
    pub(crate) fn chunk(&mut self, logprobs: &[f32]) {
        let ctx = logprobs.len() + 1;
        for &logprob in &logprobs[ctx / 2..] {
            let nll = -f64::from(logprob);
            self.sum += nll;
            self.sum_of_squares += nll * nll;
            self.count += 1;
        }
    }

    fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// e to the mean.
    pub(crate) fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Of the perplexity, from that of the mean m: e^m · √((⟨nll²⟩ − m²) / (count − 1)).
    pub(crate) fn standard_error(&self) -> f64 {
        let count = self.count as f64;
        let variance = (self.sum_of_squares / count - self.mean().powi(2)).max(0.0);
        self.perplexity() * (variance / (count - 1.0).max(1.0)).sqrt()
    }
}

impl std::fmt::Display for Surprise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ppl, error) = (self.perplexity(), self.standard_error());
        write!(f, "Final estimate: PPL = {ppl:.4} +/- {error:.5}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_chances_of_one_in_four_are_a_perplexity_of_four() {
        let mut surprise = Surprise::default();
        surprise.chunk(&[0.25f32.ln(); 7]);
        assert!((surprise.perplexity() - 4.0).abs() < 1e-6);
        assert!(surprise.standard_error() < 1e-3);
    }

    #[test]
    fn only_the_second_half_of_a_chunk_counts() {
        // Eight tokens: 5, 6 and 7 are scored, with chances 1/2, 1/4 and 1/8.
        let chances = [0.9f32, 0.9, 0.9, 0.9, 0.5, 0.25, 0.125];
        let mut surprise = Surprise::default();
        surprise.chunk(&chances.map(f32::ln));
        assert_eq!(surprise.count, 3);
        // The mean is 2 ln 2; the squares' mean 14/3 ln² 2; so the variance is 2/3 ln² 2, the error of the mean
        // ln 2 · √(2/3 / 2) and that of the perplexity four times as much.
        assert!((surprise.perplexity() - 4.0).abs() < 1e-5);
        let expected = 4.0 * 2f64.ln() * (1.0f64 / 3.0).sqrt();
        assert!((surprise.standard_error() - expected).abs() < 1e-5);
        assert_eq!(surprise.to_string(), "Final estimate: PPL = 4.0000 +/- 1.60075");
    }
}
