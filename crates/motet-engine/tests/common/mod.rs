//! An engine over the scripted device, turned by hand, with simulated time; and what each request must answer.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // each test file uses its part

use motet_engine::clock::{Clock, SimClock};
use motet_engine::scripted::{Control, Pace, Script, Scripted, Sketch, Solo};
use motet_engine::{
    Advance, Broken, Constraint, Driver, Engine, Event, FinishReason, Machine, Options, Plan, Request,
    SamplingOptions, Stream, Turn,
};
use motet_model::Stages;
use motet_model::batch::{Sampling, Seen};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub const END: u32 = 0;

/// Every kind of session state a network can have.
pub const SKETCHES: [Sketch; 6] = [
    sketch(true, None, false),
    sketch(true, Some(100), false),
    sketch(true, None, true),
    sketch(true, Some(64), true),
    sketch(false, Some(130), false),
    sketch(false, None, true),
];

pub const fn sketch(full: bool, window: Option<u32>, recurrent: bool) -> Sketch {
    Sketch { vocab: 1000, context: 8192, full, window, recurrent, head: false }
}

/// A small generator with a seed (SplitMix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In `from..to`.
    pub fn range(&mut self, from: usize, to: usize) -> usize {
        from + (self.next() % (to - from) as u64) as usize
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.next().is_multiple_of(one_in)
    }

    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        self.tokens_of(1000, count)
    }

    /// Of a vocabulary, but no end token.
    pub fn tokens_of(&mut self, vocab: usize, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.range(1, vocab) as u32).collect()
    }
}

/// An engine, what it runs on, and its clock.
pub struct Rig {
    pub engine: Engine,
    pub driver: Driver,
    pub clock: Arc<SimClock>,
    pub control: Arc<Control>,
    pub sketch: Sketch,
    pub script: Script,
}

/// 10 ms a step and 0.5 ms a row.
pub fn step_time(rows: usize) -> Duration {
    Duration::from_micros(10_000 + 500 * rows as u64)
}

pub fn random(mean: u32) -> Script {
    Script::Random { end: Some(END), mean }
}

impl Rig {
    pub fn new(sketch: Sketch, script: Script, options: &Options) -> Self {
        Self::with_head(sketch, script, options, |_, _, random| random % 10 < 7)
    }

    /// With a draft head, if the sketch has one, that is right when `agree` says so.
    pub fn with_head(
        sketch: Sketch,
        script: Script,
        options: &Options,
        agree: impl Fn(&Sampling, usize, u64) -> bool + Send + Sync + 'static,
    ) -> Self {
        let clock = Arc::new(SimClock::default());
        let several = options.stages != Stages::default();
        let pace = match several {
            true => Pace::None,
            false => Pace::Simulated(clock.clone(), Arc::new(step_time)),
        };
        let draft_pass = Arc::new(|_| Duration::from_millis(2));
        let device = Scripted { pace, agree: Arc::new(agree), draft_pass, ..Scripted::new(script.clone()) };
        let network = sketch.network();
        let plan = Plan::new(&network, options, Machine { memory: None }, &device).unwrap();
        let stages = device.stages(&network, plan.limits(), plan.split().stages());
        let (engine, driver) = match several {
            true => Engine::simulated(plan, clock.clone(), stages, Arc::new(|_, rows| step_time(rows))),
            false => Engine::by_hand(plan, clock.clone() as Arc<dyn Clock>, stages),
        }
        .unwrap();
        Self { engine, driver, clock, control: device.control, sketch, script }
    }

    /// Turns the wheel until there is nothing to do.
    pub fn run(&mut self) {
        while self.driver.turn() == Turn::Ran {}
    }

    /// Turns it so many times.
    pub fn turns(&mut self, count: u64) {
        (0..count).for_each(|_| assert_eq!(self.driver.turn(), Turn::Ran));
    }

    /// What each choice of this request must answer.
    pub fn expected(&self, request: &Request) -> Vec<Answer> {
        let context = self.engine.limits().context;
        let one = |choice| expected(self.sketch, &self.script, context, request, choice);
        (0..request.choices).map(one).collect()
    }

    /// Submits, runs everything, and returns the answers.
    pub fn answers(&mut self, request: Request) -> Vec<Answer> {
        let mut stream = self.engine.submit(request).unwrap();
        self.run();
        answers(&mut stream)
    }
}

