//! From stored blocks to F32: the definition of what each format means.
//!
//! Block layouts are those of `ggml-common.h`; every product and sum is rounded to F32 where the PyPI package `gguf`
//! rounds it, so the results are equal bit for bit.

use half::f16;

use crate::format::Format;

/// The values of [`Format::IQ4NL`] and [`Format::IQ4XS`] (`kvalues_iq4nl` in `ggml-common.h`).
const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of E2M1, doubled (OCP Microscaling Formats 1.0, table 5).
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Format {
    /// Turns whole blocks into F32.
    ///
    /// # Panics
    /// If `bytes` is not whole blocks, or `out` is not exactly as long as their elements.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len() % self.block_bytes(), 0, "{self}: not whole blocks");
        assert_eq!(
            out.len(),
            bytes.len() / self.block_bytes() * self.block_len(),
            "{self}: output of the wrong length"
        );
        let block = match self {
            Format::F32 => |b: &[u8], y: &mut [f32]| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Format::F16 => |b: &[u8], y: &mut [f32]| y[0] = f16_at(b, 0),
            Format::BF16 => |b: &[u8], y: &mut [f32]| y[0] = f32::from_le_bytes([0, 0, b[0], b[1]]),
            Format::Q4_0 => q4_0,
            Format::Q4_1 => q4_1,
            Format::Q5_0 => q5_0,
            Format::Q5_1 => q5_1,
            Format::Q8_0 => q8_0,
            Format::Q2K => q2_k,
            Format::Q3K => q3_k,
            Format::Q4K => q4_k,
            Format::Q5K => q5_k,
            Format::Q6K => q6_k,
            Format::IQ4NL => iq4_nl,
            Format::IQ4XS => iq4_xs,
            Format::MXFP4 => mxfp4,
        };
        let blocks = bytes.chunks_exact(self.block_bytes());
        for (stored, values) in blocks.zip(out.chunks_exact_mut(self.block_len())) {
            block(stored, values);
        }
    }
}

fn f16_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Element `i` of a block of 32 four-bit numbers: the low halves of 16 bytes, then the high halves.
fn nibble(qs: &[u8], i: usize) -> u8 {
    if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 }
}

/// d: f16, 16 bytes of nibbles. y = d · (q − 8)
fn q4_0(b: &[u8], y: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, y) in y.iter_mut().enumerate() {
        *y = d * (nibble(&b[2..], i) as i8 - 8) as f32;
    }
}

/// d, m: f16, 16 bytes of nibbles. y = d · q + m
fn q4_1(b: &[u8], y: &mut [f32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (i, y) in y.iter_mut().enumerate() {
        *y = d * nibble(&b[4..], i) as f32 + m;
    }
}

/// The fifth bit of element `i` lies in bit `i` of four bytes.
fn five_bits(high: &[u8], qs: &[u8], i: usize) -> u8 {
    nibble(qs, i) | ((high[i / 8] >> (i % 8)) & 1) << 4
}

/// d: f16, 4 bytes of fifth bits, 16 bytes of nibbles. y = d · (q − 16)
fn q5_0(b: &[u8], y: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, y) in y.iter_mut().enumerate() {
        *y = d * (five_bits(&b[2..6], &b[6..], i) as i8 - 16) as f32;
    }
}

/// d, m: f16, 4 bytes of fifth bits, 16 bytes of nibbles. y = d · q + m
fn q5_1(b: &[u8], y: &mut [f32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (i, y) in y.iter_mut().enumerate() {
        *y = d * five_bits(&b[4..8], &b[8..], i) as f32 + m;
    }
}

/// d: f16, 32 signed bytes. y = d · q
fn q8_0(b: &[u8], y: &mut [f32]) {
    let d = f16_at(b, 0);
    for (y, q) in y.iter_mut().zip(&b[2..]) {
        *y = *q as i8 as f32 * d;
    }
}

/// 16 bytes of scales (low nibble) and minima (high nibble), 64 bytes of 2-bit quants, d, dmin: f16.
/// Each group of 16 elements: y = (d · scale) · q − (dmin · min)
fn q2_k(b: &[u8], y: &mut [f32]) {
    let (scales, qs) = (&b[..16], &b[16..80]);
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (i, y) in y.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let q = two_bits(qs, i);
        *y = (d * (scale & 15) as f32) * q as f32 - dmin * (scale >> 4) as f32;
    }
}

