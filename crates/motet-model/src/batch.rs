//! A batch: the rows of one step, and what comes back from it.
//!
//! A batch is an explicit list of segments; a row that is not in it does not exist for the step. Everything
//! lies in flat vectors that keep their capacity from step to step: filling a batch must never allocate once
//! [`Batch::with_capacity`] has sized it. A batch knows nothing of devices.

use std::collections::TryReserveError;
use std::ops::Range;

/// Positions on one page of keys and values, for every model and device.
pub const PAGE: usize = 64;

/// Positions whose hidden rows a session remembers for a draft head, the last ones: as many may lack its keys and values,
/// but one, for the entry of a position comes of the hidden row before it. A part of a page.
pub const RECENT: usize = 32;

/// A page-table entry for a page that no row to come can see (sliding windows). It is never touched.
pub const NO_PAGE: u32 = u32::MAX;

/// A session's place in a stage's arenas of recurrent state. Stages index by it; the engine hands it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A place for a saved copy of one session's recurrent state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Checkpoint(pub u32);

/// What becomes of a segment's rows after the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// Every row is kept: prefill, and decode of one token.
    All,
    /// The rows carry drafts: the first token is certain, those behind it are drafts. Recurrent states stay behind the
    /// first row until `Stage::commit` names how many rows to keep. A row's sampling counts the drafts up to the row as
    /// generated, as if they had been accepted: where one was not, nobody looks at the row.
    Verify,
}

/// The rows of one session in one step: consecutive positions, ascending.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The session's slot.
    pub slot: Slot,
    /// The position of the first row.
    pub first_position: u32,
    /// The rows of this segment among the batch's rows; `Batch::tokens[rows]` are its tokens.
    pub rows: Range<u32>,
    /// For each pool of the network (`StateLayout::pools`), where its page table lies in [`Batch::pages`].
    /// Entry `i` of a table holds positions `64·i ..`; the table covers all rows of the segment.
    pub tables: [Range<u32>; MAX_POOLS],
    /// Whether its rows are kept without asking.
    pub commit: Commit,
    /// Whether the draft head is fed: in a step with these rows, and before them with those positions that it was not
    /// fed with yet, the last before `first_position`, whose tokens lie here in [`Batch::behind`]; for `Stage::draft`
    /// with those positions only. It changes nothing where no draft head is loaded.
    pub feed: Option<Range<u32>>,
}

/// Kinds of attention state (all positions, sliding window, …) one network may have.
pub const MAX_POOLS: usize = 2;

/// A change of session state that a stage makes before it runs the rows, in the order listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateOp {
    /// A page changes owner: set it to zero.
    ZeroPage {
        /// Index of the pool in `StateLayout::pools`.
        pool: u32,
        /// The page.
        page: u32,
    },
    /// A session begins: its recurrent state is that before the first token.
    Clear {
        /// The session.
        slot: Slot,
    },
    /// Copy a session's recurrent state into a checkpoint.
    Save {
        /// The session.
        slot: Slot,
        /// Where the copy goes.
        into: Checkpoint,
    },
    /// A session takes over the state of a checkpoint.
    Restore {
        /// The checkpoint.
        from: Checkpoint,
        /// The session.
        slot: Slot,
    },
}

/// A token that a session has seen, for penalties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The token.
    pub token: u32,
    /// How often it was generated (0: it stands in the prompt only). The repetition penalty takes every entry,
    /// the frequency and presence penalties those that were generated.
    pub generated: u32,
}

