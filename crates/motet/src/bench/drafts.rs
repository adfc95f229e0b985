//! `motet bench --drafts`: what drafts bring on this machine. Two engines, one without and one with drafts, answer the
//! same conversations in turn; the ratio of each pair counts, so that what the machine does meanwhile meets both.

use std::error::Error;
use std::fmt;
use std::time::Instant;

use motet_cpu::{CpuDevice, CpuOptions};
use motet_engine::{Drafts, MetricsSnapshot, Options, Request, SamplingOptions, Turn};
use serde::Serialize;

use super::{Answer, Bench, Wheel, median};
use crate::model::Model;

/// What conversations begin with: each at another place of this text, which repeats itself.
const TEXT: &str = "Once upon a time there was a little girl who lived near the forest. She had a red ball and a small \
dog. Every day they went to the park and played together. One day the ball rolled under a big tree. The dog ran \
after it and barked. A bird sat on the tree and said: I can help you. The girl was happy and said thank you. Then they \
all went home and told her mother what had happened. Her mother smiled and gave them something good to eat. ";

/// What was measured, as it is printed.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    model: String,
    threads: usize,
    isa: String,
    drafts: String,
    temperature: f32,
    context: u32,
    decode_tokens: u32,
    pairs: u32,
    lines: Vec<Line>,
}

/// So many conversations at once.
#[derive(Debug, Serialize)]
struct Line {
    conversations: u32,
    /// Tokens of all conversations by second, medians.
    without: f64,
    with: f64,
    /// With drafts by without, pair by pair: the quartiles.
    ratio: [f64; 3],
    /// Tokens of all conversations in a step.
    tokens_per_step: f64,
    /// The share of the drafts that was chosen, by their number in their step.
    acceptance: Vec<f64>,
}

/// What drafts did between two looks at an engine's counters.
struct Counted {
    steps: u64,
    tokens: u64,
    drafted: Vec<u64>,
    accepted: Vec<u64>,
}

impl Counted {
    fn between(before: &MetricsSnapshot, after: &MetricsSnapshot) -> Self {
        let apart = |of: fn(&MetricsSnapshot) -> &[u64]| -> Vec<u64> {
            of(after).iter().zip(of(before)).map(|(after, before)| after - before).collect()
        };
        Self {
            steps: after.steps - before.steps,
            tokens: after.generation_tokens - before.generation_tokens,
            drafted: apart(|metrics| &metrics.drafted_per_position),
            accepted: apart(|metrics| &metrics.accepted_per_position),
        }
    }

    fn acceptance(&self) -> Vec<f64> {
        let by_number = self.drafted.iter().zip(&self.accepted);
        by_number.take_while(|(drafted, _)| **drafted > 0).map(|(&d, &a)| a as f64 / d as f64).collect()
    }
}