/// One choice, computed from its tokens alone.
pub fn expected(sketch: Sketch, script: &Script, context: usize, request: &Request, choice: u32) -> Answer {
    let mut out = Answer::default();
    let mut solo = Solo::new(sketch, script.clone());
    for (i, &token) in request.prompt.iter().enumerate() {
        if i > 0 && choice == 0 && request.prompt_logprobs.is_some() {
            out.scores.push((token, solo.logprob(token)));
        }
        solo.push(token);
    }
    let o = &request.sampling;
    let sampling = Sampling {
        seed: o.seed.expect("tests give a seed"),
        choice,
        temperature: o.temperature,
        top_k: o.top_k,
        top_p: o.top_p,
        min_p: o.min_p,
        repetition_penalty: o.repetition_penalty,
        frequency_penalty: o.frequency_penalty,
        presence_penalty: o.presence_penalty,
        seen: 0..0,
        bias: 0..0,
        allowed: 0..0,
    };
    let penalties = o.repetition_penalty != 1.0 || o.frequency_penalty != 0.0 || o.presence_penalty != 0.0;
    let mut seen: BTreeMap<u32, u32> = request.prompt.iter().map(|&t| (t, 0)).collect();
    let mut cut = request.cut.as_ref().map(|make| make());
    let mut form = request.constraint.as_ref().map(|make| make());
    let most = request.answer_limit(context);
    while out.tokens.len() < most {
        let list: Vec<Seen> = match penalties {
            true => seen.iter().map(|(&token, &generated)| Seen { token, generated }).collect(),
            false => Vec::new(),
        };
        let mut allowed = vec![0; if form.is_some() { sketch.vocab.div_ceil(64) } else { 0 }];
        if let Some(form) = &mut form {
            form.mask(&mut allowed).expect("it never breaks");
        }
        let token = solo.next_allowed(&sampling, &list, &o.logit_bias, &allowed);
        out.generated += 1;
        if request.end_tokens.contains(&token) {
            out.reason = Some(FinishReason::EndToken(token));
            return out;
        }
        out.tokens.push(token);
        if request.logprobs.is_some() {
            out.logprobs.push(solo.logprob(token));
        }
        *seen.entry(token).or_default() += 1;
        solo.push(token);
        let ends = form.as_mut().is_some_and(|form| match form.advance(token) {
            Advance::GoesOn => false,
            Advance::Ends => true,
            Advance::Refused => panic!("{token} was not allowed"),
        });
        if cut.as_mut().is_some_and(|c| c.push(token)) {
            out.reason = Some(FinishReason::Cut);
            return out;
        }
        if ends {
            out.reason = Some(FinishReason::Cut);
            return out;
        }
    }
    out.reason = Some(FinishReason::Length);
    out
}

/// A form of answers: no token is one of the last two or the end, and after `length` tokens the answer is complete.
pub struct NoEcho {
    pub said: Vec<u32>,
    pub length: usize,
    pub vocab: usize,
}

impl Constraint for NoEcho {
    fn mask(&mut self, allowed: &mut [u64]) -> Result<(), Broken> {
        let last = &self.said[self.said.len().saturating_sub(2)..];
        for token in (1..self.vocab as u32).filter(|token| !last.contains(token)) {
            allowed[token as usize / 64] |= 1 << (token % 64);
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Advance {
        let last = &self.said[self.said.len().saturating_sub(2)..];
        if token == END || last.contains(&token) {
            return Advance::Refused;
        }
        self.said.push(token);
        if self.said.len() == self.length { Advance::Ends } else { Advance::GoesOn }
    }

    fn roll_back(&mut self, tokens: usize) {
        self.said.truncate(self.said.len() - tokens);
    }
}

/// A stream that has ended says what it must, however it was cached.
pub fn assert_same(said: &Answer, expected: &Answer, what: &str) {
    assert_eq!(Answer { cached: None, drafted: (0, 0), ..said.clone() }, *expected, "{what}");
}

/// What a stream said of one choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    /// Log-probabilities of `tokens`, if they were asked for.
    pub logprobs: Vec<f32>,
    /// The prompt's own tokens with theirs, if they were asked for.
    pub scores: Vec<(u32, f32)>,
    /// Position and digest of the rows that were run, if digests were asked for.
    pub rows: Vec<(usize, u64)>,
    pub cached: Option<usize>,
    pub reason: Option<FinishReason>,
    pub generated: usize,
    /// Drafts, and those that were chosen.
    pub drafted: (usize, usize),
    pub error: Option<String>,
}

/// All that has arrived, by choice.
pub fn answers(stream: &mut Stream) -> Vec<Answer> {
    let mut out = Vec::<Answer>::new();
    while let Some(event) = stream.try_next() {
        add(&mut out, event);
    }
    out
}

pub fn add(out: &mut Vec<Answer>, event: Event) {
    let choice = match event {
        Event::Started { choice, .. }
        | Event::Row { choice, .. }
        | Event::Token { choice, .. }
        | Event::Finished { choice, .. } => choice,
        Event::Prompt(_) | Event::Failed(_) => 0,
    } as usize;
    if out.len() <= choice {
        out.resize(choice + 1, Answer::default());
    }
    let answer = &mut out[choice];
    match event {
        Event::Started { cached_tokens, .. } => answer.cached = Some(cached_tokens),
        Event::Row { position, digest, .. } => answer.rows.push((position, digest)),
        Event::Prompt(scored) => answer.scores.push((scored.token, scored.logprob.unwrap())),
        Event::Token { scored, .. } => {
            answer.tokens.push(scored.token);
            answer.logprobs.extend(scored.logprob);
        }
        Event::Finished { reason, usage, .. } => {
            answer.reason = Some(reason);
            answer.generated = usage.generated;
            answer.drafted = (usage.drafted, usage.accepted);
        }
        Event::Failed(error) => answer.error = Some(error.to_string()),
    }
}

/// A request with a seed, sampled, that ends by itself.
pub fn request(prompt: Vec<u32>, seed: u64) -> Request {
    Request {
        sampling: SamplingOptions { seed: Some(seed), ..SamplingOptions::default() },
        end_tokens: vec![END],
        ..Request::new(prompt)
    }
}

/// Options for small pools.
pub fn options(sessions: usize, context: usize) -> Options {
    Options { sessions, context: Some(context), ..Options::default() }
}
