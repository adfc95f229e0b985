//! Products with experts: each row with the matrices that were chosen for it.

use bytemuck::cast_slice;
use motet_model::program::{Cols, Heads, WeightId};

use super::Machine;
use super::products::{panels_per_task, quantise};
use super::run::Run;
use super::shared::Shared;
use crate::activations::{self, ActivationBlock, BLOCK};
use crate::isa::Isa;
use crate::matmul;
use crate::panels::PANEL;
use crate::pool::{Pool, WorkerPanic};
use crate::rows::Rows;
use crate::rows::experts::entries_by_expert;
use crate::shared_rows::RowsMut;
use crate::weights::Loaded;

impl Run<'_> {
    /// The product of each row with its experts' matrices, rank by rank.
    pub(super) fn expert_linear(
        &mut self,
        x: Heads,
        weight: WeightId,
        routing: Cols,
        out: Heads,
    ) -> Result<(), WorkerPanic> {
        let Machine { isa, pool, weights, .. } = &mut *self.machine;
        let scratch = &mut *self.scratch;
        let (isa, rows, used, n) = (*isa, self.buffers.rows(), out.count, out.dim);
        let Loaded::Experts(matrices) = &weights[weight.0] else { unreachable!("experts have matrices") };
        let count = rows * used;
        let chosen = &mut scratch.chosen[..count];
        for (r, chosen) in chosen.chunks_exact_mut(used).enumerate() {
            chosen.copy_from_slice(&cast_slice(self.buffers.read(routing).row(r))[..used]);
        }
        let (entries, offsets) = (&mut scratch.entries[..count], &mut scratch.offsets[..=matrices.len()]);
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
            quantise_heads(isa, pool, rows, x, &mut scratch.quantised)?;
            self.quantised_of = (x.count == 1).then_some(cols);
        }
        let inputs = if x.count == 1 { rows } else { count };
        let input = match quantised {
            true => matmul::Rows::quantised(&scratch.quantised[..inputs * (x.dim / BLOCK)], inputs, x.dim),
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
        let products = Shared::new(RowsMut::new(&mut scratch.experts[..count * n], count, n, n));
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
        for (&entry, product) in entries.iter().zip(scratch.experts.chunks_exact(n)) {
            let (row, rank) = (entry as usize / used, entry as usize % used);
            write.row_mut(row)[out.at + rank * out.stride..][..n].copy_from_slice(product);
        }
        Ok(())
    }
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
