//! Which rows run in the next step, and what their answers mean.
//!
//! [`Scheduler::prepare`] sees to it that every session that waits for its next token has a page for it, and
//! [`drafting`] that some have drafts. [`Scheduler::fill`] fills a batch: those sessions come first, a row for the token
//! and one for each draft; what is left of the step's time goes to prompts, shared fairly. [`Scheduler::settle`] takes
//! the answers. Between the two stages ran the rows; the scheduler knows them only by the time they took. After warm-up
//! none of them allocates.
//!
//! Where there are several stages, several batches are in flight, formed of the sessions that are ready when one can be
//! sent ([`micro_batches`]). A session's token waits for the one before; chunks of a prompt follow each other. Pages and
//! places return when nothing in flight can touch them.

mod drafting;
mod feeding;
mod leaving;
mod micro_batches;
mod prompts;
mod saving;

use crate::agreement::{Agreement, FallenOut};
use crate::appetite::{Appetite, Wish};
use crate::costs::Costs;
use crate::drafts::{Drafts, Source};
use crate::metrics::MetricsSnapshot;
use crate::pipeline::Flight;
use crate::plan::Plan;
use crate::prefix::PrefixCache;
use crate::queue::Queue;
use crate::session::{Leaving, Session};
use crate::stream::{FinishReason, StreamError, Token};
use micro_batches::MicroBatches;
use motet_model::batch::{Answer, Batch, Commit, MAX_POOLS, Segment, StateOp, Want};
use motet_model::{InFlight, PAGE, Slot};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// All sessions, and everything they share.
pub(crate) struct Scheduler {
    cache: PrefixCache,
    /// Sessions with a place, by slot.
    running: Vec<Option<Box<Session>>>,
    free_slots: Vec<Slot>,
    /// Slots of the running sessions, oldest session first.
    by_age: Vec<Slot>,
    /// Sessions that go before the queue, oldest first: those that stepped back, forks, and the queue's first.
    line: VecDeque<Box<Session>>,
    /// Changes of state for the next batch, in order.
    changes: Vec<StateOp>,
    /// The sessions whose next tokens this step decides, oldest first.
    going: Vec<Slot>,
    /// Prompts of this step with the rows that each could use.
    prompts: Vec<(Slot, usize)>,
    /// Sessions of this step that could have drafts, and how many.
    wishes: Vec<Wish>,
    /// The drafts that are known at once, one of these sessions after the other.
    known: Vec<u32>,
    /// Chooses which and how many, unless their number is given.
    appetite: Option<Appetite>,
    agreement: Agreement,
    /// What `agreement` had to say of the last step.
    fallen_out: Option<FallenOut>,
    /// Rows of prompts in the last step.
    prompt_rows: usize,
    costs: Costs,
    micro_batches: MicroBatches,
    /// Requests that came out of the queue.
    arrivals: u64,
    /// Steps filled.
    steps: u64,
    /// Rows a batch may have: the workspace there is.
    most_rows: usize,
    /// Drafts that a session may have at a time.
    most_drafts: usize,
    /// Whether the network's own draft head is loaded.
    head: bool,
    /// Whose agreement is watched: the head's where it drafts, for it may break.
    watched: Source,
    pools: usize,
    recurrent: bool,
    context: usize,
    vocab: usize,
    headroom: usize,
    step: Duration,
    chunk: Option<usize>,
}

