//! Matrix products: the weights of neighbouring operations times the same rows.

use std::sync::{Mutex, PoisonError};

use motet_model::device::Observer;
use motet_model::program::{Cols, Op, WeightId};

use super::Machine;
use super::row_wise::{rows_per_task, vector};
use super::run::Run;
use crate::activations::{self, ActivationBlock, BLOCK};
use crate::isa::Isa;
use crate::matmul;
use crate::panels::{PANEL, PackedMatrix};
use crate::pool::{Pool, WorkerPanic};
use crate::rows::Rows;
use crate::rows::elementwise::{add, softcap};
use crate::shared_rows::{RowsMut, Tiles};
use crate::weights::Loaded;

/// Products that run at once at most.
const FUSED: usize = 4;

impl Run<'_> {
    /// The products of `x` with the weights of some operations.
    pub(super) fn linear(&mut self, x: Cols, ops: &[usize]) -> Result<(), WorkerPanic> {
        ops.chunks(FUSED).try_for_each(|ops| self.linear_at_once(x, ops))
    }

    fn linear_at_once(&mut self, x: Cols, ops: &[usize]) -> Result<(), WorkerPanic> {
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
            quantise(isa, pool, self.buffers.read(x), &mut self.scratch.quantised)?;
            self.quantised_of = Some(x);
        }
        let rows = self.buffers.rows();
        let stride = self.buffers.stride(x.buffer);
        let (outs, values) = self.buffers.write_columns::<FUSED>(cols, x.buffer);
        let floats = matmul::Rows::float(&values[x.at.min(values.len())..], rows, x.width, stride);
        let blocks = quantised.then(|| {
            matmul::Rows::quantised(&self.scratch.quantised[..rows * (x.width / BLOCK)], rows, x.width)
        });
        let panels: usize = matrices.iter().flatten().map(|(m, _)| m.shape().panel_count()).sum();
        let per_task = panels_per_task(panels, pool.threads());
        let tiles = Tiles::new(outs, per_task * PANEL, pool.threads());
        // Each worker goes on by itself: a claim for every tile would keep one cache line going back and forth.
        pool.run(pool.threads().min(tiles.count()), |_, worker| {
            while let Some(mut tile) = tiles.take(worker) {
                let Some((matrix, bias)) = matrices[tile.part] else { return };
                let panels = tile.columns.start / PANEL..tile.columns.end.div_ceil(PANEL);
                let x = if matrix.shape().takes_quantised() { blocks.unwrap_or(floats) } else { floats };
                matrix.multiply(isa, panels, x, tile.out.reborrow());
                if let Some(bias) = bias {
                    let bias = &vector(weights, bias)[tile.columns.clone()];
                    (0..rows).for_each(|r| add(isa, tile.out.row_mut(r), bias));
                }
            }
        })
    }

    /// Logits `[rows, vocab]` of all rows of the buffers.
    pub(super) fn head(
        &mut self,
        x: Cols,
        weight: WeightId,
        cap: Option<f32>,
        logits: &mut [f32],
    ) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let Loaded::Matrix(matrix) = &weights[weight.0] else { unreachable!("a head is a matrix") };
        if let Some(observer) = self.observer.as_deref_mut() {
            observe(observer, &self.program.weights[weight.0].tensor, self.buffers.read(x));
        }
        let (isa, rows, vocab) = (*isa, self.buffers.rows(), matrix.shape().n_out());
        let quantised = matrix.shape().takes_quantised();
        if quantised && self.quantised_of != Some(x) {
            quantise(isa, pool, self.buffers.read(x), &mut self.scratch.quantised)?;
        }
        let input = match quantised {
            true => {
                matmul::Rows::quantised(&self.scratch.quantised[..rows * (x.width / BLOCK)], rows, x.width)
            }
            false => {
                let (from, stride) = (self.buffers.tail_from(x.buffer, x.at), self.buffers.stride(x.buffer));
                matmul::Rows::float(from, rows, x.width, stride)
            }
        };
        let per_task = panels_per_task(matrix.shape().panel_count(), pool.threads());
        let whole = RowsMut::new(logits, rows, vocab, vocab);
        let tiles = Tiles::new([Some(whole)], per_task * PANEL, pool.threads());
        pool.run(pool.threads().min(tiles.count()), |_, worker| {
            while let Some(mut tile) = tiles.take(worker) {
                let panels = tile.columns.start / PANEL..tile.columns.end.div_ceil(PANEL);
                matrix.multiply(isa, panels, input, tile.out.reborrow());
                if let Some(cap) = cap {
                    (0..rows).for_each(|r| softcap(isa, tile.out.row_mut(r), cap));
                }
            }
        })
    }
}

/// Rows of activations into int8, on all threads where it pays.
pub(super) fn quantise(
    isa: Isa,
    pool: &mut Pool,
    rows: Rows<'_>,
    blocks: &mut [ActivationBlock],
) -> Result<(), WorkerPanic> {
    let per_row = rows.width() / BLOCK;
    let per_task = rows_per_task(rows.count(), 2 * rows.width(), pool.threads());
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

/// Panels of one task: several tasks for each thread, so that a busy core delays little, but none too small.
pub(super) fn panels_per_task(panels: usize, threads: usize) -> usize {
    if threads == 1 { panels.max(1) } else { panels.div_ceil(8 * threads).max(2) }
}

pub(super) fn observe(observer: &mut dyn Observer, tensor: &str, rows: Rows<'_>) {
    for r in 0..rows.count() {
        observer.product(tensor, None, rows.row(r), rows.width());
    }
}
