//! `motet bench --stages`: what a pipeline brings on this machine. Three engines run the same conversations in turn: the
//! stages at work at the same time, the same stages one after the other on all rows at once, and one stage with all
//! threads. The ratios of each round count, so that what the machine does meanwhile meets all three.

use std::error::Error;
use std::fmt;
use std::time::{Duration, Instant};

use motet_cpu::{CpuDevice, CpuOptions};
use motet_engine::{Options, Turn};
use motet_model::Stages;
use serde::Serialize;

use super::{Answer, Bench, Wheel, median};
use crate::model::Model;
use crate::options::StageCores;

/// What was measured, as it is printed.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    model: String,
    threads: usize,
    isa: String,
    /// Each stage's layers.
    stages: Vec<String>,
    context: u32,
    decode_tokens: u32,
    rounds: u32,
    decode: Vec<Line>,
    prefill: Vec<Line>,
}

/// So many conversations that decide tokens, or one prompt of so many tokens; tokens by second, medians.
#[derive(Debug, Serialize)]
struct Line {
    of: u32,
    at_once: f64,
    in_turn: f64,
    one_stage: f64,
    /// The stages at once by the others, medians of the rounds' ratios.
    to_in_turn: f64,
    to_one_stage: f64,
    /// What the measured times of the stages allow at most, if it is known.
    bound: Option<f64>,
    /// The share of the time that each stage worked; the rest are bubbles.
    busy: Vec<f64>,
}

impl Bench {
    /// Measures with these stages.
    pub(super) fn pipelined(
        &self,
        model: &Model,
        options: CpuOptions,
        stages: &Stages,
        cores: Option<&StageCores>,
    ) -> Result<Report, Box<dyn Error>> {
        let (threads, isa) = (options.threads, options.isa.to_string());
        let device = |pinned: bool| match cores {
            Some(StageCores(cores)) if pinned => CpuDevice::new(options.clone()).pinned(cores.clone()),
            _ => CpuDevice::new(options.clone()),
        };
        let sized =
            |in_turn| Options { stages: stages.clone(), in_turn, prefill_chunk: None, ..self.options() };
        let mut at_once = Wheel::new(model, sized(false), device(true))?;
        let mut in_turn = Wheel::new(model, sized(true), device(true))?;
        let mut one_stage =
            Wheel::new(model, Options { prefill_chunk: None, ..self.options() }, device(false))?;
        let layers = at_once.engine.plan().stages.iter().map(|stage| stage.layers.clone()).collect();

        let mut decode = Vec::new();
        for &conversations in &self.conversations {
            let flow = |wheel: &mut Wheel| wheel.flow(conversations, self.context, self.decode);
            let mut line = self.line(conversations, [&mut at_once, &mut in_turn, &mut one_stage], flow)?;
            // The table t(rows) of the stages, measured one at a time; what they showed beside others counts as well.
            for rows in (0..).map(|power| 1 << power).take_while(|&rows| rows < conversations) {
                in_turn.flow(rows, self.context, self.decode.min(16))?;
            }
            line.bound = bound(conversations, |rows| {
                let (one, other) = (at_once.driver.stage_times(rows)?, in_turn.driver.stage_times(rows)?);
                Some(one.into_iter().zip(other).map(|(a, b)| a.min(b)).collect())
            });
            decode.push(line);
        }
        let mut prefill = Vec::new();
        for &tokens in &self.prefill {
            let read = |wheel: &mut Wheel| Ok(f64::from(tokens) / wheel.prefill(tokens)?);
            prefill.push(self.line(tokens, [&mut at_once, &mut in_turn, &mut one_stage], read)?);
        }
        let (model, rounds) = (model.name.clone(), self.repetitions);
        let (context, decode_tokens) = (self.context, self.decode);
        Ok(Report { model, threads, isa, stages: layers, context, decode_tokens, rounds, decode, prefill })
    }

    /// Rounds of the same measurement (tokens by second) on all three; the first warms up.
    fn line(
        &self,
        of: u32,
        mut wheels: [&mut Wheel; 3],
        mut measure: impl FnMut(&mut Wheel) -> Result<f64, Box<dyn Error>>,
    ) -> Result<Line, Box<dyn Error>> {
        let mut rates: [Vec<f64>; 3] = Default::default();
        let (mut to_in_turn, mut to_one_stage) = (Vec::new(), Vec::new());
        let (mut worked, mut passed) = (Vec::new(), Duration::ZERO);
        for round in 0..=self.repetitions {
            let mut rate = [0.0; 3];
            for (which, wheel) in wheels.iter_mut().enumerate() {
                let (before, begun) = (wheel.engine.metrics().stage_busy, Instant::now());
                rate[which] = measure(wheel)?;
                if which == 0 && round > 0 {
                    passed += begun.elapsed();
                    let after = wheel.engine.metrics().stage_busy;
                    worked.resize(after.len(), Duration::ZERO);
                    let stages = worked.iter_mut().zip(after.iter().zip(&before));
                    stages.for_each(|(worked, (after, before))| *worked += *after - *before);
                }
            }
            if round > 0 {
                rates.iter_mut().zip(rate).for_each(|(rates, rate)| rates.push(rate));
                to_in_turn.push(rate[0] / rate[1]);
                to_one_stage.push(rate[0] / rate[2]);
            }
        }
        let middle = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            median(values)
        };
        let [at_once, in_turn, one_stage] = rates.each_mut().map(middle);
        Ok(Line {
            of,
            at_once,
            in_turn,
            one_stage,
            to_in_turn: middle(&mut to_in_turn),
            to_one_stage: middle(&mut to_one_stage),
            bound: None,
            busy: worked.iter().map(|worked| worked.as_secs_f64() / passed.as_secs_f64()).collect(),
        })
    }
}

