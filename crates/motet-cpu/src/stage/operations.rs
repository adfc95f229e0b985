//! Runs the operations of a program on the rows of a batch.
//!
//! Each operation is one or two parallel regions; neighbouring products of the same rows share one. Work is split by
//! rows, output channels, heads or sessions, never along a sum: which thread computes an element changes no bit.

use std::sync::{Mutex, PoisonError};

use bytemuck::{cast_slice, cast_slice_mut};
use motet_model::batch::Batch;
use motet_model::device::Observer;
use motet_model::program::{
    Activation, BufferId, Cols, Heads, Op, Program, RESIDUAL, StateId, StateKind, WeightId,
};

use super::Machine;
use super::sizes::attention_shape;
use crate::activations::{self, ActivationBlock, BLOCK};
use crate::attention::attend;
use crate::isa::Isa;
use crate::kv::{HeadRows, Segment, write_segments};
use crate::matmul;
use crate::panels::{PANEL, PackedMatrix};
use crate::pool::{Pool, WorkerPanic};
use crate::rows::convolution::convolve_silu;
use crate::rows::elementwise::{activate_times, add, scale, times_activated};
use crate::rows::experts::{Routing, combine, entries_by_expert, route};
use crate::rows::gated_delta::{DeltaInputs, decay_and_step, gated_delta};
use crate::rows::norm::{l2_norm, rms_norm, rms_norm_in_place};
use crate::rows::{self, Rows};
use crate::session_state::SessionState;
use crate::shared_rows::{RowsMut, Tiles};
use crate::weights::Loaded;
use crate::workspace::Buffers;

/// Below this many floats a region costs more than it saves.
const WORTH_SHARING: usize = 16 << 10;

/// Products that share a region at most.
const FUSED: usize = 4;

/// Operations of a program on the rows of a batch.
pub(super) struct Run<'a> {
    pub(super) program: &'a Program,
    pub(super) machine: &'a mut Machine,
    pub(super) buffers: Buffers<'a>,
    pub(super) batch: &'a Batch,
    pub(super) state: &'a mut SessionState,
    pub(super) tables: &'a mut Vec<Segment<'static>>,
    pub(super) quantised: &'a mut [ActivationBlock],
    /// The columns that `quantised` holds at the moment.
    pub(super) quantised_of: Option<Cols>,
    pub(super) rotations: &'a [f32],
    pub(super) attention: &'a mut [f32],
    pub(super) chosen: &'a mut [u32],
    pub(super) entries: &'a mut [u32],
    pub(super) offsets: &'a mut [u32],
    pub(super) experts: &'a mut [f32],
    pub(super) observer: Option<&'a mut (dyn Observer + 'static)>,
}

/// The cosines and sines of all rows, encoding by encoding: `[rows, table]` each.
pub(super) fn fill_rotations(
    machine: &mut Machine,
    batch: &Batch,
    out: &mut [f32],
) -> Result<(), WorkerPanic> {
    let rows = batch.rows();
    let mut rest = out;
    for rope in &machine.ropes {
        let len = rope.table_len();
        let (table, behind) = rest.split_at_mut(rows * len);
        rest = behind;
        let mut positions =
            batch.segments.iter().flat_map(|s| s.first_position..s.first_position + s.rows.len() as u32);
        for row in table.chunks_exact_mut(len) {
            if let Some(position) = positions.next() {
                rope.fill(position, row);
            }
        }
    }
    Ok(())
}

/// Heads as the kernels see them in a row.
fn in_row(h: Heads) -> rows::Heads {
    rows::Heads { base: h.at, count: h.count, stride: h.stride, dim: h.dim }
}

