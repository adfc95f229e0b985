//! Where every byte will be: a pure function of the network's header, the options, the machine and the device's
//! footprint. It is made, checked and printed before a weight is read, and the engine allocates by it.

mod options;
mod text;

use crate::drafts::Drafts;
use crate::prefix::{PrefixCache, window_promise};
use crate::queue::Waiting;
use crate::sampling::MAX_BIAS;
use crate::stream::StreamSize;
use motet_model::batch::{BatchLimits, RECENT};
use motet_model::layout::StateLayout;
use motet_model::split::SplitError;
use motet_model::{Device, DeviceError, Footprint, InFlight, Limits, Network, PAGE, Split};
use options::check;
pub use options::{Options, Workspace};
use serde::Serialize;
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

const MIB: u64 = 1 << 20;

/// Program, HTTP, allocator, thread stacks: what no other line names.
pub const REST: u64 = 8 * MIB;

/// Rows of prompts in a batch while several are in flight: enough to be read at full speed, few enough that one prompt
/// fills all stages.
pub(crate) const PIPELINED_ROWS: usize = 128;

/// Bytes of a tokenizer's tables for each token, about.
const TOKENIZER: u64 = 40;

/// What no other line names: at most 24 MiB with any vocabulary in use.
fn rest(vocab: usize) -> u64 {
    REST + TOKENIZER * vocab as u64
}

/// What there is to plan for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Bytes that a new process can have; `None` if nobody knows.
    pub memory: Option<u64>,
}

impl Machine {
    /// This machine, as far as the system tells: what is available, and no more than the control group (a container's
    /// limit) leaves. What files are cached in memory counts as available.
    pub fn here() -> Self {
        let Ok(mut system) = System::new() else { return Self { memory: None } };
        system.refresh_memory();
        let this = sysinfo::get_current_pid().ok().and_then(|pid| {
            system.refresh_processes_specifics(
                ProcessesToUpdate::Some(&[pid]),
                false,
                ProcessRefreshKind::nothing(),
            );
            system.process(pid)?.cgroup_limits()
        });
        let left = this.map_or(u64::MAX, |limits| limits.total_memory.saturating_sub(limits.rss));
        let available = system.available_memory();
        Self { memory: (available > 0).then_some(available.min(left)) }
    }
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An option that makes no sense.
    #[error("{option} cannot be {found}; expected 1 to {most}{}", if *option == "ctx" { ", the tokens that the model was trained for" } else { "" })]
    Option {
        /// Its name on the command line, without dashes.
        option: &'static str,
        /// What was asked for.
        found: usize,
        /// What can be had.
        most: usize,
    },
    /// The memory allowed is less than the least that works.
    #[error(
        "{} of memory are not enough; the least that would do is {smallest} bytes ({})",
        bytes(*asked),
        bytes(*smallest)
    )]
    TooLittle {
        /// What `--memory` says.
        asked: u64,
        /// What it must say at least.
        smallest: u64,
    },
    /// The network can't be split like that.
    #[error("stages: {0}")]
    Split(#[from] SplitError),
    /// The device can't run the network.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// One purpose and its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What for.
    pub name: String,
    /// How much.
    pub bytes: u64,
    /// What it consists of, if more than one thing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Line>,
}

/// What one stage holds of what is in the lines of the whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StagePlan {
    /// Its layers: the first and the last.
    pub layers: String,
    /// Its weights, its workspace, its part of all sessions' state. What stages share stands with the first.
    pub lines: Vec<Line>,
    /// Their sum.
    pub total: u64,
}

