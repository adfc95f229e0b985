//! The stage: pages, slots and checkpoints, and what rows read back from them.

use super::arithmetic::{
    CLEAR, Cell, Context, DEAD, GARBAGE, LOST, Memory, ZERO, first_seen, head_entry, hidden, learn, logprob,
    mix, next_state, random_token, rollback_bytes, see, somewhere, written,
};
use super::control::Trouble;
use super::{Pace, Script, Scripted, Sketch, Solo};
use motet_model::batch::{
    Answer, Ask, Batch, Commit, Fault, MAX_POOLS, NO_PAGE, RECENT, Sampling, Seen, Segment, StateOp, Want,
};
use motet_model::device::Observer;
use motet_model::program::StateKind;
use motet_model::{DeviceError, InFlight, Limits, Network, PAGE, Slot, Stage};
use std::time::Duration;

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

    fn set_head(&mut self, table: &[u32], position: usize, head: u64) {
        self.cells[table[position / PAGE] as usize * PAGE + position % PAGE].head = head;
    }
}

pub(super) struct ScriptedStage {
    device: Scripted,
    /// Which of how many stages it is.
    number: usize,
    of: usize,
    sketch: Sketch,
    pools: Vec<Pool>,
    slots: Vec<Memory>,
    checkpoints: Vec<Memory>,
    history: Vec<u32>,
    /// What was seen, the drafts before a row included.
    seen: Vec<Seen>,
    /// The rows of the last step that wait to be kept or not.
    verified: Vec<Verified>,
    commit_fails: bool,
    most_rows: usize,
    segments: usize,
    /// Drafts that a segment may have.
    drafts: usize,
    /// A conversation as it should be, for the draft head.
    solo: Solo,
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
    pub(super) fn new(
        device: Scripted,
        network: &Network,
        limits: &Limits,
        number: usize,
        of: usize,
    ) -> Self {
        let layout = network.state(limits.draft_head);
        let pages = |(pool, count): (usize, &usize)| Pool {
            window: layout.pools[pool].window,
            cells: vec![GARBAGE; count * PAGE],
        };
        let has = |state: &dyn Fn(&StateKind) -> bool| network.trunk.states.iter().any(|s| state(&s.kind));
        let sketch = Sketch {
            vocab: network.vocab,
            context: network.context,
            full: has(&|kind| matches!(kind, StateKind::Kv { window: None, .. })),
            window: layout.pools.iter().find_map(|pool| pool.window),
            recurrent: has(&|kind| kind.recurrent_floats() > 0),
            head: limits.draft_head,
        };
        Self {
            sketch,
            pools: limits.pages.iter().enumerate().map(pages).collect(),
            slots: vec![LOST; limits.sessions],
            checkpoints: vec![LOST; limits.checkpoints],
            history: Vec::with_capacity(limits.context),
            seen: Vec::with_capacity(limits.batch.seen + limits.batch.drafts),
            verified: Vec::with_capacity(limits.batch.rows),
            commit_fails: false,
            most_rows: limits.batch.rows,
            segments: limits.batch.segments,
            drafts: limits.batch.drafts,
            solo: Solo::with_capacity(sketch, device.script.clone(), limits.context),
            number,
            of,
            device,
        }
    }

    /// Whether sessions remember anything beside their pages.
    fn remembers(&self) -> bool {
        self.sketch.recurrent || self.sketch.head
    }

    fn check(&self, batch: &Batch) -> Result<(), DeviceError> {
        batch.check(self.pools.len()).map_err(DeviceError::Batch)?;
        match batch.fed_rows() {
            rows if rows > self.most_rows => Err(DeviceError::Batch(format!("{rows} rows to feed"))),
            _ => Ok(()),
        }
    }