impl Run<'_> {
    /// Runs operations, by index into the program.
    pub(super) fn operations(&mut self, ops: &[usize]) -> Result<(), WorkerPanic> {
        let mut next = 0;
        while next < ops.len() {
            let program = self.program;
            let op = &program.ops[ops[next]].1;
            let mut taken = 1;
            match op {
                Op::Embed { table, scale, out } => self.embed(*table, *scale, *out)?,
                Op::Norm { x, weight, eps, out } => self.norm(*x, *weight, *eps, *out)?,
                Op::UnitNorm { x, eps, scale } => {
                    self.in_place(x.buffer, x.count * x.dim, |isa, _, row| {
                        l2_norm(isa, row, in_row(*x), *scale, *eps)
                    })?;
                }
                Op::Linear { x, .. } => {
                    let same = |op: &usize| matches!(&program.ops[*op].1, Op::Linear { x: o, .. } if o == x);
                    taken = ops[next..].iter().take(FUSED).take_while(|op| same(op)).count();
                    self.linear(*x, &ops[next..next + taken])?;
                }
                Op::Rope { x, rope } => self.rotate(*x, rope.0)?,
                Op::Attend { q, k, v, out, state, scale, first } => {
                    self.attend(*q, *k, *v, *out, *state, *scale, *first)?;
                }
                Op::Convolve { x, weight, state, out } => self.convolve(*x, *weight, *state, *out)?,
                Op::Delta { q, k, v, alpha, beta, a, dt, state, out } => {
                    self.decays(*alpha, *beta, *a, *dt);
                    self.delta([*q, *k, *v], *alpha, *beta, *state, *out)?;
                }
                Op::Gate { gate, activation, x, out } => self.gate(*gate, *activation, *x, *out)?,
                Op::Add { x, out } => self.add(*x, *out)?,
                Op::Route { logits, gating, selection_bias, used, normalise, scale, out } => {
                    let routing = Routing { gating: *gating, renormalise: *normalise, scale: *scale };
                    self.route(*logits, *selection_bias, routing, *used, *out);
                }
                Op::ExpertLinear { x, weight, routing, out } => {
                    self.expert_linear(*x, *weight, *routing, *out)?
                }
                Op::Combine { x, routing, out } => self.combine(*x, *routing, *out)?,
                Op::Head { .. } => unreachable!("the head runs on the rows that want logits"),
            }
            for op in &ops[next..next + taken] {
                let writes = self.program.ops[*op].1.touches().writes;
                if self.quantised_of.is_some_and(|q| writes.contains(&q.buffer)) {
                    self.quantised_of = None;
                }
            }
            next += taken;
        }
        Ok(())
    }

    fn embed(&mut self, table: WeightId, factor: f32, out: Cols) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, tokens) = (*isa, &self.batch.tokens);
        for_rows(pool, self.buffers.write(out.buffer), out.width, |r, row| {
            let (row, token) = (&mut row[out.at..out.at + out.width], tokens[r] as usize);
            match &weights[table.0] {
                Loaded::Table(table) => table.dequantize_row(token, row),
                Loaded::Matrix(matrix) => matrix.dequantize_row(token, row),
                other => unreachable!("an embedding was loaded as {other:?}"),
            }
            if factor != 1.0 {
                scale(isa, row, factor);
            }
        })
    }

    /// Something done to each row of a buffer in place; `cost` floats of it are touched.
    fn in_place(
        &mut self,
        buffer: BufferId,
        cost: usize,
        work: impl Fn(Isa, usize, &mut [f32]) + Sync,
    ) -> Result<(), WorkerPanic> {
        let isa = self.machine.isa;
        for_rows(&mut self.machine.pool, self.buffers.write(buffer), cost, |r, row| work(isa, r, row))
    }

    fn norm(&mut self, x: Heads, weight: WeightId, eps: f32, out: Heads) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, cost) = (*isa, x.count * x.dim);
        let Loaded::Vector(weight) = &weights[weight.0] else { unreachable!("norms have vectors") };
        if x == out {
            return for_rows(pool, self.buffers.write(out.buffer), cost, |_, row| {
                rms_norm_in_place(isa, row, in_row(x), Some(weight), eps);
            });
        }
        let (write, others) = self.buffers.write_beside(out.buffer);
        for_rows(pool, write, cost, |r, row| {
            rms_norm(isa, row, in_row(out), others.row(x.buffer, r), in_row(x), Some(weight), eps);
        })
    }

    fn rotate(&mut self, x: Heads, rope: usize) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, ropes, .. } = &mut *self.machine;
        let (isa, rows) = (*isa, self.buffers.rows());
        let before: usize = ropes[..rope].iter().map(|r| rows * r.table_len()).sum();
        let (rope, tables) = (&ropes[rope], &self.rotations[before..]);
        for_rows(pool, self.buffers.write(x.buffer), x.count * x.dim, |r, row| {
            rope.rotate(isa, row, in_row(x), &tables[r * rope.table_len()..][..rope.table_len()]);
        })
    }

    fn add(&mut self, x: Cols, out: Cols) -> Result<(), WorkerPanic> {
        let isa = self.machine.isa;
        let (write, others) = self.buffers.write_beside(out.buffer);
        for_rows(&mut self.machine.pool, write, out.width, |r, row| {
            let x = &others.row(x.buffer, r)[x.at..x.at + x.width];
            add(isa, &mut row[out.at..out.at + out.width], x);
        })
    }

    fn gate(&mut self, gate: Heads, activation: Activation, x: Heads, out: Heads) -> Result<(), WorkerPanic> {
        let (isa, cost) = (self.machine.isa, 4 * out.count * out.dim);
        if gate.buffer == x.buffer {
            // The two are columns of the same rows: head by head, gate before x.
            assert!(
                out == gate && gate.at + gate.dim <= x.at && gate.stride == x.stride,
                "{gate:?} {x:?} {out:?}"
            );
            return for_rows(&mut self.machine.pool, self.buffers.write(out.buffer), cost, |_, row| {
                let whole = rows::Heads::whole(gate.dim);
                for h in 0..gate.count {
                    let (before, behind) = row.split_at_mut(x.at + h * x.stride);
                    let gate = &mut before[gate.at + h * gate.stride..][..gate.dim];
                    activate_times(isa, activation, gate, whole, &behind[..x.dim], whole);
                }
            });
        }
        let (write, others) = self.buffers.write_beside(out.buffer);
        for_rows(&mut self.machine.pool, write, cost, |r, row| match out == gate {
            true => activate_times(isa, activation, row, in_row(gate), others.row(x.buffer, r), in_row(x)),
            false => {
                assert_eq!(out, x, "a gate works in place");
                times_activated(isa, row, in_row(x), activation, others.row(gate.buffer, r), in_row(gate));
            }
        })
    }

    // ---- products ----

    /// The products of `x` with the weights of some neighbouring operations.
    fn linear(&mut self, x: Cols, ops: &[usize]) -> Result<(), WorkerPanic> {
        let mut cols = [x; FUSED];
        let mut matrices: [Option<(&PackedMatrix, Option<WeightId>)>; FUSED] = [None; FUSED];
        let program = self.program;
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, weights) = (*isa, &*weights);
        for (i, &op) in ops.iter().enumerate() {
            let Op::Linear { weight, bias, out, .. } = &program.ops[op].1 else { unreachable!("a linear") };
            let Loaded::Matrix(matrix) = &weights[weight.0] else { unreachable!("products have matrices") };
            cols[i] = *out;
            matrices[i] = Some((matrix, *bias));
        }
        let cols = &cols[..ops.len()];
        let quantised = matrices.iter().flatten().any(|(m, _)| m.shape().takes_quantised());
        if let Some(observer) = self.observer.as_deref_mut() {
            for &op in ops {
                let Op::Linear { weight, .. } = &program.ops[op].1 else { unreachable!("a linear") };
                observe(observer, &program.weights[weight.0].tensor, self.buffers.read(x));
            }
        }
        if quantised && self.quantised_of != Some(x) {
            quantise(isa, pool, self.buffers.read(x), self.quantised)?;
            self.quantised_of = Some(x);
        }
        let rows = self.buffers.rows();
        let stride = self.buffers.stride(x.buffer);
        let (mut outs, values) = self.buffers.write_columns::<FUSED>(cols, x.buffer);
        let floats = matmul::Rows::float(&values[x.at.min(values.len())..], rows, x.width, stride);
        let blocks = quantised
            .then(|| matmul::Rows::quantised(&self.quantised[..rows * (x.width / BLOCK)], rows, x.width));
        let panels: usize = matrices.iter().flatten().map(|(m, _)| m.shape().panel_count()).sum();
        let per_task = panels_per_task(panels, pool.threads());
        let mut tiles = [const { None }; FUSED];
        let mut tasks = 0;
        for (out, tiles) in outs.iter_mut().zip(&mut tiles) {
            if let Some(out) = out.take() {
                let t = Tiles::new(out, rows, per_task * PANEL);
                tasks += t.count();
                *tiles = Some(t);
            }
        }
        pool.run(tasks, |_, _| {
            for (tiles, matrix) in tiles.iter().zip(&matrices) {
                let (Some(tiles), Some((matrix, bias))) = (tiles, matrix) else { return };
                let Some(mut tile) = tiles.take() else { continue };
                let panels = tile.columns.start / PANEL..tile.columns.end.div_ceil(PANEL);
                let x = if matrix.shape().takes_quantised() { blocks.unwrap_or(floats) } else { floats };
                matrix.multiply(isa, panels, x, tile.out.reborrow());
                if let Some(bias) = bias {
                    let Loaded::Vector(bias) = &weights[bias.0] else { unreachable!("biases are vectors") };
                    for r in 0..rows {
                        add(isa, tile.out.row_mut(r), &bias[tile.columns.clone()]);
                    }
                }
                return;
            }
        })
    }

    // ---- what looks at the session ----

    fn attend(
        &mut self,
        q: Heads,
        k: Heads,
        v: Heads,
        out: Heads,
        state: StateId,
        scale: f32,
        first: u32,
    ) -> Result<(), WorkerPanic> {
        let pool_of = self.state.pool_of(state);
        let mut segments = recycle(std::mem::take(self.tables));
        segments.extend(self.batch.segments.iter().map(|s| Segment {
            first_position: s.first_position as usize,
            first_row: s.rows.start as usize,
            rows: s.rows.len(),
            pages: self.batch.table(s, pool_of),
        }));
        let Machine { isa, pool, .. } = &mut *self.machine;
        let head_rows =
            |values, stride, h: Heads| HeadRows { values, row_stride: stride, head_stride: h.stride };
        let (write, others) = self.buffers.write_beside(out.buffer);
        let view = |h: Heads| head_rows(others.tail_from(h.buffer, h.at), others.stride(h.buffer), h);
        let done = write_segments(*isa, pool, &self.state.pages_mut(state), &segments, view(k), view(v))
            .and_then(|()| {
                let pages = self.state.pages(state);
                let shape = attention_shape(
                    self.program,
                    state,
                    pages.shape().format,
                    q.count,
                    scale,
                    first as usize,
                );
                let (_, write) = write.split_columns(out.at);
                let (write, _) = write.split_columns(out.count * out.dim);
                attend(*isa, pool, &shape, &pages, &segments, view(q), write, self.attention)
            });
        *self.tables = recycle(segments);
        done
    }

    fn convolve(&mut self, x: Cols, weight: WeightId, state: StateId, out: Cols) -> Result<(), WorkerPanic> {
        /// Channels of a task.
        const CHANNELS: usize = 128;
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, segments) = (*isa, &self.batch.segments);
        let Loaded::Vector(taps) = &weights[weight.0] else { unreachable!("kernels are vectors") };
        let channels = x.width;
        let kernel = taps.len() / channels;
        let (write, others) = self.buffers.write_beside(out.buffer);
        let (state, write) = (self.state.recurrent(state), Shared::new(write));
        let chunks = channels.div_ceil(CHANNELS);
        pool.run(segments.len() * chunks, |task, _| {
            let (segment, from) = (&segments[task / chunks], task % chunks * CHANNELS);
            let width = CHANNELS.min(channels - from);
            let rows = segment.rows.start as usize..segment.rows.end as usize;
            // SAFETY: tasks differ in the session, and so in rows and slot (`Batch::check`), or in the channels.
            let (mut out, mut state) = unsafe {
                (
                    write.part(rows.clone(), out.at + from, width),
                    state.part(segment.slot, from, kernel - 1, width, channels),
                )
            };
            let stride = others.stride(x.buffer);
            let x = others.tail_from(x.buffer, rows.start * stride + x.at + from);
            let x = Rows::new(x, rows.len(), width, stride);
            let taps = Rows::new(&taps[from..], kernel, width, channels);
            convolve_silu(isa, &mut out, x, taps, &mut state);
        })
    }

    /// α and β in place of their projections.
    fn decays(&mut self, alpha: Cols, beta: Cols, a: WeightId, dt: WeightId) {
        let Machine { isa, weights, .. } = &*self.machine;
        let (Loaded::Vector(a), Loaded::Vector(dt)) = (&weights[a.0], &weights[dt.0]) else {
            unreachable!("decays have vectors")
        };
        let rows = self.buffers.rows();
        let ([alpha, beta], _) = self.buffers.write_columns::<2>(&[alpha, beta], RESIDUAL);
        if let (Some(mut alpha), Some(mut beta)) = (alpha, beta) {
            for r in 0..rows {
                decay_and_step(*isa, alpha.row_mut(r), beta.row_mut(r), a, dt);
            }
        }
    }

    fn delta(
        &mut self,
        qkv: [Heads; 3],
        alpha: Cols,
        beta: Cols,
        state: StateId,
        out: Heads,
    ) -> Result<(), WorkerPanic> {
        let StateKind::Delta { heads, key_dim, value_dim } = self.program.states[state.0].kind else {
            unreachable!("the delta rule has matrices");
        };
        let Machine { isa, pool, .. } = &mut *self.machine;
        let (isa, segments) = (*isa, &self.batch.segments);
        let (write, others) = self.buffers.write_beside(out.buffer);
        let (state, write) = (self.state.recurrent(state), Shared::new(write));
        pool.run(segments.len() * heads, |task, _| {
            let (segment, head) = (&segments[task / heads], task % heads);
            let rows = segment.rows.start as usize..segment.rows.end as usize;
            // SAFETY: tasks differ in the session, and so in rows and slot (`Batch::check`), or in the head.
            let (mut out, mut state) = unsafe {
                (
                    write.part(rows.clone(), out.at + head * out.stride, value_dim),
                    state.part(segment.slot, head * key_dim * value_dim, key_dim, value_dim, value_dim),
                )
            };
            let view = |buffer, at: usize, width| {
                let stride = others.stride(buffer);
                Rows::new(others.tail_from(buffer, rows.start * stride + at), rows.len(), width, stride)
            };
            let of_head = |h: Heads| view(h.buffer, h.at + head % h.count * h.stride, h.dim);
            let [q, k, v] = qkv.map(of_head);
            let alpha = view(alpha.buffer, alpha.at + head, 1);
            let beta = view(beta.buffer, beta.at + head, 1);
            gated_delta(isa, &mut out, DeltaInputs { q, k, v, alpha, beta }, &mut state);
        })
    }

    // ---- experts ----

    /// Chooses each row's experts; a row of `out` is the experts' numbers and then their weights.
    fn route(&mut self, logits: Cols, bias: Option<WeightId>, routing: Routing, used: usize, out: Cols) {
        let Machine { isa, weights, .. } = &*self.machine;
        let bias = bias.map(|id| match &weights[id.0] {
            Loaded::Vector(bias) => bias.as_slice(),
            other => unreachable!("a bias was loaded as {other:?}"),
        });
        let rows = self.buffers.rows();
        let ([logits, out], _) = self.buffers.write_columns::<2>(&[logits, out], RESIDUAL);
        if let (Some(mut logits), Some(mut out)) = (logits, out) {
            for r in 0..rows {
                let (chosen, weights) = out.row_mut(r).split_at_mut(used);
                route(*isa, logits.row_mut(r), bias, routing, cast_slice_mut(chosen), weights);
            }
        }
    }

    fn expert_linear(
        &mut self,
        x: Heads,
        weight: WeightId,
        routing: Cols,
        out: Heads,
    ) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, rows, used, n) = (*isa, self.buffers.rows(), out.count, out.dim);
        let Loaded::Experts(matrices) = &weights[weight.0] else { unreachable!("experts have matrices") };
        let count = rows * used;
        let chosen = &mut self.chosen[..count];
        for (r, chosen) in chosen.chunks_exact_mut(used).enumerate() {
            chosen.copy_from_slice(&cast_slice(self.buffers.read(routing).row(r))[..used]);
        }
        let (entries, offsets) = (&mut self.entries[..count], &mut self.offsets[..=matrices.len()]);
        entries_by_expert(chosen, entries, offsets);

        // One row of input serves all ranks, or there is one for each.
        let cols = Cols { buffer: x.buffer, at: x.at, width: (x.count - 1) * x.stride + x.dim };
        let stride = self.buffers.stride(x.buffer);
        assert!(
            x.count == 1 || x.stride * x.count == stride,
            "the ranks' inputs are not evenly apart: {x:?}"
        );
        let of_entry = |entry: u32| if x.count == 1 { entry as usize / used } else { entry as usize };
        if let Some(observer) = self.observer.as_deref_mut() {
            let tensor = &self.program.weights[weight.0].tensor;
            for expert in 0..matrices.len() {
                for &entry in &entries[offsets[expert] as usize..offsets[expert + 1] as usize] {
                    let row = entry as usize / used;
                    let at = x.at + if x.count == 1 { 0 } else { entry as usize % used * x.stride };
                    let floats = &self.buffers.floats(x.buffer)[row * stride + at..][..x.dim];
                    observer.product(tensor, Some(expert), floats, x.dim);
                }
            }
        }
        let quantised = matrices.iter().any(|m| m.shape().takes_quantised());
        if quantised && self.quantised_of != Some(cols) {
            let rows = self.buffers.read(cols);
            quantise_heads(isa, pool, rows, x, self.quantised)?;
            self.quantised_of = (x.count == 1).then_some(cols);
        }
        let inputs = if x.count == 1 { rows } else { count };
        let input = match quantised {
            true => matmul::Rows::quantised(&self.quantised[..inputs * (x.dim / BLOCK)], inputs, x.dim),
            false => {
                let stride = if x.count == 1 { stride } else { x.stride };
                matmul::Rows::float(self.buffers.tail_from(x.buffer, x.at), inputs, x.dim, stride)
            }
        };
        // An entry's row of input, by expert.
        for (input, &entry) in chosen.iter_mut().zip(entries.iter()) {
            *input = of_entry(entry) as u32;
        }
        let selection = &*chosen;
        let products = Shared::new(RowsMut::new(&mut self.experts[..count * n], count, n, n));
        let panels = n.div_ceil(PANEL);
        let per_task = panels_per_task(panels * matrices.len().min(count), pool.threads()).min(panels);
        let chunks = panels.div_ceil(per_task);
        let offsets = &*offsets;
        pool.run(matrices.len() * chunks, |task, _| {
            let (expert, first) = (task / chunks, task % chunks * per_task);
            let of_expert = offsets[expert] as usize..offsets[expert + 1] as usize;
            if of_expert.is_empty() {
                return;
            }
            let panels = first..(first + per_task).min(panels);
            let channels = matrices[expert].shape().channels(panels.clone());
            let x = input.select(&selection[of_expert.clone()]);
            // SAFETY: tasks differ in the expert, and so in the entries, or in the channels.
            let out = unsafe { products.part(of_expert, channels.start, channels.len()) };
            matrices[expert].multiply(isa, panels, x, out);
        })?;
        let mut write = self.buffers.write(out.buffer);
        for (&entry, product) in entries.iter().zip(self.experts.chunks_exact(n)) {
            let (row, rank) = (entry as usize / used, entry as usize % used);
            write.row_mut(row)[out.at + rank * out.stride..][..n].copy_from_slice(product);
        }
        Ok(())
    }

    fn combine(&mut self, x: Cols, routing: Cols, out: Cols) -> Result<(), WorkerPanic> {
        let isa = self.machine.isa;
        let (write, others) = self.buffers.write_beside(out.buffer);
        for_rows(&mut self.machine.pool, write, x.width, |r, row| {
            let out = &mut row[out.at..out.at + out.width];
            let outputs = &others.row(x.buffer, r)[x.at..x.at + x.width];
            let weights = &others.row(routing.buffer, r)[routing.at..routing.at + routing.width];
            out.fill(0.0);
            combine(isa, out, outputs, &weights[routing.width / 2..]);
        })
    }
}

