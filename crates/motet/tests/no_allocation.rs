//! After warm-up a step allocates nothing on any thread: not in the scheduler, not in the CPU's stage with its kernels
//! and its sampler, not in what is handed to the streams.
//!
//! Not counted: the turn in which a request comes out of the queue, which makes its session, and the clients, who take
//! their events out of the streams with memory of their own. (Digests, which only `motet verify` asks for, are told
//! again for rows that are run again; the stream of a client that reads none of them grows then.)

#![allow(clippy::unwrap_used, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_engine::clock::RealClock;
use motet_engine::{
    Drafts, Driver, Engine, Event, Machine, Options, Plan, Request, SamplingOptions, Stream, Turn,
};
use motet_gguf::{Format, ModelFile};
use motet_model::{Device, KvFormat, Network, Stages};

/// The system's allocator, which counts what all threads ask for.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Networks of every kind, as floats and quantised: dense, windowed, recurrent, with experts.
fn models() -> Vec<(String, ModelFile)> {
    let mut models = vec![(
        "the built-in model".to_owned(),
        ModelFile::open(&root().join("assets/motet-demo.gguf")).unwrap(),
    )];
    for name in ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "glm4moe"] {
        let path = root().join(format!("tests/fixtures/tiny/tiny-{name}-f32.gguf"));
        let file = ModelFile::open(&path).unwrap();
        let quantised = motet_gguf::twin(&file, Format::Q8_0).unwrap();
        models.push((format!("{name} as Q8_0"), ModelFile::from_vec(quantised).unwrap()));
        models.push((name.to_owned(), file));
    }
    models
}

struct Rig {
    engine: Engine,
    driver: Driver,
    vocab: u32,
}

impl Rig {
    /// An engine whose pool is so small that conversations step back.
    fn new(file: &ModelFile, isa: Isa, kv: KvFormat, drafts: Drafts, stages: usize) -> Self {
        let network = Network::from_gguf(file).unwrap();
        let device = CpuDevice::new(CpuOptions { threads: 2, isa });
        let mut options = Options {
            sessions: 4,
            context: Some(CONTEXT),
            kv,
            headroom: 0,
            prefill_chunk: Some(48),
            poison: true,
            drafts,
            stages: Stages::Balanced(stages),
            ..Options::default()
        };
        let plan = |options: &Options| Plan::new(&network, options, Machine { memory: None }, &device);
        options.memory = Some(plan(&options).unwrap().smallest_memory);
        let plan = plan(&options).unwrap();
        let stages = device.prepare(&network, file, plan.split(), plan.limits()).unwrap();
        let (engine, driver) = Engine::by_hand(plan, Arc::new(RealClock::default()), stages).unwrap();
        Self { engine, driver, vocab: network.vocab as u32 }
    }

    fn submit(&self, number: u32, prompt: u32, answer: usize, sampling: SamplingOptions) -> Stream {
        let token = |i: u32| (i * i * 7 + i * 31 + number * 101) % self.vocab;
        let request = Request {
            sampling: SamplingOptions { seed: Some(number.into()), ..sampling },
            max_tokens: Some(answer),
            logprobs: Some(5),
            ..Request::new((0..prompt).map(token).collect())
        };
        self.engine.submit(request).unwrap()
    }
}

const CONTEXT: usize = 384;

fn steps_of(name: &str, file: &ModelFile, isa: Isa, kv: KvFormat, drafts: Drafts, stages: usize) {
    let mut rig = Rig::new(file, isa, kv, drafts, stages);
    let plain = SamplingOptions::default;
    let ways = [
        SamplingOptions { top_k: 20, top_p: 0.9, repetition_penalty: 1.2, ..plain() },
        SamplingOptions { min_p: 0.05, frequency_penalty: 0.5, presence_penalty: 0.2, ..plain() },
        SamplingOptions { logit_bias: vec![(3, 2.0), (9, -3.0)], temperature: 0.0, ..plain() },
    ];
    let mut streams: Vec<Stream> =
        ways.iter().zip(0..).map(|(way, i)| rig.submit(i, 30, 150, way.clone())).collect();
    (0..10 * stages).for_each(|_| assert_eq!(rig.driver.turn(), Turn::Ran));
    // The compute threads go to sleep and are woken once: the standard library keeps something for each.
    std::thread::sleep(Duration::from_millis(2));
    // A prompt that is read while the others answer; first its session is made.
    streams.push(rig.submit(4, 150, 100, SamplingOptions { top_p: 0.8, ..plain() }));
    // (What is said to wait is as old as the last step that was filled or settled; some turns do neither.)
    let known = rig.engine.metrics().steps + 3;
    while rig.engine.metrics().steps < known || rig.engine.metrics().num_requests_waiting > 0 {
        assert_eq!(rig.driver.turn(), Turn::Ran);
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    assert!(before > 0, "the counter does not count");
    let mut steps = 0;
    while rig.driver.turn() == Turn::Ran {
        steps += 1;
        let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
        let what = format_args!("{name}, {isa}, kv {kv}, {drafts:?}, {stages} stages");
        assert_eq!(allocated, 0, "{what}: step {steps} allocated");
    }
    let metrics = rig.engine.metrics();
    match drafts {
        Drafts::Off => assert!(steps > 140, "{name}: {steps} steps"),
        _ => assert!(steps > 20 && metrics.num_draft_tokens > 0, "{name}: {steps} steps"),
    }
    assert!(metrics.num_preemptions > 0, "{name}: nobody stepped back");
    for mut stream in streams {
        let mut last = None;
        while let Some(event) = stream.try_next() {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Finished { .. })), "{name}: {last:?}");
    }
}

// One test: the counter is the process's.
#[test]
fn steps_allocate_nothing() {
    for (name, file) in models() {
        for isa in Isa::available() {
            for kv in KvFormat::ALL {
                steps_of(&name, &file, isa, kv, Drafts::Off, 1);
            }
        }
        // By the network's own head, or looked up.
        steps_of(&name, &file, Isa::best(), KvFormat::F16, Drafts::Exactly(3), 1);
        // Behind stages on threads of their own.
        for drafts in [Drafts::Off, Drafts::Exactly(3)] {
            steps_of(&name, &file, Isa::best(), KvFormat::F16, drafts, 2);
        }
    }
}
