//! From F32 to stored blocks, for fixtures and tools: equal to the PyPI package `gguf` (and, for Q8_0, to ggml's
//! reference), bit for bit, on finite values. Simple rounding, no search for better scales: not meant for making good
//! small models.

use half::f16;

use crate::error::GgufError;
use crate::format::Format;

impl Format {
    /// Appends the blocks of `values` to `out`.
    ///
    /// # Errors
    /// [`GgufError::NoQuantizer`] for the formats that can only be read.
    ///
    /// # Panics
    /// If `values` isn't whole blocks.
    pub fn quantize(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), GgufError> {
        assert_eq!(values.len() % self.block_len(), 0, "{self}: not whole blocks");
        let block = match self {
            Format::F32 => |x: &[f32], out: &mut Vec<u8>| out.extend(x[0].to_le_bytes()),
            Format::F16 => |x: &[f32], out: &mut Vec<u8>| out.extend(f16::from_f32(x[0]).to_le_bytes()),
            Format::BF16 => bf16,
            Format::Q4_0 => |x: &[f32], out: &mut Vec<u8>| q_0::<8>(x, out),
            Format::Q4_1 => |x: &[f32], out: &mut Vec<u8>| q_1::<15>(x, out),
            Format::Q5_0 => |x: &[f32], out: &mut Vec<u8>| q_0::<16>(x, out),
            Format::Q5_1 => |x: &[f32], out: &mut Vec<u8>| q_1::<31>(x, out),
            Format::Q8_0 => q8_0,
            _ => return Err(GgufError::NoQuantizer { format: self }),
        };
        out.reserve(values.len() / self.block_len() * self.block_bytes());
        values.chunks_exact(self.block_len()).for_each(|x| block(x, out));
        Ok(())
    }
}

/// Round to nearest even; a NaN stays one.
fn bf16(x: &[f32], out: &mut Vec<u8>) {
    let bits = x[0].to_bits();
    let upper = if x[0].is_nan() { (bits >> 16) | 64 } else { (bits + (0x7fff + ((bits >> 16) & 1))) >> 16 };
    out.extend((upper as u16).to_le_bytes());
}

/// 1 / d, and 0 for d = 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// d = amax / 127, q = x / d rounded half away from zero.
fn q8_0(x: &[f32], out: &mut Vec<u8>) {
    let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
    let d = amax / 127.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(x.iter().map(|x| (x * id).round() as i8 as u8));
}

/// Q4_0 (HALF = 8) and Q5_0 (HALF = 16): the value of greatest magnitude maps to −HALF.
fn q_0<const HALF: u8>(x: &[f32], out: &mut Vec<u8>) {
    // The first of equals, as argmax has it.
    let extreme = x.iter().fold(x[0], |m, x| if x.abs() > m.abs() { *x } else { m });
    let d = extreme / -f32::from(HALF);
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    pack(x, out, 2 * HALF - 1, |x| x * id + (f32::from(HALF) + 0.5));
}

/// Q4_1 (MAX = 15) and Q5_1 (MAX = 31): minimum to 0, maximum to MAX.
fn q_1<const MAX: u8>(x: &[f32], out: &mut Vec<u8>) {
    let (min, max) = x.iter().fold((x[0], x[0]), |(lo, hi), x| (lo.min(*x), hi.max(*x)));
    let d = (max - min) / f32::from(MAX);
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(f16::from_f32(min).to_le_bytes());
    pack(x, out, MAX, |x| (x - min) * id + 0.5);
}

/// Truncates `q(x)`, and packs fifth bits (if there are any: `max` > 15) and nibbles.
fn pack(x: &[f32], out: &mut Vec<u8>, max: u8, q: impl Fn(f32) -> f32) {
    let mut quants = [0u8; 32];
    for (quant, x) in quants.iter_mut().zip(x) {
        *quant = (q(*x) as u8).min(max);
    }
    if max > 15 {
        let high = quants.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
        out.extend(high.to_le_bytes());
    }
    out.extend((0..16).map(|i| quants[i] & 15 | quants[i + 16] << 4));
}