impl Scheduler {
    pub(crate) fn new(plan: &Plan) -> Self {
        let (limits, layout) = (&plan.limits, &plan.layout);
        let sessions = limits.sessions;
        Self {
            cache: PrefixCache::new(layout, plan.blocks, &limits.pages, limits.checkpoints, limits.context),
            running: (0..sessions).map(|_| None).collect(),
            free_slots: (0..sessions as u32).rev().map(Slot).collect(),
            by_age: Vec::with_capacity(sessions),
            line: VecDeque::with_capacity(sessions + plan.options.queue + 1),
            changes: Vec::with_capacity(limits.batch.before),
            going: Vec::with_capacity(sessions),
            prompts: Vec::with_capacity(sessions),
            wishes: Vec::with_capacity(sessions),
            known: Vec::with_capacity(sessions * limits.batch.drafts),
            appetite: (plan.options.drafts == Drafts::Auto)
                .then(|| Appetite::new(sessions, limits.batch.drafts)),
            agreement: Agreement::default(),
            fallen_out: None,
            prompt_rows: 0,
            costs: Costs::default(),
            micro_batches: MicroBatches::new(plan.split.stages(), plan.flights),
            arrivals: 0,
            steps: 0,
            most_rows: 0,
            most_drafts: limits.batch.drafts,
            head: limits.draft_head,
            watched: Source::Head,
            pools: layout.pools.len(),
            recurrent: layout.recurrent_floats > 0,
            context: limits.context,
            vocab: plan.vocab,
            headroom: plan.options.headroom,
            step: plan.options.step,
            chunk: plan.options.prefill_chunk,
        }
    }

    /// Begins a step: whoever waits for its next token, and is to go in this one, has a page for its row, oldest first.
    /// One that needs a page where none is left makes the youngest step back, itself if need be; so the oldest always
    /// advances.
    pub(crate) fn prepare(&mut self, queue: &Queue, metrics: &mut MetricsSnapshot) {
        self.steps += 1;
        self.bury_the_dead(queue, metrics);
        // Where all that were chosen have stepped back, others are chosen.
        while self.choose_who_goes() > 0 && self.make_room_for_all(metrics) && self.going.is_empty() {}
    }

    /// Gives pages to all that go. Who could have none does not go; true if one of them has stepped back.
    fn make_room_for_all(&mut self, metrics: &mut MetricsSnapshot) -> bool {
        let (mut at, mut stepped_back) = (0, false);
        while at < self.going.len() {
            let slot = self.going[at];
            if self.session(slot).is_some_and(Session::is_ready) && self.make_room(slot, metrics) {
                let session = self.running[slot.0 as usize].as_mut().expect("a running session");
                self.cache.grow(&mut session.table, session.read + 1, &mut self.changes);
                at += 1;
            } else {
                self.going.remove(at);
                stepped_back |= self.session(slot).is_none();
            }
        }
        stepped_back
    }

    /// Fills the empty batch of a step that was prepared; it stays empty if there is nothing to do.
    pub(crate) fn fill(
        &mut self,
        batch: &mut Batch,
        queue: &Queue,
        now: Duration,
        metrics: &mut MetricsSnapshot,
    ) {
        self.decode(batch);
        self.admit(queue, now, metrics);
        let decoding = batch.rows();
        self.prefill(batch);
        self.prompt_rows = batch.rows() - decoding;
        self.feed(batch);
        if batch.rows() > 0 {
            batch.before.append(&mut self.changes);
        }
    }

    /// The rows of each session that goes: one, and one for each draft, the oldest session first. Drafts may have been
    /// made in several flights for the same room; where it does not do for all, there are fewer.
    fn decode(&mut self, batch: &mut Batch) {
        let mut spare = self.most_rows.saturating_sub(self.going.len() + self.all_behind() + 1);
        for at in 0..self.going.len() {
            let slot = self.going[at];
            let drafts = &mut self.session_mut(slot).drafts;
            drafts.truncate(spare);
            spare -= drafts.len();
            let rows = 1 + drafts.len();
            self.add(batch, slot, rows);
        }
    }

    /// Whether the session could get pages for its next row.
    fn make_room(&mut self, slot: Slot, metrics: &mut MetricsSnapshot) -> bool {
        loop {
            let session = self.running(slot);
            let wanted = session.read + 1;
            if self.cache.reach(&session.table, wanted) >= wanted {
                return true;
            }
            let youngest = *self.by_age.last().expect("the session itself is running");
            if self.running(youngest).leaving.is_none() {
                self.leave(youngest, Leaving::StepsBack);
                metrics.num_preemptions += 1;
            }
            if youngest == slot || self.by_age.last() == Some(&youngest) {
                // Its own pages are gone, or those that it waits for come back with a batch in flight.
                return false;
            }
        }
    }