    fn change_one(&mut self, change: StateOp) {
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

    /// Runs the rows of a segment; `ask` is called behind each row with its position and the recurrent state there. What
    /// carries drafts leaves the session's own state where it is.
    fn run(&mut self, batch: &Batch, segment: &Segment, mut ask: impl FnMut(&mut Self, usize, usize, u64)) {
        let tokens = batch.segment_tokens(segment);
        let slot = segment.slot.0 as usize;
        let mut memory = if self.remembers() { self.slots[slot] } else { CLEAR };
        self.catch_up(batch, segment);
        for (i, &token) in tokens.iter().enumerate() {
            let position = segment.first_position as usize + i;
            let fed = self.sketch.head && segment.feed.is_some();
            let head = fed.then(|| head_entry(token, position, memory.hidden_before(position)));
            if self.sketch.recurrent {
                memory.state = next_state(memory.state, token, position);
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
                let digest = written(token, position, memory.state, before, anywhere);
                if self.sketch.head {
                    memory.recent[position % RECENT] = hidden(digest, memory.state);
                }
                cells[p] = table[position / PAGE] as usize * PAGE + position % PAGE;
                let cell = &mut pool.cells[cells[p]];
                *cell = Cell { token, digest, head: head.unwrap_or(cell.head) };
            }
            match segment.commit {
                Commit::All => self.slots[slot] = memory,
                Commit::Verify => {
                    self.slots[slot].recent = memory.recent;
                    self.verified.push(Verified { slot: segment.slot, state: memory.state, cells });
                }
            }
            ask(self, segment.rows.start as usize + i, position, memory.state);
        }
    }

    /// Feeds the draft head with the positions that a segment says it lacks.
    fn catch_up(&mut self, batch: &Batch, segment: &Segment) {
        let (tokens, table) = (batch.tokens_behind(segment), batch.table(segment, 0));
        for (position, &token) in (segment.first_position as usize - tokens.len()..).zip(tokens) {
            let before = self.slots[segment.slot.0 as usize].hidden_before(position);
            self.pools[0].set_head(table, position, head_entry(token, position, before));
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
            let dirty = |at: &usize| ![ZERO.digest, DEAD.digest].contains(&pool.at(table, *at).digest);
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
                    let (seen, bias, allowed) =
                        (&self.seen[..], batch.bias(sampling), batch.allowed(sampling));
                    let context = Context { seen, bias, vocab: self.sketch.vocab, allowed };
                    random_token(read, sampling, context, *end, *mean)
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
        top.extend((0..u32::from(ask.top)).map(|i| ((token + i) % self.sketch.vocab as u32, -(i as f32))));
        Answer {
            row: ask.row,
            token,
            logprob: if ask.logprob { logprob(read, token) } else { f32::NAN },
            top: from..top.len() as u32,
            digest: if ask.digest { read } else { 0 },
        }
    }

    /// Drafts for one session: looks first whether the head, fed with what it lacked, finds what the sequential definition
    /// would have left for it.
    fn draft_segment(
        &mut self,
        batch: &Batch,
        segment: &Segment,
        sampling: &Sampling,
        count: usize,
        drafted: &mut Vec<u32>,
    ) {
        self.catch_up(batch, segment);
        let (table, first) = (batch.table(segment, 0), segment.first_position as usize);
        let (pool, memory) = (&mut self.pools[0], &self.slots[segment.slot.0 as usize]);
        let token = batch.segment_tokens(segment)[0];
        let solo = &mut self.solo;
        solo.begin_again();
        (0..first).for_each(|at| solo.push(pool.at(table, at).token));
        if !solo.agrees(memory, |at| pool.at(table, at).head) {
            self.device.control.count_wrong_draft();
        }
        // It leaves an entry for the token that is certain, and what must not be read for those that it drafts.
        pool.set_head(table, first, head_entry(token, first, memory.hidden_before(first)));
        (first + 1..first + count).for_each(|at| pool.set_head(table, at, DEAD.head));
        solo.push(token);
        self.seen.clear();
        self.seen.extend_from_slice(batch.seen(sampling));
        for depth in 0..count {
            let right = solo.next(sampling, &self.seen, batch.bias(sampling));
            let random = mix(solo.digest(), depth as u64) >> 7;
            let draft = match (self.device.agree)(sampling, depth, random) {
                true => right,
                false => (right + 1) % self.sketch.vocab as u32,
            };
            drafted.push(draft);
            solo.push(draft);
            if !self.seen.is_empty() {
                learn(&mut self.seen, draft);
            }
        }
    }

    /// What a step that was broken off leaves behind.
    fn wreck(&mut self, batch: &Batch) {
        for change in &batch.before {
            match *change {
                StateOp::Save { into, .. } => self.checkpoints[into.0 as usize] = LOST,
                StateOp::Clear { slot } | StateOp::Restore { slot, .. } => {
                    self.slots[slot.0 as usize] = LOST;
                }
                StateOp::ZeroPage { pool, page } => self.fill(pool as usize, page, GARBAGE),
            }
        }
        for segment in &batch.segments {
            self.spoil(batch, segment, 0);
        }
    }

    /// Leaves garbage in the segment's rows from its row `from` on, and in what its session remembers behind them.
    fn spoil(&mut self, batch: &Batch, segment: &Segment, from: u32) {
        let memory = &mut self.slots[segment.slot.0 as usize];
        if segment.commit == Commit::All || from == 0 {
            *memory = LOST;
        }
        let mine = self.verified.iter_mut().filter(|v| v.slot == segment.slot);
        mine.skip(from as usize).for_each(|verified| verified.state = LOST.state);
        let first = segment.first_position as usize;
        for position in first + from as usize..first + segment.rows.len() {
            memory.recent[position % RECENT] = LOST.recent[0];
            for (p, pool) in self.pools.iter_mut().enumerate() {
                let page = batch.table(segment, p)[position / PAGE] as usize;
                pool.cells[page * PAGE + position % PAGE] = GARBAGE;
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
        let trouble = self.device.control.begin(self.number, self.of);
        self.check(&work.batch)?;
        let too_many = |s: &Segment| s.commit == Commit::Verify && s.rows.len() > 1 + self.drafts;
        if work.batch.segments.iter().any(too_many) {
            return Err(DeviceError::Batch(format!("more than {} drafts", self.drafts)));
        }
        if work.batch.fed_rows() > 0 {
            self.device.control.count_feed();
        }
        let more = if let Some(Trouble::Stall(time)) = trouble { time } else { Duration::ZERO };
        self.pass_time(work.batch.rows(), more);
        self.commit_fails |= matches!(trouble, Some(Trouble::Commit));
        let InFlight { batch, answers, top, faults, .. } = work;
        let others = answers.len();
        if let Some(Trouble::Panic) = trouble {
            self.wreck(batch);
            return Err(DeviceError::Panic("as ordered".into()));
        }
        Stage::change(self, &batch.before);
        self.verified.retain(|v| !batch.segments.iter().any(|s| s.slot == v.slot));
        let mut asks = batch.asks.iter().peekable();
        for segment in &batch.segments {
            self.run(batch, segment, |stage, row, position, state| {
                while let Some(ask) = asks.next_if(|a| a.row as usize == row) {
                    answers.push(stage.answer(ask, batch, segment, position, state, top));
                }
            });
        }
        let (before, own) = answers.split_at(others);
        let same = |(a, b): (&Answer, &Answer)| (a.row, a.token, a.digest) == (b.row, b.token, b.digest);
        if self.number > 0 && !(before.len() == own.len() && before.iter().zip(own).all(same)) {
            self.device.control.count_stage_apart();
        }
        answers.drain(..others);
        if let Some(Trouble::Fault { segment, row }) = trouble {
            let number = (segment as usize).min(batch.segments.len() - 1);
            let segment = &batch.segments[number];
            let row = segment.rows.start.saturating_add(row).min(segment.rows.end - 1);
            answers.retain(|answer| !(row..segment.rows.end).contains(&answer.row));
            self.spoil(batch, segment, row - segment.rows.start);
            faults.push(Fault { segment: number as u32, row });
        }
        Ok(())
    }

    fn change(&mut self, changes: &[StateOp]) {
        changes.iter().for_each(|&change| self.change_one(change));
    }

    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.commit_fails) {
            kept.iter().for_each(|(slot, _)| self.slots[slot.0 as usize] = LOST);
            return Err(DeviceError::Panic("as ordered".into()));
        }
        for &(slot, rows) in kept {
            let mine = self.verified.iter().filter(|v| v.slot == slot);
            if rows == 0 || mine.clone().count() < rows {
                return Err(DeviceError::Batch(format!("slot {} has no {rows} rows to keep", slot.0)));
            }
            for (row, verified) in mine.enumerate() {
                if row + 1 == rows {
                    self.slots[slot.0 as usize].state = verified.state;
                }
                if row >= rows {
                    self.pools.iter_mut().zip(verified.cells).for_each(|(p, cell)| p.cells[cell] = DEAD);
                }
            }
        }
        Ok(())
    }

    fn draft(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        if !self.sketch.head {
            return Err(DeviceError::Unsupported { device: "scripted".into(), what: "no draft head".into() });
        }
        let InFlight { batch, drafted, .. } = work;
        self.check(batch)?;
        if batch.drafts.len() != batch.segments.len() || !batch.drafts.is_sorted_by(|a, b| a >= b) {
            return Err(DeviceError::Batch("the most drafts come first".into()));
        }
        for (segment, (ask, &count)) in batch.segments.iter().zip(batch.asks.iter().zip(&batch.drafts)) {
            let Want::Sample(sampling) = &ask.want else {
                return Err(DeviceError::Batch("a draft is sampled".into()));
            };
            self.draft_segment(batch, segment, sampling, count as usize, drafted);
        }
        if let Pace::Simulated(clock, _) = &self.device.pace {
            for pass in 0..batch.drafts.first().copied().unwrap_or(0) {
                let rows = batch.drafts.iter().filter(|&&count| count > pass).count();
                clock.advance((self.device.draft_pass)(rows));
            }
        }
        Ok(())
    }

    fn bytes_for_drafts(&self, drafts: usize) -> u64 {
        let bytes = |drafts| rollback_bytes(self.segments, drafts);
        bytes(drafts).saturating_sub(bytes(self.drafts))
    }

    fn allow_drafts(&mut self, drafts: usize) -> Result<(), DeviceError> {
        let bytes = self.bytes_for_drafts(drafts);
        if self.device.control.refuses_growth() && bytes > 0 {
            let source = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
            return Err(DeviceError::Memory { what: "rows with drafts", bytes, source });
        }
        self.seen.reserve(drafts);
        self.drafts = self.drafts.max(drafts);
        Ok(())
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.fill(pool, page, GARBAGE);
    }

    fn observe(&mut self, _observer: Option<Box<dyn Observer>>) {}
}
