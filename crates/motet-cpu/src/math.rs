//! Elementary functions, our own: the same bits on every CPU, which no platform's libm promises.
//!
//! On lanes (f32): [`exp`], [`ln`], [`log1p`], [`tanh`], [`sigmoid`], [`softplus`], and the activations made of them. The definition
//! is the code, run on [`Scalar`](crate::lanes::Scalar). For the angles of RoPE (f64, plain arithmetic without FMA): [`sin_cos`],
//! [`exp_f64`], [`ln_f64`], [`pow_f64`].
//!
//! A NaN goes in, a NaN comes out. Error bounds are in units in the last place (ulp) of the result's format
//! and hold for denormal results too. The coefficients come from `tools/polynomials.py`.

use crate::lanes::Lanes;

/// The polynomial with these coefficients, highest power first, by Horner's rule with FMA.
#[inline(always)]
fn polynomial<L: Lanes, const N: usize>(l: L, x: L::F, coefficients: &[f32; N]) -> L::F {
    let mut y = l.splat(coefficients[0]);
    for &c in &coefficients[1..] {
        y = l.fma(y, x, l.splat(c));
    }
    y
}

// ln 2 in two parts; multiples of the first by small integers are exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -0.000_212_194_44;

/// 2ⁿ for −126 ≤ n ≤ 127.
#[inline(always)]
fn power_of_two<L: Lanes>(l: L, n: L::I) -> L::F {
    l.floats(l.shl::<23>(l.iadd(n, l.splat_i(127))))
}

/// The sign of `sign` on the magnitude `a`.
#[inline(always)]
fn with_sign<L: Lanes>(l: L, a: L::F, sign: L::F) -> L::F {
    l.floats(l.or(l.bits(l.abs(a)), l.and(l.bits(sign), l.splat_i(i32::MIN))))
}

/// eˣ within 1 ulp. exp(±0) = 1, exp(−∞) = +0, +∞ above 88.72.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, eʳ = 1 + (r + r²·P(r)), scaled by 2ⁿ in two steps so that only the
/// last can be denormal.
#[inline(always)]
pub fn exp<L: Lanes>(l: L, x: L::F) -> L::F {
    const P: [f32; 6] = [0.000_198_910_1, 0.001_393_366_7, 0.008_333_310_5, 0.041_666_463, 0.166_666_67, 0.5];
    // Beyond these bounds the result is 0 or infinite all the same.
    let x = l.clamp(x, -104.0, 89.0);
    let n = l.round_even(l.mul(x, l.splat(std::f32::consts::LOG2_E)));
    let r = l.fnma(n, l.splat(LN2_HIGH), x);
    let r = l.fnma(n, l.splat(LN2_LOW), r);
    let p = polynomial(l, r, &P);
    let y = l.add(l.fma(p, l.mul(r, r), r), l.splat(1.0));
    let n = l.to_int(n);
    let half = l.sar::<1>(n);
    l.mul(l.mul(y, power_of_two(l, half)), power_of_two(l, l.isub(n, half)))
}

/// ln x within 1 ulp. ln(±0) = −∞, NaN below, ln(+∞) = +∞.
///
/// x = 2ᵉ·(1 + f) with √½ ≤ 1 + f < √2, ln(1 + f) = f − f²/2 + f³·P(f).
#[inline(always)]
pub fn ln<L: Lanes>(l: L, x: L::F) -> L::F {
    const P: [f32; 9] = [
        0.069_716_12,
        -0.114_797_34,
        0.116_854_2,
        -0.124_256_87,
        0.142_490_58,
        -0.166_678_03,
        0.200_007_16,
        -0.249_999_97,
        0.333_333_3,
    ];
    let denormal = l.lt(x, l.splat(f32::MIN_POSITIVE));
    let normal = l.select(denormal, l.mul(x, l.splat(8_388_608.0)), x);
    let bits = l.bits(normal);
    let e = l.sar::<23>(l.isub(bits, l.splat_i(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32)));
    let f = l.sub(l.floats(l.isub(bits, l.shl::<23>(e))), l.splat(1.0));
    let e = l.to_float(l.select_i(denormal, l.isub(e, l.splat_i(23)), e));
    let z = l.mul(f, f);
    let y = l.mul(l.mul(polynomial(l, f, &P), f), z);
    let y = l.fma(e, l.splat(LN2_LOW), y);
    let y = l.fnma(z, l.splat(0.5), y);
    let y = l.fma(e, l.splat(LN2_HIGH), l.add(f, y));
    let y = l.select(l.eq(x, l.splat(f32::INFINITY)), x, y);
    let y = l.select(l.eq(x, l.splat(0.0)), l.splat(f32::NEG_INFINITY), y);
    let invalid = l.lt(x, l.splat(0.0));
    let y = l.select(invalid, l.splat(f32::NAN), y);
    l.select(l.is_nan(x), x, y)
}

