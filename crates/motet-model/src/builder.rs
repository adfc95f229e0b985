//! Builds a program step by step: names buffers, checks that tensors are there and have their shapes.

use crate::header::{Header, ModelError};
use crate::program::*;

/// A program under construction.
pub(crate) struct Builder<'a> {
    pub(crate) header: &'a Header<'a>,
    pub(crate) d_model: usize,
    program: Program,
    place: Place,
}

impl<'a> Builder<'a> {
    /// A program whose residual stream has `d_model` columns.
    pub(crate) fn new(header: &'a Header<'a>, d_model: usize) -> Self {
        let residual = Buffer { name: "residual".into(), width: d_model };
        let program = Program { buffers: vec![residual], ..Program::default() };
        Self { header, d_model, program, place: Place::Input }
    }

    pub(crate) fn finish(self) -> Program {
        self.program
    }

    /// The program so far.
    pub(crate) fn so_far(&self) -> Program {
        self.program.clone()
    }

    /// Operations from here on stand at `place`.
    pub(crate) fn at(&mut self, place: Place) {
        self.place = place;
    }

    pub(crate) fn push(&mut self, op: Op) {
        self.program.ops.push((self.place, op));
    }

    pub(crate) fn residual(&self) -> Cols {
        Cols { buffer: RESIDUAL, at: 0, width: self.d_model }
    }

    /// The row buffer of that name; made at first use. Layers share it.
    pub(crate) fn buffer(&mut self, name: &str, width: usize) -> Cols {
        let buffers = &mut self.program.buffers;
        let id = buffers.iter().position(|b| b.name == name).unwrap_or_else(|| {
            buffers.push(Buffer { name: name.into(), width });
            buffers.len() - 1
        });
        buffers[id].width = buffers[id].width.max(width);
        Cols { buffer: BufferId(id), at: 0, width }
    }

    /// The tensor `name` if the file holds it, as a weight of the given shape (input dimension first).
    pub(crate) fn optional(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: WeightKind,
    ) -> Result<Option<WeightId>, ModelError> {
        if let Some(at) = self.program.weights.iter().position(|w| w.tensor == name) {
            // A tied embedding is looked up and multiplied: the product decides how it is kept.
            let weight = &mut self.program.weights[at];
            if kind == WeightKind::Matrix {
                weight.kind = kind;
            }
            return Ok(Some(WeightId(at)));
        }
        let Some(info) = self.header.tensor(name, shape)? else { return Ok(None) };
        let format = info.format;
        self.program.weights.push(Weight { tensor: name.into(), shape: shape.to_vec(), format, kind });
        Ok(Some(WeightId(self.program.weights.len() - 1)))
    }

    /// As [`Builder::optional`], for a tensor that must be there.
    pub(crate) fn weight(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: WeightKind,
    ) -> Result<WeightId, ModelError> {
        self.optional(name, shape, kind)?.ok_or_else(|| ModelError::MissingTensor(name.into()))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.header.file().tensor(name).is_some()
    }

    /// A layer's state of that kind; made at first use.
    pub(crate) fn state(&mut self, layer: usize, kind: StateKind) -> StateId {
        let (states, state) = (&mut self.program.states, State { layer, kind });
        StateId(states.iter().position(|s| *s == state).unwrap_or_else(|| {
            states.push(state);
            states.len() - 1
        }))
    }

    /// The position encoding; equal ones are one.
    pub(crate) fn rope(&mut self, rope: Rope) -> RopeId {
        let ropes = &mut self.program.ropes;
        RopeId(ropes.iter().position(|r| *r == rope).unwrap_or_else(|| {
            ropes.push(rope);
            ropes.len() - 1
        }))
    }

    /// out = RMS norm of the row x with the weight `name`.
    pub(crate) fn norm(&mut self, name: &str, x: Cols, eps: f32, out: Cols) -> Result<(), ModelError> {
        self.head_norm(name, x.row(), eps, out.row())
    }

    /// RMS norm of each head.
    pub(crate) fn head_norm(&mut self, name: &str, x: Heads, eps: f32, out: Heads) -> Result<(), ModelError> {
        let weight = self.weight(name, &[x.dim], WeightKind::Vector)?;
        self.push(Op::Norm { x, weight, eps, out });
        Ok(())
    }

    /// out = W x, plus the bias if the file holds one beside `stem.weight`.
    pub(crate) fn linear(&mut self, stem: &str, x: Cols, out: Cols) -> Result<(), ModelError> {
        let weight = self.weight(&format!("{stem}.weight"), &[x.width, out.width], WeightKind::Matrix)?;
        let bias = self.optional(&format!("{stem}.bias"), &[out.width], WeightKind::Vector)?;
        self.push(Op::Linear { x, weight, bias, out });
        Ok(())
    }
}
