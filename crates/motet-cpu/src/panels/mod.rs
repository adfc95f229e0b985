//! Packed weights: matrices `[n_out, k]` as panels of 16 output channels, the form that kernels read.
//!
//! A matrix is packed once, at load, from the rows of the file; the file's bytes are not needed afterwards.
//! Packing is lossless: [`PackedMatrix::dequantize_row`] gives the bits that the file's row would give, so a
//! tied embedding needs no second copy. No kernel may depend on anything but `layout`'s bytes.

pub(crate) mod blocks;
pub(crate) mod layout;
mod pack;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use motet_gguf::Format;

use crate::arena::Arena;
use layout::Layout;
pub use layout::PANEL;

// Scales are read as numbers of the host, and files are little-endian.
const _: () = assert!(cfg!(target_endian = "little"), "packed weights need a little-endian host");

/// Why a matrix can't be packed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PanelError {
    /// There are no kernels for this format.
    #[error("no kernel for weights in {0}: requantise the model to a format that `motet inspect` lists")]
    Format(Format),
    /// The rows are not whole blocks.
    #[error("rows of {k} values are not whole blocks of {format}: expected a multiple of {expected}")]
    Row {
        /// The weights' format.
        format: Format,
        /// The length of a row.
        k: usize,
        /// What it must be a multiple of.
        expected: usize,
    },
    /// The matrix would be larger than the address space.
    #[error("a matrix of {n_out} × {k} in {format} is too large for this machine")]
    Size {
        /// The weights' format.
        format: Format,
        /// Output channels.
        n_out: usize,
        /// The length of a row.
        k: usize,
    },
    /// The place in the arena does not hold the matrix.
    #[error(
        "{bytes} bytes of packed weights at {offset} do not fit an arena of {arena} bytes in steps of {}",
        Arena::ALIGNMENT
    )]
    Place {
        /// Where the matrix should begin.
        offset: usize,
        /// How large it is.
        bytes: usize,
        /// How large the arena is.
        arena: usize,
    },
}

/// The shape of a packed matrix: all that can be said about it without its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedShape {
    format: Format,
    n_out: usize,
    k: usize,
    layout: Layout,
}

/// The bytes of a packed matrix `[n_out, k]`: a multiple of [`Arena::ALIGNMENT`].
///
/// # Errors
/// If the format has no kernels, `k` is no multiple of its block, or the size overflows.
pub fn packed_bytes(format: Format, n_out: usize, k: usize) -> Result<usize, PanelError> {
    Ok(PackedShape::new(format, n_out, k)?.bytes().next_multiple_of(Arena::ALIGNMENT))
}

impl PackedShape {
    /// The shape of `n_out` output channels with `k` weights each.
    ///
    /// # Errors
    /// As [`packed_bytes`].
    pub fn new(format: Format, n_out: usize, k: usize) -> Result<PackedShape, PanelError> {
        let layout = Layout::of(format).ok_or(PanelError::Format(format))?;
        let expected = layout.super_len();
        if k == 0 || !k.is_multiple_of(expected) {
            return Err(PanelError::Row { format, k, expected });
        }
        let shape = PackedShape { format, n_out, k, layout };
        (k / expected)
            .checked_mul(layout.super_bytes())
            .and_then(|panel| panel.checked_mul(shape.panel_count()))
            .filter(|&bytes| bytes <= isize::MAX as usize - Arena::ALIGNMENT)
            .ok_or(PanelError::Size { format, n_out, k })?;
        Ok(shape)
    }

    /// The weights' format in the file.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Output channels.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Weights of a channel.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Whether products take quantised activations (or else floats).
    pub fn takes_quantised(&self) -> bool {
        matches!(self.layout, Layout::Quant(_))
    }

    /// How many panels; the last one may have lanes without a channel.
    pub fn panel_count(&self) -> usize {
        self.n_out.div_ceil(PANEL)
    }

    /// Bytes of one panel.
    pub fn panel_bytes(&self) -> usize {
        self.k / self.layout.super_len() * self.layout.super_bytes()
    }

