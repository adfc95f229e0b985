//! A session: one choice of one request, with its tokens and what it holds.
//!
//! The tokens and the sampler are the truth; everything in the table is a cache of them. So a session can step back
//! into the line at any time and be read again, and nobody can tell but by the clock.

use crate::appetite::Chances;
use crate::constraint::{Advance, Broken, Constraint};
use crate::drafts::Source;
use crate::prefix::Table;
use crate::queue::Waiting;
use crate::request::Cut;
use crate::sampling::{Sampler, random_seed};
use crate::stream::{FinishReason, Sender, Token, Usage};
use motet_model::batch::{Ask, Batch, Want};
use motet_model::{Checkpoint, PAGE};
use std::collections::{TryReserveError, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Recurrent state is saved at least this often.
pub(crate) const CHECKPOINT_EVERY: usize = 512;

/// What all choices of a request share.
pub(crate) struct Task {
    /// Tokens in the prompt.
    pub(crate) prompt: usize,
    /// Page borders in the prompt where recurrent state is saved, ascending.
    borders: Vec<usize>,
    /// Tokens of the answer at most.
    pub(crate) answer: usize,
    end_tokens: Vec<u32>,
    logprobs: Option<u8>,
    prompt_logprobs: Option<u8>,
    pub(crate) digests: bool,
    drafts: bool,
    pub(crate) arrived: Duration,
}

/// One choice of one request.
pub(crate) struct Session {
    /// Number of the request in order of arrival, and the choice: the lower, the older.
    pub(crate) age: (u64, u32),
    pub(crate) task: Arc<Task>,
    /// Prompt and answer; all but the last few have been run.
    pub(crate) tokens: Vec<u32>,
    /// Positions whose rows have been run: the table holds their state.
    pub(crate) read: usize,
    /// Positions that the network's draft head was fed with, that of the next row perhaps included.
    pub(crate) fed: usize,
    /// Positions whose rows have been run or are in flight; drafts that were not kept don't count any more.
    pub(crate) sent: usize,
    /// Batches in flight with rows of it: several with parts of its prompt, else one.
    pub(crate) in_flight: usize,
    /// When it was last sent: the number of the step.
    pub(crate) sent_in: u64,
    /// What becomes of it once nothing of it is in flight, if it does not go on.
    pub(crate) leaving: Option<Leaving>,
    /// The furthest it was ever read: rows before it are run again after stepping back.
    pub(crate) furthest: usize,
    /// Whether its next row is that of the token chosen last; if not, it reads its prompt (or reads again).
    pub(crate) decodes: bool,
    /// Tokens that may follow, for the next step.
    pub(crate) drafts: Vec<u32>,
    /// Where they come from.
    pub(crate) source: Source,
    /// Whether it has been decided how many drafts its next row has.
    pub(crate) asked: bool,
    /// Whether it takes drafts.
    pub(crate) drafting: bool,
    /// How its drafts fared, by source.
    pub(crate) chances: [Chances; 2],
    /// Drafts so far, and those that were chosen.
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
    /// Steps whose first draft was the head's (any, where it drafts for nobody) and could be compared with what was
    /// chosen, and those in which it was.
    pub(crate) compared: usize,
    pub(crate) agreed: usize,
    pub(crate) table: Table,
    pub(crate) sender: Sender,
    pub(crate) sampler: Sampler,
    cut: Option<Box<dyn Cut>>,
    constraint: Option<Box<dyn Constraint>>,
    /// Why its answer can't keep to its form any longer.
    pub(crate) broken: Option<Broken>,
    /// The first row of its segment in flight that doesn't count, since nobody knows what may come there.
    pub(crate) void: Option<usize>,
    /// Tokens chosen so far, an end token included.
    pub(crate) generated: usize,
    /// Prompt tokens whose score was published, the first (which has none) included.
    pub(crate) scored: usize,
    /// The other choices: they wait until the prompt has been read, and then share its pages.
    pub(crate) forks: Vec<Session>,
    /// The checkpoint at the last border of the answer so far, with its block: given up for the next one.
    pub(crate) rolling: Option<(u32, Checkpoint)>,
    /// Borders whose state is saved by batches in flight, ascending, each with the place; they get it once read up to.
    pub(crate) saving: VecDeque<(usize, Checkpoint)>,
    /// The checkpoint that its state was taken from, until rows of it have landed: what saves that may be in flight.
    pub(crate) begun_with: Option<Checkpoint>,
    /// The step in which its prompt last advanced.
    pub(crate) served: u64,
    /// Prompt tokens found in the cache when it first started; `None` until then.
    pub(crate) cached: Option<usize>,
    /// How often it stepped back.
    pub(crate) preemptions: usize,
    pub(crate) times: Times,
}

/// How a session gives up its place, once no batch in flight can touch its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// For good: its reader has left, or has been told an error.
    Gone,
    /// Into the line, to be read again.
    StepsBack,
}

