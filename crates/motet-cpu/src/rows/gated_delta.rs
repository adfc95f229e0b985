//! The gated delta rule (Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks): one value head's recurrence over tokens.
//!
//! A head's state S is `[dk, dv]`. For one token with key k, query q `[dk]`, value v `[dv]`, decay α and step size β,
//! each column j by itself:
//!
//! 1. `S[i][j] = α · S[i][j]`, rounded;
//! 2. `p = Σ S[i][j] · k[i]` by FMA in ascending i, from +0;
//! 3. `d = β · (v[j] − p)`, the difference and the product rounded;
//! 4. `S[i][j] = fma(k[i], d, S[i][j])`;
//! 5. `o[j] = Σ S[i][j] · q[i]` by FMA in ascending i, from +0.

use super::Rows;
use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;
use crate::shared_rows::RowsMut;

dispatch! {
    /// α and β of one row's value heads, in place of the projections that they come from.
    ///
    /// `alpha[h] = exp(a[h] · softplus(alpha[h] + dt[h]))`, each step rounded, and `beta[h] = sigmoid(beta[h])`.
    /// `a` is the tensor `ssm_a` (negative), `dt` is `ssm_dt.bias`. Panics if the lengths differ.
    pub fn decay_and_step(alpha: &mut [f32], beta: &mut [f32], a: &[f32], dt: &[f32]) = decay_and_step_on_lanes;
}

#[inline(always)]
fn decay_and_step_on_lanes<L: Lanes>(l: L, alpha: &mut [f32], beta: &mut [f32], a: &[f32], dt: &[f32]) {
    let heads = alpha.len();
    assert!(beta.len() == heads && a.len() == heads && dt.len() == heads, "one of each for {heads} heads");
    let mut first = 0;
    while first < heads {
        let lanes = first..heads.min(first + LANES);
        let alpha = &mut alpha[lanes.clone()];
        let beta = &mut beta[lanes.clone()];
        let (a, dt) = (l.load_tail(&a[lanes.clone()], 0.0), l.load_tail(&dt[lanes], 0.0));
        let time = math::softplus(l, l.add(l.load_tail(alpha, 0.0), dt));
        l.store_tail(math::exp(l, l.mul(a, time)), alpha);
        l.store_tail(math::sigmoid(l, l.load_tail(beta, 0.0)), beta);
        first += LANES;
    }
}

/// What moves one value head's state: its inputs for the rows of one session.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a> {
    /// Keys, normalised, `[rows, dk]`. Value head j uses query and key head j mod nk.
    pub k: Rows<'a>,
    /// Values, `[rows, dv]`.
    pub v: Rows<'a>,
    /// Decays α, `[rows, 1]`.
    pub alpha: Rows<'a>,
    /// Step sizes β, `[rows, 1]`.
    pub beta: Rows<'a>,
}

/// The rows of one session, in order, through one value head's recurrence.
///
/// `state` `[dk, dv]` is advanced past the last row; `out` `[rows, dv]` receives what the queries `q` `[rows, dk]`
/// (normalised and scaled) read: o. A thread may also take some columns only: of `state`, `v` and `out` alike.
/// Panics if the shapes don't fit.
pub fn gated_delta(
    isa: crate::isa::Isa,
    out: &mut RowsMut<'_>,
    q: Rows<'_>,
    inputs: DeltaInputs<'_>,
    state: &mut RowsMut<'_>,
) {
    let (rows, dk, dv) = (inputs.k.count(), state.rows(), state.width());
    assert!(
        (q.count(), q.width()) == (rows, dk) && (out.rows(), out.width()) == (rows, dv),
        "q [{}, {}], out [{}, {}] for {rows} rows and a state [{dk}, {dv}]",
        q.count(),
        q.width(),
        out.rows(),
        out.width()
    );
    recurrence(isa, inputs, state, Some(Read { q, out: out.reborrow() }));
}

/// Advances one value head's state past some rows without reading it: the bits of [`gated_delta`]'s.
pub fn advance(isa: crate::isa::Isa, inputs: DeltaInputs<'_>, state: &mut RowsMut<'_>) {
    recurrence(isa, inputs, state, None);
}

/// What is read from the state, row by row.
struct Read<'a> {
    q: Rows<'a>,
    out: RowsMut<'a>,
}

