//! One output element from the input elements at the same place.
//!
//! A gate is an activated row times another one; either of the two rows may take the product.

use super::Heads;
pub use motet_model::program::Activation;

use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;

/// A function of one element.
trait Of1: Copy {
    fn lanes<L: Lanes>(self, l: L, y: L::F) -> L::F;
}

/// A function of two elements at the same place.
trait Of2: Copy {
    fn lanes<L: Lanes>(self, l: L, y: L::F, x: L::F) -> L::F;
}

/// y = f(y)
#[inline(always)]
fn change<L: Lanes>(l: L, f: impl Of1, y: &mut [f32]) {
    let (y, y_tail) = y.as_chunks_mut::<LANES>();
    for y in y {
        l.store(f.lanes(l, l.load(y)), y);
    }
    if !y_tail.is_empty() {
        l.store_tail(f.lanes(l, l.load_tail(y_tail, 0.0)), y_tail);
    }
}

/// y = f(y, x)
#[inline(always)]
fn combine<L: Lanes>(l: L, f: impl Of2, y: &mut [f32], x: &[f32]) {
    assert_eq!(y.len(), x.len(), "as many elements on both sides");
    let (y, y_tail) = y.as_chunks_mut::<LANES>();
    let (x, x_tail) = x.as_chunks::<LANES>();
    for (y, x) in y.iter_mut().zip(x) {
        l.store(f.lanes(l, l.load(y), l.load(x)), y);
    }
    if !y_tail.is_empty() {
        l.store_tail(f.lanes(l, l.load_tail(y_tail, 0.0), l.load_tail(x_tail, 0.0)), y_tail);
    }
}

dispatch! {
    /// `y[i] = y[i] + x[i]`: the residual stream, a bias. Panics if the lengths differ.
    pub fn add(y: &mut [f32], x: &[f32]) = add_on_lanes;
}

#[derive(Clone, Copy)]
struct Add;

impl Of2 for Add {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F, x: L::F) -> L::F {
        l.add(y, x)
    }
}

#[inline(always)]
fn add_on_lanes<L: Lanes>(l: L, y: &mut [f32], x: &[f32]) {
    combine(l, Add, y, x);
}

dispatch! {
    /// `y[i] = factor · x[i] + y[i]`, one FMA. Panics if the lengths differ.
    pub fn add_scaled(y: &mut [f32], x: &[f32], factor: f32) = add_scaled_on_lanes;
}

#[derive(Clone, Copy)]
struct AddScaled(f32);

impl Of2 for AddScaled {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F, x: L::F) -> L::F {
        l.fma(l.splat(self.0), x, y)
    }
}

#[inline(always)]
fn add_scaled_on_lanes<L: Lanes>(l: L, y: &mut [f32], x: &[f32], factor: f32) {
    combine(l, AddScaled(factor), y, x);
}

dispatch! {
    /// `y[i] = y[i] · factor`.
    pub fn scale(y: &mut [f32], factor: f32) = scale_on_lanes;
}

#[derive(Clone, Copy)]
struct Scale(f32);

impl Of1 for Scale {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F) -> L::F {
        l.mul(y, l.splat(self.0))
    }
}

#[inline(always)]
fn scale_on_lanes<L: Lanes>(l: L, y: &mut [f32], factor: f32) {
    change(l, Scale(factor), y);
}

dispatch! {
    /// `y[i] = cap · tanh(y[i] / cap)`: the soft cap of final logits. Panics unless `cap` is positive.
    pub fn softcap(y: &mut [f32], cap: f32) = softcap_on_lanes;
}

#[derive(Clone, Copy)]
struct Softcap(f32);

impl Of1 for Softcap {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F) -> L::F {
        let cap = l.splat(self.0);
        l.mul(cap, math::tanh(l, l.div(y, cap)))
    }
}

#[inline(always)]
fn softcap_on_lanes<L: Lanes>(l: L, y: &mut [f32], cap: f32) {
    assert!(cap > 0.0, "a soft cap of {cap}");
    change(l, Softcap(cap), y);
}

/// y = activation(y) · x
#[derive(Clone, Copy)]
struct ActivateY(Activation);

impl Of2 for ActivateY {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F, x: L::F) -> L::F {
        let activated = match self.0 {
            Activation::Silu => math::silu(l, y),
            Activation::GeluTanh => math::gelu_tanh(l, y),
            Activation::Sigmoid => math::sigmoid(l, y),
        };
        l.mul(activated, x)
    }
}

