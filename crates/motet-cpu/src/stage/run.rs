//! Runs the operations of a program on the rows of a batch, region by region.
//!
//! A region is one parallel piece of work (two for attention): neighbouring operations on rows, products of the same
//! rows, or one operation of another kind. Work is split by rows, output channels, heads or sessions, never along a
//! sum: which thread computes an element changes no bit. Nothing here allocates.

use motet_model::device::Observer;
use motet_model::layout::regions;
use motet_model::program::{BufferId, Cols, Op, Program, WeightId};

use super::lines::Lines;
use super::profile::{Profile, Watch};
use super::rollback::RollBack;
use super::{Machine, Scratch};
use crate::pool::WorkerPanic;
use crate::session_state::SessionState;
use crate::weights::Loaded;
use crate::workspace::Buffers;

/// Operations that run as one parallel region.
#[derive(Debug)]
pub(super) struct Region {
    /// By index into the program.
    pub(super) ops: Vec<usize>,
    /// All buffers that they touch, and those that they write.
    pub(super) touched: Vec<BufferId>,
    writes: Vec<BufferId>,
    /// Whether rows are rotated by their positions.
    pub(super) rotates: bool,
}

impl Region {
    /// The regions of some operations, in order.
    pub(super) fn all(program: &Program, ops: &[usize]) -> Vec<Region> {
        let region = |ops: &[usize]| {
            let (mut touched, mut writes) = (Vec::new(), Vec::new());
            for &op in ops {
                let t = program.ops[op].1.touches();
                touched.extend(t.reads.into_iter().chain(t.writes.iter().copied()));
                writes.extend(t.writes);
            }
            for buffers in [&mut touched, &mut writes] {
                buffers.sort_unstable_by_key(|id: &BufferId| id.0);
                buffers.dedup();
            }
            let rotates = ops.iter().any(|&op| matches!(program.ops[op].1, Op::Rope { .. }));
            Region { ops: ops.to_vec(), touched, writes, rotates }
        };
        regions(program, ops).into_iter().map(|range| region(&ops[range])).collect()
    }
}

/// Operations of a program on the rows of a batch.
pub(super) struct Run<'a> {
    pub(super) program: &'a Program,
    pub(super) machine: &'a mut Machine,
    pub(super) buffers: Buffers<'a>,
    pub(super) lines: Lines<'a>,
    pub(super) state: &'a mut SessionState,
    pub(super) rollback: &'a mut RollBack,
    pub(super) scratch: &'a mut Scratch,
    /// The columns whose quantised rows the scratch holds at the moment.
    pub(super) quantised_of: Option<Cols>,
    pub(super) observer: Option<&'a mut (dyn Observer + 'static)>,
    pub(super) profile: &'a mut Profile,
}

impl Run<'_> {
    /// Runs some regions; `behind` is the operation that comes next.
    pub(super) fn regions(&mut self, regions: &[Region], behind: Option<&Op>) -> Result<(), WorkerPanic> {
        for (i, region) in regions.iter().enumerate() {
            let watch = Watch::start();
            let program = self.program;
            let first = &program.ops[region.ops[0]].1;
            if self.quantised_of.is_some_and(|q| region.writes.contains(&q.buffer)) {
                self.quantised_of = None;
            }
            match first {
                op if op.is_row_wise() => {
                    let next = regions.get(i + 1).map(|next| &program.ops[next.ops[0]].1).or(behind);
                    let wanted = next.and_then(|op| self.wants_quantised(op));
                    self.row_wise(region, wanted.filter(|x| region.touched.contains(&x.buffer)))?;
                }
                Op::Linear { x, .. } => self.linear(*x, &region.ops)?,
                Op::Attend { q, k, v, out, state, scale, first } => {
                    self.attend(*q, *k, *v, *out, *state, *scale, *first)?;
                }
                Op::Remember { k, v, state } => self.remember(*k, *v, *state)?,
                Op::Convolve { x, weight, state, out } => self.convolve(*x, *weight, *state, *out)?,
                Op::Delta { q, k, v, alpha, beta, a, dt, state, out } => {
                    self.decays(*alpha, *beta, *a, *dt)?;
                    self.delta([*q, *k, *v], *alpha, *beta, *state, *out)?;
                }
                Op::ExpertLinear { x, weight, routing, out } => {
                    self.expert_linear(*x, *weight, *routing, *out)?;
                }
                other => unreachable!("{} is not run with others", other.name()),
            }
            watch.region(self.profile, program, region, &self.lines, self.buffers.rows());
        }
        Ok(())
    }

    /// The rows that a product takes as int8, if it does.
    fn wants_quantised(&self, op: &Op) -> Option<Cols> {
        let takes = |weight: WeightId| match &self.machine.weights[weight.0] {
            Loaded::Matrix(matrix) => matrix.shape().takes_quantised(),
            Loaded::Experts(matrices) => matrices.iter().any(|m| m.shape().takes_quantised()),
            _ => false,
        };
        match *op {
            Op::Linear { x, weight, .. } | Op::Head { x, weight, .. } if takes(weight) => Some(x),
            Op::ExpertLinear { x, weight, .. } if x.count == 1 && takes(weight) => {
                Some(Cols { buffer: x.buffer, at: x.at, width: x.dim })
            }
            _ => None,
        }
    }
}
