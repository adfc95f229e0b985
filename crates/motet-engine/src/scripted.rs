//! A device without weights: it stores what each row writes, page by page and slot by slot, and derives each token
//! from what it reads back. So a wrong page table, a stale page, a page that was not cleared, a bad checkpoint, rows with
//! drafts that were kept or not kept wrongly, or two sessions mixed up give a wrong token, and [`Solo`] says, from a
//! conversation's tokens alone, which one is right.
//!
//! Time can be simulated, real or none; troubles (a panic, a value that is not finite, a step that hangs) come when
//! they are asked for. It must never look at anything but its batch and its memory.

use crate::clock::{Clock, SimClock};
use crate::engine::Engine;
use crate::plan::{Machine, Options, Plan, PlanError};
use motet_gguf::ModelFile;
use motet_model::batch::{
    Answer, Ask, Batch, Commit, MAX_POOLS, NO_PAGE, Sampling, Seen, Segment, StateOp, Want,
};
use motet_model::device::Observer;
use motet_model::layout::StateLayout;
use motet_model::program::{State, StateKind};
use motet_model::{Device, DeviceError, Footprint, InFlight, Limits, Network, PAGE, Program, Slot, Stage};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What a scripted network remembers of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sketch {
    /// Tokens.
    pub vocab: usize,
    /// Positions.
    pub context: usize,
    /// Whether it has a layer that sees all positions.
    pub full: bool,
    /// The window of its sliding layer, if it has one.
    pub window: Option<u32>,
    /// Whether it has recurrent state.
    pub recurrent: bool,
}

impl Default for Sketch {
    fn default() -> Self {
        Self { vocab: 1000, context: 8192, full: true, window: None, recurrent: false }
    }
}

impl Sketch {
    /// A network of that shape: session state and nothing to compute.
    pub fn network(&self) -> Network {
        let kv = |window| StateKind::Kv { heads: 1, key_dim: 1, value_dim: 1, window };
        let kinds = [
            self.full.then(|| kv(None)),
            self.window.map(|w| kv(Some(w))),
            self.recurrent.then_some(StateKind::Delta { heads: 1, key_dim: 2, value_dim: 1 }),
        ];
        let states = kinds.into_iter().flatten().enumerate().map(|(layer, kind)| State { layer, kind });
        let trunk = Program { states: states.collect(), ..Program::default() };
        Network {
            architecture: "scripted".into(),
            name: None,
            vocab: self.vocab,
            d_model: 1,
            layers: trunk.states.len(),
            context: self.context,
            trunk,
            draft: None,
        }
    }
}

/// What a script answers after a history (prompt and answer so far), sampled in some way.
pub type AnswerFn = Arc<dyn Fn(&[u32], &Sampling) -> u32 + Send + Sync>;

/// How tokens come out of what was read back.
#[derive(Clone)]
pub enum Script {
    /// Any token, from a digest of all that was read and of the sampling; about every `mean`-th one is `end`.
    Random {
        /// The end token, if answers end by themselves.
        end: Option<u32>,
        /// Mean length of an answer.
        mean: u32,
    },
    /// A function of the tokens as they were read back. Needs a layer that sees all positions.
    Answers(AnswerFn),
}

/// How long steps take.
#[derive(Clone)]
pub enum Pace {
    /// No time.
    None,
    /// A clock is moved by the time of the number of rows.
    Simulated(Arc<SimClock>, Arc<dyn Fn(usize) -> Duration + Send + Sync>),
    /// The thread sleeps for the time of the number of rows.
    Real(Arc<dyn Fn(usize) -> Duration + Send + Sync>),
}

/// A device that follows a script.
#[derive(Clone)]
pub struct Scripted {
    /// How tokens are made.
    pub script: Script,
    /// How long steps take.
    pub pace: Pace,
    /// Troubles to come.
    pub control: Arc<Control>,
}

impl Scripted {
    /// A device with that script whose steps take no time.
    pub fn new(script: Script) -> Self {
        Self { script, pace: Pace::None, control: Arc::default() }
    }

    /// A stage for the whole network; no model file is needed.
    pub fn stage(&self, network: &Network, limits: &Limits) -> Box<dyn Stage> {
        let layout = network.state(false);
        let pages = |(pool, count): (usize, &usize)| Pool {
            window: layout.pools[pool].window,
            cells: vec![GARBAGE; count * PAGE],
        };
        Box::new(ScriptedStage {
            device: self.clone(),
            vocab: network.vocab,
            pools: limits.pages.iter().enumerate().map(pages).collect(),
            recurrent: layout.recurrent_floats > 0,
            slots: vec![GARBAGE.digest; limits.sessions],
            checkpoints: vec![GARBAGE.digest; limits.checkpoints],
            history: Vec::with_capacity(limits.context),
            seen: Vec::with_capacity(limits.batch.seen + limits.batch.drafts),
            verified: Vec::with_capacity(limits.batch.rows),
            commit_fails: false,
        })
    }