/// ln(1 + x) within 2 ulp. log1p(−1) = −∞, NaN below, log1p(+∞) = +∞; log1p(−0) = +0.
///
/// u = 1 + x rounded, c what the rounding lost: ln u + c / u.
#[inline(always)]
pub fn log1p<L: Lanes>(l: L, x: L::F) -> L::F {
    let one = l.splat(1.0);
    let u = l.add(one, x);
    let c = l.select(l.lt(x, one), l.sub(x, l.sub(u, one)), l.sub(one, l.sub(u, x)));
    let y = ln(l, u);
    // c is 0 at x = −1, and means nothing where u is infinite.
    let ordinary = l.both(l.lt(l.splat(0.0), u), l.lt(u, l.splat(f32::INFINITY)));
    l.select(ordinary, l.add(y, l.div(c, u)), y)
}

/// tanh x within 2 ulp.
///
/// Up to 0.625: x + x·z·P(z), z = x²; beyond: 1 − 2 / (exp(2|x|) + 1) with the sign of x.
#[inline(always)]
pub fn tanh<L: Lanes>(l: L, x: L::F) -> L::F {
    const P: [f32; 5] = [-0.006_096_714, 0.020_997_18, -0.053_850_908, 0.133_327_7, -0.333_333_28];
    let a = l.abs(x);
    let z = l.mul(a, a);
    let near = l.fma(l.mul(polynomial(l, z, &P), z), a, a);
    let e = exp(l, l.add(a, a));
    let far = l.sub(l.splat(1.0), l.div(l.splat(2.0), l.add(e, l.splat(1.0))));
    with_sign(l, l.select(l.lt(a, l.splat(0.625)), near, far), x)
}

/// 1 / (1 + e⁻ˣ) within 3 ulp: with e = exp(−|x|), 1 / (1 + e) for x ≥ 0 and e / (1 + e) for x < 0.
#[inline(always)]
pub fn sigmoid<L: Lanes>(l: L, x: L::F) -> L::F {
    let one = l.splat(1.0);
    let e = exp(l, l.neg(l.abs(x)));
    l.div(l.select(l.lt(x, l.splat(0.0)), e, one), l.add(one, e))
}

/// ln(1 + eˣ) within 3 ulp: max(x, 0) + log1p(exp(−|x|)).
#[inline(always)]
pub fn softplus<L: Lanes>(l: L, x: L::F) -> L::F {
    l.add(l.max(l.splat(0.0), x), log1p(l, exp(l, l.neg(l.abs(x)))))
}

/// x · sigmoid(x), within 4 ulp for x ≥ −87; below, where the sigmoid is denormal, within |x|·2⁻¹⁴⁹.
#[inline(always)]
pub fn silu<L: Lanes>(l: L, x: L::F) -> L::F {
    l.mul(x, sigmoid(l, x))
}

/// The tanh form of GELU (Hendrycks and Gimpel 2016): ½x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
///
/// Rounds: x², then x + (0.044715·x)·x² (one FMA), times √(2/π), tanh, + 1, times ½x.
#[inline(always)]
pub fn gelu_tanh<L: Lanes>(l: L, x: L::F) -> L::F {
    let cubic = l.fma(l.mul(x, l.splat(0.044_715)), l.mul(x, x), x);
    let t = tanh(l, l.mul(cubic, l.splat(0.797_884_6)));
    l.mul(l.mul(x, l.splat(0.5)), l.add(t, l.splat(1.0)))
}

/// The polynomial with these coefficients, highest power first, by Horner's rule.
#[inline(always)]
fn polynomial_f64(x: f64, coefficients: &[f64]) -> f64 {
    coefficients.iter().fold(0.0, |y, c| y * x + c)
}