/// How a token is chosen from a row's logits: the race of DESIGN "Drafts".
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Key of the noise.
    pub seed: u64,
    /// Which of the `n` choices of a request this is: a counter word of the noise.
    pub choice: u32,
    /// 0 takes the greatest processed logit.
    pub temperature: f32,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Candidates kept by cumulated probability; 1 keeps all.
    pub top_p: f32,
    /// Candidates kept whose probability is at least this share of the greatest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of seen tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once per generated occurrence; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once if generated; 0 is off.
    pub presence_penalty: f32,
    /// The tokens seen, in [`Batch::seen`]; empty when no penalty is set.
    pub seen: Range<u32>,
    /// Added to logits by token, in [`Batch::bias`].
    pub bias: Range<u32>,
    /// The tokens that may be chosen, as a set of bits in [`Batch::allowed`]: token `t` is bit `t % 64` of word
    /// `t / 64`; empty: all. The others count as −∞, after penalties and biases.
    pub allowed: Range<u32>,
}

/// What a row is asked for besides running.
#[derive(Debug, Clone, PartialEq)]
pub enum Want {
    /// Choose the next token.
    Sample(Sampling),
    /// The log-probability of this given next token (perplexity, log-probabilities of prompts).
    Score {
        /// The token that follows the row.
        target: u32,
    },
}

/// A question to one row's logits.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The row in the batch.
    pub row: u32,
    /// What is wanted.
    pub want: Want,
    /// How many of the most likely tokens to report with their log-probabilities (of raw logits): 0–20.
    pub top: u8,
    /// Whether the log-probability of the token is wanted (it costs a pass over the row).
    pub logprob: bool,
    /// Whether a digest of the row's logits is wanted (`motet verify`).
    pub digest: bool,
}

/// The rows of one step.
#[derive(Debug, Default)]
pub struct Batch {
    /// Changes of state before the rows run.
    pub before: Vec<StateOp>,
    /// At most one segment per session; their rows are consecutive: `[0, a), [a, b), …`.
    pub segments: Vec<Segment>,
    /// `[rows]`
    pub tokens: Vec<u32>,
    /// Page tables of the segments.
    pub pages: Vec<u32>,
    /// Questions, rows ascending, at most one to a row.
    pub asks: Vec<Ask>,
    /// Tokens seen, for penalties.
    pub seen: Vec<Seen>,
    /// Logit biases: (token, added).
    pub bias: Vec<(u32, f32)>,
    /// Sets of tokens that may be chosen.
    pub allowed: Vec<u64>,
    /// Tokens that a draft head was not fed with yet.
    pub behind: Vec<u32>,
    /// How many tokens to draft for each segment, descending, none 0: set in a batch for `Stage::draft`, where every
    /// segment has one row (the token that is certain and not yet run) and one [`Want::Sample`]. Empty otherwise.
    pub drafts: Vec<u32>,
}

/// The greatest lengths of a batch's parts: what its vectors are sized by, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Rows.
    pub rows: usize,
    /// Segments (sessions).
    pub segments: usize,
    /// Page-table entries in all.
    pub pages: usize,
    /// State operations.
    pub before: usize,
    /// Rows with a question.
    pub asks: usize,
    /// Tokens seen, over all sessions with penalties.
    pub seen: usize,
    /// Logit biases over all sessions.
    pub bias: usize,
    /// Words of the sets of tokens that may be chosen.
    pub allowed: usize,
    /// Drafts to a segment; 0 where nothing is drafted or verified.
    pub drafts: usize,
    /// Tokens that a draft head was not fed with yet; 0 without one.
    pub behind: usize,
}

