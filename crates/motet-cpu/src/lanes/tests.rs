//! Every operation on lanes: the scalar one against plain Rust or known values, the others against the scalar one.

use super::*;
use crate::isa::Isa;
use crate::testing::Random;

/// Bit patterns where rounding, overflow, denormals or conversions change.
const EXTREMES: [u32; 42] = [
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x0080_0001,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xffc0_0001,
    0x7f80_0001,
    0x3f80_0000,
    0xbf80_0000,
    0x3f00_0000,
    0xbf00_0000,
    0x3fc0_0000,
    0x4020_0000,
    0x477f_e000,
    0x477f_efff,
    0x477f_f000,
    0x477f_f001,
    0xc77f_f000,
    0x3300_0000,
    0x3300_0001,
    0x3880_0000,
    0x387f_ffff,
    0x3380_0000,
    0x33c0_0000,
    0x4b00_0000,
    0x4aff_ffff,
    0x4b00_0001,
    0x4eff_ffff,
    0x4f00_0000,
    0xcf00_0000,
    0xcf00_0001,
    0x4f7f_ffff,
    0x4f80_0000,
    0x7f7f_8000,
    0xffff_ffff,
];

/// Groups of 16 bit patterns: all pairs of extremes meet, then random patterns and random ordinary numbers.
fn patterns(seed: u64) -> Vec<[u32; LANES]> {
    let mut random = Random::new(seed);
    let mut all = Vec::new();
    for shift in 0..EXTREMES.len() {
        for start in 0..3 {
            all.push(std::array::from_fn(|i| {
                EXTREMES[(start * LANES + i + if seed == 2 { shift } else { 0 }) % EXTREMES.len()]
            }));
        }
    }
    for _ in 0..1500 {
        all.push(std::array::from_fn(|_| random.next()));
        all.push(std::array::from_fn(|_| (random.next() as i32 as f32 * 1e-8).to_bits()));
    }
    all
}

/// The results of every operation on three groups of patterns, as bits: floats with NaNs made equal.
#[inline(always)]
fn all_operations<L: Lanes>(l: L, a: &[u32; LANES], b: &[u32; LANES], c: &[u32; LANES], out: &mut Vec<u32>) {
    let lanes = |x: &[u32; LANES]| l.load_i(&x.map(|x| x as i32));
    let (ai, bi, ci) = (lanes(a), lanes(b), lanes(c));
    let (af, bf, cf) = (l.floats(ai), l.floats(bi), l.floats(ci));
    let one = |x: f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
    for v in [
        l.splat(f32::from_bits(a[0])),
        l.add(af, bf),
        l.sub(af, bf),
        l.mul(af, bf),
        l.div(af, bf),
        l.sqrt(af),
        l.fma(af, bf, cf),
        l.fnma(af, bf, cf),
        l.min(af, bf),
        l.max(af, bf),
        l.round_even(af),
        l.clamp(af, -127.0, 127.5),
        l.abs(af),
        l.neg(af),
        l.swap_pairs(af),
        l.to_float(ai),
        l.to_float_unsigned(ai),
        l.select(l.lt(af, bf), af, cf),
        l.select(l.first((a[0] % 17) as usize), af, bf),
        l.load(&a.map(f32::from_bits)),
        l.load_tail(&a.map(f32::from_bits)[..(b[0] % 17) as usize], 3.0),
        l.load_f16(&a.map(|x| x as u16)),
        l.load_f16_tail(&a.map(|x| x as u16)[..(b[0] % 17) as usize]),
        l.load_bf16(&a.map(|x| x as u16)),
        l.load_bf16_tail(&a.map(|x| x as u16)[..(b[0] % 17) as usize]),
    ] {
        out.extend(l.to_array(v).map(one));
    }
    for v in [
        l.splat_i(a[0] as i32),
        l.to_int(af),
        l.iadd(ai, bi),
        l.isub(ai, bi),
        l.imul(ai, bi),
        l.mul_high_unsigned(ai, bi),
        l.and(ai, bi),
        l.or(ai, bi),
        l.xor(ai, bi),
        l.shl::<0>(ai),
        l.shl::<7>(ai),
        l.shr::<31>(ai),
        l.shr::<5>(ai),
        l.sar::<13>(ai),
        l.select_i(l.le(af, bf), ai, bi),
        l.load_i8(&a.map(|x| x as i8)),
        l.load_u8(&a.map(|x| x as u8)),
        l.load_u16(&a.map(|x| x as u16)),
    ] {
        out.extend(l.to_array_i(v).map(|x| x as u32));
    }
    for m in [
        l.lt(af, bf),
        l.le(af, bf),
        l.eq(af, bf),
        l.is_nan(af),
        l.ieq(ai, bi),
        l.igt(ai, bi),
        l.mask(a[3] as u16),
        l.both(l.mask(a[3] as u16), l.mask(b[5] as u16)),
    ] {
        out.push(u32::from(l.mask_bits(m)));
    }
    out.push(one(l.sum(af)));
    if l.mask_bits(l.is_nan(af)) == 0 {
        out.push(one(l.max_lane(af)));
    }
    let mut tail = [7.0f32; LANES];
    l.store_tail(af, &mut tail[..(c[0] % 17) as usize]);
    out.extend(tail.map(one));
    let half_one = |x: u16| if x & 0x7fff > 0x7c00 { 0x7e00 } else { u32::from(x) };
    let mut halves = [0u16; LANES];
    l.store_f16(af, &mut halves);
    out.extend(halves.map(half_one));
    l.store_f16_saturating(af, &mut halves);
    out.extend(halves.map(half_one));
    l.store_bf16(af, &mut halves);
    out.extend(halves.map(|x| if x & 0x7fff > 0x7f80 { 0x7fc0 } else { u32::from(x) }));
    l.store_u16(ai, &mut halves);
    out.extend(halves.map(u32::from));
    let mut bytes = [0i8; LANES];
    l.store_i8(ai, &mut bytes);
    out.extend(bytes.map(|x| x as u32));
}