/// y = activation(x) · y
#[derive(Clone, Copy)]
struct ActivateX(Activation);

impl Of2 for ActivateX {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F, x: L::F) -> L::F {
        ActivateY(self.0).lanes(l, x, y)
    }
}

dispatch! {
    /// `gate[i] = activation(gate[i]) · x[i]` in each head: SwiGLU, GeGLU. The activation is rounded, then the product.
    ///
    /// Both are rows with as many heads of the same size. Panics if they differ or don't fit.
    pub fn activate_times(
        activation: Activation,
        gate: &mut [f32],
        gate_heads: Heads,
        x: &[f32],
        x_heads: Heads
    ) = activate_times_on_lanes;
}

#[inline(always)]
fn activate_times_on_lanes<L: Lanes>(
    l: L,
    activation: Activation,
    gate: &mut [f32],
    gate_heads: Heads,
    x: &[f32],
    x_heads: Heads,
) {
    combine_heads(l, ActivateY(activation), gate, gate_heads, x, x_heads);
}

dispatch! {
    /// `x[i] = activation(gate[i]) · x[i]` in each head: gated attention, the output of the gated delta rule. As [`activate_times`],
    /// but `x` takes the product.
    pub fn times_activated(
        x: &mut [f32],
        x_heads: Heads,
        activation: Activation,
        gate: &[f32],
        gate_heads: Heads
    ) = times_activated_on_lanes;
}

#[inline(always)]
fn times_activated_on_lanes<L: Lanes>(
    l: L,
    x: &mut [f32],
    x_heads: Heads,
    activation: Activation,
    gate: &[f32],
    gate_heads: Heads,
) {
    combine_heads(l, ActivateX(activation), x, x_heads, gate, gate_heads);
}

/// y = f(y, x) in each head
#[inline(always)]
fn combine_heads<L: Lanes>(l: L, f: impl Of2, y: &mut [f32], y_heads: Heads, x: &[f32], x_heads: Heads) {
    y_heads.check(y.len());
    x_heads.check(x.len());
    assert_eq!(y_heads.count, x_heads.count, "as many heads on both sides");
    for head in 0..y_heads.count {
        combine(l, f, &mut y[y_heads.range(head)], &x[x_heads.range(head)]);
    }
}

dispatch! {
    /// `y[i] = sigmoid(y[i])`.
    pub fn sigmoid(y: &mut [f32]) = sigmoid_on_lanes;
}

#[derive(Clone, Copy)]
struct Sigmoid;

impl Of1 for Sigmoid {
    #[inline(always)]
    fn lanes<L: Lanes>(self, l: L, y: L::F) -> L::F {
        math::sigmoid(l, y)
    }
}

#[inline(always)]
fn sigmoid_on_lanes<L: Lanes>(l: L, y: &mut [f32]) {
    change(l, Sigmoid, y);
}

dispatch! {
    /// Whether every element is finite. A hidden row or a logits row that is not ends its session.
    pub fn is_finite(x: &[f32]) -> bool = is_finite_on_lanes;
}