    /// An engine over this device, with a thread of its own.
    ///
    /// # Errors
    /// Options that make no sense.
    pub fn start(&self, sketch: &Sketch, options: &Options) -> Result<Engine, PlanError> {
        let network = sketch.network();
        let plan = Plan::new(&network, options, Machine { memory: None }, self)?;
        let (device, limits) = (self.clone(), plan.limits().clone());
        let open = move || Ok(device.stage(&network, &limits));
        Ok(match &self.pace {
            Pace::Simulated(clock, _) => {
                Engine::start_with_clock(plan, clock.clone() as Arc<dyn Clock>, open)
            }
            _ => Engine::start(plan, open),
        })
    }
}

/// Troubles that a test orders. They come in the next steps, one a step, in that order.
#[derive(Default)]
pub struct Control {
    troubles: Mutex<VecDeque<Trouble>>,
    held: Mutex<bool>,
    let_go: Condvar,
    steps: Mutex<u64>,
}

enum Trouble {
    Panic,
    Fault(u32),
    Stall(Duration),
    Commit,
}

impl Control {
    /// The next step fails as if a compute thread had panicked, and leaves garbage behind.
    pub fn panic_next(&self) {
        self.troubles.lock().push_back(Trouble::Panic);
    }

    /// In the next step, the rows of the segment with this number (or the last) are not finite.
    pub fn fault_next(&self, segment: u32) {
        self.troubles.lock().push_back(Trouble::Fault(segment));
    }

    /// The next time that rows with drafts are kept, it fails and leaves garbage behind.
    pub fn fail_commit_next(&self) {
        self.troubles.lock().push_back(Trouble::Commit);
    }

    /// The next step takes that much longer.
    pub fn stall_next(&self, time: Duration) {
        self.troubles.lock().push_back(Trouble::Stall(time));
    }

    /// Steps wait at their beginning until [`Control::resume`].
    pub fn hold(&self) {
        *self.held.lock() = true;
    }

    /// Held steps go on.
    pub fn resume(&self) {
        *self.held.lock() = false;
        self.let_go.notify_all();
    }

    /// Steps that were begun.
    pub fn steps(&self) -> u64 {
        *self.steps.lock()
    }

    fn begin(&self) -> Option<Trouble> {
        *self.steps.lock() += 1;
        let mut held = self.held.lock();
        self.let_go.wait_while(&mut held, |held| *held);
        drop(held);
        self.troubles.lock().pop_front()
    }
}

/// What a row leaves at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    token: u32,
    digest: u64,
}

const ZERO: Cell = Cell { token: 0, digest: 0 };
const GARBAGE: Cell = Cell { token: 0, digest: 0xdead_beef_dead_beef };
/// Behind the rows that were kept: to be overwritten before it is read.
const DEAD: Cell = Cell { token: 0, digest: 0xdead_0000_dead_0000 };

/// The recurrent state before the first token.
const CLEAR: u64 = 0x5eed;

fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ x >> 32
}

/// The recurrent state after a token.
fn next_state(state: u64, token: u32, position: usize) -> u64 {
    mix(mix(state, u64::from(token)), position as u64)
}

/// What a row writes, from its token, its state and what two of the cells it sees held: the one before it, and one
/// anywhere.
fn written(token: u32, position: usize, state: u64, before: u64, anywhere: u64) -> u64 {
    let own = mix(mix(u64::from(token) + 1, position as u64), state);
    mix(mix(own, before), anywhere)
}

/// The first position that a row sees.
fn first_seen(position: usize, window: Option<u32>) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w as usize))
}

/// Some earlier position that the row sees.
fn somewhere(position: usize, window: Option<u32>) -> usize {
    let first = first_seen(position, window);
    first + (mix(position as u64, 7) % (position - first).max(1) as u64) as usize
}

/// The token that is chosen, from a digest of all that a row reads.
fn random_token(read: u64, sampling: &Sampling, context: Context<'_>, end: Option<u32>, mean: u32) -> u32 {
    let mut digest = read;
    if sampling.temperature > 0.0 {
        digest = mix(mix(digest, sampling.seed), u64::from(sampling.choice));
    }
    for seen in context.seen {
        digest = mix(digest, u64::from(seen.token) << 32 | u64::from(seen.generated));
    }
    for &(token, bias) in context.bias {
        digest = mix(digest, u64::from(token) << 32 | u64::from(bias.to_bits()));
    }
    match end {
        Some(end) if digest >> 32 & 0xffff_ffff < (1 << 32) / u64::from(mean) => end,
        Some(end) => (end + 1 + (digest % (context.vocab as u64 - 1)) as u32) % context.vocab as u32,
        None => (digest % context.vocab as u64) as u32,
    }
}

