//! How much of everything a stage takes: one place, used for the plan and for the allocation.

use motet_model::device::{DeviceError, Limits};
use motet_model::layout::{StateLayout, WorkspaceLayout};
use motet_model::network::Network;
use motet_model::program::{Op, Program, StateKind};

use super::rollback::RollBackLayout;
use super::{Floats, Scratch, Workspace};
use crate::activations::{ActivationBlock, BLOCK};
use crate::arena::Arena;
use crate::attention::{AttentionShape, scratch_floats};
use crate::kv::KvShape;
use crate::sampling::scratch_len;
use crate::session_state::PageLayout;
use crate::worker_scratch::WorkerScratch;
use crate::workspace::Place;

/// Sizes of a stage.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    pub(crate) pages: Vec<PageLayout>,
    pub(crate) recurrent_at: Vec<usize>,
    pub(crate) recurrent_floats: usize,
    pub(crate) vocab: usize,
    d_model: usize,
    /// Floats per row of the row buffers.
    row_floats: usize,
    /// Quantised blocks per row.
    row_blocks: usize,
    /// Floats per row of cosines and sines, all encodings.
    row_rotations: usize,
    /// Expert entries per row, and floats of their products.
    row_entries: usize,
    row_expert_floats: usize,
    experts: usize,
    attention_floats: usize,
    /// Floats of the states that verify rows are run on.
    state_floats: usize,
    pub(crate) rollback: RollBackLayout,
    logit_rows: usize,
    sampler_floats: usize,
    segments: usize,
}

impl Sizes {
    /// The sizes of a stage that runs `ops` of the network's program, with its draft head or without.
    pub(crate) fn of(
        network: &Network,
        ops: &[usize],
        limits: &Limits,
        threads: usize,
    ) -> Result<Self, DeviceError> {
        let program = network.program(limits.draft_head);
        let all = ops.iter().map(|&op| &program.ops[op].1);
        let touched: Vec<usize> = all.clone().filter_map(|op| op.touches().state).map(|s| s.0).collect();
        let here: Vec<usize> = (0..program.states.len()).filter(|s| touched.contains(s)).collect();
        let layout = StateLayout::of(program);
        let (mut recurrent_at, mut recurrent_floats) = (vec![0; program.states.len()], 0);
        for &state in &here {
            recurrent_at[state] = recurrent_floats;
            recurrent_floats += program.states[state].kind.recurrent_floats();
        }
        let (mut row_blocks, mut row_entries, mut row_expert_floats, mut experts) = (0, 0, 0, 0);
        let (mut attention_floats, mut has_head) = (0, false);
        for op in all {
            match op {
                Op::Linear { x, .. } => row_blocks = row_blocks.max(x.width.div_ceil(BLOCK)),
                Op::Head { x, .. } => {
                    row_blocks = row_blocks.max(x.width.div_ceil(BLOCK));
                    has_head = true;
                }
                Op::ExpertLinear { x, weight, out, .. } => {
                    row_blocks = row_blocks.max(x.count * x.dim.div_ceil(BLOCK));
                    row_entries = row_entries.max(out.count);
                    row_expert_floats = row_expert_floats.max(out.count * out.dim);
                    experts = experts.max(program.weights[weight.0].shape[2]);
                }
                Op::Attend { q, state, scale, first, .. } => {
                    let shape = attention_shape(program, *state, limits.kv, q.count, *scale, *first as usize);
                    attention_floats = attention_floats.max(scratch_floats(&shape, threads, limits.context));
                }
                _ => {}
            }
        }
        let rollback = RollBackLayout::of(program, ops, limits);
        let state_floats = state_floats(&rollback, threads);
        let logit_rows = if has_head { limits.logit_rows } else { 0 };
        Ok(Self {
            pages: PageLayout::of(program, &layout, |s| here.contains(&s), limits.kv),
            recurrent_at,
            recurrent_floats,
            vocab: network.vocab,
            d_model: network.d_model,
            row_floats: WorkspaceLayout::of(program, ops).width,
            row_blocks,
            row_rotations: program.ropes.iter().map(|r| 2 * r.rot).sum(),
            row_entries,
            row_expert_floats,
            experts,
            attention_floats,
            state_floats,
            rollback,
            logit_rows,
            segments: limits.batch.segments,
            sampler_floats: if has_head {
                WorkerScratch::floats(threads, scratch_len(network.vocab))
            } else {
                0
            },
        })
    }

    /// The same for up to `drafts` drafts to a segment.
    pub(crate) fn with_drafts(&self, drafts: usize, threads: usize) -> Self {
        let rollback = self.rollback.with_drafts(drafts);
        Self { state_floats: state_floats(&rollback, threads), rollback, ..self.clone() }
    }

