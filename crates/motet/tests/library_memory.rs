//! As a library: the CPU's workspace comes with the first session, grows between steps to what the sessions need
//! together, and a growth that the system refuses harms nobody.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::sync::Arc;

use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_engine::clock::RealClock;
use motet_engine::{
    Driver, Engine, Event, Machine, Options, Plan, Request, SamplingOptions, Stream, Turn, Workspace,
};
use motet_gguf::ModelFile;
use motet_model::{Device, Network};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const MIB: u64 = 1 << 20;
/// Rows of the largest batch.
const ROWS: usize = 1024;

/// Bytes of address space that the process has.
fn mapped() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmSize:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// What the process may map beyond what it has, while this lives.
struct Limited(Rlimit);

impl Limited {
    fn to(more: u64) -> Self {
        let before = getrlimit(Resource::As);
        let limit = Rlimit { current: Some(mapped() + more), ..before };
        setrlimit(Resource::As, limit).unwrap();
        Self(before)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        setrlimit(Resource::As, self.0).unwrap();
    }
}

struct Rig {
    engine: Engine,
    driver: Driver,
    network: Network,
    device: CpuDevice,
}

impl Rig {
    fn new(workspace: Workspace) -> Self {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let file = ModelFile::open(&root.join("assets/motet-demo.gguf")).unwrap();
        let network = Network::from_gguf(&file).unwrap();
        let device = CpuDevice::new(CpuOptions { threads: 2, isa: Isa::best() });
        let options = Options {
            sessions: 4,
            context: Some(1200),
            rows: ROWS,
            prefill_chunk: Some(ROWS),
            workspace,
            ..Options::default()
        };
        let plan = Plan::new(&network, &options, Machine { memory: None }, &device).unwrap();
        let stage = device.prepare(&network, &file, 0..network.layers, plan.limits()).unwrap();
        let (engine, driver) = Engine::by_hand(plan, Arc::new(RealClock::default()), stage).unwrap();
        Self { engine, driver, network, device }
    }

    /// Bytes of a workspace for batches of so many rows, as the device says.
    fn workspace(&self, rows: usize) -> u64 {
        let mut limits = self.engine.plan().limits().clone();
        limits.batch.rows = rows;
        self.device.footprint(&self.network, 0..self.network.layers, &limits).unwrap().workspace()
    }

    fn submit(&self, prompt: u32, answer: usize) -> Stream {
        let token = |i: u32| 300 + (i * i * 7 + i * 31 + prompt) % 700;
        let request = Request {
            sampling: SamplingOptions::greedy(),
            max_tokens: Some(answer),
            digests: true,
            ..Request::new((0..prompt).map(token).collect())
        };
        self.engine.submit(request).unwrap()
    }

    fn turns(&mut self, count: usize) {
        (0..count).for_each(|_| assert_eq!(self.driver.turn(), Turn::Ran));
    }

    fn rest(&mut self) {
        while self.driver.turn() == Turn::Ran {}
    }
}

/// The rows with their digests, and the tokens, of a conversation that has ended well.
fn heard(mut stream: Stream) -> (Vec<(usize, u64)>, Vec<u32>) {
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

/// Growing to `rows` took what the device says of such a workspace beyond one of `before` rows.
fn assert_grown(rig: &Rig, (before, rows): (usize, usize), grown: u64) {
    let expected = rig.workspace(rows) - if before == 0 { 0 } else { rig.workspace(before) };
    let spare = MIB / 2;
    assert!(
        (expected - expected.min(spare)..=expected + spare).contains(&grown),
        "from {before} to {rows} rows: {grown} bytes more, {expected} expected"
    );
}

// One test: the process's memory is measured.
#[test]
fn the_workspace_comes_and_grows_with_sessions_and_a_refused_growth_does_no_harm() {
    let mut rig = Rig::new(Workspace::WithSessions);
    assert!(rig.workspace(ROWS) > 4 * MIB, "too little to measure: {}", rig.workspace(ROWS));
    let at_rest = mapped();
    assert_eq!(rig.driver.turn(), Turn::Idle);
    assert_eq!(mapped(), at_rest, "nobody is there, and yet memory was taken");

    let short = rig.submit(20, 60);
    rig.turns(5);
    let first = mapped();
    assert_grown(&rig, (0, 32), first - at_rest);
    // Between two steps of the first conversation it grows to what both need.
    let long = rig.submit(1000, 5);
    rig.turns(1);
    assert_grown(&rig, (32, ROWS), mapped() - first);
    rig.rest();
    let together = [heard(short), heard(long)];
    drop(rig);

    // Now the system has no memory for the long one: it is read in the workspace that there is.
    let mut rig = Rig::new(Workspace::WithSessions);
    let short = rig.submit(20, 60);
    rig.turns(5);
    let first = mapped();
    let long = rig.submit(1000, 5);
    let limited = Limited::to(rig.workspace(ROWS) / 4);
    rig.turns(1);
    let grown = mapped() - first;
    assert!(grown < rig.workspace(ROWS) / 4, "{grown} bytes were taken");
    rig.rest();
    drop(limited);
    assert!(rig.driver.at_rest());
    let refused = [heard(short), heard(long)];
    drop(rig);

    // Both say what they say alone, with room from the start.
    let mut roomy = Rig::new(Workspace::AtStart);
    let alone = [(20, 60), (1000, 5)].map(|(prompt, answer)| {
        let stream = roomy.submit(prompt, answer);
        roomy.rest();
        heard(stream)
    });
    assert!(together == alone);
    assert!(refused == alone);
}