/// (sin x, cos x) within 1 ulp for |x| ≤ 2²⁰; beyond, the absolute error grows to |x|·2⁻⁵². x must be finite and below 2⁵⁰.
///
/// x = n·π/2 + r by three parts of π/2, sin r = r + r·z·P(z), cos r = 1 − z/2 + z²·Q(z), z = r². Without branches, so
/// that a loop of it runs on vectors.
#[inline(always)]
pub fn sin_cos(x: f64) -> (f64, f64) {
    const HALF_PI: [f64; 3] = [1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21];
    const P: [f64; 7] = [
        -7.586696964319367e-13,
        1.6058531616384064e-10,
        -2.505210623243116e-08,
        2.755731921933912e-06,
        -0.00019841269841265065,
        0.008333333333333331,
        -0.16666666666666666,
    ];
    const Q: [f64; 6] = [
        -1.138263220199036e-11,
        2.0876146265300598e-09,
        -2.7557317271714906e-07,
        2.480158729876566e-05,
        -0.0013888888888887398,
        0.041666666666666664,
    ];
    // Added to a number below 2⁵¹ this leaves its nearest integer in the last bits.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    let rounded = x * std::f64::consts::FRAC_2_PI + ROUND;
    let n = rounded - ROUND;
    let r = ((x - n * HALF_PI[0]) - n * HALF_PI[1]) - n * HALF_PI[2];
    let z = r * r;
    let sin = r + r * (z * polynomial_f64(z, &P));
    let half = z * 0.5;
    let one = 1.0 - half;
    // What the subtraction lost goes back in with the rest.
    let cos = one + (((1.0 - one) - half) + z * z * polynomial_f64(z, &Q));
    let quarter = rounded.to_bits();
    let (a, b) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let negative = |of: u64| (of & 2) << 62;
    (
        f64::from_bits(a.to_bits() ^ negative(quarter)),
        f64::from_bits(b.to_bits() ^ negative(quarter.wrapping_add(1))),
    )
}

const LN2_HIGH_F64: f64 = 0.6931471803691238;
const LN2_LOW_F64: f64 = 1.9082149292705877e-10;

/// 2ⁿ for −1022 ≤ n ≤ 1023.
fn power_of_two_f64(n: i64) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// eˣ within 1 ulp, in f64: [`exp`] with more coefficients.
pub fn exp_f64(x: f64) -> f64 {
    const P: [f64; 11] = [
        2.0914701283103285e-09,
        2.51052370507603e-08,
        2.7557273608709007e-07,
        2.7557255352032673e-06,
        2.4801587325574868e-05,
        0.00019841269874858612,
        0.0013888888888883742,
        0.008333333333326124,
        0.04166666666666667,
        0.1666666666666667,
        0.5,
    ];
    if x.is_nan() {
        return x;
    }
    let x = x.clamp(-746.0, 710.0);
    let n = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = (x - n * LN2_HIGH_F64) - n * LN2_LOW_F64;
    let y = 1.0 + (r + r * r * polynomial_f64(r, &P));
    let n = n as i64;
    let half = n >> 1;
    y * power_of_two_f64(half) * power_of_two_f64(n - half)
}

/// ln x within 1 ulp, in f64. ln 0 = −∞, NaN below, ln(+∞) = +∞.
///
/// x = 2ᵉ·m with √½ ≤ m < √2, s = (m − 1) / (m + 1), ln m = 2s + s·z·P(z), z = s².
pub fn ln_f64(x: f64) -> f64 {
    const P: [f64; 8] = [
        0.13086626147840102,
        0.13268773138656886,
        0.15386239702814658,
        0.18181795640132906,
        0.22222222391713917,
        0.28571428570803614,
        0.4000000000000088,
        0.6666666666666666,
    ];
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x == f64::INFINITY {
        return x;
    }
    let (normal, shift) = if x < f64::MIN_POSITIVE { (x * 2f64.powi(54), 54) } else { (x, 0) };
    let bits = normal.to_bits() as i64;
    let e = (bits - std::f64::consts::FRAC_1_SQRT_2.to_bits() as i64) >> 52;
    let f = f64::from_bits((bits - (e << 52)) as u64) - 1.0;
    let e = (e - shift) as f64;
    // 2s = f − s·f, so that the leading term is exact and only a correction is rounded.
    let s = f / (2.0 + f);
    let z = s * s;
    let correction = s * (f - z * polynomial_f64(z, &P));
    e * LN2_HIGH_F64 + (f - (correction - e * LN2_LOW_F64))
}