/// What a choice takes into account besides what was read.
#[derive(Clone, Copy)]
struct Context<'b> {
    seen: &'b [Seen],
    bias: &'b [(u32, f32)],
    vocab: usize,
}

/// What `row` must know of: what was seen before the batch and, if anything of that matters, the drafts up to the row.
fn see(seen: &mut Vec<Seen>, batch: &Batch, segment: &Segment, row: u32, sampling: &Sampling) {
    seen.clear();
    seen.extend_from_slice(batch.seen(sampling));
    if segment.commit == Commit::Verify && !seen.is_empty() {
        let drafts = segment.rows.start as usize + 1..=row as usize;
        batch.tokens[drafts].iter().for_each(|&token| learn(seen, token));
    }
}

/// Counts a token as generated in a list by token.
fn learn(seen: &mut Vec<Seen>, token: u32) {
    match seen.binary_search_by_key(&token, |s| s.token) {
        Ok(at) => seen[at].generated += 1,
        Err(at) => seen.insert(at, Seen { token, generated: 1 }),
    }
}

fn logprob(read: u64, token: u32) -> f32 {
    -((mix(read, u64::from(token)) % 1000) as f32) / 100.0
}

struct Pool {
    window: Option<u32>,
    cells: Vec<Cell>,
}

impl Pool {
    fn at(&self, table: &[u32], position: usize) -> Cell {
        match table[position / PAGE] {
            NO_PAGE => GARBAGE,
            page => self.cells[page as usize * PAGE + position % PAGE],
        }
    }
}

struct ScriptedStage {
    device: Scripted,
    vocab: usize,
    pools: Vec<Pool>,
    recurrent: bool,
    slots: Vec<u64>,
    checkpoints: Vec<u64>,
    history: Vec<u32>,
    /// What was seen, the drafts before a row included.
    seen: Vec<Seen>,
    /// The rows of the last step that wait to be kept or not.
    verified: Vec<Verified>,
    commit_fails: bool,
}

/// A row of a segment with drafts.
struct Verified {
    slot: Slot,
    /// The recurrent state behind the row.
    state: u64,
    /// Where it was written, in each pool.
    cells: [usize; MAX_POOLS],
}

impl ScriptedStage {
    fn change(&mut self, change: StateOp) {
        match change {
            StateOp::ZeroPage { pool, page } => self.fill(pool as usize, page, ZERO),
            StateOp::Clear { slot } => self.slots[slot.0 as usize] = CLEAR,
            StateOp::Save { slot, into } => self.checkpoints[into.0 as usize] = self.slots[slot.0 as usize],
            StateOp::Restore { from, slot } => {
                self.slots[slot.0 as usize] = self.checkpoints[from.0 as usize]
            }
        }
    }

    fn fill(&mut self, pool: usize, page: u32, cell: Cell) {
        let from = page as usize * PAGE;
        self.pools[pool].cells[from..from + PAGE].fill(cell);
    }

    /// Runs the rows of a segment; `ask` is called behind each row with its position and the recurrent state. What
    /// carries drafts leaves the session's own state where it is.
    fn run(&mut self, batch: &Batch, segment: &Segment, mut ask: impl FnMut(&mut Self, usize, usize, u64)) {
        let tokens = batch.segment_tokens(segment);
        let slot = segment.slot.0 as usize;
        let mut state = if self.recurrent { self.slots[slot] } else { CLEAR };
        for (i, &token) in tokens.iter().enumerate() {
            let position = segment.first_position as usize + i;
            if self.recurrent {
                state = next_state(state, token, position);
            }
            let mut cells = [0; MAX_POOLS];
            for (p, pool) in self.pools.iter_mut().enumerate() {
                let table = batch.table(segment, p);
                let before = match position > first_seen(position, pool.window) {
                    true => pool.at(table, position - 1).digest,
                    false => 0,
                };
                let anywhere = match somewhere(position, pool.window) {
                    at if at < position => pool.at(table, at).digest,
                    _ => 0,
                };
                let digest = written(token, position, state, before, anywhere);
                cells[p] = table[position / PAGE] as usize * PAGE + position % PAGE;
                pool.cells[cells[p]] = Cell { token, digest };
            }
            match segment.commit {
                Commit::All if self.recurrent => self.slots[slot] = state,
                Commit::All => {}
                Commit::Verify => self.verified.push(Verified { slot: segment.slot, state, cells }),
            }
            ask(self, segment.rows.start as usize + i, position, state);
        }
    }

