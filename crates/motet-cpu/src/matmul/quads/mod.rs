//! Sixteen lanes of four bytes: the integer half of a matrix product, on top of [`Lanes`].

mod scalar;

#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod avx2;
#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod avx512;

use crate::activations::ActivationBlock;
use crate::lanes::Lanes;
use crate::panels::layout::GROUP;

/// Sixteen quads of bytes, and exact dot products with quads of `i8`. Same bits on every implementation.
///
/// A block's weights are eight quads per lane: `w[g]` holds the k = 4g … 4g + 3 of each lane's channel.
/// Signed weights have a representation of the implementation's own, made by [`Quads::signed`] and
/// [`Quads::table`] and understood by [`Quads::dot_signed`] alone.
pub(crate) trait Quads: Lanes {
    /// Sixteen lanes of four bytes.
    type Q: Copy;

    /// How many rows a product takes at once.
    const ROWS: usize;

    /// Lane i = bytes 4i … 4i + 3.
    fn load_quads(self, bytes: &[u8; GROUP]) -> Self::Q;
    /// `(byte >> N) & mask` of every byte.
    fn field_down<const N: u32>(self, a: Self::Q, mask: u8) -> Self::Q;
    /// `(byte << N) & mask` of every byte.
    fn field_up<const N: u32>(self, a: Self::Q, mask: u8) -> Self::Q;
    /// a | b
    fn or_quads(self, a: Self::Q, b: Self::Q) -> Self::Q;
    /// Signed weights from bytes that have 128 added.
    fn signed(self, biased: Self::Q) -> Self::Q;
    /// Signed weights from a table by numbers below 16.
    fn table(self, index: Self::Q, table: &[i8; 16]) -> Self::Q;

    /// Per lane and row: start + Σ w · x over the groups FROM … TO − 1, for unsigned weights below 2^BITS
    /// (BITS ≤ 6).
    ///
    /// R rows at once, group by group: sums of one row depend on each other, those of several rows don't.
    fn dot<const BITS: u32, const FROM: usize, const TO: usize, const R: usize>(
        self,
        start: [Self::I; R],
        w: &[Self::Q; 8],
        x: [&ActivationBlock; R],
    ) -> [Self::I; R];
    /// Per lane and row: Σ w · x over all groups, for signed weights.
    fn dot_signed<const R: usize>(self, w: &[Self::Q; 8], x: [&ActivationBlock; R]) -> [Self::I; R];
    /// Per lane: low · (low half of `sums`) + high · (high half), where a lane of `a` is two `i16`, low and high.
    fn dot_sums(self, a: Self::I, sums: i32) -> Self::I;
}

/// Two `i16` as one lane for [`Quads::dot_sums`].
#[inline(always)]
pub(crate) const fn pair(low: i16, high: i16) -> i32 {
    (low as u16 as i32) | (high as i32) << 16
}

/// The quants 4 · group … 4 · group + 3 of a row as one lane.
#[cfg(all(feature = "simd", target_arch = "x86_64"))]
#[inline(always)]
fn four(x: &ActivationBlock, group: usize) -> i32 {
    i32::from_le_bytes(x.quants.as_chunks::<4>().0[group].map(|q| q as u8))
}
