//! The whole engine over the CPU: with drafts, from the network's own head or looked up, every token and every row of
//! logits are those of the run without, for conversations of all kinds beside each other and in too little memory.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_engine::clock::RealClock;

use motet_engine::{
    Advance, Broken, Constraint, Drafts, Engine, Event, Machine, MetricsSnapshot, Options, Plan, Request,
    SamplingOptions, Turn,
};
use motet_gguf::{Format, ModelFile};
use motet_model::{Device, Network};

const CONTEXT: usize = 256;

/// An answer: its tokens, and by position the digest of the logits that they were chosen from.
#[derive(Debug, Default, PartialEq)]
struct Transcript {
    tokens: Vec<u32>,
    rows: BTreeMap<usize, u64>,
}

/// Tokens of the shortest prompt; each next one has three more.
const PROMPT: u32 = 70;

/// Conversations of different lengths and ways to choose; the second and the third begin as the first does.
fn requests(vocab: u32) -> Vec<Request> {
    let plain = SamplingOptions::default;
    let ways = [
        SamplingOptions { temperature: 0.0, ..plain() },
        SamplingOptions { temperature: 1.0, ..plain() },
        SamplingOptions { top_k: 20, top_p: 0.9, repetition_penalty: 1.3, ..plain() },
        SamplingOptions { temperature: 0.7, min_p: 0.05, frequency_penalty: 0.9, ..plain() },
        SamplingOptions { temperature: 1.0, presence_penalty: 0.7, logit_bias: vec![(3, 3.0)], ..plain() },
    ];
    let request = |(number, way): (u32, SamplingOptions)| {
        let same = if number < 3 { 66 } else { 0 };
        let token = |i: u32| (i * i * 7 + i * 31 + if i < same { 0 } else { number * 101 }) % vocab;
        Request {
            sampling: SamplingOptions { seed: Some(number.into()), ..way },
            max_tokens: Some(60 + 13 * number as usize),
            digests: true,
            ..Request::new((0..PROMPT + 3 * number).map(token).collect())
        }
    };
    (0..).zip(ways).map(request).collect()
}

/// A number: some digits, then one of its ends.
#[derive(Default)]
struct Number {
    digits: usize,
    ended: bool,
}

impl Number {
    const DIGITS: std::ops::Range<u32> = 20..30;
    const ENDS: std::ops::Range<u32> = 30..40;
    /// From so many digits on it may end, and with so many it must.
    const SHORTEST: usize = 20;
    const LONGEST: usize = 90;

    fn may(&self, token: u32) -> bool {
        match Self::ENDS.contains(&token) {
            true => self.digits >= Self::SHORTEST && !self.ended,
            false => Self::DIGITS.contains(&token) && self.digits < Self::LONGEST && !self.ended,
        }
    }
}