impl Batch {
    /// An empty batch that can take up to `limits` without allocating.
    pub fn with_capacity(limits: &BatchLimits) -> Self {
        Self {
            before: Vec::with_capacity(limits.before),
            segments: Vec::with_capacity(limits.segments),
            tokens: Vec::with_capacity(limits.rows),
            pages: Vec::with_capacity(limits.pages),
            asks: Vec::with_capacity(limits.asks),
            seen: Vec::with_capacity(limits.seen),
            bias: Vec::with_capacity(limits.bias),
            allowed: Vec::with_capacity(limits.allowed),
            behind: Vec::with_capacity(limits.behind),
            drafts: Vec::with_capacity(if limits.drafts > 0 { limits.segments } else { 0 }),
        }
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.before.clear();
        self.segments.clear();
        self.tokens.clear();
        self.pages.clear();
        self.asks.clear();
        self.seen.clear();
        self.bias.clear();
        self.allowed.clear();
        self.behind.clear();
        self.drafts.clear();
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// The page table of `segment` in `pool`.
    pub fn table(&self, segment: &Segment, pool: usize) -> &[u32] {
        let r = &segment.tables[pool];
        &self.pages[r.start as usize..r.end as usize]
    }

    /// The tokens of `segment`.
    pub fn segment_tokens(&self, segment: &Segment) -> &[u32] {
        &self.tokens[segment.rows.start as usize..segment.rows.end as usize]
    }

    /// The tokens before `segment` that the draft head is to be fed with; none if it is not to be fed.
    pub fn tokens_behind(&self, segment: &Segment) -> &[u32] {
        segment.feed.as_ref().map_or(&[], |r| &self.behind[r.start as usize..r.end as usize])
    }

    /// The positions that the draft head is to be fed with because of `segment`: those behind, and in a step its own.
    pub fn fed(&self, segment: &Segment) -> Range<u32> {
        let first = segment.first_position;
        let own = if segment.feed.is_some() && self.drafts.is_empty() { segment.rows.len() } else { 0 };
        first - self.tokens_behind(segment).len() as u32..first + own as u32
    }

    /// How many rows the draft head is to be fed with.
    pub fn fed_rows(&self) -> usize {
        self.segments.iter().map(|s| self.fed(s).len()).sum()
    }

    /// The tokens that the sampling of one row must know of.
    pub fn seen(&self, sampling: &Sampling) -> &[Seen] {
        &self.seen[sampling.seen.start as usize..sampling.seen.end as usize]
    }

    /// The logit biases of one row.
    pub fn bias(&self, sampling: &Sampling) -> &[(u32, f32)] {
        &self.bias[sampling.bias.start as usize..sampling.bias.end as usize]
    }

    /// The tokens that may be chosen in one row; empty: all.
    pub fn allowed(&self, sampling: &Sampling) -> &[u64] {
        &self.allowed[sampling.allowed.start as usize..sampling.allowed.end as usize]
    }

    /// Checks what every stage relies on: rows cover the segments without gaps, tables cover the rows, asks ascend.
    ///
    /// # Errors
    /// A sentence that names the first rule that is broken. A batch that fails is the scheduler's mistake.
    pub fn check(&self, pools: usize) -> Result<(), String> {
        let mut next = 0;
        for (i, s) in self.segments.iter().enumerate() {
            if s.rows.start != next || s.rows.end <= s.rows.start {
                return Err(format!("segment {i}: rows {:?}, expected to start at {next}", s.rows));
            }
            next = s.rows.end;
            let last = s.first_position as usize + s.rows.len() - 1;
            for p in 0..pools {
                let table = self.table(s, p);
                if table.len() <= last / PAGE {
                    return Err(format!("segment {i}, pool {p}: {} pages for position {last}", table.len()));
                }
                let first = s.first_position as usize / PAGE;
                if table[first..=last / PAGE].contains(&NO_PAGE) {
                    return Err(format!("segment {i}, pool {p}: no page to write position {last} to"));
                }
            }
            if let Some(behind) = &s.feed {
                let least = (s.first_position as usize).min(RECENT - 1);
                if behind.start > behind.end
                    || behind.end as usize > self.behind.len()
                    || behind.len() > least
                {
                    let (found, first) = (behind.len(), s.first_position);
                    return Err(format!("segment {i}: {found} positions to feed before {first}"));
                }
            }
            if self.segments[..i].iter().any(|o| o.slot == s.slot) {
                return Err(format!("segment {i}: slot {} stands twice in the batch", s.slot.0));
            }
        }
        if next as usize != self.tokens.len() {
            return Err(format!("{} tokens, segments hold {next} rows", self.tokens.len()));
        }
        if !self.asks.is_sorted_by(|a, b| a.row < b.row) || self.asks.last().is_some_and(|a| a.row >= next) {
            return Err("asks must ascend, one to a row, and name rows of the batch".into());
        }
        Ok(())
    }
}

/// The answer to an [`Ask`].
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The row in the batch.
    pub row: u32,
    /// The token chosen, or the target asked for.
    pub token: u32,
    /// Natural logarithm of its probability under the raw logits; NaN unless asked for.
    pub logprob: f32,
    /// The most likely tokens, best first, in [`InFlight::top`].
    pub top: Range<u32>,
    /// Digest of the bits of the row's logits; 0 unless asked for.
    pub digest: u64,
}

