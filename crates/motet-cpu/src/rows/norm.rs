//! Root-mean-square norm and l2 norm of the heads of a row. A whole row is one head.
//!
//! The sum of squares Σx² of a head: lane i adds the squares of elements i, i + 16, i + 32, … in ascending order
//! with FMA, from +0; then one tree over the lanes ([`Lanes::sum`]).

use super::Heads;
use crate::lanes::{LANES, Lanes, dispatch};

#[inline(always)]
fn sum_of_squares<L: Lanes>(l: L, x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sums = l.splat(0.0);
    for chunk in chunks {
        let x = l.load(chunk);
        sums = l.fma(x, x, sums);
    }
    if !tail.is_empty() {
        let x = l.load_tail(tail, 0.0);
        sums = l.fma(x, x, sums);
    }
    l.sum(sums)
}

/// 1 / √(Σx² / n + eps), each step rounded to f32.
#[inline(always)]
fn rms_factor<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(l, x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn check_weight(weight: Option<&[f32]>, dim: usize) {
    if let Some(weight) = weight {
        assert_eq!(weight.len(), dim, "a weight for each element of a head");
    }
}

/// y · factor, then · weight
#[inline(always)]
fn scale<L: Lanes>(l: L, y: &mut [f32], factor: f32, weight: Option<&[f32]>) {
    let factor = l.splat(factor);
    let (y, y_tail) = y.as_chunks_mut::<LANES>();
    match weight {
        Some(weight) => {
            let (weight, weight_tail) = weight.as_chunks::<LANES>();
            for (y, weight) in y.iter_mut().zip(weight) {
                l.store(l.mul(l.mul(l.load(y), factor), l.load(weight)), y);
            }
            if !y_tail.is_empty() {
                let scaled = l.mul(l.load_tail(y_tail, 0.0), factor);
                l.store_tail(l.mul(scaled, l.load_tail(weight_tail, 0.0)), y_tail);
            }
        }
        None => {
            for y in y {
                l.store(l.mul(l.load(y), factor), y);
            }
            if !y_tail.is_empty() {
                l.store_tail(l.mul(l.load_tail(y_tail, 0.0), factor), y_tail);
            }
        }
    }
}

dispatch! {
    /// `y = x · r`, then `· weight` if there is one, in each head; r = 1 / √(Σx² / n + eps) (Zhang and Sennrich 2019).
    ///
    /// `x` and `y` are rows with as many heads of the same size n; `weight` `[n]` serves all of them.
    /// Rounds Σx² / n, + eps, √, 1 /, · r, · weight. Panics if the shapes don't fit.
    pub fn rms_norm(
        y: &mut [f32],
        y_heads: Heads,
        x: &[f32],
        x_heads: Heads,
        weight: Option<&[f32]>,
        eps: f32
    ) = rms_norm_on_lanes;
}

#[inline(always)]
fn rms_norm_on_lanes<L: Lanes>(
    l: L,
    y: &mut [f32],
    y_heads: Heads,
    x: &[f32],
    x_heads: Heads,
    weight: Option<&[f32]>,
    eps: f32,
) {
    y_heads.check(y.len());
    x_heads.check(x.len());
    assert!(
        y_heads.count == x_heads.count && y_heads.dim == x_heads.dim,
        "as many heads of the same size on both sides"
    );
    check_weight(weight, x_heads.dim);
    for head in 0..x_heads.count {
        let (y, x) = (&mut y[y_heads.range(head)], &x[x_heads.range(head)]);
        let factor = rms_factor(l, x, eps);
        y.copy_from_slice(x);
        scale(l, y, factor, weight);
    }
}

dispatch! {
    /// [`rms_norm`] in place.
    pub fn rms_norm_in_place(row: &mut [f32], heads: Heads, weight: Option<&[f32]>, eps: f32) = rms_norm_in_place_on_lanes;
}

#[inline(always)]
fn rms_norm_in_place_on_lanes<L: Lanes>(
    l: L,
    row: &mut [f32],
    heads: Heads,
    weight: Option<&[f32]>,
    eps: f32,
) {
    heads.check(row.len());
    check_weight(weight, heads.dim);
    for head in 0..heads.count {
        let head = &mut row[heads.range(head)];
        let factor = rms_factor(l, head, eps);
        scale(l, head, factor, weight);
    }
}

dispatch! {
    /// `x = x · (factor / √(Σx² + eps))` for each head of a row, in place: q and k of the gated delta rule.
    ///
    /// Rounds Σx² + eps, √, factor /, · . Panics if the heads don't fit in the row.
    pub fn l2_norm(row: &mut [f32], heads: Heads, factor: f32, eps: f32) = l2_norm_on_lanes;
}

#[inline(always)]
fn l2_norm_on_lanes<L: Lanes>(l: L, row: &mut [f32], heads: Heads, factor: f32, eps: f32) {
    heads.check(row.len());
    for head in 0..heads.count {
        let head = &mut row[heads.range(head)];
        let factor = factor / (sum_of_squares(l, head) + eps).sqrt();
        scale(l, head, factor, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, same_on_all};

    fn rms_f64(x: &[f32], weight: Option<&[f32]>, eps: f32) -> Vec<f64> {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        (0..x.len()).map(|i| f64::from(x[i]) * factor * weight.map_or(1.0, |w| f64::from(w[i]))).collect()
    }

    #[test]
    fn rms_norm_is_its_formula_with_the_same_bits_everywhere() {
        let mut random = Random::new(11);
        for n in [1, 5, 16, 23, 64, 100, 576, 1000] {
            let weight = random.row(n);
            for weight in [None, Some(&weight[..])] {
                for wild in [false, true] {
                    let x = if wild { random.wild_row(n) } else { random.row(n) };
                    let found = same_on_all(|isa| {
                        let mut y = vec![7.0; n];
                        rms_norm(isa, &mut y, Heads::whole(n), &x, Heads::whole(n), weight, 1e-5);
                        let mut in_place = x.clone();
                        rms_norm_in_place(isa, &mut in_place, Heads::whole(n), weight, 1e-5);
                        assert_eq!(crate::testing::bits(&y), crate::testing::bits(&in_place));
                        y
                    });
                    if !wild {
                        assert_close(&found, &rms_f64(&x, weight, 1e-5), 1e-6, 1e-3);
                    }
                }
            }
        }
    }

    #[test]
    fn the_order_of_the_sum_is_the_documented_one() {
        // 40 elements: three partial sums for lanes 0..8, two for the others.
        let x = Random::new(12).row(40);
        let mut lanes = [0f32; 16];
        for (i, &x) in x.iter().enumerate() {
            lanes[i % 16] = x.mul_add(x, lanes[i % 16]);
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        let factor = 1.0 / (lanes[0] / 40.0 + 1e-6).sqrt();
        let expected: Vec<u32> = x.iter().map(|x| (x * factor).to_bits()).collect();
        for isa in crate::isa::Isa::available() {
            let mut y = x.clone();
            rms_norm_in_place(isa, &mut y, Heads::whole(40), None, 1e-6);
            assert_eq!(crate::testing::bits(&y), expected);
        }
    }

    #[test]
    fn heads_are_independent_and_the_rest_stays() {
        let heads = Heads { base: 3, count: 4, stride: 30, dim: 20 };
        let mut random = Random::new(13);
        let (row, weight) = (random.row(130), random.row(20));
        let found = same_on_all(|isa| {
            let mut row = row.clone();
            rms_norm_in_place(isa, &mut row, heads, Some(&weight), 1e-6);
            row
        });
        let mut expected: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
        for head in 0..4 {
            let range = heads.range(head);
            expected[range.clone()].copy_from_slice(&rms_f64(&row[range], Some(&weight), 1e-6));
        }
        assert_close(&found, &expected, 1e-6, 1e-3);
        let mut packed = vec![0.0; 80];
        rms_norm(
            crate::isa::Isa::best(),
            &mut packed,
            Heads::packed(4, 20),
            &row,
            heads,
            Some(&weight),
            1e-6,
        );
        for head in 0..4 {
            assert_eq!(packed[head * 20..][..20], found[heads.range(head)]);
        }
        let mut second = row.clone();
        rms_norm_in_place(crate::isa::Isa::best(), &mut second, heads.only(1..2), Some(&weight), 1e-6);
        assert_eq!(second[33..53], found[33..53]);
        assert_eq!(second[53..], row[53..]);
        assert_eq!(second[..33], row[..33]);
    }

    #[test]
    fn l2_norm_is_its_formula() {
        let heads = Heads { base: 1, count: 3, stride: 40, dim: 40 };
        let mut random = Random::new(14);
        for wild in [false, true] {
            let row = if wild { random.wild_row(121) } else { random.row(121) };
            let found = same_on_all(|isa| {
                let mut row = row.clone();
                l2_norm(isa, &mut row, heads, 0.125, 1e-6);
                row
            });
            if !wild {
                let mut expected: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
                for head in 0..3 {
                    let range = heads.range(head);
                    let sum: f64 = row[range.clone()].iter().map(|&x| f64::from(x).powi(2)).sum();
                    for x in &mut expected[range] {
                        *x *= 0.125 / (sum + 1e-6).sqrt();
                    }
                }
                assert_close(&found, &expected, 1e-6, 1e-3);
            }
        }
    }

    #[test]
    #[should_panic(expected = "a weight for each element")]
    fn a_weight_of_another_length_is_refused() {
        rms_norm_in_place(crate::isa::Isa::best(), &mut [0.0; 8], Heads::whole(8), Some(&[1.0; 7]), 1e-6);
    }
}
