//! What the tests of this crate's operations on rows share.

use crate::isa::Isa;

/// xorshift64*: repeatable numbers for tests.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Even over −1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        self.next() as i32 as f32 / 2_147_483_648.0
    }

    /// A row of ordinary numbers.
    pub(crate) fn row(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() * 3.0).collect()
    }

    /// A row where every third number is zero, denormal, tiny or huge.
    pub(crate) fn wild_row(&mut self, n: usize) -> Vec<f32> {
        const WILD: [u32; 10] = [
            0,
            0x8000_0000,
            1,
            0x8000_0005,
            0x007f_ffff,
            0x0080_0000,
            0x1e3c_e508,
            0xdf80_0000,
            0x6000_0001,
            0x42c8_0000,
        ];
        let mut row = self.row(n);
        for x in row.iter_mut() {
            if self.below(3) == 0 {
                *x = f32::from_bits(WILD[self.below(WILD.len())]);
            }
        }
        row
    }
}

/// Bits, with all NaNs made equal.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
}

/// Runs an operation on every instruction set, asserts that all return the same bits, and returns the scalar result.
pub(crate) fn same_on_all(mut operation: impl FnMut(Isa) -> Vec<f32>) -> Vec<f32> {
    let expected = operation(Isa::Scalar);
    for isa in Isa::available() {
        assert_eq!(bits(&operation(isa)), bits(&expected), "{isa}");
    }
    expected
}

/// Asserts that each number is within `relative` of its reference, measured against the reference's magnitude or `floor`.
pub(crate) fn assert_close(found: &[f32], expected: &[f64], relative: f64, floor: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= relative * expected.abs().max(floor), "element {i}: {found} for {expected}");
    }
}