/// When things happened to a session.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    pub(crate) started: Duration,
    pub(crate) first_token: Option<Duration>,
    pub(crate) last_token: Duration,
}

impl Session {
    /// The first choice of a request, which carries the others as forks. It may get `drafts` drafts at a time, and have
    /// rows in so many `flights`.
    pub(crate) fn new(number: u64, waiting: Waiting, context: usize, drafts: usize, flights: usize) -> Self {
        let Waiting { request, senders, answer, arrived } = waiting;
        let prompt = request.prompt.len();
        // The next turn shares the whole prompt, a fork all but its last token.
        let ends = request.marks.iter().copied().chain([prompt - 1, prompt]);
        let mut borders: Vec<usize> = ends.map(|end| end / PAGE * PAGE).filter(|&b| b > 0).collect();
        borders.sort_unstable();
        borders.dedup();
        let task = Arc::new(Task {
            prompt,
            borders,
            answer,
            end_tokens: request.end_tokens,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            digests: request.digests,
            drafts: request.drafts,
            arrived,
        });
        let seed = request.sampling.seed.unwrap_or_else(random_seed);
        let sampling = Arc::new(request.sampling);
        let choice = |(choice, sender): (usize, Sender)| {
            let choice = choice as u32;
            let mut tokens = Vec::with_capacity(prompt + answer);
            tokens.extend_from_slice(&request.prompt);
            Self {
                age: (number, choice),
                task: task.clone(),
                sampler: Sampler::new(sampling.clone(), seed, choice, &tokens, answer),
                tokens,
                read: 0,
                fed: 0,
                sent: 0,
                in_flight: 0,
                sent_in: 0,
                leaving: None,
                furthest: 0,
                decodes: false,
                drafts: Vec::with_capacity(drafts),
                source: Source::Head,
                asked: false,
                drafting: task.drafts,
                chances: [Chances::of_session(); 2],
                drafted: 0,
                accepted: 0,
                compared: 0,
                agreed: 0,
                table: Table::with_capacity(context),
                sender,
                cut: request.cut.as_ref().map(|make| make()),
                constraint: request.constraint.as_ref().map(|make| make()),
                broken: None,
                void: None,
                generated: 0,
                scored: if choice == 0 { 1 } else { prompt },
                forks: Vec::new(),
                rolling: None,
                saving: VecDeque::with_capacity(flights),
                begun_with: None,
                served: 0,
                cached: None,
                preemptions: 0,
                times: Times::default(),
            }
        };
        let mut choices = senders.into_iter().enumerate().map(choice);
        let mut first = choices.next().expect("a checked request has a choice");
        first.forks = choices.collect();
        first
    }

    /// Positions that are reserved when it starts: those of its tokens and `headroom` more.
    pub(crate) fn reservation(&self, headroom: usize) -> usize {
        (self.tokens.len() + headroom).min(self.task.prompt + self.task.answer)
    }

    /// How much of its tokens may come from the cache: all but the last, whose logits are needed; none while the
    /// prompt's own scores are.
    pub(crate) fn sharable(&self) -> usize {
        match self.task.prompt_logprobs {
            Some(_) if self.scored < self.task.prompt => 0,
            _ => self.tokens.len() - 1,
        }
    }

    /// Tokens that its answer may still have.
    pub(crate) fn left(&self) -> usize {
        self.task.answer - self.generated
    }

    /// Whether the row of its next token can be sent.
    pub(crate) fn is_ready(&self) -> bool {
        self.decodes && self.in_flight == 0 && self.leaving.is_none()
    }

