//! Storms: thousands of seeded interleavings of requests that arrive, leave, overflow queue and pool, step back,
//! share prefixes, fork and fail, with drafts and without. Every stream says what its conversation alone would have said, and afterwards
//! nothing is held.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::Sketch;
use motet_engine::{
    Constraint, Cut, Drafts, DraftsError, Machine, MetricsSnapshot, Options, Plan, Request, SamplingOptions,
    Stream, SubmitError, Turn,
};
use motet_model::Stages;

/// Ends an answer when the sum of its tokens is divisible by 37.
#[derive(Default)]
struct ThirtySeven(u32);

impl Cut for ThirtySeven {
    fn push(&mut self, token: u32) -> bool {
        self.0 += token;
        self.0.is_multiple_of(37)
    }
}

/// A client: its request's answer as it must be, and as it has come so far.
struct Client {
    stream: Option<Stream>,
    request: Request,
    expected: Vec<Answer>,
    said: Vec<Answer>,
}

/// What a storm does besides arriving and leaving.
#[derive(Clone, Copy, PartialEq)]
enum Weather {
    Fair,
    /// Steps panic and rows are not finite.
    Failing,
}

fn storm_options(rng: &mut Rng, sketch: Sketch, drafts: Drafts) -> Options {
    let sessions = rng.range(1, 9);
    let mut options = Options {
        queue: rng.range(3, 12),
        rows: rng.range(8, 300),
        prefill_chunk: rng.chance(4).then(|| rng.range(1, 8)),
        checkpoint_memory: rng.chance(2).then(|| rng.range(0, 12) as u64 * 8),
        poison: rng.chance(2),
        headroom: rng.range(0, 60),
        stages: Stages::Balanced([1, 1, 2, 3, 5][rng.range(0, 5)]),
        drafts,
        ..options(sessions, rng.range(130, 700))
    };
    // Often a pool of little more than one context for all sessions.
    let device = motet_engine::scripted::Scripted::new(random(50));
    let plan = Plan::new(&sketch.network(), &options, Machine { memory: None }, &device).unwrap();
    if !rng.chance(3) {
        options.memory = Some(plan.smallest_memory + rng.range(0, 8_000) as u64);
    }
    options
}

fn random_request(rng: &mut Rng, vocab: usize, context: usize, clients: &[Client]) -> Request {
    let mut prompt = match clients.is_empty() || rng.chance(2) {
        // One of three texts that conversations begin with.
        true => Rng(rng.next() % 3).tokens_of(vocab, context),
        // The next turn of an earlier one.
        false => {
            let earlier = &clients[rng.range(0, clients.len())];
            let answer = earlier.expected[0].tokens.iter();
            let mut prompt: Vec<u32> = earlier.request.prompt.iter().chain(answer).copied().collect();
            prompt.extend(rng.tokens_of(vocab, 10));
            prompt
        }
    };
    prompt.truncate(rng.range(1, context));
    if rng.chance(2) {
        let own = rng.range(0, 40).min(context - 1 - prompt.len());
        prompt.extend(rng.tokens_of(vocab, own));
    }
    let mut sampling = SamplingOptions { seed: Some(rng.next()), ..SamplingOptions::default() };
    if rng.chance(4) {
        sampling.temperature = 0.0;
    }
    if rng.chance(3) {
        sampling.repetition_penalty = 1.1;
    }
    if rng.chance(6) {
        sampling.logit_bias = vec![(2, 1.5), (rng.range(0, vocab) as u32, -2.0)];
    }
    let mut marks: Vec<usize> = (0..rng.range(0, 3)).map(|_| rng.range(0, prompt.len())).collect();
    marks.sort_unstable();
    let max_tokens = match rng.range(0, 5) {
        0 => None,
        1 => Some(rng.range(0, 3)),
        _ => Some(rng.range(1, 300)),
    };
    Request {
        marks,
        sampling,
        choices: if rng.chance(6) { rng.range(2, 4) as u32 } else { 1 },
        max_tokens,
        end_tokens: vec![END],
        cut: rng.chance(4).then(|| Box::new(|| Box::new(ThirtySeven::default()) as Box<dyn Cut>) as _),
        constraint: rng.chance(4).then(|| {
            let length = rng.range(1, 200);
            Box::new(move || Box::new(NoEcho { said: Vec::new(), length, vocab }) as Box<dyn Constraint>) as _
        }),
        logprobs: rng.chance(4).then(|| rng.range(0, 4) as u8),
        prompt_logprobs: rng.chance(8).then_some(1),
        ..Request::new(prompt)
    }
}