/// Calls `work(row number, row)` for each row, on all threads where it pays; `cost` floats of a row are touched.
fn for_rows(
    pool: &mut Pool,
    mut out: RowsMut<'_>,
    cost: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), WorkerPanic> {
    let rows = out.rows();
    if rows * cost < WORTH_SHARING || pool.threads() == 1 {
        // A region of one task: a panic is caught all the same.
        let out = Mutex::new(out);
        return pool.run(1, |_, _| {
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            for r in 0..rows {
                work(r, out.row_mut(r));
            }
        });
    }
    let per_task = rows.div_ceil(4 * pool.threads());
    let width = out.width();
    let tiles = Tiles::new(out.reborrow(), per_task, width);
    pool.run(tiles.count(), |_, _| {
        if let Some(mut tile) = tiles.take() {
            for (i, r) in tile.rows.clone().enumerate() {
                work(r, tile.out.row_mut(i));
            }
        }
    })
}

/// Rows of activations into int8, on all threads where it pays.
pub(super) fn quantise(
    isa: Isa,
    pool: &mut Pool,
    rows: Rows<'_>,
    blocks: &mut [ActivationBlock],
) -> Result<(), WorkerPanic> {
    let per_row = rows.width() / BLOCK;
    let shared = rows.count() * rows.width() >= WORTH_SHARING;
    let per_task = if shared { rows.count().div_ceil(4 * pool.threads()) } else { rows.count() };
    let parts = Mutex::new(blocks[..rows.count() * per_row].chunks_mut(per_task * per_row).enumerate());
    pool.run(rows.count().div_ceil(per_task), |_, _| {
        let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        if let Some((i, part)) = next {
            for (r, blocks) in part.chunks_exact_mut(per_row).enumerate() {
                activations::quantise(isa, rows.row(i * per_task + r), blocks);
            }
        }
    })
}