/// The plan: bytes by purpose, and the sizes that the engine and the device allocate by.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Conversations that run at once.
    pub sessions: usize,
    /// Positions per conversation.
    pub context: usize,
    /// Rows of the largest batch.
    pub rows: usize,
    /// Pages of 64 positions in each pool of the network.
    pub pages: Vec<usize>,
    /// Places for saved recurrent state.
    pub checkpoints: usize,
    /// Bytes by purpose; their sum is `total`.
    pub lines: Vec<Line>,
    /// Of the lines, what each stage holds.
    pub stages: Vec<StagePlan>,
    /// Bytes of the whole process while its sessions run.
    pub total: u64,
    /// What many clients at once may add at most: requests that wait, and what the front end holds. Nothing of it is
    /// taken before it is needed.
    pub clients: Vec<Line>,
    /// Bytes of the whole process at most: `total` and `clients`. Never more than `--memory`.
    pub most: u64,
    /// Bytes that one more conversation adds (pools by sessions × context; with `--memory` the pools are given).
    pub state_per_session: u64,
    /// Bytes that buffers of its own for drafting would have added; it has none.
    pub separate_draft_buffers: u64,
    /// Bytes that buffers of their own for every conversation would have added.
    pub separate_buffers: u64,
    /// The smallest `--memory` that would do with these sessions and this context.
    pub smallest_memory: u64,
    /// What there is.
    pub machine: Machine,
    /// Whether the plan fits the machine.
    pub fits: bool,
    #[serde(skip)]
    pub(crate) limits: Limits,
    #[serde(skip)]
    pub(crate) layout: StateLayout,
    /// Whether the network has a draft head that is not loaded.
    #[serde(skip)]
    pub(crate) head_left_out: bool,
    #[serde(skip)]
    pub(crate) split: Split,
    /// Batches in flight at most.
    #[serde(skip)]
    pub(crate) flights: usize,
    #[serde(skip)]
    pub(crate) blocks: usize,
    #[serde(skip)]
    pub(crate) vocab: usize,
    #[serde(skip)]
    pub(crate) d_model: usize,
    #[serde(skip)]
    pub(crate) options: Options,
}

