//! Operations that look at their own row only: embedding, norms, rotations, gates, sums, routing.
//!
//! Neighbours run as one region, one after the other for each row, and the row that the next product takes is quantised
//! right behind them. Which thread has a row, and what is done to other rows meanwhile, changes no bit.

use bytemuck::cast_slice_mut;
use motet_model::program::{Cols, Heads, Op, WeightId};

use super::Machine;
use super::run::{Region, Run};
use crate::activations::{self, BLOCK};
use crate::isa::Isa;
use crate::pool::WorkerPanic;
use crate::rows;
use crate::rows::elementwise::{activate_times, add, scale, times_activated};
use crate::rows::experts::{Routing, combine, route};
use crate::rows::gated_delta::decay_and_step;
use crate::rows::norm::{l2_norm, rms_norm, rms_norm_in_place};
use crate::rows::rope::Rope;
use crate::weights::Loaded;
use crate::workspace::Row;

/// Below this many floats, weighted by what is done to them, a region is taken to cost more than it saves.
const WORTH_SHARING: usize = 4 << 10;

/// What the operations of a row need beside the row.
struct Context<'a> {
    isa: Isa,
    weights: &'a [Loaded],
    ropes: &'a [Rope],
    /// The cosines and sines of all rows, encoding by encoding.
    rotations: &'a [f32],
    rows: usize,
    tokens: &'a [u32],
}

impl Run<'_> {
    /// Runs the operations of a region; `then` is what the next product wants quantised.
    pub(super) fn row_wise(&mut self, region: &Region, then: Option<Cols>) -> Result<(), WorkerPanic> {
        let program = self.program;
        let ops = || region.ops.iter().map(|&op| &program.ops[op].1);
        let Machine { isa, pool, weights, ropes, .. } = &mut *self.machine;
        let rows = self.buffers.rows();
        let context = Context {
            isa: *isa,
            weights,
            ropes,
            rotations: &self.scratch.rotations,
            rows,
            tokens: self.lines.tokens,
        };
        let cost = ops().map(cost).sum::<usize>() + then.map_or(0, |x| 2 * x.width);
        let per_task = rows_per_task(rows, cost, pool.threads());
        let blocks = then.map_or(0, |x| x.width / BLOCK);
        let quantised = &mut self.scratch.quantised[..rows * blocks];
        let parts = self.buffers.by_rows(&region.touched, per_task, quantised);
        pool.run(rows.div_ceil(per_task), |_, _| {
            for mut row in parts.take() {
                for op in ops() {
                    run(op, &context, &mut row);
                }
                if let Some(x) = then {
                    let (values, quantised) = row.beside_blocks(x);
                    activations::quantise(context.isa, values, quantised);
                }
            }
        })?;
        self.quantised_of = then.or(self.quantised_of);
        Ok(())
    }

    /// α and β of the gated delta rule in place of their projections.
    pub(super) fn decays(
        &mut self,
        alpha: Cols,
        beta: Cols,
        a: WeightId,
        dt: WeightId,
    ) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, rows) = (*isa, self.buffers.rows());
        let (a, dt) = (vector(weights, a), vector(weights, dt));
        let per_task = rows_per_task(rows, 32 * alpha.width, pool.threads());
        let touched = [alpha.buffer, beta.buffer];
        let parts = self.buffers.by_rows(&touched, per_task, &mut []);
        pool.run(rows.div_ceil(per_task), |_, _| {
            for mut row in parts.take() {
                let [of_alpha, of_beta] = row.parts(touched);
                let alpha = &mut of_alpha[alpha.at..alpha.at + alpha.width];
                decay_and_step(isa, alpha, &mut of_beta[beta.at..beta.at + beta.width], a, dt);
            }
        })
    }
}