/// Element `i` of 256 two-bit numbers: 128 elements are 4 planes of 32 in 32 bytes.
fn two_bits(qs: &[u8], i: usize) -> u8 {
    (qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3
}

/// 32 bytes of third bits, 64 bytes of 2-bit quants, 12 bytes of 6-bit scales, d: f16.
/// Each group of 16 elements: y = (d · (scale − 32)) · (q − 4), the third bit of q included.
fn q3_k(b: &[u8], y: &mut [f32]) {
    let (high, qs, scales) = (&b[..32], &b[32..96], &b[96..108]);
    let d = f16_at(b, 108);
    for (i, y) in y.iter_mut().enumerate() {
        let group = i / 16;
        let low = scales[group % 8] >> (group / 8 * 4) & 15;
        let scale = low | (scales[8 + group % 4] >> (group / 4 * 2) & 3) << 4;
        let q = two_bits(qs, i) | (high[i % 32] >> (i / 32) & 1) << 2;
        *y = (d * (scale as i8 - 32) as f32) * (q as i8 - 4) as f32;
    }
}

/// The 6-bit scale and minimum of group `j` (of 8) in 12 bytes: four bytes hold scales 0–3, four minima 0–3, four the low
/// bits of scales and minima 4–7, whose upper two bits top the first eight bytes.
fn scale_and_min(s: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4)
    };
    (scale as f32, min as f32)
}

/// Element `i` of 256 four-bit numbers: 64 elements are 2 planes of 32 in 32 bytes.
fn four_bits(qs: &[u8], i: usize) -> u8 {
    qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15
}

/// d, dmin: f16, 12 bytes of scales and minima, 128 bytes of nibbles.
/// Each group of 32 elements: y = (d · scale) · q − (dmin · min)
fn q4_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (i, y) in y.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], i / 32);
        *y = (d * scale) * four_bits(&b[16..], i) as f32 - dmin * min;
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits (plane `i / 32`) before the nibbles.
fn q5_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (i, y) in y.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], i / 32);
        let q = four_bits(&b[48..], i) | (b[16 + i % 32] >> (i / 32) & 1) << 4;
        *y = (d * scale) * q as f32 - dmin * min;
    }
}

/// 128 bytes of low nibbles, 64 bytes of upper 2 bits, 16 signed scales, d: f16.
/// Each group of 16 elements: y = (d · scale) · (q − 32)
fn q6_k(b: &[u8], y: &mut [f32]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = f16_at(b, 208);
    for (i, y) in y.iter_mut().enumerate() {
        // Low nibbles: 128 elements are 2 planes of 64 in 64 bytes.
        let q = low[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15 | two_bits(high, i) << 4;
        *y = (d * scales[i / 16] as i8 as f32) * (q as i8 - 32) as f32;
    }
}

/// d: f16, 16 bytes of nibbles. y = d · value(q)
fn iq4_nl(b: &[u8], y: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, y) in y.iter_mut().enumerate() {
        *y = d * IQ4_VALUES[nibble(&b[2..], i) as usize] as f32;
    }
}

/// d: f16, 2 bytes of upper and 4 of lower scale bits, 128 bytes of nibbles.
/// Each group of 32 elements: y = (d · (scale − 32)) · value(q)
fn iq4_xs(b: &[u8], y: &mut [f32]) {
    let d = f16_at(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for (i, y) in y.iter_mut().enumerate() {
        let group = i / 32;
        let low = b[4 + group / 2] >> (group % 2 * 4) & 15;
        let scale = low | ((high >> (2 * group) & 3) as u8) << 4;
        let q = nibble(&b[8 + 16 * group..8 + 16 * (group + 1)], i % 32);
        *y = (d * (scale as i8 - 32) as f32) * IQ4_VALUES[q as usize] as f32;
    }
}

/// e: a power of two with bias 127 (E8M0), 16 bytes of E2M1. y = 2^(e − 128) · (2 · value(q))
fn mxfp4(b: &[u8], y: &mut [f32]) {
    let e = u32::from(b[0]);
    let d = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    for (i, y) in y.iter_mut().enumerate() {
        *y = d * E2M1_DOUBLED[nibble(&b[1..], i) as usize] as f32;
    }
}