impl Plan {
    /// Plans a network on one or several stages of `device`.
    ///
    /// # Errors
    /// Options that make no sense, too little memory (with the least that would do), a network that the device
    /// can't run or that has too few layers for its stages.
    pub fn new(
        network: &Network,
        options: &Options,
        machine: Machine,
        device: &dyn Device,
    ) -> Result<Self, PlanError> {
        let context = check(network, options)?;
        let draft_head = options.drafts != Drafts::Off && !options.look_up && network.draft.is_some();
        let split = options.stages.split(network, draft_head, options.layer_costs.as_ref())?;
        // One for each stage, and one that is being settled and filled meanwhile.
        let flights = if split.stages() > 1 && !options.in_turn { split.stages() + 1 } else { 1 };
        let layout = network.state(draft_head);
        let sessions = options.sessions;
        let blocks_per_context = context.div_ceil(PAGE);
        let rows = match options.prefill_chunk {
            None if flights > 1 => {
                options.rows.min(PIPELINED_ROWS + sessions * (1 + options.drafts.most(draft_head)))
            }
            _ => options.rows,
        };
        let rows = rows.max(2 * sessions);
        let mut limits = Limits {
            batch: batch_limits(
                rows,
                options.drafts.most(draft_head),
                draft_head,
                options,
                context,
                layout.pools.len(),
                network.vocab,
            ),
            sessions,
            context,
            logit_rows: options.max_logit_rows,
            pages: vec![0; layout.pools.len()],
            checkpoints: 0,
            kv: options.kv,
            draft_head,
        };
        let footprints = device.footprint(network, &split, &limits)?;
        let footprint = together(&footprints);

        let full = layout.pools.iter().position(|p| p.window.is_none());
        let block_bytes = PrefixCache::bytes_per_block() as u64;
        let full_page = block_bytes + full.map_or(0, |p| footprint.page[p]);
        // Sliding-window pages that each session is promised, and those of all batches in flight beyond them.
        let windows: Vec<(usize, usize)> = layout
            .pools
            .iter()
            .enumerate()
            .filter_map(|(p, pool)| Some((p, window_promise(pool.window? as usize, context))))
            .collect();
        let chunk = flights * rows.div_ceil(PAGE);
        let windows_per_session: u64 = windows.iter().map(|&(p, n)| n as u64 * footprint.page[p]).sum();
        let windows_chunk: u64 = windows.iter().map(|&(p, _)| chunk as u64 * footprint.page[p]).sum();

        let batch_bytes = flights as u64 * InFlight::bytes(&limits.batch, network.d_model);
        let bookkeeping = StreamSize::bytes(context) + (context * 4 + 3 * blocks_per_context * 4) as u64;
        let n = sessions as u64;
        let clients = clients(options, context);
        let clients_bytes: u64 = clients.iter().map(|l| l.bytes).sum();
        let pages_per_session = blocks_per_context as u64 * full_page + windows_per_session;
        let recurrent = footprint.recurrent;
        let checkpoints_per_session = match recurrent {
            0 => 0,
            r => (pages_per_session / 4 / r).max(2),
        };
        let fixed = footprint.weights
            + footprint.workspace()
            + footprint.rollback
            + batch_bytes
            + rest(network.vocab)
            + clients_bytes
            + n * (bookkeeping + recurrent + windows_per_session)
            + windows_chunk;
        let asked_checkpoints = options.checkpoint_memory.map(|b| b.checked_div(recurrent).unwrap_or(0));
        let least_blocks =
            if full.is_some() { blocks_per_context } else { sessions * blocks_per_context } as u64;
        let smallest_memory = fixed + least_blocks * full_page + asked_checkpoints.unwrap_or(0) * recurrent;

        let (blocks, checkpoints, more_windows) = match options.memory {
            None => {
                (n * blocks_per_context as u64, asked_checkpoints.unwrap_or(n * checkpoints_per_session), 0)
            }
            Some(asked) if asked < smallest_memory => {
                return Err(PlanError::TooLittle { asked, smallest: smallest_memory });
            }
            Some(memory) => {
                let left = memory - fixed - least_blocks * full_page;
                let checkpoints = asked_checkpoints.unwrap_or(match recurrent {
                    0 => 0,
                    r => (left + least_blocks * full_page) / 4 / r,
                });
                let checkpoints = checkpoints.min(left.checked_div(recurrent).unwrap_or(0));
                let left = left - checkpoints * recurrent;
                match full {
                    Some(_) => (least_blocks + left / full_page, checkpoints, 0),
                    None => {
                        (least_blocks, checkpoints, left / windows_page(&windows, &footprint.page).max(1))
                    }
                }
            }
        };
        let blocks = blocks as usize;
        for &(p, promise) in &windows {
            // More than there are blocks are of no use, but every session is promised its own, however few blocks it has.
            let promised = sessions * promise;
            limits.pages[p] = (promised + chunk + more_windows as usize).min(blocks.max(promised));
        }
        if let Some(p) = full {
            limits.pages[p] = blocks;
        }
        limits.checkpoints = checkpoints as usize;

        let of_head = &footprint.draft;
        let head_page = |p: usize| of_head.page.get(p).copied().unwrap_or(0);
        let mut pool_parts: Vec<Line> = layout
            .pools
            .iter()
            .enumerate()
            .map(|(p, pool)| {
                let name = pool.window.map_or("full attention".into(), |w| format!("window of {w}"));
                line(
                    &format!("{} pages, {name}", limits.pages[p]),
                    limits.pages[p] as u64 * (footprint.page[p] - head_page(p)),
                )
            })
            .collect();
        let drafts = limits.batch.drafts > 0;
        if draft_head {
            let bytes = (0..layout.pools.len()).map(|p| limits.pages[p] as u64 * head_page(p)).sum();
            pool_parts.push(line("the draft head's", bytes));
        }
        let workspace = footprint.workspace_parts.iter().map(|(name, b)| line(name, *b)).collect();
        let mut lines = vec![
            line("weights", footprint.weights - of_head.weights),
            Line { parts: workspace, ..line("workspace", footprint.workspace()) },
            line("batches in flight", batch_bytes),
            line(&format!("recurrent state, {sessions} sessions"), n * (recurrent - of_head.recurrent)),
            Line {
                bytes: pool_parts.iter().map(|l| l.bytes).sum(),
                parts: pool_parts,
                ..line("keys and values", 0)
            },
            line(&format!("{checkpoints} checkpoints"), checkpoints * recurrent),
            line("prefix index", blocks as u64 * block_bytes),
            line("streams and page tables", n * bookkeeping),
            line("the rest: program, tokenizer, HTTP", rest(network.vocab)),
        ];
        if drafts {
            lines.insert(3, line("rows with drafts until they are kept", footprint.rollback));
        }
        if draft_head {
            lines.insert(1, line("draft head", of_head.weights));
            lines.insert(5, line("last hidden rows, for the draft head", n * of_head.recurrent));
        }
        let stages = split.ranges().iter().zip(&footprints).map(|(layers, footprint)| {
            let pages =
                limits.pages.iter().zip(&footprint.page).map(|(&count, page)| count as u64 * page).sum();
            let lines = vec![
                line("weights", footprint.weights),
                line("workspace", footprint.workspace()),
                line("rows with drafts", footprint.rollback),
                line("recurrent state", (n + checkpoints) * footprint.recurrent),
                line("keys and values", pages),
            ];
            let total = lines.iter().map(|l| l.bytes).sum();
            StagePlan { layers: format!("{}-{}", layers.start, layers.end - 1), lines, total }
        });
        let stages = stages.collect();
        let total: u64 = lines.iter().map(|l| l.bytes).sum();
        let most = total + clients_bytes;
        Ok(Self {
            sessions,
            context,
            rows,
            pages: limits.pages.clone(),
            checkpoints: limits.checkpoints,
            lines,
            stages,
            total,
            clients,
            most,
            state_per_session: pages_per_session
                + bookkeeping
                + (1 + checkpoints_per_session) * recurrent
                + footprint.rollback / n,
            separate_draft_buffers: match drafts {
                true => footprint.workspace() + batch_bytes,
                false => 0,
            },
            separate_buffers: (n - 1) * (footprint.workspace() + batch_bytes),
            smallest_memory,
            machine,
            fits: machine.memory.is_none_or(|m| most <= m),
            limits,
            layout,
            head_left_out: network.draft.is_some() && !draft_head,
            split,
            flights,
            blocks,
            vocab: network.vocab,
            d_model: network.d_model,
            options: options.clone(),
        })
    }