impl DeltaInputs<'_> {
    /// The inputs before and from `row` on.
    pub fn split(self, row: usize) -> (Self, Self) {
        let [k, v, alpha, beta] = [self.k, self.v, self.alpha, self.beta].map(|x| x.split(row));
        (
            DeltaInputs { k: k.0, v: v.0, alpha: alpha.0, beta: beta.0 },
            DeltaInputs { k: k.1, v: v.1, alpha: alpha.1, beta: beta.1 },
        )
    }
}

dispatch! {
    fn recurrence(inputs: DeltaInputs<'_>, state: &mut RowsMut<'_>, read: Option<Read<'_>>) = recurrence_on_lanes;
}

#[inline(always)]
fn recurrence_on_lanes<L: Lanes>(
    l: L,
    inputs: DeltaInputs<'_>,
    state: &mut RowsMut<'_>,
    mut read: Option<Read<'_>>,
) {
    let DeltaInputs { k, v, alpha, beta } = inputs;
    let (rows, dk, dv) = (k.count(), state.rows(), state.width());
    assert!(
        [v, alpha, beta].iter().all(|x| x.count() == rows),
        "inputs of {}, {} and {} rows for {rows}",
        v.count(),
        alpha.count(),
        beta.count()
    );
    assert!(
        k.width() == dk && v.width() == dv,
        "k of {}, v of {} for a state [{dk}, {dv}]",
        k.width(),
        v.width()
    );
    assert!(alpha.width() == 1 && beta.width() == 1, "one decay and one step size for a row");
    let read = &mut read;
    // Four groups of lanes at a time: enough sums in flight, and their part of the state stays in the first cache.
    let mut first = 0;
    while first + 4 * LANES <= dv {
        columns::<L, 4>(l, inputs, state, read, first);
        first += 4 * LANES;
    }
    while first + LANES <= dv {
        columns::<L, 1>(l, inputs, state, read, first);
        first += LANES;
    }
    if first < dv {
        last_columns(l, inputs, state, read, first);
    }
}

/// G groups of 16 columns from `first` on.
#[inline(always)]
fn columns<L: Lanes, const G: usize>(
    l: L,
    inputs: DeltaInputs<'_>,
    state: &mut RowsMut<'_>,
    read: &mut Option<Read<'_>>,
    first: usize,
) {
    let zero = l.splat(0.0);
    for row in 0..inputs.k.count() {
        let k = inputs.k.row(row);
        let alpha = l.splat(inputs.alpha.row(row)[0]);
        let beta = l.splat(inputs.beta.row(row)[0]);
        let mut sums = [zero; G];
        for (i, &k) in k.iter().enumerate() {
            let k = l.splat(k);
            let s = groups::<G>(&mut state.row_mut(i)[first..]);
            for g in 0..G {
                sums[g] = l.fma(l.mul(alpha, l.load(&s[g])), k, sums[g]);
            }
        }
        let (v, _) = inputs.v.row(row)[first..].as_chunks::<LANES>();
        for g in 0..G {
            sums[g] = l.mul(beta, l.sub(l.load(&v[g]), sums[g]));
        }
        let d = sums;
        let Some(Read { q, out }) = read else {
            for (i, &k) in k.iter().enumerate() {
                move_row(l, groups::<G>(&mut state.row_mut(i)[first..]), alpha, k, &d);
            }
            continue;
        };
        let mut o = [zero; G];
        for (i, (&q, &k)) in q.row(row).iter().zip(k).enumerate() {
            let new = move_row(l, groups::<G>(&mut state.row_mut(i)[first..]), alpha, k, &d);
            let q = l.splat(q);
            for g in 0..G {
                o[g] = l.fma(new[g], q, o[g]);
            }
        }
        let out = groups::<G>(&mut out.row_mut(row)[first..]);
        for g in 0..G {
            l.store(o[g], &mut out[g]);
        }
    }
}

/// Steps 1 and 4 for one row of the state; what it is then.
#[inline(always)]
fn move_row<L: Lanes, const G: usize>(
    l: L,
    s: &mut [[f32; LANES]; G],
    alpha: L::F,
    k: f32,
    d: &[L::F; G],
) -> [L::F; G] {
    let k = l.splat(k);
    let mut new = *d;
    for g in 0..G {
        new[g] = l.fma(k, d[g], l.mul(alpha, l.load(&s[g])));
        l.store(new[g], &mut s[g]);
    }
    new
}

#[inline(always)]
fn groups<const G: usize>(x: &mut [f32]) -> &mut [[f32; LANES]; G] {
    let (groups, _) = x.as_chunks_mut::<LANES>();
    let (groups, _) = groups.split_first_chunk_mut::<G>().expect("the shapes were checked");
    groups
}

/// The columns that don't fill all lanes.
#[inline(always)]
fn last_columns<L: Lanes>(
    l: L,
    inputs: DeltaInputs<'_>,
    state: &mut RowsMut<'_>,
    read: &mut Option<Read<'_>>,
    first: usize,
) {
    for row in 0..inputs.k.count() {
        let k = inputs.k.row(row);
        let alpha = l.splat(inputs.alpha.row(row)[0]);
        let beta = l.splat(inputs.beta.row(row)[0]);
        let mut p = l.splat(0.0);
        for (i, &k) in k.iter().enumerate() {
            let s = l.load_tail(&state.row_mut(i)[first..], 0.0);
            p = l.fma(l.mul(alpha, s), l.splat(k), p);
        }
        let d = l.mul(beta, l.sub(l.load_tail(&inputs.v.row(row)[first..], 0.0), p));
        let mut o = l.splat(0.0);
        for (i, &k) in k.iter().enumerate() {
            let s = &mut state.row_mut(i)[first..];
            let new = l.fma(l.splat(k), d, l.mul(alpha, l.load_tail(s, 0.0)));
            l.store_tail(new, s);
            if let Some(read) = read {
                o = l.fma(new, l.splat(read.q.row(row)[i]), o);
            }
        }
        if let Some(read) = read {
            l.store_tail(o, &mut read.out.row_mut(row)[first..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::testing::{Random, assert_close, bits, same_on_all};

    /// One head: q, k `[rows, dk]`, v `[rows, dv]`, α and β `[rows]`, state `[dk, dv]`.
    #[derive(Clone)]
    struct Head {
        rows: usize,
        dk: usize,
        dv: usize,
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        alpha: Vec<f32>,
        beta: Vec<f32>,
        state: Vec<f32>,
    }

    impl Head {
        fn new(seed: u64, rows: usize, dk: usize, dv: usize, wild: bool) -> Head {
            let mut random = Random::new(seed);
            let mut row = |n| if wild { random.wild_row(n) } else { random.row(n) };
            let (q, v, state) = (row(rows * dk), row(rows * dv), row(dk * dv));
            let mut k = row(rows * dk);
            for k in k.chunks_mut(dk) {
                let norm = k.iter().map(|x| x * x).sum::<f32>().sqrt();
                k.iter_mut().for_each(|x| *x /= norm.max(1.0));
            }
            let alpha = (0..rows).map(|_| random.unit().abs()).collect();
            let beta = (0..rows).map(|_| random.unit().abs()).collect();
            Head { rows, dk, dv, q, k, v, alpha, beta, state }
        }

        fn inputs(&self, rows: std::ops::Range<usize>) -> DeltaInputs<'_> {
            let n = rows.len();
            DeltaInputs {
                k: Rows::new(&self.k[rows.start * self.dk..], n, self.dk, self.dk),
                v: Rows::new(&self.v[rows.start * self.dv..], n, self.dv, self.dv),
                alpha: Rows::new(&self.alpha[rows.start..], n, 1, 1),
                beta: Rows::new(&self.beta[rows.start..], n, 1, 1),
            }
        }

        fn queries(&self, rows: std::ops::Range<usize>) -> Rows<'_> {
            Rows::new(&self.q[rows.start * self.dk..], rows.len(), self.dk, self.dk)
        }

        /// Outputs and then the state behind them.
        fn run(&self, isa: Isa) -> Vec<f32> {
            let (mut out, mut state) = (vec![9.0; self.rows * self.dv], self.state.clone());
            gated_delta(
                isa,
                &mut RowsMut::new(&mut out, self.rows, self.dv, self.dv),
                self.queries(0..self.rows),
                self.inputs(0..self.rows),
                &mut RowsMut::new(&mut state, self.dk, self.dv, self.dv),
            );
            out.extend(state);
            out
        }

        /// The formula of the paper in f64: S ← αS; S += k ⊗ β(v − Sᵀk); o = Sᵀq.
        fn formula(&self) -> Vec<f64> {
            let (dk, dv) = (self.dk, self.dv);
            let mut s: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
            let mut out = Vec::new();
            for row in 0..self.rows {
                let at = |x: &[f32], i: usize| f64::from(x[i]);
                s.iter_mut().for_each(|s| *s *= at(&self.alpha, row));
                for j in 0..dv {
                    let p: f64 = (0..dk).map(|i| s[i * dv + j] * at(&self.k, row * dk + i)).sum();
                    let d = at(&self.beta, row) * (at(&self.v, row * dv + j) - p);
                    for i in 0..dk {
                        s[i * dv + j] += at(&self.k, row * dk + i) * d;
                    }
                }
                out.extend(
                    (0..dv).map(|j| (0..dk).map(|i| s[i * dv + j] * at(&self.q, row * dk + i)).sum::<f64>()),
                );
            }
            out.extend(s);
            out
        }
    }

    #[test]
    fn the_recurrence_is_its_formula_with_the_same_bits_everywhere() {
        for (rows, dk, dv) in [(1, 16, 16), (5, 32, 128), (3, 128, 96), (4, 7, 5), (6, 20, 83), (0, 16, 16)] {
            let head = Head::new(51, rows, dk, dv, false);
            let found = same_on_all(|isa| head.run(isa));
            assert_close(&found, &head.formula(), 3e-6, 30.0);
            let wild = Head::new(52, rows, dk, dv, true);
            same_on_all(|isa| wild.run(isa));
            for head in [head, wild] {
                let found = same_on_all(|isa| {
                    let mut state = head.state.clone();
                    advance(isa, head.inputs(0..rows), &mut RowsMut::new(&mut state, dk, dv, dv));
                    state
                });
                assert_eq!(bits(&found), bits(&head.run(Isa::best())[rows * dv..]), "nothing was read");
            }
        }
    }

    #[test]
    fn the_order_of_operations_is_the_documented_one() {
        let head = Head::new(53, 2, 24, 37, true);
        let (dk, dv) = (head.dk, head.dv);
        let mut s = head.state.clone();
        let mut expected = vec![0f32; head.rows * dv];
        for row in 0..head.rows {
            for j in 0..dv {
                let mut p = 0f32;
                for i in 0..dk {
                    s[i * dv + j] *= head.alpha[row];
                    p = s[i * dv + j].mul_add(head.k[row * dk + i], p);
                }
                let d = head.beta[row] * (head.v[row * dv + j] - p);
                let mut o = 0f32;
                for i in 0..dk {
                    s[i * dv + j] = head.k[row * dk + i].mul_add(d, s[i * dv + j]);
                    o = s[i * dv + j].mul_add(head.q[row * dk + i], o);
                }
                expected[row * dv + j] = o;
            }
        }
        expected.extend(s);
        assert_eq!(bits(&head.run(Isa::best())), bits(&expected));
    }

    #[test]
    fn rows_at_once_equal_rows_one_by_one_in_split_columns() {
        let head = Head::new(54, 6, 16, 80, false);
        let whole = head.run(Isa::best());
        let (mut out, mut state) = (vec![0.0; head.rows * head.dv], head.state.clone());
        let (left, right) = RowsMut::new(&mut out, head.rows, head.dv, head.dv).split_columns(33);
        let (left_state, right_state) = RowsMut::new(&mut state, head.dk, head.dv, head.dv).split_columns(33);
        for (from, mut out, mut state) in [(0, left, left_state), (33, right, right_state)] {
            for row in 0..head.rows {
                let (mut this, rest) = out.split_rows(1);
                let width = this.width();
                let inputs = head.inputs(row..row + 1);
                let v = Rows::new(&head.v[row * head.dv + from..], 1, width, head.dv);
                let q = head.queries(row..row + 1);
                gated_delta(Isa::best(), &mut this, q, DeltaInputs { v, ..inputs }, &mut state);
                out = rest;
            }
        }
        out.extend(state);
        assert_eq!(bits(&out), bits(&whole));
    }

    #[test]
    fn decay_and_step_are_their_formulas() {
        let mut random = Random::new(55);
        for heads in [1, 16, 33] {
            let (alpha, beta, dt) = (random.row(heads), random.row(heads), random.row(heads));
            let a: Vec<f32> = (0..heads).map(|_| -random.unit().abs() * 8.0).collect();
            let found = same_on_all(|isa| {
                let (mut alpha, mut beta) = (alpha.clone(), beta.clone());
                decay_and_step(isa, &mut alpha, &mut beta, &a, &dt);
                alpha.extend(beta);
                alpha
            });
            let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
            let decay =
                |h: usize| (f64::from(a[h]) * (f64::from(alpha[h]) + f64::from(dt[h])).exp().ln_1p()).exp();
            let expected: Vec<f64> = (0..heads).map(decay).chain(beta.iter().map(|&x| sigmoid(x))).collect();
            assert_close(&found, &expected, 5e-6, 1e-6);
        }
    }
}
