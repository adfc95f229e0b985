//! `motet bench`: tokens per second of this model on this machine, reading prompts and deciding tokens, for one and
//! for many conversations.
//!
//! The engine's wheel is turned here, step by step, so that a measurement begins and ends between two steps. No
//! prompt has the beginning of another, so nothing comes from the prefix cache.

mod drafts;
mod stages;

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use motet_cpu::{CpuDevice, CpuOptions};
use motet_engine::clock::RealClock;
use motet_engine::{Drafts, Driver, Engine, Event, Options, Request, SamplingOptions, Stream, Turn};
use motet_model::{KvFormat, Stages};
use serde::Serialize;

use crate::Outcome;
use crate::model::{self, Model};
use crate::options::{ModelArgs, StageCores};
use crate::output::say;

/// Arguments of `motet bench`.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prompts that are read
    #[arg(long, value_delimiter = ',', default_value = "512", value_parser = clap::value_parser!(u32).range(1..))]
    prefill: Vec<u32>,
    /// Tokens that each conversation decides, the first apart
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    decode: u32,
    /// Tokens of each conversation before it decides one
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Conversations that decide tokens at once
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    conversations: Vec<u32>,
    /// Format of keys and values: f16, f32 or q8_0
    #[arg(long, default_value_t = KvFormat::F16, value_name = "FORMAT")]
    kv: KvFormat,
    /// Each measurement is made so many times; their median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Compare deciding tokens with so many drafts (auto or 1 to 16) and without, pair by pair, and nothing else
    #[arg(long, value_name = "NUMBER")]
    drafts: Option<Drafts>,
    /// Look drafts up in the conversation's own tokens, even if the model has a draft head
    #[arg(long, requires = "drafts")]
    look_up: bool,
    /// Pairs of runs with drafts and without
    #[arg(long, default_value_t = 15, requires = "drafts", value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Temperature of conversations with drafts and without
    #[arg(long, default_value_t = 0.0, requires = "drafts")]
    temperature: f32,
    /// Compare these stages (a number, or each one's layers) at work at the same time, one after the other, and one stage
    /// with all threads, and nothing else
    #[arg(long, value_name = "STAGES", conflicts_with = "drafts")]
    stages: Option<Stages>,
    /// Processors of each stage, a thread to each (0;1)
    #[arg(long, value_name = "CORES", requires = "stages")]
    stage_cores: Option<StageCores>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was measured, as it is printed.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    threads: usize,
    isa: String,
    kv: &'static str,
    context: u32,
    decode_tokens: u32,
    repetitions: u32,
    load_seconds: f64,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
}

/// Reading a prompt, up to its first answered token.
#[derive(Debug, Serialize)]
struct Prefill {
    tokens: u32,
    tokens_per_second: f64,
}

/// Deciding tokens; those of all conversations together.
#[derive(Debug, Serialize)]
struct Decode {
    conversations: u32,
    tokens_per_second: f64,
}

impl Bench {
    pub(crate) fn run(&self) -> Outcome {
        let model = Model::open(self.model.model.as_deref())?;
        let mut options = CpuOptions::from_env()?;
        options.threads = self.model.threads().unwrap_or(options.threads);
        if let Some(drafts) = self.drafts {
            let report = self.compare(&model, options, drafts)?;
            return match self.json {
                true => Ok(say!("{}\n", serde_json::to_string_pretty(&report)?)?),
                false => Ok(say!("{report}")?),
            };
        }
        if let Some(stages) = &self.stages {
            let report = self.pipelined(&model, options, stages, self.stage_cores.as_ref())?;
            return match self.json {
                true => Ok(say!("{}\n", serde_json::to_string_pretty(&report)?)?),
                false => Ok(say!("{report}")?),
            };
        }
        let (threads, isa) = (options.threads, options.isa.to_string());
        let begun = Instant::now();
        let mut wheel = Wheel::new(&model, self.options(), CpuDevice::new(options))?;
        let load_seconds = begun.elapsed().as_secs_f64();
        // Warm-up: pages of memory that were never touched, threads that sleep.
        wheel.prefill(self.prefill.iter().copied().max().unwrap_or(1))?;

        let mut prefill = Vec::new();
        for &tokens in &self.prefill {
            let seconds = self.median(|| wheel.prefill(tokens))?;
            prefill.push(Prefill { tokens, tokens_per_second: f64::from(tokens) / seconds });
        }
        let mut decode = Vec::new();
        for &conversations in &self.conversations {
            let seconds = self.median(|| wheel.decode(conversations, self.context, self.decode))?;
            let tokens = f64::from(conversations) * f64::from(self.decode);
            decode.push(Decode { conversations, tokens_per_second: tokens / seconds });
        }
        let report = Report {
            model: model.name,
            threads,
            isa,
            kv: self.kv.name(),
            context: self.context,
            decode_tokens: self.decode,
            repetitions: self.repetitions,
            load_seconds,
            prefill,
            decode,
        };
        match self.json {
            true => say!("{}\n", serde_json::to_string_pretty(&report)?)?,
            false => say!("{report}")?,
        }
        Ok(())
    }