/// xʸ = exp(y · ln x) for x > 0, in f64: relative error at most (2 + 2·|y·ln x|)·2⁻⁵³.
pub fn pow_f64(x: f64, y: f64) -> f64 {
    exp_f64(y * ln_f64(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::lanes::{LANES, dispatch};

    /// A function on lanes, its reference in f64 and its bound in ulp.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Function {
        Exp,
        Ln,
        Log1p,
        Tanh,
        Sigmoid,
        Softplus,
        Silu,
        GeluTanh,
    }

    use Function::*;

    dispatch! {
        fn apply(function: Function, x: &mut [f32; LANES]) = apply_on_lanes;
    }

    #[inline(always)]
    fn apply_on_lanes<L: Lanes>(l: L, function: Function, x: &mut [f32; LANES]) {
        let v = l.load(x);
        let y = match function {
            Exp => exp(l, v),
            Ln => ln(l, v),
            Log1p => log1p(l, v),
            Tanh => tanh(l, v),
            Sigmoid => sigmoid(l, v),
            Softplus => softplus(l, v),
            Silu => silu(l, v),
            GeluTanh => gelu_tanh(l, v),
        };
        l.store(y, x);
    }

    fn one(function: Function, x: f32) -> f32 {
        let mut lanes = [x; LANES];
        apply(Isa::best(), function, &mut lanes);
        lanes[0]
    }

    fn reference(function: Function, x: f64) -> f64 {
        match function {
            Exp => x.exp(),
            Ln => x.ln(),
            Log1p => x.ln_1p(),
            Tanh => x.tanh(),
            Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            Silu => x / (1.0 + (-x).exp()),
            GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
            }
        }
    }

    /// The distance between neighbouring `f32` at this magnitude.
    fn ulp(x: f64) -> f64 {
        let exponent = (x.abs().to_bits() >> 52) as i32 - 1023;
        2f64.powi(exponent.max(-126) - 23)
    }

    /// Every 1009th bit pattern and every 67th of those with ordinary exponents.
    fn samples() -> impl Iterator<Item = f32> {
        let all = (0..=u32::MAX).step_by(1009);
        let ordinary = (0x3580_0000u32..0x42c8_0000).step_by(67);
        let negative = ordinary.clone().map(|bits| bits | 0x8000_0000);
        all.chain(ordinary).chain(negative).map(f32::from_bits)
    }

    fn check(function: Function, bound: f64, from: f32, to: f32) {
        let mut worst = (0.0, 0.0);
        let mut group = [1.0; LANES];
        let mut n = 0;
        for x in samples().filter(|x| (from..=to).contains(x)) {
            group[n] = x;
            n += 1;
            if n == LANES {
                n = 0;
                let mut found = group;
                apply(Isa::best(), function, &mut found);
                for (x, y) in group.into_iter().zip(found) {
                    let expected = reference(function, f64::from(x));
                    if expected.abs() > f64::from(f32::MAX) {
                        assert!(y.abs() == f32::INFINITY || y.abs() == f32::MAX, "{function:?}({x}) = {y}");
                        continue;
                    }
                    if !y.is_finite() {
                        assert_eq!(f64::from(y), expected, "{function:?}({x})");
                        continue;
                    }
                    let error = (f64::from(y) - expected).abs() / ulp(expected);
                    if error > worst.0 {
                        worst = (error, x);
                    }
                }
            }
        }
        println!("{function:?}: {:.3} ulp at {}", worst.0, worst.1);
        assert!(worst.0 <= bound, "{function:?}: {} ulp at {}", worst.0, worst.1);
        assert!(worst.0 > 0.4, "{function:?}: too good to have been measured");
    }

    #[test]
    fn errors_are_within_the_bounds() {
        check(Exp, 1.0, f32::NEG_INFINITY, f32::INFINITY);
        check(Ln, 1.0, 0.0, f32::INFINITY);
        check(Log1p, 2.0, -1.0, f32::INFINITY);
        check(Tanh, 2.0, f32::NEG_INFINITY, f32::INFINITY);
        check(Sigmoid, 3.0, f32::NEG_INFINITY, f32::INFINITY);
        check(Softplus, 3.0, f32::MIN, f32::INFINITY);
        check(Silu, 4.0, -87.0, f32::INFINITY);
    }

    #[test]
    fn gelu_is_within_three_units_of_its_argument() {
        // 1 + tanh cancels for negative x: the error is absolute there.
        for x in samples().filter(|x| x.abs() < 1e6) {
            let error = (f64::from(one(GeluTanh, x)) - reference(GeluTanh, f64::from(x))).abs();
            assert!(error <= 3.0 * ulp(f64::from(x)), "{x}: {error}");
        }
    }

    #[test]
    fn special_values() {
        let inf = f32::INFINITY;
        for (function, x, y) in [
            (Exp, 0.0, 1.0),
            (Exp, -0.0, 1.0),
            (Exp, -inf, 0.0),
            (Exp, inf, inf),
            (Exp, 88.722_84, inf),
            (Exp, -104.0, 0.0),
            (Exp, f32::MIN, 0.0),
            (Ln, 1.0, 0.0),
            (Ln, 0.0, -inf),
            (Ln, -0.0, -inf),
            (Ln, inf, inf),
            (Log1p, -1.0, -inf),
            (Log1p, 0.0, 0.0),
            (Log1p, inf, inf),
            (Log1p, f32::from_bits(1), f32::from_bits(1)),
            (Tanh, 0.0, 0.0),
            (Tanh, -0.0, -0.0),
            (Tanh, inf, 1.0),
            (Tanh, -inf, -1.0),
            (Sigmoid, 0.0, 0.5),
            (Sigmoid, inf, 1.0),
            (Sigmoid, -inf, 0.0),
            (Softplus, -inf, 0.0),
            (Softplus, inf, inf),
            (Silu, 0.0, 0.0),
            (GeluTanh, 0.0, 0.0),
        ] {
            let found = one(function, x);
            assert_eq!(found.to_bits(), y.to_bits(), "{function:?}({x}) = {found}");
        }
        assert!(one(Ln, -1.0).is_nan() && one(Ln, -inf).is_nan() && one(Log1p, -1.5).is_nan());
        for function in [Exp, Ln, Log1p, Tanh, Sigmoid, Softplus, Silu, GeluTanh] {
            assert!(one(function, f32::NAN).is_nan(), "{function:?}");
        }
        // Denormal results, by the definition of the nearest: e^-100 / 2^-149 is 26.55.
        assert_eq!(one(Exp, -100.0).to_bits(), 27);
        assert_eq!(one(Exp, 88.722_83).to_bits(), (88.722_83f32 as f64).exp().to_bits_of_f32());
    }

    trait ToF32Bits {
        fn to_bits_of_f32(self) -> u32;
    }

    impl ToF32Bits for f64 {
        fn to_bits_of_f32(self) -> u32 {
            (self as f32).to_bits()
        }
    }

    #[test]
    fn every_instruction_set_has_the_same_bits() {
        let mut lanes = [0.0; LANES];
        for (i, x) in samples().step_by(7).enumerate() {
            lanes[i % LANES] = x;
            if i % LANES != LANES - 1 {
                continue;
            }
            for function in [Exp, Ln, Log1p, Tanh, Sigmoid, Softplus, Silu, GeluTanh] {
                let mut expected = lanes;
                apply_on_lanes(crate::lanes::Scalar, function, &mut expected);
                for isa in Isa::available() {
                    let mut found = lanes;
                    apply(isa, function, &mut found);
                    for i in 0..LANES {
                        let same = found[i].to_bits() == expected[i].to_bits()
                            || found[i].is_nan() && expected[i].is_nan();
                        assert!(same, "{function:?}({}) on {isa}: {} {}", lanes[i], found[i], expected[i]);
                    }
                }
            }
        }
    }

    #[test]
    fn f64_functions_are_those_of_mpmath() {
        let fixture = include_str!("../tests/fixtures/math_f64.txt");
        let mut worst = std::collections::BTreeMap::new();
        for line in fixture.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split(' ');
            let name = words.next().unwrap();
            let numbers: Vec<f64> =
                words.map(|word| f64::from_bits(u64::from_str_radix(word, 16).unwrap())).collect();
            let (x, expected) = (numbers[0], numbers[numbers.len() - 1]);
            let (found, bound) = match name {
                "sin" => (sin_cos(x).0, 1.0),
                "cos" => (sin_cos(x).1, 1.0),
                "exp" => (exp_f64(x), 1.0),
                "ln" => (ln_f64(x), 1.0),
                "pow" => (pow_f64(x, numbers[1]), 2.0 + 2.0 * (numbers[1] * x.ln()).abs()),
                _ => panic!("{name}"),
            };
            let spacing = expected.abs().next_up() - expected.abs();
            let error = (found - expected).abs() / spacing;
            assert!(error <= bound, "{name} {numbers:?}: {found}, {error} ulp");
            let entry = worst.entry(name).or_insert((0.0, 0));
            *entry = (f64::max(entry.0, error), entry.1 + 1);
        }
        println!("{worst:?}");
        assert_eq!(worst.len(), 5);
        assert!(worst.values().all(|&(_, count)| count > 400));
    }
}
