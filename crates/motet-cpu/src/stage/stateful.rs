//! Operations that look at the sessions: attention over their pages, convolution and the gated delta rule over their
//! recurrent states.

use motet_model::program::{Cols, Heads, StateId, WeightId};

use super::Machine;
use super::rollback::DeltaColumns;
use super::row_wise::vector;
use super::run::Run;
use super::shared::Shared;
use super::sizes::attention_shape;
use crate::attention::attend;
use crate::kv::{HeadRows, Segment, write_segments};
use crate::pool::WorkerPanic;
use crate::rows::Rows;
use crate::rows::convolution::{MAX_TAPS, convolve_silu};
use crate::rows::gated_delta::{DeltaInputs, gated_delta};
use crate::shared_rows::RowsMut;
use crate::worker_scratch::WorkerScratch;

impl Run<'_> {
    /// Writes the rows' keys and values, then attends.
    pub(super) fn attend(
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
        let mut segments = recycle(std::mem::take(&mut self.scratch.tables));
        segments.extend(self.lines.with_pages(pool_of));
        let Machine { isa, pool, .. } = &mut *self.machine;
        let (write, others) = self.buffers.write_beside(out.buffer);
        let view = |h: Heads| head_rows(others.tail_from(h.buffer, h.at), others.stride(h.buffer), h.stride);
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
                attend(*isa, pool, &shape, &pages, &segments, view(q), write, &mut self.scratch.attention)
            });
        self.scratch.tables = recycle(segments);
        done
    }

    /// Writes the rows' keys and values.
    pub(super) fn remember(&mut self, k: Heads, v: Heads, state: StateId) -> Result<(), WorkerPanic> {
        let pool_of = self.state.pool_of(state);
        let mut segments = recycle(std::mem::take(&mut self.scratch.tables));
        segments.extend(self.lines.with_pages(pool_of));
        let Machine { isa, pool, .. } = &mut *self.machine;
        let buffers = &self.buffers;
        let view =
            |h: Heads| head_rows(buffers.tail_from(h.buffer, h.at), buffers.stride(h.buffer), h.stride);
        let pages = self.state.pages_mut(state);
        let done = write_segments(*isa, pool, &pages, &segments, view(k), view(v));
        self.scratch.tables = recycle(segments);
        done
    }

    /// Causal convolution over each session's rows and what it remembers, then silu.
    pub(super) fn convolve(
        &mut self,
        x: Cols,
        weight: WeightId,
        state: StateId,
        out: Cols,
    ) -> Result<(), WorkerPanic> {
        /// Channels of a task.
        const CHANNELS: usize = 128;
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let (isa, segments) = (*isa, self.lines.segments);
        let taps = vector(weights, weight);
        let channels = x.width;
        let kernel = taps.len() / channels;
        let (write, others) = self.buffers.write_beside(out.buffer);
        let (states, write) = (self.state.recurrent(state), Shared::new(write));
        let record = self.rollback.recorder(state);
        let chunks = channels.div_ceil(CHANNELS);
        pool.run(segments.len() * chunks, |task, _| {
            let (number, from) = (task / chunks, task % chunks * CHANNELS);
            let segment = &segments[number];
            let width = CHANNELS.min(channels - from);
            let rows = segment.rows.start as usize..segment.rows.end as usize;
            // SAFETY: tasks differ in the session, and so in rows and slot (`Batch::check`), or in the channels.
            let (mut out, mut state) = unsafe {
                (
                    write.part(rows.clone(), out.at + from, width),
                    states.part(segment.slot, from, kernel - 1, width, channels),
                )
            };
            let stride = others.stride(x.buffer);
            let x = others.tail_from(x.buffer, rows.start * stride + x.at + from);
            let x = Rows::new(x, rows.len(), width, stride);
            let taps = Rows::new(&taps[from..], kernel, width, channels);
            if !record.wants(number) {
                return convolve_silu(isa, &mut out, x, taps, &mut state);
            }
            // The first row is certain, the others run on a copy.
            let (mut first_out, mut out) = out.split_rows(1);
            let (first_x, x) = x.split(1);
            convolve_silu(isa, &mut first_out, first_x, taps, &mut state);
            let mut copy = [0.0; (MAX_TAPS - 1) * CHANNELS];
            let mut copy = RowsMut::new(&mut copy, kernel - 1, width, CHANNELS);
            (0..kernel - 1).for_each(|j| copy.row_mut(j).copy_from_slice(state.row_mut(j)));
            convolve_silu(isa, &mut out, x, taps, &mut copy);
            // SAFETY: tasks of one session differ in the channels.
            unsafe { record.take_down(number, from, x) };
        })
    }

    /// The gated delta rule, position by position; the decays are there already.
    pub(super) fn delta(
        &mut self,
        [q, k, v]: [Heads; 3],
        alpha: Cols,
        beta: Cols,
        state: StateId,
        out: Heads,
    ) -> Result<(), WorkerPanic> {
        let (heads, key_dim, value_dim) = (v.count, k.dim, v.dim);
        let Machine { isa, pool, .. } = &mut *self.machine;
        let (isa, segments) = (*isa, self.lines.segments);
        let (write, others) = self.buffers.write_beside(out.buffer);
        let (states, write) = (self.state.recurrent(state), Shared::new(write));
        let record = self.rollback.recorder(state);
        let copies = WorkerScratch::whole(&mut self.scratch.states, pool.threads());
        pool.run(segments.len() * heads, |task, worker| {
            let (number, head) = (task / heads, task % heads);
            let segment = &segments[number];
            let rows = segment.rows.start as usize..segment.rows.end as usize;
            // SAFETY: tasks differ in the session, and so in rows and slot (`Batch::check`), or in the head.
            let (mut out, mut state) = unsafe {
                (
                    write.part(rows.clone(), out.at + head * out.stride, value_dim),
                    states.part(segment.slot, head * key_dim * value_dim, key_dim, value_dim, value_dim),
                )
            };
            let view = |buffer, at: usize, width| {
                let stride = others.stride(buffer);
                Rows::new(others.tail_from(buffer, rows.start * stride + at), rows.len(), width, stride)
            };
            let of_head = |h: Heads| view(h.buffer, h.at + head % h.count * h.stride, h.dim);
            let inputs = DeltaInputs {
                k: of_head(k),
                v: of_head(v),
                alpha: view(alpha.buffer, alpha.at + head, 1),
                beta: view(beta.buffer, beta.at + head, 1),
            };
            if !record.wants(number) {
                return gated_delta(isa, &mut out, of_head(q), inputs, &mut state);
            }
            // The first row is certain, the others run on a copy.
            let (mut first_out, mut out) = out.split_rows(1);
            let (first_q, q) = of_head(q).split(1);
            let (first, inputs) = inputs.split(1);
            gated_delta(isa, &mut first_out, first_q, first, &mut state);
            let mut copy = copies.lend(worker);
            let mut copy = RowsMut::new(&mut copy, key_dim, value_dim, value_dim);
            (0..key_dim).for_each(|i| copy.row_mut(i).copy_from_slice(state.row_mut(i)));
            gated_delta(isa, &mut out, q, inputs, &mut copy);
            let columns = DeltaColumns { key_heads: k.count, key_dim, heads, value_dim };
            // SAFETY: tasks of one session differ in the head; a key head is taken down by the first that reads it.
            unsafe {
                if head < k.count {
                    record.take_down(number, columns.key(head), inputs.k);
                }
                record.take_down(number, columns.value(head), inputs.v);
                record.take_down(number, columns.alpha(head), inputs.alpha);
                record.take_down(number, columns.beta(head), inputs.beta);
            }
        })
    }
}

/// Heads of rows as attention takes them.
fn head_rows(values: &[f32], row_stride: usize, head_stride: usize) -> HeadRows<'_> {
    HeadRows { values, row_stride, head_stride }
}

/// The memory of an emptied vector for elements of another lifetime.
fn recycle<'b>(mut segments: Vec<Segment<'_>>) -> Vec<Segment<'b>> {
    segments.clear();
    // Collecting from a vector's own iterator keeps its memory.
    segments.into_iter().map(|_| unreachable!("it is empty")).collect()
}
