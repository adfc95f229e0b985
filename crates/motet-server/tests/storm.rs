//! A storm: requests that arrive, leave, stop and overflow at random, from a seed; each answer is compared with its
//! script, and afterwards everything is back where it was.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::client::{Response, head, send};
use common::vocabulary::{END, VOCAB};
use common::{options, start_with};
use motet_engine::scripted::{Pace, Script, Scripted, Sketch};
use motet_engine::{Engine, MetricsSnapshot, Options};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

const REQUESTS: u64 = 10_000;
/// Clients at once: more than run (4) and wait (12) together, so that the queue overflows.
const CLIENTS: u64 = 24;
const CONTEXT: usize = 512;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The script: the next token follows from every token before it, the seed and the choice. Few letters, so that stop
/// strings hit, and é, whose two bytes come one after the other; about every 40th token is the end.
fn next_token(history: &[u32], seed: u64, choice: u32) -> u32 {
    const E_ACUTE: [u32; 2] = [0xc3, 0xa9];
    if history.last() == Some(&E_ACUTE[0]) {
        return E_ACUTE[1];
    }
    let start = mix(seed ^ u64::from(choice) << 40);
    let digest = history.iter().fold(start, |digest, &token| mix(digest ^ u64::from(token)));
    match digest % 40 {
        0 => END,
        1..8 => E_ACUTE[0],
        other => u32::from(b"abcd "[other as usize % 5]),
    }
}

/// What a request must be answered: for each choice its text and why it ends.
fn expected(plan: &Plan) -> Vec<(String, &'static str)> {
    (0..plan.choices).map(|choice| expected_choice(plan, choice)).collect()
}

fn expected_choice(plan: &Plan, choice: u32) -> (String, &'static str) {
    let mut history = plan.prompt_tokens();
    let most = plan.max_tokens.min(CONTEXT - history.len());
    let mut bytes = Vec::new();
    while bytes.len() < most {
        let token = next_token(&history, plan.seed, choice);
        if token == END {
            return (String::from_utf8_lossy(&bytes).into_owned(), "stop");
        }
        history.push(token);
        bytes.push(token as u8);
        let text = String::from_utf8_lossy(&bytes);
        if let Some(cut) = plan.stop.as_ref().and_then(|stop| text.find(stop)) {
            return (text[..cut].to_string(), "stop");
        }
    }
    (String::from_utf8_lossy(&bytes).into_owned(), "length")
}

/// One client's plan.
#[derive(Debug)]
struct Plan {
    chat: bool,
    stream: bool,
    prompt: String,
    seed: u64,
    choices: u32,
    max_tokens: usize,
    stop: Option<String>,
    leaves: Leaves,
}

/// When a client leaves.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Leaves {
    Never,
    /// After this time from the request on.
    After(Duration),
    /// After so many events of its stream.
    AfterEvents(u64),
}