/// The tokens by second that stages with these times (by rows) could decide at most for so many conversations: each
/// has its next token after the least, over the number g of batches, of the greater of g · max t(n/g), for the dearest
/// stage runs all of them, and Σ t(n/g), for a batch passes all stages before its next one.
fn bound(conversations: u32, times: impl Fn(usize) -> Option<Vec<Duration>>) -> Option<f64> {
    let round = |batches: u32| {
        let times = times(conversations.div_ceil(batches) as usize)?;
        let dearest = times.iter().max().copied()?;
        Some((dearest * batches).max(times.iter().sum()))
    };
    let least = (1..=conversations).filter_map(round).min()?;
    Some(f64::from(conversations) / least.as_secs_f64())
}

impl Wheel {
    /// Tokens by second of so many conversations behind prompts of `context` tokens, while all of them decide `decode`
    /// tokens.
    fn flow(&mut self, conversations: u32, context: u32, decode: u32) -> Result<f64, Box<dyn Error>> {
        let mut answers = (0..conversations).map(|_| self.ask(context)).collect::<Result<Vec<_>, _>>()?;
        while answers.iter().any(|answer| answer.tokens == 0) {
            self.step(&mut answers)?;
        }
        let total = |answers: &[Answer]| answers.iter().map(|answer| answer.tokens).sum::<usize>();
        let (before, begun) = (total(&answers), Instant::now());
        let wanted = before + (conversations * decode) as usize;
        while total(&answers) < wanted {
            self.step(&mut answers)?;
        }
        let rate = (total(&answers) - before) as f64 / begun.elapsed().as_secs_f64();
        drop(answers);
        self.rest();
        Ok(rate)
    }

    fn step(&mut self, answers: &mut [Answer]) -> Result<(), Box<dyn Error>> {
        if self.driver.turn() != Turn::Ran {
            return Err("the engine has nothing to run in the middle of a measurement".into());
        }
        answers.iter_mut().try_for_each(Answer::read)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, threads, isa, stages, context, decode_tokens, rounds, decode, prefill } = self;
        let layers = stages.join(" and ");
        writeln!(f, "{model}: {threads} threads, {isa}, {} stages of layers {layers}", stages.len())?;
        writeln!(f, "{rounds} rounds; tokens/s of the stages at once, of the same in turn, of one stage\n")?;
        let lines = |f: &mut fmt::Formatter<'_>, head: &str, lines: &[Line]| {
            writeln!(
                f,
                "{head:>24}  {:>8}  {:>8}  {:>9}  {:>10}  {:>12}  {:>9}  stages at work",
                "at once", "in turn", "one stage", "to in turn", "to one stage", "of bound"
            )?;
            for line in lines {
                let bound = line.bound.map_or(String::new(), |bound| format!("{:.2}", line.at_once / bound));
                let busy: Vec<String> = line.busy.iter().map(|share| format!("{share:.2}")).collect();
                writeln!(
                    f,
                    "{:>24}  {:>8.1}  {:>8.1}  {:>9.1}  {:>10.2}  {:>12.2}  {bound:>9}  {}",
                    line.of,
                    line.at_once,
                    line.in_turn,
                    line.one_stage,
                    line.to_in_turn,
                    line.to_one_stage,
                    busy.join(" ")
                )?;
            }
            Ok(())
        };
        lines(f, "conversations", decode)?;
        writeln!(f, "  ({decode_tokens} tokens each, behind {context})\n")?;
        lines(f, "prompt tokens", prefill)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_takes_the_number_of_batches_that_is_fastest() {
        // Two stages, 2 ms and 1 ms a row each: four conversations in two batches pass in 2 · (2 + 2) ms.
        let even = |rows: usize| Some(vec![Duration::from_millis(2 + rows as u64); 2]);
        assert_eq!(bound(4, even), Some(4.0 / 0.008));
        // The second stage is free: one batch, in the first stage's time.
        let uneven = |rows: usize| Some(vec![Duration::from_millis(2 + rows as u64), Duration::ZERO]);
        assert_eq!(bound(4, uneven), Some(4.0 / 0.006));
        assert_eq!(bound(4, |_| None), None);
    }
}