    /// Starts sessions while there are places and pages, strictly in order of age: nobody overtakes, nobody starves.
    fn admit(&mut self, queue: &Queue, now: Duration, metrics: &mut MetricsSnapshot) {
        while !self.free_slots.is_empty() {
            if self.line.is_empty() {
                let Some(waiting) = queue.pop(now) else { break };
                self.line.push_back(Box::new(Session::new(
                    self.arrivals,
                    waiting,
                    self.context,
                    self.most_drafts,
                    self.micro_batches.flights(),
                )));
                self.arrivals += 1;
            }
            let Some(session) = self.line.pop_front() else { break };
            if let Err(session) = self.start(session, now, metrics) {
                self.line.push_front(session);
                break;
            }
        }
    }

    /// Gives a session a place and what the prefix cache has of its tokens, or gives it back.
    fn start(
        &mut self,
        mut session: Box<Session>,
        now: Duration,
        metrics: &mut MetricsSnapshot,
    ) -> Result<(), Box<Session>> {
        let hit = self.cache.find(&session.tokens, session.sharable());
        let positions = session.reservation(self.headroom);
        if !self.cache.admit(hit, positions, &mut session.table) {
            return Err(session);
        }
        let slot = self.free_slots.pop().expect("a free slot was seen");
        if self.recurrent {
            self.changes.push(match hit.checkpoint {
                Some(from) => StateOp::Restore { from, slot },
                None => StateOp::Clear { slot },
            });
        }
        session.read = hit.blocks * PAGE;
        session.fed = session.read;
        session.sent = session.read;
        session.furthest = session.furthest.max(session.read);
        session.begun_with = hit.checkpoint;
        session.decodes = false;
        session.served = self.steps;
        if session.cached.is_none() {
            session.cached = Some(session.read);
            session.times.started = now;
            session.sender.started(session.read, session.sampler.seed());
            metrics.started(&session, now);
        }
        let age = session.age;
        let at = self.by_age.partition_point(|&s| self.running(s).age < age);
        self.by_age.insert(at, slot);
        self.running[slot.0 as usize] = Some(session);
        Ok(())
    }

    /// Adds a segment: the session's next `rows` rows, for which there are pages.
    fn add(&mut self, batch: &mut Batch, slot: Slot, rows: usize) {
        let session = self.running[slot.0 as usize].as_mut().expect("a running session");
        self.cache.grow(&mut session.table, session.sent + rows, &mut self.changes);
        if !session.decodes {
            session.served = self.steps;
        }
        self.save_ahead(slot);
        self.lay(batch, slot, rows);
        let steps = self.steps;
        let session = self.session_mut(slot);
        session.sent += rows;
        session.in_flight += 1;
        session.sent_in = steps;
    }

    /// Lays a session's next `rows` rows into a batch: of its tokens, and behind the last of them its drafts.
    fn lay(&mut self, batch: &mut Batch, slot: Slot, rows: usize) {
        let session = self.running[slot.0 as usize].as_mut().expect("a running session");
        let first_row = batch.tokens.len();
        session.ask(rows, first_row, self.vocab, batch);
        batch.tokens.extend(session.tokens[session.sent..].iter().chain(&session.drafts).take(rows));
        let mut tables: [Range<u32>; MAX_POOLS] = std::array::from_fn(|_| 0..0);
        for (pool, range) in tables.iter_mut().enumerate().take(self.pools) {
            let from = batch.pages.len() as u32;
            batch.pages.extend_from_slice(self.cache.table(&session.table, pool));
            *range = from..batch.pages.len() as u32;
        }
        let drafts = session.sent + rows > session.tokens.len();
        batch.segments.push(Segment {
            slot,
            first_position: session.sent as u32,
            rows: first_row as u32..batch.tokens.len() as u32,
            tables,
            commit: if drafts { Commit::Verify } else { Commit::All },
            feed: None,
        });
    }