dispatch! {
    fn operations(a: &[u32; LANES], b: &[u32; LANES], c: &[u32; LANES], out: &mut Vec<u32>) = all_operations;
}

#[test]
fn every_operation_has_the_same_bits_on_every_instruction_set() {
    let (a, b, c) = (patterns(2), patterns(3), patterns(4));
    for ((a, b), c) in a.iter().zip(&b).zip(&c) {
        let mut plain = Vec::new();
        all_operations(Scalar, a, b, c, &mut plain);
        assert!(plain.len() > 750);
        for isa in Isa::available() {
            let mut found = Vec::new();
            operations(isa, a, b, c, &mut found);
            assert_eq!(plain, found, "{isa}\n{a:x?}\n{b:x?}\n{c:x?}");
        }
    }
}

#[test]
fn scalar_rounding_and_conversion_are_those_of_rust() {
    for group in patterns(2).into_iter().chain(patterns(7)) {
        let x = group.map(f32::from_bits);
        let rounded = Scalar.round_even(x);
        let ints = Scalar.to_int(x);
        for i in 0..LANES {
            let expected = x[i].round_ties_even();
            assert!(
                rounded[i].to_bits() == expected.to_bits() || expected.is_nan() && rounded[i].is_nan(),
                "{}",
                x[i]
            );
            if x[i].abs() < 2_147_483_648.0 {
                assert_eq!(ints[i], expected as i32);
            } else {
                assert_eq!(ints[i], i32::MIN);
            }
        }
    }
}

#[test]
fn f16_round_trips_and_rounds_to_the_nearest_even() {
    // Every F16 number by its definition, in f64.
    for half in 0..=0xffffu16 {
        let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 0x3ff));
        let magnitude = match exponent {
            31 if fraction != 0.0 => f64::NAN,
            31 => f64::INFINITY,
            0 => fraction * 2f64.powi(-24),
            _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
        };
        let value = if half >> 15 == 1 { -magnitude } else { magnitude };
        let found = f16_to_f32(half);
        if value.is_nan() {
            assert!(found.is_nan() && f32_to_f16(found) & 0x7fff > 0x7c00);
            continue;
        }
        assert_eq!(f64::from(found), value);
        assert_eq!(found.is_sign_negative(), half >> 15 == 1);
        assert_eq!(f32_to_f16(found), half);
        // Between this number and the next: the middle goes to the even one, its neighbours to the nearer one.
        if exponent < 31 && half >> 15 == 0 {
            let next = if half == 0x7bff { 65536.0 } else { f16_to_f32(half + 1) };
            let middle = (found + next) / 2.0;
            assert_eq!(f32_to_f16(middle), if half % 2 == 0 { half } else { half + 1 }, "{middle}");
            assert_eq!(f32_to_f16(middle.next_down()), half);
            assert_eq!(f32_to_f16(middle.next_up()), half + 1);
            assert_eq!(f32_to_f16(-middle.next_up()), (half + 1) | 0x8000);
        }
    }
    assert_eq!(f32_to_f16_saturating(f32::INFINITY), 0x7bff);
    assert_eq!(f32_to_f16_saturating(-65520.0), 0xfbff);
    assert!(f32_to_f16_saturating(f32::NAN) & 0x7fff > 0x7c00);
}

#[test]
fn bf16_rounds_to_the_nearest_even() {
    for (x, half) in [
        (0x3f80_0000u32, 0x3f80u16),
        (0x3f80_8000, 0x3f80),
        (0x3f81_8000, 0x3f82),
        (0x3f80_8001, 0x3f81),
        (0x7f7f_ffff, 0x7f80),
        (0x0000_8001, 0x0001),
        (0xff80_0000, 0xff80),
        (0x7f80_0001, 0x7fc0),
    ] {
        assert_eq!(f32_to_bf16(f32::from_bits(x)), half, "{x:#x}");
        assert_eq!(bf16_to_f32(half).to_bits(), u32::from(half) << 16);
    }
}

#[test]
fn the_sum_is_the_fixed_tree() {
    let x: [f32; LANES] = std::array::from_fn(|i| if i == 0 { 1e8 } else { i as f32 * 1.25 });
    let pair = |i: usize| x[i] + x[i + 8];
    let quad = |i: usize| pair(i) + pair(i + 4);
    assert_eq!(Scalar.sum(x), (quad(0) + quad(2)) + (quad(1) + quad(3)));
    assert_eq!(Scalar.max_lane(x), 1e8);
}