    /// Bytes of what depends on the number of drafts: the record of verify rows, and the states they run on.
    pub(crate) fn draft_bytes(&self) -> u64 {
        (self.rollback.bytes() + 4 * self.state_floats) as u64
    }

    /// The states that verify rows run on.
    pub(crate) fn states(&self) -> Result<Vec<f32>, DeviceError> {
        let bytes = 4 * self.state_floats as u64;
        zeros(self.state_floats).map_err(|source| DeviceError::Memory {
            what: "the states of verify rows",
            bytes,
            source,
        })
    }

    /// Bytes of the workspace for batches of `rows` rows, by part.
    pub(crate) fn parts(&self, rows: usize) -> Vec<(String, u64)> {
        let floats = |n: usize| 4 * n as u64;
        let experts = rows * (self.row_expert_floats + 2 * self.row_entries) + self.experts;
        [
            ("row buffers", floats(rows * self.row_floats)),
            ("quantised rows", (rows * self.row_blocks * size_of::<ActivationBlock>()) as u64),
            ("rotations", floats(rows * self.row_rotations)),
            ("attention", floats(self.attention_floats)),
            ("states of verify rows", floats(self.state_floats)),
            ("experts", floats(experts)),
            ("logits", floats(self.logit_rows * (self.d_model + self.vocab))),
            ("sampler", floats(self.sampler_floats)),
        ]
        .into_iter()
        .map(|(name, bytes)| (name.to_string(), bytes))
        .filter(|(_, bytes)| *bytes > 0)
        .collect()
    }

    /// The workspace for batches of `rows` rows.
    pub(crate) fn allocate(
        &self,
        rows: usize,
        layout: &WorkspaceLayout,
        program: &Program,
    ) -> Result<Workspace, DeviceError> {
        let bytes = self.parts(rows).iter().map(|(_, bytes)| bytes).sum();
        let refused = |source| DeviceError::Memory { what: "workspace", bytes, source };
        let floats = Arena::allocate(4 * rows * self.row_floats).map_err(refused)?;
        let place = |(column, buffer): (&Option<usize>, &motet_model::program::Buffer)| {
            column.map(|column| Place { at: column * rows, width: buffer.width })
        };
        Ok(Workspace {
            places: layout.at.iter().zip(&program.buffers).map(place).collect(),
            floats: Floats(Some(floats)),
            scratch: Scratch {
                quantised: zeros(rows * self.row_blocks).map_err(refused)?,
                rotations: zeros(rows * self.row_rotations).map_err(refused)?,
                attention: zeros(self.attention_floats).map_err(refused)?,
                states: zeros(self.state_floats).map_err(refused)?,
                tables: Vec::with_capacity(self.segments),
                chosen: zeros(rows * self.row_entries).map_err(refused)?,
                entries: zeros(rows * self.row_entries).map_err(refused)?,
                offsets: zeros(self.experts + 1).map_err(refused)?,
                experts: zeros(rows * self.row_expert_floats).map_err(refused)?,
            },
            asked: zeros(self.logit_rows * self.d_model).map_err(refused)?,
            logits: zeros(self.logit_rows * self.vocab).map_err(refused)?,
            sampler: zeros(self.sampler_floats).map_err(refused)?,
            fed: Vec::with_capacity(self.segments),
            tokens: Vec::with_capacity(rows),
        })
    }
}

/// Floats of the states that verify rows are run on, one to a thread.
fn state_floats(rollback: &RollBackLayout, threads: usize) -> usize {
    match rollback.copied_floats() {
        0 => 0,
        floats => WorkerScratch::floats(threads, floats),
    }
}

/// So many zeros, or the system's refusal.
fn zeros<T: bytemuck::Zeroable + Clone>(len: usize) -> Result<Vec<T>, std::io::Error> {
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(len).map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
    zeros.resize(len, T::zeroed());
    Ok(zeros)
}

/// What one layer's attention is.
pub(crate) fn attention_shape(
    program: &Program,
    state: motet_model::program::StateId,
    format: motet_model::device::KvFormat,
    heads: usize,
    scale: f32,
    first: usize,
) -> AttentionShape {
    let StateKind::Kv { heads: kv_heads, key_dim, value_dim, window } = program.states[state.0].kind else {
        unreachable!("attention has keys and values");
    };
    let kv = KvShape { format, kv_heads, head_dim_k: key_dim, head_dim_v: value_dim };
    AttentionShape { kv, heads, scale, window: window.map(|w| w as usize), first }
}
