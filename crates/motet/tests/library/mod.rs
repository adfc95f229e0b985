//! The engine as a library over the CPU, and the memory of its process.
#![allow(unreachable_pub, dead_code, clippy::unwrap_used, reason = "tests; each uses its part")]

use std::path::PathBuf;
use std::sync::Arc;

use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_engine::clock::RealClock;
use motet_engine::{Driver, Engine, Event, Machine, Options, Plan, Request, SamplingOptions, Stream, Turn};
use motet_gguf::ModelFile;
use motet_model::{Device, Network};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub const MIB: u64 = 1 << 20;
/// Bytes that the process may write to. (Address space that an allocator reserves for threads is not among them.)
pub fn mapped() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmData:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// What the process may take beyond what it has, while this lives.
pub struct Limited(Rlimit);

impl Limited {
    pub fn to(more: u64) -> Self {
        let before = getrlimit(Resource::Data);
        let limit = Rlimit { current: Some(mapped() + more), ..before };
        setrlimit(Resource::Data, limit).unwrap();
        Self(before)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        setrlimit(Resource::Data, self.0).unwrap();
    }
}

/// An engine over the CPU, turned by hand.
pub struct Rig {
    pub engine: Engine,
    pub driver: Driver,
    pub network: Network,
    pub device: CpuDevice,
}

impl Rig {
    /// Over a model below the repository's root.
    pub fn new(model: &str, options: &Options) -> Self {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let file = ModelFile::open(&root.join(model)).unwrap();
        let network = Network::from_gguf(&file).unwrap();
        let device = CpuDevice::new(CpuOptions { threads: 2, isa: Isa::best() });
        let plan = Plan::new(&network, options, Machine { memory: None }, &device).unwrap();
        let stages = device.prepare(&network, &file, plan.split(), plan.limits()).unwrap();
        let (engine, driver) = Engine::by_hand(plan, Arc::new(RealClock::default()), stages).unwrap();
        Self { engine, driver, network, device }
    }

    /// A conversation of a prompt of so many tokens and an answer.
    pub fn submit(&self, prompt: u32, answer: usize) -> Stream {
        let token = |i: u32| 20 + (i * i * 7 + i * 31 + prompt) % 250;
        let request = Request {
            sampling: SamplingOptions::greedy(),
            max_tokens: Some(answer),
            digests: true,
            ..Request::new((0..prompt).map(token).collect())
        };
        self.engine.submit(request).unwrap()
    }

    pub fn turns(&mut self, count: usize) {
        (0..count).for_each(|_| assert_eq!(self.driver.turn(), Turn::Ran));
    }

    pub fn rest(&mut self) {
        while self.driver.turn() == Turn::Ran {}
    }
}

/// The rows with their digests, and the tokens, of a conversation that has ended well.
pub fn heard(mut stream: Stream) -> (Vec<(usize, u64)>, Vec<u32>) {
    let (mut rows, mut tokens, mut finished) = (Vec::new(), Vec::new(), false);
    while let Some(event) = stream.try_next() {
        match event {
            Event::Row { position, digest, .. } => rows.push((position, digest)),
            Event::Token { scored, .. } => tokens.push(scored.token),
            Event::Finished { .. } => finished = true,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert!(finished);
    (rows, tokens)
}