#[inline(always)]
fn is_finite_on_lanes<L: Lanes>(l: L, x: &[f32]) -> bool {
    let exponent = l.splat_i(0x7f80_0000);
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut bad = 0;
    for chunk in chunks {
        bad |= l.mask_bits(l.ieq(l.and(l.bits(l.load(chunk)), exponent), exponent));
    }
    bad |= l.mask_bits(l.ieq(l.and(l.bits(l.load_tail(tail, 0.0)), exponent), exponent));
    bad == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, same_on_all};

    const LENGTHS: [usize; 9] = [0, 1, 7, 15, 16, 17, 48, 100, 576];

    fn sigmoid_f64(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    /// Same bits everywhere on wild rows, the formula on ordinary ones.
    fn check(
        operation: impl Fn(crate::isa::Isa, &mut [f32], &[f32]),
        formula: impl Fn(f64, f64) -> f64,
        relative: f64,
    ) {
        let mut random = Random::new(5);
        for n in LENGTHS {
            for wild in [false, true] {
                let (y, x) = if wild {
                    (random.wild_row(n), random.wild_row(n))
                } else {
                    (random.row(n), random.row(n))
                };
                let found = same_on_all(|isa| {
                    let mut y = y.clone();
                    operation(isa, &mut y, &x);
                    y
                });
                if !wild {
                    let expected: Vec<f64> =
                        y.iter().zip(&x).map(|(&y, &x)| formula(f64::from(y), f64::from(x))).collect();
                    assert_close(&found, &expected, relative, 0.1);
                }
            }
        }
    }

    #[test]
    fn each_is_its_formula_with_the_same_bits_everywhere() {
        check(add, |y, x| y + x, 1e-7);
        check(|isa, y, x| add_scaled(isa, y, x, 0.75), |y, x| y + 0.75 * x, 1e-7);
        check(|isa, y, _| scale(isa, y, 1.25), |y, _| y * 1.25, 1e-7);
        check(|isa, y, _| softcap(isa, y, 2.0), |y, _| 2.0 * (y / 2.0).tanh(), 4e-7);
        let gelu = |x: f64| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        };
        for (activation, formula, relative) in [
            (Activation::Silu, (&|x| x * sigmoid_f64(x)) as &dyn Fn(f64) -> f64, 5e-7),
            (Activation::GeluTanh, &gelu, 3e-6),
            (Activation::Sigmoid, &sigmoid_f64, 5e-7),
        ] {
            let heads = |row: &[f32]| Heads::whole(row.len());
            check(
                |isa, y, x| activate_times(isa, activation, y, heads(y), x, heads(x)),
                |y, x| formula(y) * x,
                relative,
            );
            check(
                |isa, y, x| times_activated(isa, y, heads(y), activation, x, heads(x)),
                |y, x| formula(x) * y,
                relative,
            );
        }
        check(|isa, y, _| sigmoid(isa, y), |y, _| sigmoid_f64(y), 4e-7);
    }

    #[test]
    fn gates_pick_their_heads_and_leave_the_rest() {
        // Rows of [q | gate] per head: 3 heads of 20, the gate behind each q.
        let (heads, dim) = (3, 20);
        let mut random = Random::new(6);
        let (x, gate) = (random.row(heads * dim + 5), random.row(2 * heads * dim));
        let x_heads = Heads::packed(heads, dim);
        let gate_heads = Heads { base: dim, count: heads, stride: 2 * dim, dim };
        let found = same_on_all(|isa| {
            let mut x = x.clone();
            times_activated(isa, &mut x, x_heads, Activation::Sigmoid, &gate, gate_heads);
            x
        });
        let expected: Vec<f64> = (0..heads * dim)
            .map(|i| f64::from(x[i]) * sigmoid_f64(f64::from(gate[i / dim * 2 * dim + dim + i % dim])))
            .collect();
        assert_close(&found[..heads * dim], &expected, 5e-7, 0.1);
        assert_eq!(found[heads * dim..], x[heads * dim..]);
        // The same product may land in the gate's row.
        let mut row = gate.clone();
        activate_times(crate::isa::Isa::best(), Activation::Sigmoid, &mut row, gate_heads, &x, x_heads);
        for head in 0..heads {
            assert_eq!(row[gate_heads.range(head)], found[x_heads.range(head)]);
            assert_eq!(row[head * 2 * dim..][..dim], gate[head * 2 * dim..][..dim]);
        }
    }

    #[test]
    fn finite_rows_are_told_from_others() {
        for isa in crate::isa::Isa::available() {
            for n in LENGTHS {
                let row = Random::new(7).wild_row(n);
                assert!(is_finite(isa, &row));
                for at in 0..n.min(40) {
                    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)] {
                        let mut row = row.clone();
                        row[at] = bad;
                        assert!(!is_finite(isa, &row), "{isa} {n} {at}");
                    }
                }
                if n > 0 {
                    let mut row = row.clone();
                    row[n - 1] = f32::MAX;
                    assert!(is_finite(isa, &row));
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "as many elements")]
    fn rows_of_different_lengths_are_refused() {
        add(crate::isa::Isa::best(), &mut [0.0; 16], &[0.0; 17]);
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn heads_beyond_the_row_are_refused() {
        let heads = Heads::packed(3, 8);
        times_activated(crate::isa::Isa::best(), &mut [0.0; 24], heads, Activation::Silu, &[0.0; 23], heads);
    }
}