    /// The lengths of batches with so many drafts to a segment, the rest as planned.
    pub(crate) fn batch_with_drafts(&self, drafts: usize) -> BatchLimits {
        let pools = self.layout.pools.len();
        batch_limits(
            self.rows,
            drafts,
            self.limits.draft_head,
            &self.options,
            self.context,
            pools,
            self.vocab,
        )
    }

    /// Bytes that may be taken beside the plan: what `--memory` and the machine leave; `None` if nothing bounds them.
    pub(crate) fn spare(&self) -> Option<u64> {
        let bounds = [self.options.memory, self.machine.memory];
        bounds.into_iter().flatten().min().map(|bound| bound.saturating_sub(self.most))
    }

    /// What the device is sized for: the same goes to [`Device::prepare`].
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The layers of each stage: they go to [`Device::prepare`] as well.
    pub fn split(&self) -> &Split {
        &self.split
    }
}

/// What all stages take.
fn together(stages: &[Footprint]) -> Footprint {
    let mut all = Footprint::default();
    let add = |sum: &mut Vec<u64>, pages: &[u64]| {
        sum.resize(pages.len(), 0);
        sum.iter_mut().zip(pages).for_each(|(sum, page)| *sum += page);
    };
    for stage in stages {
        all.weights += stage.weights;
        for (name, bytes) in &stage.workspace_parts {
            match all.workspace_parts.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += bytes,
                None => all.workspace_parts.push((name.clone(), *bytes)),
            }
        }
        add(&mut all.page, &stage.page);
        all.recurrent += stage.recurrent;
        all.rollback += stage.rollback;
        all.draft.weights += stage.draft.weights;
        if !stage.draft.page.is_empty() {
            add(&mut all.draft.page, &stage.draft.page);
        }
        all.draft.recurrent += stage.draft.recurrent;
    }
    all
}

fn line(name: &str, bytes: u64) -> Line {
    Line { name: name.into(), bytes, parts: Vec::new() }
}

/// What many clients at once may add: prompts that wait (their streams are reserved, but not touched before they run),
/// and the front end's own.
fn clients(options: &Options, context: usize) -> Vec<Line> {
    let prompt = context * size_of::<u32>() + size_of::<Waiting>();
    let waiting = line(&format!("{} prompts that wait", options.queue), (options.queue * prompt) as u64);
    std::iter::once(waiting).chain(options.front_end.iter().cloned()).collect()
}

/// One page of each sliding-window pool.
fn windows_page(windows: &[(usize, usize)], page: &[u64]) -> u64 {
    windows.iter().map(|&(p, _)| page[p]).sum()
}

fn batch_limits(
    rows: usize,
    drafts: usize,
    draft_head: bool,
    options: &Options,
    context: usize,
    pools: usize,
    vocab: usize,
) -> BatchLimits {
    let sessions = options.sessions;
    BatchLimits {
        rows,
        segments: sessions,
        pages: sessions * pools * context.div_ceil(PAGE),
        // New pages of a batch's rows and of drafts that never came to it; per session a start, and a checkpoint of the
        // step before.
        before: pools * (rows.div_ceil(PAGE) + (2 + drafts.min(1)) * sessions) + 3 * sessions,
        asks: rows,
        seen: sessions * context.min(vocab),
        bias: sessions * MAX_BIAS.min(vocab),
        allowed: sessions * (1 + drafts) * vocab.div_ceil(64),
        drafts,
        behind: if draft_head { sessions * RECENT } else { 0 },
    }
}

/// `1.50 GiB`.
fn bytes(n: u64) -> String {
    match n {
        0..1024 => format!("{n} B"),
        1024..MIB => format!("{:.2} KiB", n as f64 / 1024.0),
        MIB..0x4000_0000 => format!("{:.2} MiB", n as f64 / MIB as f64),
        _ => format!("{:.2} GiB", n as f64 / (1u64 << 30) as f64),
    }
}