    /// Bytes of all panels.
    pub fn bytes(&self) -> usize {
        self.panel_bytes() * self.panel_count()
    }

    /// Bytes of one row in the file.
    pub fn row_bytes(&self) -> usize {
        self.k / self.format.block_len() * self.format.block_bytes()
    }

    /// The output channels of some panels.
    pub fn channels(&self, panels: Range<usize>) -> Range<usize> {
        (panels.start * PANEL).min(self.n_out)..(panels.end * PANEL).min(self.n_out)
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Packs some panels from the file's rows into their part of the packed matrix. Parts may be packed in
    /// parallel: panel p begins at byte p · [`panel_bytes`](PackedShape::panel_bytes).
    ///
    /// # Panics
    /// If `rows` is not the whole matrix as it is in the file, or `part` not `panels.len()` panels long.
    pub fn pack_panels(&self, panels: Range<usize>, rows: &[u8], part: &mut [u8]) {
        assert!(
            panels.start <= panels.end && panels.end <= self.panel_count(),
            "no panels {panels:?} in {self:?}"
        );
        assert_eq!(rows.len(), self.n_out * self.row_bytes(), "bytes of the file's rows of {self:?}");
        assert_eq!(part.len(), panels.len() * self.panel_bytes(), "bytes of panels {panels:?} of {self:?}");
        pack::pack(self, panels, rows, part);
    }
}

/// A packed matrix: a shape and its place in an arena.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    shape: PackedShape,
    arena: Arc<Arena>,
    offset: usize,
}

impl PackedMatrix {
    /// The matrix whose panels were packed into `arena` from byte `offset` on.
    ///
    /// # Errors
    /// If the arena does not have these bytes or the offset is not aligned.
    pub fn new(shape: PackedShape, arena: Arc<Arena>, offset: usize) -> Result<PackedMatrix, PanelError> {
        let (bytes, arena_bytes) = (shape.bytes(), arena.bytes().len());
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= arena_bytes);
        if !fits || !offset.is_multiple_of(Arena::ALIGNMENT) {
            return Err(PanelError::Place { offset, bytes, arena: arena_bytes });
        }
        Ok(PackedMatrix { shape, arena, offset })
    }

    /// Packs a whole matrix into an arena of its own. For tests and small matrices; a device packs all its
    /// matrices into one arena.
    ///
    /// # Errors
    /// If the arena can't be had.
    ///
    /// # Panics
    /// As [`PackedShape::pack_panels`].
    pub fn pack(shape: PackedShape, rows: &[u8]) -> std::io::Result<PackedMatrix> {
        let mut arena = Arena::allocate(shape.bytes())?;
        shape.pack_panels(0..shape.panel_count(), rows, &mut arena.bytes_mut()[..shape.bytes()]);
        Ok(PackedMatrix { shape, arena: Arc::new(arena), offset: 0 })
    }

    /// Its shape.
    pub fn shape(&self) -> &PackedShape {
        &self.shape
    }

    /// The bytes of some panels.
    pub(crate) fn panels(&self, panels: Range<usize>) -> &[u8] {
        let panel = self.shape.panel_bytes();
        &self.arena.bytes()[self.offset..][..self.shape.bytes()][panels.start * panel..panels.end * panel]
    }

    /// Row `row` as floats: the bits that [`Format::dequantize`] gives for the file's row.
    ///
    /// # Panics
    /// If there is no such row or `out` is not `k` long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.shape.n_out, "row {row} of {:?}", self.shape);
        assert_eq!(out.len(), self.shape.k, "values of a row of {:?}", self.shape);
        let (panel, lane) = (row / PANEL, row % PANEL);
        let format = self.shape.format;
        let len = format.block_len();
        pack::unpack_row(&self.shape, self.panels(panel..panel + 1), lane, |block, bytes| {
            format.dequantize(bytes, &mut out[block * len..][..len]);
        });
    }
}
