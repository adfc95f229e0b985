//! The weights of a stage: where each lies in one arena, and how they get there from the model file. What an earlier
//! stage has in its arena is shared.
//!
//! Each tensor is packed by all threads, slab by slab, and the file's pages are given back behind it, so that a
//! weight is in memory once; the peak while loading is the packed weights and a slab.

use std::sync::{Arc, Mutex, PoisonError};

use motet_gguf::{Format, ModelFile, TensorInfo};
use motet_model::device::DeviceError;
use motet_model::layout::manifest;
use motet_model::program::{Op, Program, Weight, WeightId, WeightKind};

use crate::arena::Arena;
use crate::device::unsupported;
use crate::panels::{PackedMatrix, PackedShape, PanelError};
use crate::pool::Pool;
use crate::rows::convolution::taps_first;

/// Bytes of a file that are mapped in at most while a tensor is packed.
const SLAB: usize = 8 << 20;

/// Where each weight of a stage will lie.
pub(crate) struct WeightsLayout {
    places: Vec<(WeightId, usize)>,
    /// Those that an earlier stage holds.
    shared: Vec<WeightId>,
    /// Bytes of the arena and of the vectors.
    pub(crate) bytes: usize,
    arena_bytes: usize,
}

/// A weight in memory.
#[derive(Debug, Clone)]
pub(crate) enum Loaded {
    /// Not of this stage.
    Elsewhere,
    /// Panels.
    Matrix(PackedMatrix),
    /// Panels, expert by expert.
    Experts(Vec<PackedMatrix>),
    /// Rows as they are in the file.
    Table(Table),
    /// Floats.
    Vector(Vec<f32>),
}

/// Rows that are looked up, in the file's format.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    arena: Arc<Arena>,
    offset: usize,
    rows: usize,
    row_bytes: usize,
    format: Format,
}

impl Table {
    /// Row `row` as floats.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a table of {}", self.rows);
        let at = self.offset + row * self.row_bytes;
        self.format.dequantize(&self.arena.bytes()[at..at + self.row_bytes], out);
    }
}

/// The shape of one matrix of a weight: `[out, in]`, for experts of one of them.
fn matrix_shape(weight: &Weight) -> Result<PackedShape, DeviceError> {
    PackedShape::new(weight.format, weight.shape[1], weight.shape[0]).map_err(|e| refused(weight, &e))
}

fn refused(weight: &Weight, error: &PanelError) -> DeviceError {
    unsupported(format!("tensor {}: {error}", weight.tensor))
}

/// Bytes that a weight takes in the arena; vectors lie beside it.
fn arena_bytes(weight: &Weight) -> Result<usize, DeviceError> {
    let bytes = match weight.kind {
        WeightKind::Vector => 0,
        WeightKind::Table => weight.file_bytes() as usize,
        WeightKind::Matrix => matrix_shape(weight)?.bytes(),
        WeightKind::Experts => {
            let one = matrix_shape(weight)?.bytes().next_multiple_of(Arena::ALIGNMENT);
            one.checked_mul(weight.shape[2]).ok_or_else(|| unsupported("experts beyond the address space"))?
        }
    };
    Ok(bytes.next_multiple_of(Arena::ALIGNMENT))
}

impl WeightsLayout {
    /// Places the weights of `ops` one behind the other, but for those that earlier stages hold.
    pub(crate) fn of(program: &Program, ops: &[usize], earlier: &[WeightId]) -> Result<Self, DeviceError> {
        let (mut places, mut shared) = (Vec::new(), Vec::new());
        let (mut at, mut vectors) = (0usize, 0);
        for id in manifest(program, ops) {
            if earlier.contains(&id) {
                shared.push(id);
                continue;
            }
            let weight = &program.weights[id.0];
            places.push((id, at));
            at = at
                .checked_add(arena_bytes(weight)?)
                .ok_or_else(|| unsupported("weights beyond the address space"))?;
            if weight.kind == WeightKind::Vector {
                vectors += 4 * weight.len();
            }
        }
        Ok(Self { places, shared, bytes: at + vectors, arena_bytes: at })
    }

    /// The weights that lie in the arena: later stages share them.
    pub(crate) fn held<'p>(&'p self, program: &'p Program) -> impl Iterator<Item = WeightId> + 'p {
        let ids = self.places.iter().map(|&(id, _)| id);
        ids.filter(|id| program.weights[id.0].kind != WeightKind::Vector)
    }