/// One operation on one row.
fn run(op: &Op, c: &Context<'_>, row: &mut Row<'_, '_, '_>) {
    let isa = c.isa;
    let number = row.number();
    match *op {
        Op::Embed { table, scale: factor, out } => {
            let [into] = row.parts([out.buffer]);
            let (into, token) = (columns(into, out), c.tokens[number] as usize);
            match &c.weights[table.0] {
                Loaded::Table(table) => table.dequantize_row(token, into),
                Loaded::Matrix(matrix) => matrix.dequantize_row(token, into),
                other => unreachable!("an embedding was loaded as {other:?}"),
            }
            if factor != 1.0 {
                scale(isa, into, factor);
            }
        }
        Op::Norm { x, weight, eps, out } if x == out => {
            let [row] = row.parts([x.buffer]);
            rms_norm_in_place(isa, row, in_row(x), Some(vector(c.weights, weight)), eps);
        }
        Op::Norm { x, weight, eps, out } => {
            let [into, from] = row.parts([out.buffer, x.buffer]);
            rms_norm(isa, into, in_row(out), from, in_row(x), Some(vector(c.weights, weight)), eps);
        }
        Op::UnitNorm { x, eps, scale } => {
            let [row] = row.parts([x.buffer]);
            l2_norm(isa, row, in_row(x), scale, eps);
        }
        Op::Rope { x, rope } => {
            let before: usize = c.ropes[..rope.0].iter().map(|r| c.rows * r.table_len()).sum();
            let rope = &c.ropes[rope.0];
            let table = &c.rotations[before + number * rope.table_len()..][..rope.table_len()];
            let [row] = row.parts([x.buffer]);
            rope.rotate(isa, row, in_row(x), table);
        }
        Op::Gate { gate, activation, x, out } if gate.buffer == x.buffer => {
            // The two are columns of the same row: head by head, gate before x.
            assert!(
                out == gate && gate.at + gate.dim <= x.at && gate.stride == x.stride,
                "{gate:?} {x:?} {out:?}"
            );
            let whole = rows::Heads::whole(gate.dim);
            let [row] = row.parts([x.buffer]);
            for h in 0..gate.count {
                let (before, behind) = row.split_at_mut(x.at + h * x.stride);
                let gate = &mut before[gate.at + h * gate.stride..][..gate.dim];
                activate_times(isa, activation, gate, whole, &behind[..x.dim], whole);
            }
        }
        Op::Gate { gate, activation, x, out } if gate.dim < x.dim => {
            assert!(out == x && gate.dim == 1 && gate.count == x.count, "{gate:?} {x:?} {out:?}");
            let [of_gate, of_x] = row.parts([gate.buffer, x.buffer]);
            let one = rows::Heads::whole(1);
            for h in 0..x.count {
                let (mut factor, gate) = ([1.0], &of_gate[gate.at + h * gate.stride..][..1]);
                times_activated(isa, &mut factor, one, activation, gate, one);
                scale(isa, &mut of_x[x.at + h * x.stride..][..x.dim], factor[0]);
            }
        }
        Op::Gate { gate, activation, x, out } => {
            let [of_gate, of_x] = row.parts([gate.buffer, x.buffer]);
            match out == gate {
                true => activate_times(isa, activation, of_gate, in_row(gate), of_x, in_row(x)),
                false => {
                    assert_eq!(out, x, "a gate works in place");
                    times_activated(isa, of_x, in_row(x), activation, of_gate, in_row(gate));
                }
            }
        }
        Op::Add { x, out } => {
            let [into, from] = row.parts([out.buffer, x.buffer]);
            add(isa, columns(into, out), columns(from, x));
        }
        Op::Route { logits, gating, selection_bias, used, normalise, scale, out } => {
            let routing = Routing { gating, renormalise: normalise, scale };
            let bias = selection_bias.map(|id| vector(c.weights, id));
            let [into, from] = row.parts([out.buffer, logits.buffer]);
            let (chosen, weights) = columns(into, out).split_at_mut(used);
            route(isa, columns(from, logits), bias, routing, cast_slice_mut(chosen), weights);
        }
        Op::Combine { x, routing, out } => {
            let [into, outputs, routed] = row.parts([out.buffer, x.buffer, routing.buffer]);
            let into = columns(into, out);
            into.fill(0.0);
            let weights = &columns(routed, routing)[routing.width / 2..];
            combine(isa, into, columns(outputs, x), weights);
        }
        Op::Linear { .. }
        | Op::Attend { .. }
        | Op::Remember { .. }
        | Op::Keep { .. }
        | Op::Convolve { .. }
        | Op::Delta { .. }
        | Op::ExpertLinear { .. }
        | Op::Head { .. } => unreachable!("{} looks at more than its row", op.name()),
    }
}

/// Floats of a row that an operation touches, weighted by what is done to them.
fn cost(op: &Op) -> usize {
    match op {
        Op::Embed { out, .. } => 2 * out.width,
        Op::Norm { x, .. } | Op::UnitNorm { x, .. } | Op::Rope { x, .. } => x.count * x.dim,
        Op::Gate { out, .. } => 4 * out.count * out.dim,
        Op::Add { out, .. } => out.width,
        Op::Route { logits, .. } => 8 * logits.width,
        Op::Combine { x, .. } => x.width,
        _ => 0,
    }
}

/// Rows of one task: all where sharing them does not pay, else so few that a busy core delays little.
pub(super) fn rows_per_task(rows: usize, cost_of_a_row: usize, threads: usize) -> usize {
    let worth = rows * cost_of_a_row / WORTH_SHARING;
    match threads > 1 && worth > 0 {
        true => rows.div_ceil(worth.clamp(threads, 4 * threads)),
        false => rows,
    }
}

/// Heads as the kernels see them in a row.
fn in_row(h: Heads) -> rows::Heads {
    rows::Heads { base: h.at, count: h.count, stride: h.stride, dim: h.dim }
}

fn columns(row: &mut [f32], cols: Cols) -> &mut [f32] {
    &mut row[cols.at..cols.at + cols.width]
}

/// A weight that is read as it is.
pub(super) fn vector(weights: &[Loaded], id: WeightId) -> &[f32] {
    match &weights[id.0] {
        Loaded::Vector(vector) => vector,
        other => unreachable!("a vector was loaded as {other:?}"),
    }
}