impl Constraint for Number {
    fn mask(&mut self, allowed: &mut [u64]) -> Result<(), Broken> {
        for token in (0..Self::ENDS.end).filter(|&token| self.may(token)) {
            allowed[token as usize / 64] |= 1 << (token % 64);
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Advance {
        if !self.may(token) {
            return Advance::Refused;
        }
        self.ended = Self::ENDS.contains(&token);
        self.digits += usize::from(!self.ended);
        if self.ended { Advance::Ends } else { Advance::GoesOn }
    }

    fn roll_back(&mut self, tokens: usize) {
        let digits = tokens - usize::from(self.ended && tokens > 0);
        self.ended &= tokens == 0;
        self.digits -= digits;
    }
}

/// The same conversations; all but the first two answer with a number.
fn numbers(vocab: u32) -> Vec<Request> {
    let mut requests = requests(vocab);
    for request in &mut requests[2..] {
        request.constraint = Some(Box::new(|| Box::new(Number::default())));
        request.max_tokens = Some(150);
    }
    requests
}

/// All conversations to their ends, in as little memory as will do.
fn run(
    file: &ModelFile,
    requests: fn(u32) -> Vec<Request>,
    drafts: Drafts,
    look_up: bool,
) -> (Vec<Transcript>, MetricsSnapshot) {
    let network = Network::from_gguf(file).unwrap();
    let device = CpuDevice::new(CpuOptions { threads: 2, isa: Isa::best() });
    let mut options = Options {
        sessions: 4,
        context: Some(CONTEXT),
        headroom: 0,
        prefill_chunk: Some(48),
        poison: true,
        drafts,
        look_up,
        ..Options::default()
    };
    let plan = |options: &Options| Plan::new(&network, options, Machine { memory: None }, &device).unwrap();
    options.memory = Some(plan(&options).smallest_memory);
    let plan = plan(&options);
    let stages = device.prepare(&network, file, plan.split(), plan.limits()).unwrap();
    let (engine, mut driver) = Engine::by_hand(plan, Arc::new(RealClock::default()), stages).unwrap();
    let requests = requests(network.vocab as u32);
    let mut streams: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut transcripts: Vec<Transcript> = streams.iter().map(|_| Transcript::default()).collect();
    let mut going = true;
    while going {
        going = driver.turn() == Turn::Ran;
        for (number, (stream, transcript)) in streams.iter_mut().zip(&mut transcripts).enumerate() {
            // Which rows of a prompt are run depends on what the cache holds.
            let prompt = PROMPT as usize + 3 * number;
            while let Some(event) = stream.try_next() {
                match event {
                    Event::Token { scored, .. } => transcript.tokens.push(scored.token),
                    Event::Row { position, digest, .. } if position >= prompt - 1 => {
                        let before = transcript.rows.insert(position, digest);
                        assert!(before.is_none_or(|before| before == digest), "position {position} changed");
                    }
                    Event::Failed(error) => panic!("{error}"),
                    _ => {}
                }
            }
        }
    }
    (transcripts, engine.metrics())
}

/// The built-in model and one of each kind of network.
fn models() -> Vec<(&'static str, ModelFile)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let built_in = ModelFile::open(&root.join("assets/motet-demo.gguf")).unwrap();
    let mut models = vec![("the built-in model", built_in)];
    for name in ["llama", "gemma3", "qwen35", "qwen35moe", "glm4moe"] {
        let file = ModelFile::open(&root.join(format!("tests/fixtures/tiny/tiny-{name}-f32.gguf"))).unwrap();
        models.push((name, ModelFile::from_vec(motet_gguf::twin(&file, Format::Q8_0).unwrap()).unwrap()));
    }
    models
}

#[test]
fn drafts_change_no_token_and_no_logit() {
    for (name, file) in models() {
        let (want, _) = run(&file, requests, Drafts::Off, false);
        assert!(want.iter().all(|t| t.tokens.len() >= 60), "{name}: conversations end early");
        for (drafts, look_up) in [(1, false), (3, false), (5, false), (4, true)] {
            let (got, metrics) = run(&file, requests, Drafts::Exactly(drafts), look_up);
            for (number, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{name}, conversation {number}: {drafts} drafts, looked up: {look_up}");
                assert_eq!(got.tokens, want.tokens, "{what}");
                assert_eq!(got.rows, want.rows, "{what}");
            }
            assert!(metrics.num_preemptions > 0, "{name}: nobody stepped back");
            assert!(metrics.num_draft_tokens > 0, "{name}: nothing was drafted");
        }
    }
}

/// Numbers and free answers beside each other: what a number may not hold is never chosen, whatever was drafted, and
/// nothing is left of drafts behind its end.
#[test]
fn answers_keep_to_their_form_with_drafts_as_without() {
    for (name, file) in models() {
        let (want, _) = run(&file, numbers, Drafts::Off, false);
        let mut ended_early = 0;
        for (number, answer) in want[2..].iter().enumerate() {
            let (end, digits) = answer.tokens.split_last().unwrap();
            let what = format!("{name}, number {number}: {:?}", answer.tokens);
            assert!(
                Number::ENDS.contains(end) && digits.iter().all(|d| Number::DIGITS.contains(d)),
                "{what}"
            );
            assert!((Number::SHORTEST..=Number::LONGEST).contains(&digits.len()), "{what}");
            ended_early += usize::from(digits.len() < Number::LONGEST);
        }
        assert!(ended_early > 0, "{name}: no number ended before it had to");
        for (drafts, look_up) in [(2, false), (5, false), (4, true)] {
            let (got, metrics) = run(&file, numbers, Drafts::Exactly(drafts), look_up);
            let what = format!("{name}: {drafts} drafts, looked up: {look_up}");
            assert!(got == want, "{what}");
            let (drafted, accepted) = (metrics.num_draft_tokens, metrics.num_accepted_tokens);
            assert!(0 < accepted && accepted < drafted, "{what}: {accepted} of {drafted} came true");
        }
    }
}