    /// Reads the weights into memory; `earlier` are those of earlier stages.
    pub(crate) fn load(
        &self,
        program: &Program,
        file: &ModelFile,
        pool: &mut Pool,
        earlier: &[Loaded],
    ) -> Result<Vec<Loaded>, DeviceError> {
        let bytes = self.arena_bytes as u64;
        let mut arena = Arena::allocate(self.arena_bytes).map_err(|source| DeviceError::Memory {
            what: "weights",
            bytes,
            source,
        })?;
        arena.touch(pool).map_err(|panic| DeviceError::Panic(panic.to_string()))?;
        let mut loaded = vec![Loaded::Elsewhere; program.weights.len()];
        self.shared.iter().for_each(|id| loaded[id.0] = earlier[id.0].clone());
        for &(id, offset) in &self.places {
            let weight = &program.weights[id.0];
            let info = tensor(file, weight)?;
            let part = &mut arena.bytes_mut()[offset..offset + arena_bytes(weight)?];
            match weight.kind {
                WeightKind::Vector => loaded[id.0] = Loaded::Vector(vector(program, id, file, info)),
                WeightKind::Table => copy(file, info, part),
                WeightKind::Matrix | WeightKind::Experts => pack(file, info, weight, part, pool)?,
            }
            file.release(info);
        }
        let arena = Arc::new(arena);
        for &(id, offset) in &self.places {
            let weight = &program.weights[id.0];
            let place = |at| {
                let shape = matrix_shape(weight)?;
                PackedMatrix::new(shape, Arc::clone(&arena), at).map_err(|e| refused(weight, &e))
            };
            match weight.kind {
                WeightKind::Vector => {}
                WeightKind::Table => {
                    let rows = weight.shape[1];
                    loaded[id.0] = Loaded::Table(Table {
                        arena: Arc::clone(&arena),
                        offset,
                        rows,
                        row_bytes: weight.file_bytes() as usize / rows,
                        format: weight.format,
                    });
                }
                WeightKind::Matrix => loaded[id.0] = Loaded::Matrix(place(offset)?),
                WeightKind::Experts => {
                    let one = arena_bytes(weight)? / weight.shape[2];
                    let experts = (0..weight.shape[2]).map(|e| place(offset + e * one));
                    loaded[id.0] = Loaded::Experts(experts.collect::<Result<_, _>>()?);
                }
            }
        }
        Ok(loaded)
    }
}

/// The weight's tensor, as the header promised it.
fn tensor<'f>(file: &'f ModelFile, weight: &Weight) -> Result<&'f TensorInfo, DeviceError> {
    let wrong = |what: String| DeviceError::Tensor { tensor: weight.tensor.clone(), what };
    let info = file.tensor(&weight.tensor).ok_or_else(|| wrong("not in the file".into()))?;
    if info.format != weight.format || info.elements() != weight.len() as u64 {
        let (format, elements) = (info.format.name(), info.elements());
        return Err(wrong(format!(
            "{elements} values in {format}, expected {} in {}",
            weight.len(),
            weight.format.name()
        )));
    }
    Ok(info)
}

fn vector(program: &Program, id: WeightId, file: &ModelFile, info: &TensorInfo) -> Vec<f32> {
    let weight = &program.weights[id.0];
    let mut floats = vec![0.0; weight.len()];
    weight.format.dequantize(file.bytes(info), &mut floats);
    let convolves = |op: &Op| matches!(op, Op::Convolve { weight, .. } if *weight == id);
    match program.ops.iter().any(|(_, op)| convolves(op)) {
        true => taps_first(&floats, weight.shape[0]),
        false => floats,
    }
}

/// Copies a tensor as it is.
fn copy(file: &ModelFile, info: &TensorInfo, part: &mut [u8]) {
    let bytes = file.bytes(info);
    for at in (0..bytes.len()).step_by(SLAB) {
        let slab = at..(at + SLAB).min(bytes.len());
        part[slab.clone()].copy_from_slice(&bytes[slab.clone()]);
        file.release_part(info, slab);
    }
}

/// Packs a matrix, or one expert's matrix after the other.
fn pack(
    file: &ModelFile,
    info: &TensorInfo,
    weight: &Weight,
    part: &mut [u8],
    pool: &mut Pool,
) -> Result<(), DeviceError> {
    let shape = matrix_shape(weight)?;
    let bytes = file.bytes(info);
    let matrix_bytes = shape.n_out() * shape.row_bytes();
    let packed = shape.bytes().next_multiple_of(Arena::ALIGNMENT);
    let rows_of_panel = shape.channels(0..1).len().max(1);
    let slab = (SLAB / (rows_of_panel * shape.row_bytes())).max(1);
    for (expert, part) in part.chunks_exact_mut(packed).enumerate() {
        let rows = &bytes[expert * matrix_bytes..][..matrix_bytes];
        let part = &mut part[..shape.bytes()];
        for first in (0..shape.panel_count()).step_by(slab) {
            let panels = first..(first + slab).min(shape.panel_count());
            let part = &mut part[panels.start * shape.panel_bytes()..panels.end * shape.panel_bytes()];
            let per_task = panels.len().div_ceil(4 * pool.threads());
            let parts = Mutex::new(part.chunks_mut(per_task * shape.panel_bytes()).enumerate());
            pool.run(panels.len().div_ceil(per_task), |_, _| {
                let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                if let Some((i, part)) = next {
                    let first = panels.start + i * per_task;
                    shape.pack_panels(first..(first + per_task).min(panels.end), rows, part);
                }
            })
            .map_err(|panic| DeviceError::Panic(panic.to_string()))?;
            let channels = shape.channels(panels);
            let start = expert * matrix_bytes;
            let used = start + channels.start * shape.row_bytes()..start + channels.end * shape.row_bytes();
            file.release_part(info, used);
        }
    }
    Ok(())
}