/// As [`quantise`], for the heads of rows: `[rows · heads, dim]`.
fn quantise_heads(
    isa: Isa,
    pool: &mut Pool,
    rows: Rows<'_>,
    heads: Heads,
    blocks: &mut [ActivationBlock],
) -> Result<(), WorkerPanic> {
    if heads.stride == heads.dim || heads.count == 1 {
        return quantise(isa, pool, rows, blocks);
    }
    let per_head = heads.dim / BLOCK;
    let blocks = blocks.chunks_exact_mut(per_head);
    for (entry, blocks) in (0..rows.count() * heads.count).zip(blocks) {
        let at = entry % heads.count * heads.stride;
        activations::quantise(isa, &rows.row(entry / heads.count)[at..at + heads.dim], blocks);
    }
    Ok(())
}

/// Panels of one task: several tasks for each thread, so that a busy core delays little, but none too small.
pub(super) fn panels_per_task(panels: usize, threads: usize) -> usize {
    if threads == 1 { panels.max(1) } else { panels.div_ceil(8 * threads).max(2) }
}

pub(super) fn observe(observer: &mut dyn Observer, tensor: &str, rows: Rows<'_>) {
    for r in 0..rows.count() {
        observer.product(tensor, None, rows.row(r), rows.width());
    }
}