    /// Takes the answers of a step: state has advanced, tokens are published, finished sessions leave. The rows that
    /// sessions with drafts keep are in [`Flight::kept`] then.
    pub(crate) fn settle(&mut self, flight: &mut Flight, now: Duration, metrics: &mut MetricsSnapshot) {
        let all = flight.time();
        let Flight { work, took, kept, saved, .. } = flight;
        self.costs.measured(work.batch.rows(), all);
        self.micro_batches.measured(work.batch.rows(), took);
        metrics.stepped(work.batch.rows(), took);
        let mut answers = &work.answers[..];
        for (i, segment) in work.batch.segments.iter().enumerate() {
            let (slot, verifies) = (segment.slot, segment.commit == Commit::Verify);
            let mine;
            (mine, answers) = answers.split_at(answers.partition_point(|a| a.row < segment.rows.end));
            self.session_mut(slot).drafts.clear();
            if !self.landed(slot) {
                continue;
            }
            if self.fail_if_broken(slot, metrics) {
                continue;
            }
            let fault = work.faults.iter().find(|fault| fault.segment as usize == i);
            let sound = fault.map_or(segment.rows.len(), |fault| (fault.row - segment.rows.start) as usize);
            let (rows, end) = self.publish(segment, mine, sound, work, now, metrics);
            if rows > sound {
                let position = segment.first_position as usize + sound;
                self.fail(slot, StreamError::NonFinite { position }, metrics);
                continue;
            }
            if self.fail_if_broken(slot, metrics) {
                continue;
            }
            let changes = self.changes.len();
            if segment.feed.is_some() && verifies {
                self.session_mut(slot).fed = segment.first_position as usize + rows;
            }
            self.advance(slot, rows, metrics);
            if verifies {
                kept.push((slot, rows));
                saved.extend(self.changes[changes..].iter().filter_map(|change| match *change {
                    StateOp::Save { into, .. } => Some(into),
                    _ => None,
                }));
                self.learn(slot, segment.rows.len() - 1, rows - 1, end.is_some(), metrics);
            }
            if let Some(reason) = end {
                self.finish(slot, reason, now, metrics);
            }
        }
    }

    /// One batch less is in flight with rows of a session: whether it goes on.
    fn landed(&mut self, slot: Slot) -> bool {
        let session = self.session_mut(slot);
        session.in_flight -= 1;
        session.asked = false;
        match session.leaving {
            None => true,
            Some(how) => {
                self.leave(slot, how);
                false
            }
        }
    }