impl Plan {
    fn new(number: u64) -> Plan {
        let mut rng = Rng(number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        // Many prompts begin alike, as those with a system prompt do; some are longer than the context.
        let mut prompt = "You answer. ".repeat(rng.below(12) as usize);
        prompt.extend((0..rng.below(120)).map(|_| char::from(b'a' + rng.below(26) as u8)));
        if rng.one_in(50) {
            prompt.push_str(&"long ".repeat(150));
        }
        let stream = rng.one_in(2);
        let leaves = match rng.below(6) {
            0 => Leaves::After(Duration::from_micros(rng.below(5000))),
            1 if stream => Leaves::AfterEvents(rng.below(20)),
            _ => Leaves::Never,
        };
        let letter = |rng: &mut Rng| ["a", "b", "c", "d", " ", "é"][rng.below(6) as usize];
        let stop = rng.one_in(3).then(|| format!("{}{}", letter(&mut rng), letter(&mut rng)));
        let most = if rng.one_in(4) { usize::MAX } else { 1 + rng.below(60) as usize };
        let choices = if rng.one_in(8) { 2 + rng.below(2) as u32 } else { 1 };
        Plan {
            chat: rng.one_in(2),
            stream,
            prompt,
            seed: rng.next() >> 11,
            choices,
            max_tokens: most,
            stop,
            leaves,
        }
    }

    fn body(&self) -> Value {
        let mut body = json!({"seed": self.seed, "n": self.choices, "stream": self.stream});
        if self.chat {
            body["messages"] = json!([{"role": "user", "content": self.prompt}]);
        } else {
            body["prompt"] = (self.prompt.clone() + ">").into();
        }
        if let Some(stop) = &self.stop {
            body["stop"] = stop.as_str().into();
        }
        if self.max_tokens != usize::MAX {
            body["max_tokens"] = self.max_tokens.into();
        }
        body
    }

    /// ChatML, or the prompt as it is. Bytes are their own ids.
    fn prompt_tokens(&self) -> Vec<u32> {
        let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        if self.chat {
            let user = bytes(&format!("user\n{}", self.prompt));
            [&[256], &*user, &[END], &*bytes("\n"), &[256], &*bytes("assistant\n")].concat()
        } else {
            bytes(&(self.prompt.clone() + ">"))
        }
    }

    fn is_too_long(&self) -> bool {
        self.prompt_tokens().len() >= CONTEXT
    }
}

/// What became of the requests.
#[derive(Debug, Default)]
struct Tally {
    answered: AtomicU64,
    choices: AtomicU64,
    left: AtomicU64,
    overflowed: AtomicU64,
    too_long: AtomicU64,
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// One client: asks until it is answered, or leaves.
async fn client(address: SocketAddr, number: u64, tally: &Tally) {
    let plan = Plan::new(number);
    let path = if plan.chat { "/v1/chat/completions" } else { "/v1/completions" };
    loop {
        let asked = send(address, "POST", path, "", plan.body().to_string().as_bytes()).await;
        let begun = Instant::now();
        if let Leaves::After(time) = plan.leaves {
            let _ = timeout(time, async { head(asked).await.bytes().await }).await;
            return count(&tally.left, 1);
        }
        let mut response = head(asked).await;
        match response.status {
            200 => {}
            503 => {
                let error = response.json().await;
                assert_eq!(error["error"]["code"], "queue_full", "{number}: {error}");
                assert!(response.header("retry-after").is_some());
                count(&tally.overflowed, 1);
                assert!(begun.elapsed() < Duration::from_secs(10), "{number}: an overflow that hangs");
                sleep(Duration::from_millis(1 + number % 7)).await;
                continue;
            }
            400 => {
                let error = response.json().await;
                assert_eq!(error["error"]["code"], "context_length_exceeded", "{number}: {error}");
                assert!(plan.is_too_long(), "{number}: {error}");
                return count(&tally.too_long, 1);
            }
            other => panic!("{number}: status {other}: {:?}", response.json().await),
        }
        assert!(!plan.is_too_long(), "{number}: a prompt beyond the context was taken");
        if let Leaves::AfterEvents(events) = plan.leaves {
            let mut said = vec![String::new(); plan.choices as usize];
            for _ in 0..events {
                let Some(event) = response.event().await.filter(|event| event != "[DONE]") else { break };
                let event: Value = serde_json::from_str(&event).unwrap();
                let choice = &event["choices"][0];
                let delta = if plan.chat { &choice["delta"]["content"] } else { &choice["text"] };
                said[choice["index"].as_u64().unwrap() as usize].push_str(delta.as_str().unwrap_or(""));
            }
            let right = said.iter().zip(expected(&plan)).all(|(said, (whole, _))| whole.starts_with(said));
            assert!(right, "{number}: {plan:?} said {said:?}");
            return count(&tally.left, 1);
        }
        assert_eq!(answer(response, &plan).await, expected(&plan), "{number}: {plan:?}");
        count(&tally.answered, 1);
        return count(&tally.choices, u64::from(plan.choices));
    }
}

/// The choices of a response, streamed or whole.
async fn answer(mut response: Response, plan: &Plan) -> Vec<(String, &'static str)> {
    let reason = |value: &Value| match value.as_str() {
        Some("stop") => "stop",
        Some("length") => "length",
        _ => "none",
    };
    let mut choices = vec![(String::new(), "none"); plan.choices as usize];
    if plan.stream {
        for event in response.events().await {
            let choice = &event["choices"][0];
            let (text, ended) = &mut choices[choice["index"].as_u64().unwrap() as usize];
            let delta = if plan.chat { &choice["delta"]["content"] } else { &choice["text"] };
            assert_eq!(*ended, "none", "something after the end of a choice");
            text.push_str(delta.as_str().unwrap_or(""));
            *ended = reason(&choice["finish_reason"]);
        }
    } else {
        for choice in response.json().await["choices"].as_array().unwrap() {
            let text = if plan.chat { &choice["message"]["content"] } else { &choice["text"] };
            let text = text.as_str().unwrap().to_string();
            choices[choice["index"].as_u64().unwrap() as usize] = (text, reason(&choice["finish_reason"]));
        }
    }
    choices
}

fn at_rest(metrics: &MetricsSnapshot) -> bool {
    metrics.num_requests_running == 0 && metrics.num_requests_waiting == 0 && metrics.kv_cache_usage == 0.0
}

/// An engine of four conversations with both kinds of session state. Its steps take some time, so that clients leave in
/// the queue, while their prompts are read and while their answers are written.
fn engine() -> Engine {
    let sketch = Sketch { vocab: VOCAB, context: CONTEXT, recurrent: true, ..Sketch::default() };
    let script =
        Script::Answers(Arc::new(|history, sampling| next_token(history, sampling.seed, sampling.choice)));
    let options = Options {
        sessions: 4,
        context: Some(CONTEXT),
        queue: 12,
        prefill_chunk: Some(64),
        ..Options::default()
    };
    let pace = Pace::Real(Arc::new(|_| Duration::from_micros(50)));
    let device = Scripted { pace, ..Scripted::new(script) };
    let engine = device.start(&sketch, &options).unwrap();
    engine.wait_until_loaded().unwrap();
    engine
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_each_get_their_own_answer() {
    let engine = engine();
    let server = start_with(options(), &engine).ready().await;
    let (tally, next) = (Arc::new(Tally::default()), Arc::new(AtomicU64::new(0)));
    let address = server.address;
    let clients = (0..CLIENTS).map(|_| {
        let (tally, next) = (tally.clone(), next.clone());
        tokio::spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= REQUESTS {
                    return;
                }
                client(address, number, &tally).await;
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }

    let Tally { answered, choices, left, overflowed, too_long } = Arc::into_inner(tally).unwrap();
    let [answered, choices, left, overflowed, too_long] =
        [answered, choices, left, overflowed, too_long].map(AtomicU64::into_inner);
    println!("{answered} answered, {left} left, {overflowed} overflows, {too_long} too long");
    // Each kind of fate was met, often.
    assert_eq!(answered + left + too_long, REQUESTS);
    assert!(answered > 6000 && left > 1000 && overflowed > 100 && too_long > 50);

    let begun = Instant::now();
    while !at_rest(&engine.metrics()) {
        assert!(begun.elapsed() < Duration::from_secs(10), "not at rest: {:?}", engine.metrics());
        sleep(Duration::from_millis(5)).await;
    }
    let metrics = engine.metrics();
    assert!(metrics.finished_stop + metrics.finished_length >= choices, "answers that no session gave");
    assert_eq!((metrics.finished_error, metrics.failed_steps), (0, 0));
    println!("{} given up, {} tokens from the cache", metrics.finished_abort, metrics.prefix_cache_hits);
    assert!(metrics.finished_abort > 200 && metrics.prefix_cache_hits > 10_000);
    // The server knows of no answer under way either: nothing keeps it.
    server.stop().await;
    timeout(Duration::from_secs(5), server.ended()).await.unwrap().unwrap();
}
