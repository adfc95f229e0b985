//! The formats that a tensor may be stored in: names, numbers and block sizes.

use std::fmt;

/// How a tensor's elements are stored. A row is a whole number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an F32.
    BF16,
    /// 32 × 4 bits, scale.
    Q4_0,
    /// 32 × 4 bits, scale and minimum.
    Q4_1,
    /// 32 × 5 bits, scale.
    Q5_0,
    /// 32 × 5 bits, scale and minimum.
    Q5_1,
    /// 32 × 8 bits, scale.
    Q8_0,
    /// 256 × 2 bits, 16 groups with 4-bit scales and minima.
    Q2K,
    /// 256 × 3 bits, 16 groups with 6-bit scales.
    Q3K,
    /// 256 × 4 bits, 8 groups with 6-bit scales and minima.
    Q4K,
    /// 256 × 5 bits, 8 groups with 6-bit scales and minima.
    Q5K,
    /// 256 × 6 bits, 16 groups with 8-bit scales.
    Q6K,
    /// 32 × 4 bits into a table of 16 values, scale.
    IQ4NL,
    /// 256 × 4 bits into the table of [`Format::IQ4NL`], 8 groups with 6-bit scales.
    IQ4XS,
    /// 32 × 4-bit floats (E2M1), 8-bit power-of-two scale.
    MXFP4,
}

impl Format {
    /// Every format that can be read.
    pub const ALL: [Format; 16] = [
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q2K,
        Format::Q3K,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
        Format::IQ4NL,
        Format::IQ4XS,
        Format::MXFP4,
    ];

    /// (ggml type number, name, elements per block, bytes per block): `ggml.h` and `ggml-common.h`.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Format::F32 => (0, "F32", 1, 4),
            Format::F16 => (1, "F16", 1, 2),
            Format::Q4_0 => (2, "Q4_0", 32, 2 + 16),
            Format::Q4_1 => (3, "Q4_1", 32, 2 + 2 + 16),
            Format::Q5_0 => (6, "Q5_0", 32, 2 + 4 + 16),
            Format::Q5_1 => (7, "Q5_1", 32, 2 + 2 + 4 + 16),
            Format::Q8_0 => (8, "Q8_0", 32, 2 + 32),
            Format::Q2K => (10, "Q2_K", 256, 16 + 64 + 2 + 2),
            Format::Q3K => (11, "Q3_K", 256, 32 + 64 + 12 + 2),
            Format::Q4K => (12, "Q4_K", 256, 2 + 2 + 12 + 128),
            Format::Q5K => (13, "Q5_K", 256, 2 + 2 + 12 + 32 + 128),
            Format::Q6K => (14, "Q6_K", 256, 128 + 64 + 16 + 2),
            Format::IQ4NL => (20, "IQ4_NL", 32, 2 + 16),
            Format::IQ4XS => (23, "IQ4_XS", 256, 2 + 2 + 4 + 128),
            Format::BF16 => (30, "BF16", 1, 2),
            Format::MXFP4 => (39, "MXFP4", 32, 1 + 16),
        }
    }

    /// The name that ggml uses, e.g. `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// The number of this type in a GGUF file.
    pub const fn ggml_type(self) -> u32 {
        self.facts().0
    }

    /// The format with this number in a GGUF file, if it can be read.
    pub fn from_ggml_type(number: u32) -> Option<Format> {
        Format::ALL.into_iter().find(|f| f.ggml_type() == number)
    }

    /// Elements per block.
    pub const fn block_len(self) -> usize {
        self.facts().2
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Stored bits per weight, scales included.
    pub fn bits_per_weight(self) -> f32 {
        (8 * self.block_bytes()) as f32 / self.block_len() as f32
    }

    /// Bytes of `elements` elements; `None` if they aren't whole blocks or the number overflows.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        let block = self.block_len() as u64;
        if !elements.is_multiple_of(block) {
            return None;
        }
        (elements / block).checked_mul(self.block_bytes() as u64)
    }

    /// All names, for messages.
    pub(crate) fn list() -> String {
        Format::ALL.map(Format::name).join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What ggml calls a type number, for messages about types that can't be read.
pub(crate) fn ggml_name(number: u32) -> &'static str {
    if let Some(format) = Format::from_ggml_type(number) {
        return format.name();
    }
    match number {
        4 => "Q4_2, removed from ggml",
        5 => "Q4_3, removed from ggml",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31..=33 | 36..=38 => "a packed layout, removed from ggml",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => "unknown",
    }
}