/// The memory of an emptied vector for elements of another lifetime.
fn recycle<'b>(mut segments: Vec<Segment<'_>>) -> Vec<Segment<'b>> {
    segments.clear();
    // Collecting from a vector's own iterator keeps its memory.
    segments.into_iter().map(|_| unreachable!("it is empty")).collect()
}

/// A rectangle of which tasks take disjoint parts.
struct Shared<'a> {
    first: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    borrow: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: exclusive access to plain floats, of which `part`'s callers take disjoint parts.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    fn new(mut rows: RowsMut<'a>) -> Self {
        let (count, width) = (rows.rows(), rows.width());
        let first = if count == 0 { std::ptr::null_mut() } else { rows.row_mut(0).as_mut_ptr() };
        Shared { first, rows: count, width, stride: rows.stride(), borrow: std::marker::PhantomData }
    }

    /// `width` columns from `column` on, of some rows.
    ///
    /// # Safety
    /// No other part that is alive has a float in common with this one.
    unsafe fn part(&self, rows: std::ops::Range<usize>, column: usize, width: usize) -> RowsMut<'_> {
        assert!(
            rows.start < rows.end && rows.end <= self.rows && column + width <= self.width,
            "{rows:?} {column}"
        );
        // SAFETY: within the rectangle by the assertion; disjoint from other parts by the caller's promise.
        unsafe {
            RowsMut::from_raw(
                self.first.add(rows.start * self.stride + column),
                rows.len(),
                width,
                self.stride,
            )
        }
    }
}