    /// A digest of all that the row at `position` sees. Cells behind the segment's last row must be zero, or dead.
    fn read(&self, batch: &Batch, segment: &Segment, position: usize, state: u64) -> u64 {
        let mut digest = state;
        for (p, pool) in self.pools.iter().enumerate() {
            let table = batch.table(segment, p);
            for at in first_seen(position, pool.window)..=position {
                digest = mix(digest, pool.at(table, at).digest);
            }
            let dirty = |at: &usize| ![ZERO, DEAD].contains(&pool.at(table, *at));
            if (position + 1..(position + 1).next_multiple_of(PAGE)).any(|at| dirty(&at)) {
                digest = mix(digest, GARBAGE.digest);
            }
        }
        digest
    }

    fn answer(
        &mut self,
        ask: &Ask,
        batch: &Batch,
        segment: &Segment,
        position: usize,
        state: u64,
        top: &mut Vec<(u32, f32)>,
    ) -> Answer {
        let read = self.read(batch, segment, position, state);
        let token = match &ask.want {
            Want::Score { target } => *target,
            Want::Sample(sampling) => match &self.device.script {
                Script::Random { end, mean } => {
                    see(&mut self.seen, batch, segment, ask.row, sampling);
                    let (seen, bias) = (&self.seen[..], batch.bias(sampling));
                    random_token(read, sampling, Context { seen, bias, vocab: self.vocab }, *end, *mean)
                }
                Script::Answers(answer) => {
                    let table = batch.table(segment, 0);
                    self.history.clear();
                    self.history.extend((0..=position).map(|at| self.pools[0].at(table, at).token));
                    answer(&self.history, sampling)
                }
            },
        };
        let from = top.len() as u32;
        top.extend((0..u32::from(ask.top)).map(|i| ((token + i) % self.vocab as u32, -(i as f32))));
        Answer {
            row: ask.row,
            token,
            logprob: if ask.logprob { logprob(read, token) } else { f32::NAN },
            top: from..top.len() as u32,
            digest: if ask.digest { read } else { 0 },
        }
    }

    /// What a step that was broken off leaves behind.
    fn wreck(&mut self, batch: &Batch) {
        for change in &batch.before {
            match *change {
                StateOp::Save { into, .. } => self.checkpoints[into.0 as usize] = GARBAGE.digest,
                StateOp::Clear { slot } | StateOp::Restore { slot, .. } => {
                    self.slots[slot.0 as usize] = GARBAGE.digest;
                }
                StateOp::ZeroPage { pool, page } => self.fill(pool as usize, page, GARBAGE),
            }
        }
        for segment in &batch.segments {
            self.slots[segment.slot.0 as usize] = GARBAGE.digest;
            let first = segment.first_position as usize;
            for (p, pool) in self.pools.iter_mut().enumerate() {
                for position in first..first + segment.rows.len() {
                    let page = batch.table(segment, p)[position / PAGE] as usize;
                    pool.cells[page * PAGE + position % PAGE] = GARBAGE;
                }
            }
        }
    }

    fn pass_time(&self, rows: usize, more: Duration) {
        match &self.device.pace {
            Pace::None => {}
            Pace::Simulated(clock, time) => clock.advance(time(rows) + more),
            Pace::Real(time) => std::thread::sleep(time(rows) + more),
        }
    }
}

impl Stage for ScriptedStage {
    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        let trouble = self.device.control.begin();
        work.batch.check(self.pools.len()).map_err(DeviceError::Batch)?;
        let more = if let Some(Trouble::Stall(time)) = trouble { time } else { Duration::ZERO };
        self.pass_time(work.batch.rows(), more);
        self.commit_fails |= matches!(trouble, Some(Trouble::Commit));
        let InFlight { batch, answers, top, faults, .. } = work;
        if let Some(Trouble::Panic) = trouble {
            self.wreck(batch);
            return Err(DeviceError::Panic("as ordered".into()));
        }
        batch.before.iter().for_each(|&change| self.change(change));
        self.verified.clear();
        let mut asks = batch.asks.iter().peekable();
        for segment in &batch.segments {
            self.run(batch, segment, |stage, row, position, state| {
                while let Some(ask) = asks.next_if(|a| a.row as usize == row) {
                    answers.push(stage.answer(ask, batch, segment, position, state, top));
                }
            });
        }
        if let Some(Trouble::Fault(segment)) = trouble {
            faults.push(segment.min(batch.segments.len() as u32 - 1));
        }
        Ok(())
    }

    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.commit_fails) {
            kept.iter().for_each(|(slot, _)| self.slots[slot.0 as usize] = GARBAGE.digest);
            return Err(DeviceError::Panic("as ordered".into()));
        }
        for &(slot, rows) in kept {
            let mine = self.verified.iter().filter(|v| v.slot == slot);
            if rows == 0 || mine.clone().count() < rows {
                return Err(DeviceError::Batch(format!("slot {} has no {rows} rows to keep", slot.0)));
            }
            for (row, verified) in mine.enumerate() {
                if row + 1 == rows && self.recurrent {
                    self.slots[slot.0 as usize] = verified.state;
                }
                if row >= rows {
                    self.pools.iter_mut().zip(verified.cells).for_each(|(p, cell)| p.cells[cell] = DEAD);
                }
            }
        }
        Ok(())
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.fill(pool, page, GARBAGE);
    }

    fn observe(&mut self, _observer: Option<Box<dyn Observer>>) {}
}

