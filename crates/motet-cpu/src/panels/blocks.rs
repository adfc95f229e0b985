//! A block of a file taken apart into scales and codes, and put together again, bit for bit.
//!
//! The block formats are those of ggml (`ggml-common.h`; unpacking as in `ggml-quants.c`).

use motet_gguf::Format;

/// The parts of one block (of 32 values: only the first 32 codes and no sub-scales).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parts {
    /// The scale: F16 bits, or an 8-bit exponent.
    pub(crate) d: u16,
    /// The minimum: F16 bits.
    pub(crate) min: u16,
    /// Per 32 values up to two bytes: (scale, minimum), (first scale, second scale), or one signed scale.
    pub(crate) subs: [[u8; 2]; 8],
    /// The quants as unsigned numbers; signed bytes have 128 added.
    pub(crate) codes: [u8; 256],
}

impl Parts {
    pub(crate) const EMPTY: Parts = Parts { d: 0, min: 0, subs: [[0; 2]; 8], codes: [0; 256] };

    /// Takes a block apart. Fields that the format does not have keep what they hold.
    #[inline]
    pub(crate) fn split(&mut self, format: Format, block: &[u8]) {
        match format {
            Format::Q4_0 | Format::IQ4NL => {
                self.d = u16_at(block, 0);
                self.split_nibbles(0, &block[2..18]);
            }
            Format::Q4_1 => {
                (self.d, self.min) = (u16_at(block, 0), u16_at(block, 2));
                self.split_nibbles(0, &block[4..20]);
            }
            Format::Q5_0 => {
                self.d = u16_at(block, 0);
                self.split_nibbles(0, &block[6..22]);
                self.split_fifth_bits(&block[2..6]);
            }
            Format::Q5_1 => {
                (self.d, self.min) = (u16_at(block, 0), u16_at(block, 2));
                self.split_nibbles(0, &block[8..24]);
                self.split_fifth_bits(&block[4..8]);
            }
            Format::Q8_0 => {
                self.d = u16_at(block, 0);
                for (code, quant) in self.codes.iter_mut().zip(&block[2..34]) {
                    *code = quant ^ 0x80;
                }
            }
            Format::MXFP4 => {
                self.d = u16::from(block[0]);
                self.split_nibbles(0, &block[1..17]);
            }
            Format::Q2K => {
                (self.d, self.min) = (u16_at(block, 80), u16_at(block, 82));
                self.subs.as_flattened_mut().copy_from_slice(&block[..16]);
                self.split_pairs_of_bits(&block[16..80]);
            }
            Format::Q3K => {
                self.d = u16_at(block, 108);
                let scales = &block[96..108];
                for (i, sub) in self.subs.as_flattened_mut().iter_mut().enumerate() {
                    let low = scales[i % 8] >> (4 * (i / 8)) & 15;
                    let high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
                    *sub = (low | high << 4).wrapping_sub(32);
                }
                self.split_pairs_of_bits(&block[32..96]);
                for (i, codes) in self.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    for (code, bits) in codes.iter_mut().zip(&block[..32]) {
                        *code |= (bits >> i & 1) << 2;
                    }
                }
            }
            Format::Q4K => {
                (self.d, self.min) = (u16_at(block, 0), u16_at(block, 2));
                self.split_six_bit_scales(&block[4..16]);
                self.split_long_nibbles(&block[16..144]);
            }
            Format::Q5K => {
                (self.d, self.min) = (u16_at(block, 0), u16_at(block, 2));
                self.split_six_bit_scales(&block[4..16]);
                self.split_long_nibbles(&block[48..176]);
                for (i, codes) in self.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    for (code, bits) in codes.iter_mut().zip(&block[16..48]) {
                        *code |= (bits >> i & 1) << 4;
                    }
                }
            }
            Format::Q6K => {
                self.d = u16_at(block, 208);
                self.subs.as_flattened_mut().copy_from_slice(&block[192..208]);
                for (half, codes) in self.codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
                    let (low, high) = (&block[64 * half..][..64], &block[128 + 32 * half..][..32]);
                    for i in 0..32 {
                        codes[i] = low[i] & 15 | (high[i] & 3) << 4;
                        codes[i + 32] = low[i + 32] & 15 | (high[i] >> 2 & 3) << 4;
                        codes[i + 64] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
                        codes[i + 96] = low[i + 32] >> 4 | (high[i] >> 6) << 4;
                    }
                }
            }
            Format::IQ4XS => {
                self.d = u16_at(block, 0);
                let high = u16_at(block, 2);
                for i in 0..8 {
                    let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
                    self.subs[i][0] = (low | ((high >> (2 * i) & 3) as u8) << 4).wrapping_sub(32);
                    self.split_nibbles(32 * i, &block[8 + 16 * i..][..16]);
                }
            }
            _ => unreachable!("{format} has no blocks of codes"),
        }
    }

    /// The inverse of [`Parts::split`].
    pub(crate) fn join(&self, format: Format, block: &mut [u8]) {
        match format {
            Format::Q4_0 | Format::IQ4NL => {
                put_u16(block, 0, self.d);
                self.join_nibbles(0, &mut block[2..18]);
            }
            Format::Q4_1 => {
                put_u16(block, 0, self.d);
                put_u16(block, 2, self.min);
                self.join_nibbles(0, &mut block[4..20]);
            }
            Format::Q5_0 => {
                put_u16(block, 0, self.d);
                self.join_fifth_bits(&mut block[2..6]);
                self.join_nibbles(0, &mut block[6..22]);
            }
            Format::Q5_1 => {
                put_u16(block, 0, self.d);
                put_u16(block, 2, self.min);
                self.join_fifth_bits(&mut block[4..8]);
                self.join_nibbles(0, &mut block[8..24]);
            }
            Format::Q8_0 => {
                put_u16(block, 0, self.d);
                for (quant, code) in block[2..34].iter_mut().zip(&self.codes) {
                    *quant = code ^ 0x80;
                }
            }
            Format::MXFP4 => {
                block[0] = self.d as u8;
                self.join_nibbles(0, &mut block[1..17]);
            }
            Format::Q2K => {
                put_u16(block, 80, self.d);
                put_u16(block, 82, self.min);
                block[..16].copy_from_slice(self.subs.as_flattened());
                self.join_pairs_of_bits(&mut block[16..80]);
            }
            Format::Q3K => {
                put_u16(block, 108, self.d);
                block[96..108].fill(0);
                for (i, sub) in self.subs.as_flattened().iter().enumerate() {
                    let scale = sub.wrapping_add(32);
                    block[96 + i % 8] |= (scale & 15) << (4 * (i / 8));
                    block[104 + i % 4] |= (scale >> 4 & 3) << (2 * (i / 4));
                }
                self.join_pairs_of_bits(&mut block[32..96]);
                self.join_bit_of_each(2, &mut block[..32]);
            }
            Format::Q4K => {
                put_u16(block, 0, self.d);
                put_u16(block, 2, self.min);
                self.join_six_bit_scales(&mut block[4..16]);
                self.join_long_nibbles(&mut block[16..144]);
            }
            Format::Q5K => {
                put_u16(block, 0, self.d);
                put_u16(block, 2, self.min);
                self.join_six_bit_scales(&mut block[4..16]);
                self.join_bit_of_each(4, &mut block[16..48]);
                self.join_long_nibbles(&mut block[48..176]);
            }
            Format::Q6K => {
                put_u16(block, 208, self.d);
                block[192..208].copy_from_slice(self.subs.as_flattened());
                for (half, codes) in self.codes.as_chunks::<128>().0.iter().enumerate() {
                    for i in 0..32 {
                        block[64 * half + i] = codes[i] & 15 | codes[i + 64] << 4;
                        block[64 * half + i + 32] = codes[i + 32] & 15 | codes[i + 96] << 4;
                        block[128 + 32 * half + i] = codes[i] >> 4
                            | codes[i + 32] >> 4 << 2
                            | codes[i + 64] >> 4 << 4
                            | codes[i + 96] >> 4 << 6;
                    }
                }
            }
            Format::IQ4XS => {
                put_u16(block, 0, self.d);
                block[4..8].fill(0);
                let mut high = 0;
                for (i, sub) in self.subs.iter().enumerate() {
                    let scale = sub[0].wrapping_add(32);
                    block[4 + i / 2] |= (scale & 15) << (4 * (i % 2));
                    high |= u16::from(scale >> 4 & 3) << (2 * i);
                    self.join_nibbles(32 * i, &mut block[8 + 16 * i..][..16]);
                }
                put_u16(block, 2, high);
            }
            _ => unreachable!("{format} has no blocks of codes"),
        }
    }

    /// 32 codes from 16 bytes: low nibbles, then high nibbles.
    #[inline(always)]
    fn split_nibbles(&mut self, first: usize, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            self.codes[first + i] = byte & 15;
            self.codes[first + i + 16] = byte >> 4;
        }
    }

    fn join_nibbles(&self, first: usize, bytes: &mut [u8]) {
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = self.codes[first + i] & 15 | self.codes[first + i + 16] << 4;
        }
    }

    /// The fifth bits of 32 codes, one per bit.
    #[inline(always)]
    fn split_fifth_bits(&mut self, bits: &[u8]) {
        for (i, code) in self.codes[..32].iter_mut().enumerate() {
            *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
        }
    }

    fn join_fifth_bits(&self, bits: &mut [u8]) {
        bits.fill(0);
        for (i, code) in self.codes[..32].iter().enumerate() {
            bits[i / 8] |= (code >> 4 & 1) << (i % 8);
        }
    }

    /// 256 codes from 128 bytes: per 32 bytes the low nibbles, then the high ones.
    #[inline(always)]
    fn split_long_nibbles(&mut self, bytes: &[u8]) {
        for (codes, bytes) in self.codes.as_chunks_mut::<64>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
            for (i, byte) in bytes.iter().enumerate() {
                codes[i] = byte & 15;
                codes[i + 32] = byte >> 4;
            }
        }
    }

    fn join_long_nibbles(&self, bytes: &mut [u8]) {
        for (codes, bytes) in self.codes.as_chunks::<64>().0.iter().zip(bytes.as_chunks_mut::<32>().0) {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = codes[i] & 15 | codes[i + 32] << 4;
            }
        }
    }

    /// 256 two-bit codes from 64 bytes: per 32 bytes four runs of 32 codes, lowest bits first.
    #[inline(always)]
    fn split_pairs_of_bits(&mut self, bytes: &[u8]) {
        for (codes, bytes) in self.codes.as_chunks_mut::<128>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
            for (run, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                for (code, byte) in codes.iter_mut().zip(bytes) {
                    *code = byte >> (2 * run) & 3;
                }
            }
        }
    }

    fn join_pairs_of_bits(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        for (codes, bytes) in self.codes.as_chunks::<128>().0.iter().zip(bytes.as_chunks_mut::<32>().0) {
            for (run, codes) in codes.as_chunks::<32>().0.iter().enumerate() {
                for (code, byte) in codes.iter().zip(bytes.iter_mut()) {
                    *byte |= (code & 3) << (2 * run);
                }
            }
        }
    }

    /// Bit `bit` of code 32·i + j becomes bit i of byte j.
    fn join_bit_of_each(&self, bit: u32, bytes: &mut [u8]) {
        bytes.fill(0);
        for (i, codes) in self.codes.as_chunks::<32>().0.iter().enumerate() {
            for (code, byte) in codes.iter().zip(bytes.iter_mut()) {
                *byte |= (code >> bit & 1) << i;
            }
        }
    }

    /// Eight 6-bit scales and eight 6-bit minima from 12 bytes.
    #[inline(always)]
    fn split_six_bit_scales(&mut self, bytes: &[u8]) {
        for i in 0..4 {
            self.subs[i] = [bytes[i] & 63, bytes[i + 4] & 63];
            self.subs[i + 4] = [
                bytes[i + 8] & 15 | bytes[i] >> 6 << 4, //
                bytes[i + 8] >> 4 | bytes[i + 4] >> 6 << 4,
            ];
        }
    }

    fn join_six_bit_scales(&self, bytes: &mut [u8]) {
        for i in 0..4 {
            let ([scale, min], [later_scale, later_min]) = (self.subs[i], self.subs[i + 4]);
            bytes[i] = scale | later_scale >> 4 << 6;
            bytes[i + 4] = min | later_min >> 4 << 6;
            bytes[i + 8] = later_scale & 15 | later_min << 4;
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}
