//! What a panel looks like, byte by byte, for every weight format. Packing and kernels both follow this.
//!
//! A panel is one stream over K of 16 output channels. Float weights: for each k the values of the 16 channels.
//! Quantised weights: for each super-block (32 or 256 values of K)
//!
//! ```text
//! [d of 16 channels] [min of 16 channels]?                         the header
//! for each block of 32:
//!   [sub-scale byte of 16 channels] × 0, 1 or 2
//!   [plane of the low bits of the codes] [plane of the high bits]?
//! ```
//!
//! A code is a quant as an unsigned number. The 32 codes of a block are 8 groups of 4; group g of all channels
//! is 64 bytes, `[16 channels][4]`. A plane of b bits packs 8 / b groups into each byte: the vector v of a
//! plane holds in its bits b·i … the groups v + i · (number of vectors). So no instruction is spent on
//! shuffling, and every bit of the file's block is in the panel: packing loses nothing.

use motet_gguf::Format;

/// Output channels of a panel: one per lane.
pub const PANEL: usize = crate::lanes::LANES;

/// Values of K that share one product of scales.
pub(crate) const BLOCK: usize = crate::activations::BLOCK;

/// The bytes of one group of four codes of all channels.
pub(crate) const GROUP: usize = 4 * PANEL;

/// How the codes of a block are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planes {
    /// Bits of the first plane: 2, 4 or 8.
    pub(crate) low: usize,
    /// Bits of the second plane: 0, 1 or 2.
    pub(crate) high: usize,
}

impl Planes {
    /// Bytes of a block of all channels.
    pub(crate) const fn bytes(self) -> usize {
        (self.low + self.high) * GROUP
    }
}

/// The stream of a quantised panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantLayout {
    /// Blocks of 32 per header: 1 or 8.
    pub(crate) blocks: usize,
    /// Bytes of a channel's d: 2 (F16) or 1 (a power of two).
    pub(crate) d_bytes: usize,
    /// Bytes of a channel's minimum: 2 (F16) or 0.
    pub(crate) min_bytes: usize,
    /// Sub-scale bytes of a channel per block.
    pub(crate) subs: usize,
    /// The codes.
    pub(crate) planes: Planes,
}

impl QuantLayout {
    /// Bytes before the blocks of a super-block.
    pub(crate) const fn header_bytes(self) -> usize {
        (self.d_bytes + self.min_bytes) * PANEL
    }

    /// Bytes of one block of 32.
    pub(crate) const fn block_bytes(self) -> usize {
        self.subs * PANEL + self.planes.bytes()
    }

    /// Bytes of a super-block.
    pub(crate) const fn super_bytes(self) -> usize {
        self.header_bytes() + self.blocks * self.block_bytes()
    }
}

/// How a format is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Values of so many bytes.
    Float(usize),
    /// Quantised.
    Quant(QuantLayout),
}

impl Layout {
    /// The layout of a format, if there are kernels for it.
    pub(crate) const fn of(format: Format) -> Option<Layout> {
        const fn small(d_bytes: usize, min_bytes: usize, low: usize, high: usize) -> Layout {
            Layout::Quant(QuantLayout {
                blocks: 1,
                d_bytes,
                min_bytes,
                subs: 0,
                planes: Planes { low, high },
            })
        }
        const fn large(min_bytes: usize, subs: usize, low: usize, high: usize) -> Layout {
            Layout::Quant(QuantLayout {
                blocks: 8,
                d_bytes: 2,
                min_bytes,
                subs,
                planes: Planes { low, high },
            })
        }
        Some(match format {
            Format::F32 => Layout::Float(4),
            Format::F16 | Format::BF16 => Layout::Float(2),
            Format::Q4_0 | Format::IQ4NL => small(2, 0, 4, 0),
            Format::Q4_1 => small(2, 2, 4, 0),
            Format::Q5_0 => small(2, 0, 4, 1),
            Format::Q5_1 => small(2, 2, 4, 1),
            Format::Q8_0 => small(2, 0, 8, 0),
            Format::MXFP4 => small(1, 0, 4, 0),
            Format::Q2K => large(2, 2, 2, 0),
            Format::Q3K => large(0, 2, 2, 1),
            Format::Q4K => large(2, 2, 4, 0),
            Format::Q5K => large(2, 2, 4, 1),
            Format::Q6K => large(0, 2, 4, 2),
            Format::IQ4XS => large(0, 1, 4, 0),
            _ => return None,
        })
    }

    /// Values of K that a stream can't be cut within.
    pub(crate) const fn super_len(self) -> usize {
        match self {
            Layout::Float(_) => 1,
            Layout::Quant(quant) => quant.blocks * BLOCK,
        }
    }

    /// Bytes of `super_len` values of all channels.
    pub(crate) const fn super_bytes(self) -> usize {
        match self {
            Layout::Float(bytes) => bytes * PANEL,
            Layout::Quant(quant) => quant.super_bytes(),
        }
    }
}