impl Device for Scripted {
    fn name(&self) -> String {
        "scripted".into()
    }

    fn footprint(
        &self,
        network: &Network,
        _layers: Range<usize>,
        _limits: &Limits,
    ) -> Result<Footprint, DeviceError> {
        let layout: StateLayout = network.state(false);
        let full = layout.pools.first().is_some_and(|p| p.window.is_none());
        if matches!(self.script, Script::Answers(_)) && !full {
            let what = "answers by history need a layer that sees all positions".into();
            return Err(DeviceError::Unsupported { device: self.name(), what });
        }
        Ok(Footprint {
            weights: 0,
            workspace_parts: vec![("history".into(), 4 * network.context as u64)],
            page: vec![(PAGE * size_of::<Cell>()) as u64; layout.pools.len()],
            recurrent: if layout.recurrent_floats > 0 { 8 } else { 0 },
            ..Footprint::default()
        })
    }

    fn prepare(
        &self,
        network: &Network,
        _file: &ModelFile,
        _layers: Range<usize>,
        limits: &Limits,
    ) -> Result<Box<dyn Stage>, DeviceError> {
        Ok(self.stage(network, limits))
    }
}

/// One conversation alone, without pages, slots or batches: the definition of what a scripted network answers.
pub struct Solo {
    sketch: Sketch,
    script: Script,
    tokens: Vec<u32>,
    /// What each position wrote, by kind of attention: (window, digests).
    layers: Vec<(Option<u32>, Vec<u64>)>,
    state: u64,
}

impl Solo {
    /// A conversation before its first token.
    pub fn new(sketch: Sketch, script: Script) -> Self {
        let full = sketch.full.then_some((None, Vec::new()));
        let sliding = sketch.window.map(|w| (Some(w), Vec::new()));
        let layers = full.into_iter().chain(sliding).collect();
        Self { sketch, script, tokens: Vec::new(), layers, state: CLEAR }
    }

    /// Reads a token.
    pub fn push(&mut self, token: u32) {
        let position = self.tokens.len();
        if self.sketch.recurrent {
            self.state = next_state(self.state, token, position);
        }
        for (window, layer) in &mut self.layers {
            let sees_one_before = position > 0 && *window != Some(1);
            let before = if sees_one_before { layer[position - 1] } else { 0 };
            let anywhere = layer.get(somewhere(position, *window)).copied().unwrap_or(0);
            layer.push(written(token, position, self.state, before, anywhere));
        }
        self.tokens.push(token);
    }

    /// What is chosen after the tokens read so far. `seen`: as in the batch.
    pub fn next(&self, sampling: &Sampling, seen: &[Seen], bias: &[(u32, f32)]) -> u32 {
        match &self.script {
            Script::Random { end, mean } => {
                let context = Context { seen, bias, vocab: self.sketch.vocab };
                random_token(self.digest(), sampling, context, *end, *mean)
            }
            Script::Answers(answer) => answer(&self.tokens, sampling),
        }
    }

    /// The log-probability of a token after those read so far.
    pub fn logprob(&self, token: u32) -> f32 {
        logprob(self.digest(), token)
    }

    /// The digest that an `Ask` would report.
    pub fn digest(&self) -> u64 {
        let seen = |window: &Option<u32>, layer: &Vec<u64>| {
            let from = window.map_or(0, |w| layer.len().saturating_sub(w as usize));
            from..layer.len()
        };
        self.layers.iter().fold(self.state, |digest, (window, layer)| {
            layer[seen(window, layer)].iter().fold(digest, |d, &cell| mix(d, cell))
        })
    }
}