/// What has come so far is the beginning of what must come.
fn assert_begins(said: &Answer, expected: &Answer, what: &str) {
    assert!(expected.tokens.starts_with(&said.tokens), "{what}");
    assert!(expected.scores.starts_with(&said.scores), "{what}");
}

fn storm(mut sketch: Sketch, seed: u64, weather: Weather) -> MetricsSnapshot {
    let rng = &mut Rng(seed);
    let drafts = match rng.range(0, 4) {
        0 | 1 => Drafts::Off,
        2 => Drafts::Exactly(rng.range(1, 17)),
        _ => Drafts::Auto,
    };
    if drafts != Drafts::Off && !sketch.head || rng.chance(4) {
        // Few tokens: what is looked up is often right.
        sketch.vocab = rng.range(4, 7);
    }
    let what = format!("{sketch:?}, storm {seed}");
    let options = storm_options(rng, sketch, drafts);
    let context = options.context.unwrap();
    let mut rig = Rig::new(sketch, random(rng.range(20, 300) as u32), &options);
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..rng.range(10, 40) {
        match rng.range(0, 10) {
            0..5 => {
                let request = random_request(rng, sketch.vocab, context, &clients);
                let expected = rig.expected(&request);
                // The engine takes the request; the client keeps its prompt.
                let kept = Request::new(request.prompt.clone());
                match rig.engine.submit(request) {
                    Ok(stream) => {
                        let said = vec![Answer::default(); expected.len()];
                        clients.push(Client { stream: Some(stream), request: kept, expected, said });
                    }
                    Err(SubmitError::QueueFull { waiting, .. }) => assert!(waiting > 0, "{what}"),
                    Err(error) => panic!("{what}: {error}"),
                }
            }
            5 if !clients.is_empty() => {
                let leaves = rng.range(0, clients.len());
                clients[leaves].stream = None;
            }
            6 if rng.chance(4) => {
                // Another number of drafts, or none; of a head if it is there.
                let drafts = match rng.range(0, 4) {
                    0 => Drafts::Off,
                    1 => Drafts::Auto,
                    _ => Drafts::Exactly(rng.range(1, 17)),
                };
                rig.control.refuse_growth(rng.chance(3));
                match rig.driver.set_drafts(drafts, rng.chance(2)) {
                    Ok(()) => {}
                    Err(DraftsError::Memory { needed, missing, .. }) => {
                        assert!(0 < missing && missing <= needed)
                    }
                    Err(DraftsError::HeadNotLoaded) => assert!(sketch.head, "{what}"),
                    Err(DraftsError::Device(_)) => {}
                    Err(error) => panic!("{what}: {error}"),
                }
            }
            6 if weather == Weather::Failing => match rng.range(0, 3) {
                0 => rig.control.panic_next(),
                1 => rig.control.fault_next(rng.range(0, 3) as u32, rng.range(0, 6) as u32),
                _ => rig.control.fail_commit_next(),
            },
            _ => {
                for _ in 0..rng.range(1, 150) {
                    rig.driver.turn();
                }
            }
        }
        for client in &mut clients {
            while let Some(event) = client.stream.as_mut().and_then(Stream::try_next) {
                add(&mut client.said, event);
            }
        }
    }
    let mut turns = 0;
    while rig.driver.turn() == Turn::Ran {
        turns += 1;
        assert!(turns < 1_000_000, "{what}: no end");
    }
    for (i, client) in clients.iter_mut().enumerate() {
        let what = format!("{what}, client {i}");
        while let Some(event) = client.stream.as_mut().and_then(Stream::try_next) {
            add(&mut client.said, event);
        }
        let failed = client.said.iter().any(|a| a.error.is_some());
        assert!(!failed || weather == Weather::Failing, "{what}: {:?}", client.said);
        for (said, expected) in client.said.iter().zip(&client.expected) {
            match client.stream.is_some() && !failed {
                true => assert_same(said, expected, &what),
                false => assert_begins(said, expected, &what),
            }
        }
        assert!(client.stream.as_ref().is_none_or(Stream::is_over), "{what}");
    }
    assert!(rig.driver.at_rest(), "{what}");
    // Behind several stages drafts may be under way when it turns out that rows could not be kept.
    let may_be_lost = weather == Weather::Failing && options.stages != Stages::default();
    assert!(may_be_lost || rig.control.wrong_drafts() == 0, "{what}");
    // What failed goes on in other stages until it is out of the last one.
    assert!(weather == Weather::Failing || rig.control.stages_apart() == 0, "{what}");
    let metrics = rig.engine.metrics();
    assert_eq!((metrics.num_requests_running, metrics.num_requests_waiting), (0, 0), "{what}");
    assert_eq!(metrics.kv_cache_usage, 0.0, "{what}");
    assert_eq!(rig.engine.health(), motet_engine::Health::Ready);
    metrics
}