    /// An engine with room for every measurement, whose batches are as large as they can be.
    fn options(&self) -> Options {
        let rows = Options::default().rows;
        let sessions = self.conversations.iter().map(|&c| c as usize).max().unwrap_or(1);
        // While the last conversations read their prompts, the first decide tokens already: one in each step.
        let context = self.context as usize;
        let steps = (sessions * context).div_ceil(rows - sessions.min(rows / 2)) + sessions;
        let decode = context + steps + self.decode as usize + 1;
        let prefill = self.prefill.iter().map(|&p| p as usize + 1).max().unwrap_or(1);
        Options {
            sessions,
            context: Some(decode.max(prefill)),
            kv: self.kv,
            rows,
            prefill_chunk: Some(rows),
            queue: sessions,
            ..Options::default()
        }
    }

    /// The median of the repetitions.
    fn median(
        &self,
        mut measure: impl FnMut() -> Result<f64, Box<dyn Error>>,
    ) -> Result<f64, Box<dyn Error>> {
        let mut seconds = (0..self.repetitions).map(|_| measure()).collect::<Result<Vec<_>, _>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(median(&seconds))
    }
}

/// The middle of ascending values, or halfway between the two in the middle.
fn median(ascending: &[f64]) -> f64 {
    let n = ascending.len();
    f64::midpoint(ascending[(n - 1) / 2], ascending[n / 2])
}

/// An engine, turned by hand.
struct Wheel {
    engine: Engine,
    driver: Driver,
    /// Tokens that prompts are made of.
    words: Vec<u32>,
    /// State of the pseudo-random numbers.
    random: u64,
}

impl Wheel {
    /// Loads the weights.
    fn new(model: &Model, options: Options, device: CpuDevice) -> Result<Self, Box<dyn Error>> {
        let plan = model::plan(&model.weights.network, &options, &device)?;
        let stages = model.weights.prepare(&device, plan.split(), plan.limits())?;
        let (engine, driver) = Engine::by_hand(plan, Arc::new(RealClock::default()), stages)?;
        let tokenizer = &model.tokenizer;
        let vocab = tokenizer.vocab_len().min(model.weights.network.vocab) as u32;
        let words = (0..vocab).filter(|&t| !tokenizer.is_control(t) && !tokenizer.is_end(t)).collect();
        Ok(Self { engine, driver, words, random: 0 })
    }

    /// Seconds from the request to the first token behind a prompt of so many tokens.
    fn prefill(&mut self, tokens: u32) -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        let mut answer = self.ask(tokens)?;
        while answer.tokens == 0 {
            self.turn()?;
            answer.read()?;
        }
        let took = begun.elapsed().as_secs_f64();
        drop(answer);
        self.rest();
        Ok(took)
    }

    /// Seconds that so many conversations take for `decode` further tokens each, from the moment that all have one.
    fn decode(&mut self, conversations: u32, context: u32, decode: u32) -> Result<f64, Box<dyn Error>> {
        let mut answers = (0..conversations).map(|_| self.ask(context)).collect::<Result<Vec<_>, _>>()?;
        while answers.iter().any(|answer| answer.tokens == 0) {
            self.turn()?;
            answers.iter_mut().try_for_each(Answer::read)?;
        }
        let before: Vec<usize> = answers.iter().map(|answer| answer.tokens).collect();
        let begun = Instant::now();
        for _ in 0..decode {
            self.turn()?;
        }
        let took = begun.elapsed().as_secs_f64();
        answers.iter_mut().try_for_each(Answer::read)?;
        if answers.iter().zip(before).any(|(answer, before)| answer.tokens != before + decode as usize) {
            return Err("the conversations did not decide one token in every step".into());
        }
        drop(answers);
        self.rest();
        Ok(took)
    }

    /// A new conversation with a prompt that was never there before.
    fn ask(&mut self, tokens: u32) -> Result<Answer, Box<dyn Error>> {
        let prompt = (0..tokens).map(|_| self.word()).collect();
        let mut request = Request::new(prompt);
        request.sampling = SamplingOptions::greedy();
        Ok(Answer { stream: self.engine.submit(request)?, tokens: 0 })
    }

    /// The next pseudo-random token: splitmix64 (Steele, Lea and Flood, 2014).
    fn word(&mut self) -> u32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.words[((z ^ (z >> 31)) % self.words.len() as u64) as usize]
    }

    fn turn(&mut self) -> Outcome {
        match self.driver.turn() {
            Turn::Ran => Ok(()),
            Turn::Idle | Turn::Closed => {
                Err("the engine has nothing to run in the middle of a measurement".into())
            }
        }
    }

    /// Turns until nothing runs: conversations whose reader has left end.
    fn rest(&mut self) {
        while self.driver.turn() == Turn::Ran {}
    }
}

/// The tokens of one conversation, counted.
struct Answer {
    stream: Stream,
    tokens: usize,
}

impl Answer {
    /// Counts what has come.
    fn read(&mut self) -> Outcome {
        while let Some(event) = self.stream.try_next() {
            match event {
                Event::Token { .. } => self.tokens += 1,
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { model, threads, isa, kv, load_seconds, context, .. } = self;
        writeln!(f, "{model}: {threads} threads, {isa}, kv {kv}, loaded in {load_seconds:.2} s")?;
        writeln!(f, "\n{:>24}  {:>10}", "prompt tokens", "tokens/s")?;
        for line in &self.prefill {
            writeln!(f, "{:>24}  {:>10.1}", line.tokens, line.tokens_per_second)?;
        }
        writeln!(f, "\n{:>24}  {:>10}  (behind {context} tokens each)", "conversations", "tokens/s")?;
        for line in &self.decode {
            writeln!(f, "{:>24}  {:>10.1}", line.conversations, line.tokens_per_second)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[1.0, 4.0]), 2.5);
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
    }
}