    /// Publishes what the first `sound` rows of a session answered, and says how many of its rows are kept and whether
    /// the answer ends. A row behind a draft counts only if the row before chose that draft; what such a row holds that
    /// does not count is nobody's.
    fn publish(
        &mut self,
        segment: &Segment,
        answers: &[Answer],
        sound: usize,
        work: &InFlight,
        now: Duration,
        metrics: &mut MetricsSnapshot,
    ) -> (usize, Option<FinishReason>) {
        let session = self.running[segment.slot.0 as usize].as_mut().expect("a running session");
        let tokens = work.batch.segment_tokens(segment);
        let before = session.generated;
        let outcome = 'rows: {
            for answer in answers {
                let row = (answer.row - segment.rows.start) as usize;
                if row >= sound {
                    break;
                }
                let position = segment.first_position as usize + row;
                if session.task.digests {
                    session.sender.row(position, answer.digest);
                }
                let top = &work.top[answer.top.start as usize..answer.top.end as usize];
                let token = Token::new(answer.token, answer.logprob);
                let ask = work.batch.asks.binary_search_by_key(&answer.row, |a| a.row);
                match ask.map(|i| &work.batch.asks[i].want) {
                    Ok(Want::Score { .. }) => {
                        if session.scores().contains(&position) {
                            session.scored += 1;
                            session.sender.prompt(token, top);
                        }
                    }
                    _ => {
                        let end = session.take(token, top);
                        let goes_on =
                            tokens.get(row + 1) == Some(&answer.token) && session.void != Some(row + 1);
                        if end.is_some() || !goes_on {
                            break 'rows (row + 1, end);
                        }
                    }
                }
            }
            let read_only = session.task.answer == 0 && session.read + tokens.len() == session.tokens.len();
            (tokens.len(), read_only.then_some(FinishReason::Length))
        };
        let chosen = session.generated - before;
        if chosen > 0 {
            metrics.chosen(chosen, &mut session.times, session.task.arrived, now);
        }
        outcome
    }

    /// The next `rows` rows of a session have been run: pages are sealed, state is saved at a border, forks set out.
    fn advance(&mut self, slot: Slot, rows: usize, metrics: &mut MetricsSnapshot) {
        let session = self.running[slot.0 as usize].as_mut().expect("a running session");
        let prompt = session.task.prompt;
        session.read += rows;
        if session.in_flight == 0 {
            session.sent = session.read;
        }
        metrics.rows_were_run(session, rows);
        session.furthest = session.furthest.max(session.read);
        self.cache.advance(&mut session.table, &session.tokens[..session.read]);
        session.begun_with = None;
        self.save(slot);
        let session = self.session_mut(slot);
        if session.read >= prompt && !session.forks.is_empty() {
            let forks = std::mem::take(&mut session.forks);
            forks.into_iter().for_each(|fork| self.line_up(Box::new(fork)));
        }
    }

    fn session(&self, slot: Slot) -> Option<&Session> {
        self.running[slot.0 as usize].as_deref()
    }

    fn session_mut(&mut self, slot: Slot) -> &mut Session {
        self.running[slot.0 as usize].as_deref_mut().expect("a running session")
    }

    fn running(&self, slot: Slot) -> &Session {
        self.session(slot).expect("a running session")
    }

    /// Rows that could run now: what the workspace should hold.
    pub(crate) fn rows_wanted(&self) -> usize {
        let running = self.by_age.iter().map(|&slot| self.running(slot));
        let rows = |s: &Session| s.tokens.len() - s.read + self.most_drafts;
        running.chain(self.line.iter().map(|s| &**s)).map(rows).sum()
    }

    /// The workspace holds so many rows from now on.
    pub(crate) fn set_most_rows(&mut self, rows: usize) {
        self.most_rows = rows;
    }

    /// That drafts have stopped agreeing, if the last step showed it.
    pub(crate) fn take_fallen_out(&mut self) -> Option<FallenOut> {
        self.fallen_out.take()
    }

    /// Brings the gauges up to date.
    pub(crate) fn measure(&self, queue: &Queue, metrics: &mut MetricsSnapshot) {
        let pages = self.cache.pages();
        metrics.num_requests_running = self.by_age.len();
        metrics.num_requests_waiting = self.line.len() + queue.len();
        metrics.kv_cache_usage = pages.held() as f64 / pages.count().max(1) as f64;
        metrics.cached_pages = pages.idle();
        metrics.checkpoints_used = self.cache.checkpoints().used();
    }

    /// Calls `poison` with the free pages of every pool that were not poisoned since they became free.
    pub(crate) fn poison(&mut self, poison: impl FnMut(usize, u32)) {
        self.cache.take_unpoisoned(poison);
    }

    /// Whether nothing runs, waits in line or holds anything.
    pub(crate) fn at_rest(&self) -> bool {
        self.by_age.is_empty()
            && self.line.is_empty()
            && self.free_slots.len() == self.running.len()
            && self.cache.at_rest()
            && self.cache.is_consistent()
    }
}