impl Bench {
    /// Measures with these drafts and without.
    pub(super) fn compare(
        &self,
        model: &Model,
        options: CpuOptions,
        drafts: Drafts,
    ) -> Result<Report, Box<dyn Error>> {
        let (threads, isa) = (options.threads, options.isa.to_string());
        let sized = |drafts| Options { drafts, look_up: self.look_up, ..self.options() };
        let mut without = Wheel::new(model, sized(Drafts::Off), CpuDevice::new(options.clone()))?;
        let mut with = Wheel::new(model, sized(drafts), CpuDevice::new(options))?;
        let text = model.tokenizer.encode_prompt(TEXT, motet_text::Special::AsText);
        let mut lines = Vec::new();
        for &conversations in &self.conversations {
            let (mut off, mut on, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            // The first pair warms up.
            let mut before = with.engine.metrics();
            for pair in 0..=self.pairs {
                let requests = || (0..conversations).map(|number| self.request(&text, number));
                let seconds = [without.converse(requests())?, with.converse(requests())?];
                if pair == 0 {
                    before = with.engine.metrics();
                    continue;
                }
                off.push(seconds[0]);
                on.push(seconds[1]);
                ratios.push(seconds[1] / seconds[0]);
            }
            let counted = Counted::between(&before, &with.engine.metrics());
            for rates in [&mut off, &mut on, &mut ratios] {
                rates.sort_by(f64::total_cmp);
            }
            lines.push(Line {
                conversations,
                without: median(&off),
                with: median(&on),
                ratio: [0.25, 0.5, 0.75].map(|share| quantile(&ratios, share)),
                tokens_per_step: counted.tokens as f64 / counted.steps as f64,
                acceptance: counted.acceptance(),
            });
        }
        Ok(Report {
            model: model.name.clone(),
            threads,
            isa,
            drafts: format!("{drafts}{}", if self.look_up { ", looked up" } else { "" }),
            temperature: self.temperature,
            context: self.context,
            decode_tokens: self.decode,
            pairs: self.pairs,
            lines,
        })
    }

    /// A conversation that begins at a place of its own.
    fn request(&self, text: &[u32], number: u32) -> Request {
        let prompt = text.iter().cycle().skip(number as usize * 37 % text.len());
        Request {
            sampling: SamplingOptions {
                temperature: self.temperature,
                seed: Some(u64::from(number)),
                ..SamplingOptions::default()
            },
            max_tokens: Some(self.decode as usize + 1),
            ..Request::new(prompt.take(self.context as usize).copied().collect())
        }
    }
}

impl Wheel {
    /// Tokens of all conversations by second, from the moment that each has one to the last one's end.
    fn converse(&mut self, requests: impl Iterator<Item = Request>) -> Result<f64, Box<dyn Error>> {
        let submit = |request| Ok(Answer { stream: self.engine.submit(request)?, tokens: 0 });
        let mut answers = requests.map(submit).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        while answers.iter().any(|answer| answer.tokens == 0) {
            self.turn()?;
            answers.iter_mut().try_for_each(Answer::read)?;
        }
        let before: usize = answers.iter().map(|answer| answer.tokens).sum();
        let begun = Instant::now();
        while self.driver.turn() == Turn::Ran {}
        let took = begun.elapsed().as_secs_f64();
        answers.iter_mut().try_for_each(Answer::read)?;
        let after: usize = answers.iter().map(|answer| answer.tokens).sum();
        Ok((after - before) as f64 / took)
    }
}

/// Of ascending values, on the line between the two nearest.
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let at = share * (ascending.len() - 1) as f64;
    let (below, above) = (ascending[at.floor() as usize], ascending[at.ceil() as usize]);
    below + at.fract() * (above - below)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, threads, isa, drafts, temperature, context, decode_tokens, pairs, .. } = self;
        writeln!(f, "{model}: {threads} threads, {isa}, drafts {drafts}, temperature {temperature}")?;
        writeln!(
            f,
            "{decode_tokens} tokens behind {context}, {pairs} pairs of runs, without and with drafts in turn\n"
        )?;
        writeln!(
            f,
            "{:>13}  {:>10}  {:>10}  {:>24}  {:>11}  acceptance by position",
            "conversations", "tokens/s", "with", "ratio (quartiles)", "tokens/step"
        )?;
        for line in &self.lines {
            let Line {
                conversations,
                without,
                with,
                ratio: [low, middle, high],
                tokens_per_step,
                acceptance,
            } = line;
            let acceptance: Vec<String> = acceptance.iter().map(|share| format!("{share:.2}")).collect();
            writeln!(
                f,
                "{conversations:>13}  {without:>10.1}  {with:>10.1}  {:>24}  {tokens_per_step:>11.2}  {}",
                format!("{middle:.3} ({low:.3}–{high:.3})"),
                acceptance.join(" ")
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_their_neighbours() {
        let values = [1.0, 2.0, 4.0, 8.0, 16.0];
        assert_eq!([0.0, 0.25, 0.5, 0.75, 1.0].map(|share| quantile(&values, share)), values);
        assert_eq!(quantile(&[1.0, 2.0], 0.25), 1.25);
    }

    #[test]
    fn acceptance_is_counted_by_position_and_from_a_moment_on() {
        let counted = Counted { steps: 1, tokens: 1, drafted: vec![8, 4, 0, 0], accepted: vec![6, 1, 0, 0] };
        assert_eq!(counted.acceptance(), [0.75, 0.25]);
    }
}