    /// Where the next chunk must end at the latest, if state is saved at borders.
    pub(crate) fn next_border(&self) -> usize {
        let regular = (self.sent / CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY;
        let in_prompt = self.task.borders.iter().copied().find(|&b| b > self.sent);
        let last = Some(self.tokens.len() / PAGE * PAGE).filter(|&b| b > self.sent);
        [in_prompt, last].into_iter().flatten().fold(regular.min(self.tokens.len()), usize::min)
    }

    /// Whether state is saved at `position`.
    pub(crate) fn saves_at(&self, position: usize) -> bool {
        position.is_multiple_of(PAGE) && self.border_at(position) != Border::Passing
    }

    /// Whether the state at `position`, a border, is worth keeping, and for how long.
    pub(crate) fn border_at(&self, position: usize) -> Border {
        let in_prompt = self.task.borders.binary_search(&position).is_ok();
        if position.is_multiple_of(CHECKPOINT_EVERY) || in_prompt {
            Border::Lasting
        } else if position > self.task.prompt {
            Border::Rolling
        } else {
            Border::Passing
        }
    }

    /// The positions whose rows have scores of the prompt's tokens to tell, and have not told them.
    pub(crate) fn scores(&self) -> Range<usize> {
        match self.task.prompt_logprobs {
            Some(_) => self.scored - 1..self.task.prompt - 1,
            None => 0..0,
        }
    }

    /// The session's questions to its rows `sent .. sent + rows`, the first of which is row `at` of the batch. From the
    /// last of its tokens on (behind it there may be drafts), each row chooses a token.
    pub(crate) fn ask(&mut self, rows: usize, at: usize, vocab: usize, batch: &mut Batch) {
        let task = self.task.clone();
        let end = self.sent + rows;
        let scores = self.scores();
        self.void = None;
        let told = if task.digests { self.sent..end.min(self.tokens.len() - 1) } else { scores.clone() };
        for position in self.sent.max(told.start)..end.min(told.end) {
            let logprob = scores.contains(&position);
            batch.asks.push(Ask {
                row: (at + position - self.sent) as u32,
                want: Want::Score { target: self.tokens[position + 1] },
                top: task.prompt_logprobs.filter(|_| logprob).unwrap_or(0),
                logprob,
                digest: task.digests,
            });
        }
        if end >= self.tokens.len() && task.answer > 0 {
            let sampling = self.sampler.parameters(batch);
            let last = at + self.tokens.len() - 1 - self.sent;
            for row in last..at + rows {
                let mut sampling = sampling.clone();
                if let Some(constraint) = &mut self.constraint {
                    if row > last {
                        constraint.advance(self.drafts[row - last - 1]);
                    }
                    match allow(&mut **constraint, vocab, batch) {
                        Ok(allowed) => sampling.allowed = allowed,
                        Err(broken) if row == last => self.broken = Some(broken),
                        Err(_) => self.void = self.void.or(Some(row - at)),
                    }
                }
                batch.asks.push(Ask {
                    row: row as u32,
                    want: Want::Sample(sampling),
                    top: task.logprobs.unwrap_or(0),
                    logprob: task.logprobs.is_some(),
                    digest: task.digests,
                });
            }
            if let Some(constraint) = &mut self.constraint {
                constraint.roll_back(at + rows - 1 - last);
            }
        }
    }

    /// Makes room for so many drafts.
    pub(crate) fn allow_drafts(&mut self, drafts: usize) -> Result<(), TryReserveError> {
        self.drafts.try_reserve_exact(drafts.saturating_sub(self.drafts.len()))?;
        self.forks.iter_mut().try_for_each(|fork| fork.allow_drafts(drafts))
    }

    /// Takes drafts for the next step: those before the first that may not stand there, or behind which nothing may.
    pub(crate) fn expect(&mut self, drafts: &[u32]) {
        self.drafts.extend_from_slice(drafts);
        if let Some(constraint) = &mut self.constraint {
            let (mut advanced, mut expected) = (0, 0);
            for &draft in drafts {
                let form = constraint.advance(draft);
                advanced += usize::from(form != Advance::Refused);
                if form != Advance::GoesOn {
                    break;
                }
                expected += 1;
            }
            constraint.roll_back(advanced);
            self.drafts.truncate(expected);
        }
    }

    /// Takes a chosen token: publishes it unless it is an end token, and says whether the answer ends with it.
    pub(crate) fn take(&mut self, token: Token, top: &[(u32, f32)]) -> Option<FinishReason> {
        let id = token.token;
        self.generated += 1;
        if self.task.end_tokens.contains(&id) {
            return Some(FinishReason::EndToken(id));
        }
        let form = self.constraint.as_mut().map(|constraint| constraint.advance(id));
        if form == Some(Advance::Refused) {
            self.broken = Some(Broken { what: "the token that was chosen may not stand there".to_owned() });
            return Some(FinishReason::Cut);
        }
        self.decodes = true;
        self.tokens.push(id);
        self.sampler.learn(id);
        self.sender.token(token, top);
        if self.cut.as_mut().is_some_and(|cut| cut.push(id)) {
            return Some(FinishReason::Cut);
        }
        if form == Some(Advance::Ends) {
            return Some(FinishReason::Cut);
        }
        (self.generated == self.task.answer).then_some(FinishReason::Length)
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt: self.task.prompt,
            cached: self.cached.unwrap_or(0),
            generated: self.generated,
            drafted: self.drafted,
            accepted: self.accepted,
        }
    }
}

/// Writes down which tokens may come next, unless all may; says where.
fn allow(constraint: &mut dyn Constraint, vocab: usize, batch: &mut Batch) -> Result<Range<u32>, Broken> {
    if constraint.asleep() {
        return Ok(0..0);
    }
    let from = batch.allowed.len();
    batch.allowed.resize(from + vocab.div_ceil(64), 0);
    let made = constraint.mask(&mut batch.allowed[from..]);
    if made.is_err() {
        batch.allowed.truncate(from);
    }
    made.map(|()| from as u32..batch.allowed.len() as u32)
}

/// What the state at a page border is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Border {
    /// The end of a message, or a regular distance: kept.
    Lasting,
    /// Within the answer: kept until the next border, or if the answer ends.
    Rolling,
    /// Nothing.
    Passing,
}