/// A row whose hidden values or logits are not finite: it has no answer, and neither have the rows behind it in its
/// segment a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// The number of the segment in the batch.
    pub segment: u32,
    /// The row in the batch.
    pub row: u32,
}

/// A batch on its way through the stages, with what travels with it.
#[derive(Debug, Default)]
pub struct InFlight {
    /// The rows.
    pub batch: Batch,
    /// The residual stream, `[rows, d_model]`: the hand-off from stage to stage.
    pub hidden: Vec<f32>,
    /// One answer per ask, in their order, once the last stage is done; none for rows that are not finite.
    pub answers: Vec<Answer>,
    /// (token, log-probability) of the answers' top lists.
    pub top: Vec<(u32, f32)>,
    /// The segments with a row that is not finite, ascending, each with the first such row.
    pub faults: Vec<Fault>,
    /// What `Stage::draft` drafted, segment after segment, `Batch::drafts` tokens each.
    pub drafted: Vec<u32>,
}

impl InFlight {
    /// Sized once, at start-up.
    pub fn with_capacity(limits: &BatchLimits, d_model: usize) -> Self {
        Self {
            batch: Batch::with_capacity(limits),
            hidden: vec![0.0; limits.rows * d_model],
            answers: Vec::with_capacity(limits.asks),
            top: Vec::with_capacity(limits.asks * 20),
            faults: Vec::with_capacity(limits.segments),
            drafted: Vec::with_capacity(limits.segments * limits.drafts),
        }
    }

    /// Makes room for batches of `limits` that have more drafts than those it was sized for.
    ///
    /// # Errors
    /// The memory could not be had.
    pub fn allow_drafts(&mut self, limits: &BatchLimits) -> Result<(), TryReserveError> {
        fn to<T>(list: &mut Vec<T>, capacity: usize) -> Result<(), TryReserveError> {
            list.try_reserve_exact(capacity.saturating_sub(list.len()))
        }
        to(&mut self.batch.before, limits.before)?;
        to(&mut self.batch.allowed, limits.allowed)?;
        to(&mut self.batch.drafts, limits.segments)?;
        to(&mut self.drafted, limits.segments * limits.drafts)
    }

    /// Bytes that [`InFlight::with_capacity`] takes.
    pub fn bytes(limits: &BatchLimits, d_model: usize) -> u64 {
        let l = limits;
        let parts = [
            l.before * size_of::<StateOp>(),
            l.segments * size_of::<Segment>(),
            (l.rows + l.pages + l.behind) * 4,
            l.asks * (size_of::<Ask>() + size_of::<Answer>() + 20 * 8),
            l.seen * size_of::<Seen>() + l.bias * 8 + l.allowed * 8 + l.segments * 4,
            l.rows * d_model * 4,
            if l.drafts > 0 { l.segments * (1 + l.drafts) * 4 } else { 0 },
        ];
        parts.iter().map(|&b| b as u64).sum()
    }

    /// Empties the batch and its answers, keeps the memory.
    pub fn clear(&mut self) {
        self.batch.clear();
        self.answers.clear();
        self.top.clear();
        self.faults.clear();
        self.drafted.clear();
    }
}