fn storms(sketch: Sketch) {
    let mut all: Vec<MetricsSnapshot> = Vec::new();
    for seed in 0..200 {
        all.push(storm(sketch, seed, Weather::Fair));
        all.push(storm(sketch, seed + 1_000_000, Weather::Failing));
    }
    // A storm in which nothing happens shows nothing.
    let sum = |count: fn(&MetricsSnapshot) -> u64| all.iter().map(count).sum::<u64>();
    let happened = [
        ("answers that ended by themselves", sum(|m| m.finished_stop)),
        ("answers that ran to their limit", sum(|m| m.finished_length)),
        ("readers that left", sum(|m| m.finished_abort)),
        ("requests that failed", sum(|m| m.finished_error)),
        ("steps that failed", sum(|m| m.failed_steps)),
        ("requests turned away", sum(|m| m.rejected_queue_full)),
        ("drafts that were chosen", sum(|m| m.num_accepted_tokens)),
        ("drafts that were not", sum(|m| m.num_draft_tokens - m.num_accepted_tokens)),
        ("tokens found in the cache", sum(|m| m.prompt_tokens_cached)),
        // Without a layer that sees all positions, every session has its window for good.
        ("sessions that stepped back", if sketch.full { sum(|m| m.num_preemptions) } else { u64::MAX }),
        ("tokens read again", if sketch.full { sum(|m| m.prompt_tokens_recomputed) } else { u64::MAX }),
    ];
    for (what, count) in happened {
        assert!(count >= 80, "{sketch:?}: {count} {what}");
    }
}

/// Whenever the head is asked it finds the true hidden rows: after pauses, steps back, prefixes that were found, and
/// steps without drafts.
#[test]
fn storms_over_a_draft_head() {
    storms(Sketch { head: true, ..SKETCHES[0] });
    storms(Sketch { head: true, ..SKETCHES[3] });
}

#[test]
fn storms_over_full_attention() {
    storms(SKETCHES[0]);
}

#[test]
fn storms_over_a_sliding_window() {
    storms(SKETCHES[1]);
}

#[test]
fn storms_over_recurrent_state() {
    storms(SKETCHES[2]);
}

#[test]
fn storms_over_everything_at_once() {
    storms(SKETCHES[3]);
}

#[test]
fn storms_over_a_sliding_window_alone() {
    storms(SKETCHES[4]);
}

#[test]
fn storms_over_recurrent_state_alone() {
    storms(SKETCHES[5]);
}
