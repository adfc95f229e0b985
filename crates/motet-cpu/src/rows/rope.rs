//! Rotary position embedding (Su et al. 2021): pairs of a head's elements turned by angles that grow with position.
//!
//! A [`Rope`] holds what depends on the model: one frequency per pair, in f64. [`Rope::fill`] makes the cosines and
//! sines of one position, once per row and step for all layers; [`Rope::rotate`] turns the heads of a row by them.

use std::f64::consts::PI;

use super::Heads;
pub use motet_model::program::RopeStyle;

use crate::isa::Isa;
use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;

/// How a model was stretched to longer contexts (`rope.scaling.*`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by `factor` (Chen et al. 2023).
    Linear {
        /// How many times longer the context became.
        factor: f64,
    },
    /// Slow pairs are interpolated, fast ones kept, and queries and keys grow by a factor (Peng et al. 2023, YaRN, section 3).
    Yarn {
        /// How many times longer the context became.
        factor: f64,
        /// The context length before.
        original_context: f64,
        /// Multiplies the growth 1 + 0.1·ln factor. Default 1.
        attention_factor: f64,
        /// Pairs that turn more often than this within the original context are kept. Default 32.
        beta_fast: f64,
        /// Pairs that turn less often are interpolated. Default 1.
        beta_slow: f64,
    },
}

/// Why the rotary embedding of a model can't be set up.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RopeError {
    /// Pairs need an even, positive number of elements.
    #[error("rope.dimension_count is {found}: expected an even number from 2 to the length of a head")]
    Dims {
        /// What was found.
        found: usize,
    },
    /// The tensor `rope_freqs` has the wrong length or holds something that can't divide.
    #[error("rope_freqs must hold {expected} finite numbers above 0, one for each pair; found {found}")]
    Factors {
        /// How many there should be.
        expected: usize,
        /// What is wrong: the length or the value.
        found: String,
    },
    /// A number is not finite or not above its bound.
    #[error("{key} is {found}: expected a finite number above {above}")]
    Parameter {
        /// The metadata key, without the architecture.
        key: &'static str,
        /// What was found.
        found: f64,
        /// What it must exceed.
        above: f64,
    },
}

/// The rotation of one kind of layer.
#[derive(Clone, Debug)]
pub struct Rope {
    style: RopeStyle,
    /// Radians per position, for each pair.
    frequencies: Vec<f64>,
    /// What cosine and sine are multiplied by.
    magnitude: f64,
}

impl Rope {
    /// The rotation of the first `dims` elements of a head.
    ///
    /// Pair i turns by position · base^(−2i / dims), divided by `factors[i]` if there are any (the tensor `rope_freqs`;
    /// Llama 3 scaling comes in this form), then scaled.
    pub fn new(
        style: RopeStyle,
        dims: usize,
        base: f64,
        scaling: RopeScaling,
        factors: Option<&[f32]>,
    ) -> Result<Rope, RopeError> {
        if dims == 0 || !dims.is_multiple_of(2) {
            return Err(RopeError::Dims { found: dims });
        }
        let pairs = dims / 2;
        above("rope.freq_base", base, 1.0)?;
        if let Some(factors) = factors {
            let wrong = if factors.len() != pairs {
                Some(format!("{} numbers", factors.len()))
            } else {
                factors.iter().find(|f| !(f.is_finite() && **f > 0.0)).map(f32::to_string)
            };
            if let Some(found) = wrong {
                return Err(RopeError::Factors { expected: pairs, found });
            }
        }
        let mut frequencies: Vec<f64> = (0..pairs)
            .map(|i| {
                let frequency = math::pow_f64(base, -((2 * i) as f64) / dims as f64);
                frequency / factors.map_or(1.0, |factors| f64::from(factors[i]))
            })
            .collect();
        let magnitude = scaling.apply(&mut frequencies, dims, base)?;
        Ok(Rope { style, frequencies, magnitude })
    }

    /// How many elements at the start of a head are turned.
    pub fn dims(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The length of one position's row of cosines and sines.
    pub fn table_len(&self) -> usize {
        match self.style {
            RopeStyle::Norm => 2 * self.dims(),
            RopeStyle::Neox => self.dims(),
        }
    }

    /// The cosines, then the sines, of one position; each is computed in f64 and rounded once.
    ///
    /// One number per pair of [`RopeStyle::Neox`]; one per element of [`RopeStyle::Norm`], the even sines negated.
    /// Panics unless `table` is [`Rope::table_len`] long.
    pub fn fill(&self, isa: Isa, position: u32, table: &mut [f32]) {
        assert_eq!(table.len(), self.table_len(), "the table of one position");
        turns(isa, self, f64::from(position), table);
    }

    /// Turns the heads of a row in place by a table of [`Rope::fill`]. Elements of a head beyond [`Rope::dims`] stay.
    ///
    /// A pair (a, b) becomes (fma(−b, sin, a·cos), fma(a, sin, b·cos)), the products with cos rounded.
    /// Panics if the heads don't fit in the row or are shorter than what is turned.
    pub fn rotate(&self, isa: Isa, row: &mut [f32], heads: Heads, table: &[f32]) {
        assert_eq!(table.len(), self.table_len(), "the table of one position");
        assert!(self.dims() <= heads.dim, "{} elements of heads of {} are turned", self.dims(), heads.dim);
        match self.style {
            RopeStyle::Norm => rotate_neighbours(isa, row, heads, table),
            RopeStyle::Neox => rotate_halves(isa, row, heads, table),
        }
    }
}

impl RopeScaling {
    /// Scales the frequencies; what cosine and sine are to be multiplied by.
    fn apply(self, frequencies: &mut [f64], dims: usize, base: f64) -> Result<f64, RopeError> {
        match self {
            RopeScaling::None => Ok(1.0),
            RopeScaling::Linear { factor } => {
                above("rope.scaling.factor", factor, 0.0)?;
                frequencies.iter_mut().for_each(|f| *f /= factor);
                Ok(1.0)
            }
            RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
                above("rope.scaling.factor", factor, 0.0)?;
                above("rope.scaling.original_context_length", original_context, 0.0)?;
                above("rope.scaling.attn_factor", attention_factor, 0.0)?;
                above("rope.scaling.yarn_beta_fast", beta_fast, 0.0)?;
                above("rope.scaling.yarn_beta_slow", beta_slow, 0.0)?;
                // The pair that turns so often within the original context.
                let pair = |turns: f64| {
                    dims as f64 * math::ln_f64(original_context / (turns * 2.0 * PI))
                        / (2.0 * math::ln_f64(base))
                };
                let low = pair(beta_fast).floor().max(0.0);
                let high = pair(beta_slow).ceil().min(dims as f64 - 1.0);
                for (i, frequency) in frequencies.iter_mut().enumerate() {
                    let slow = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    *frequency = *frequency / factor * slow + *frequency * (1.0 - slow);
                }
                Ok(attention_factor * (1.0 + 0.1 * math::ln_f64(factor)))
            }
        }
    }
}

fn above(key: &'static str, found: f64, above: f64) -> Result<(), RopeError> {
    if found.is_finite() && found > above { Ok(()) } else { Err(RopeError::Parameter { key, found, above }) }
}

dispatch! {
    fn turns(rope: &Rope, position: f64, table: &mut [f32]) = turns_on_lanes;
}

/// The compiler makes vectors of it.
#[inline(always)]
fn turns_on_lanes<L: Lanes>(_: L, rope: &Rope, position: f64, table: &mut [f32]) {
    let (cosines, sines) = table.split_at_mut(table.len() / 2);
    match rope.style {
        RopeStyle::Norm => {
            let (cosines, sines) = (cosines.as_chunks_mut::<2>().0, sines.as_chunks_mut::<2>().0);
            for ((frequency, cosines), sines) in rope.frequencies.iter().zip(cosines).zip(sines) {
                let (sin, cos) = turn(position, *frequency, rope.magnitude);
                (*cosines, *sines) = ([cos, cos], [-sin, sin]);
            }
        }
        RopeStyle::Neox => {
            for ((frequency, cosine), sine) in rope.frequencies.iter().zip(cosines).zip(sines) {
                (*sine, *cosine) = turn(position, *frequency, rope.magnitude);
            }
        }
    }
}

#[inline(always)]
fn turn(position: f64, frequency: f64, magnitude: f64) -> (f32, f32) {
    let (sin, cos) = math::sin_cos(position * frequency);
    ((sin * magnitude) as f32, (cos * magnitude) as f32)
}

dispatch! {
    fn rotate_neighbours(row: &mut [f32], heads: Heads, table: &[f32]) = rotate_neighbours_on_lanes;
}

#[inline(always)]
fn rotate_neighbours_on_lanes<L: Lanes>(l: L, row: &mut [f32], heads: Heads, table: &[f32]) {
    heads.check(row.len());
    let (cosines, sines) = table.split_at(table.len() / 2);
    let (cosines, cosines_tail) = cosines.as_chunks::<LANES>();
    let (sines, sines_tail) = sines.as_chunks::<LANES>();
    for head in 0..heads.count {
        let head = &mut row[heads.range(head)][..table.len() / 2];
        let (x, x_tail) = head.as_chunks_mut::<LANES>();
        for ((x, cos), sin) in x.iter_mut().zip(cosines).zip(sines) {
            l.store(turn_neighbours(l, l.load(x), l.load(cos), l.load(sin)), x);
        }
        if !x_tail.is_empty() {
            let (cos, sin) = (l.load_tail(cosines_tail, 0.0), l.load_tail(sines_tail, 0.0));
            l.store_tail(turn_neighbours(l, l.load_tail(x_tail, 0.0), cos, sin), x_tail);
        }
    }
}

#[inline(always)]
fn turn_neighbours<L: Lanes>(l: L, x: L::F, cos: L::F, sin: L::F) -> L::F {
    l.fma(l.swap_pairs(x), sin, l.mul(x, cos))
}

dispatch! {
    fn rotate_halves(row: &mut [f32], heads: Heads, table: &[f32]) = rotate_halves_on_lanes;
}

#[inline(always)]
fn rotate_halves_on_lanes<L: Lanes>(l: L, row: &mut [f32], heads: Heads, table: &[f32]) {
    heads.check(row.len());
    let pairs = table.len() / 2;
    let (cosines, sines) = table.split_at(pairs);
    let (cosines, cosines_tail) = cosines.as_chunks::<LANES>();
    let (sines, sines_tail) = sines.as_chunks::<LANES>();
    for head in 0..heads.count {
        let (first, second) = row[heads.range(head)][..2 * pairs].split_at_mut(pairs);
        let (first, first_tail) = first.as_chunks_mut::<LANES>();
        let (second, second_tail) = second.as_chunks_mut::<LANES>();
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
            let (x, y) = turn_halves(l, l.load(a), l.load(b), l.load(cos), l.load(sin));
            l.store(x, a);
            l.store(y, b);
        }
        if !first_tail.is_empty() {
            let (cos, sin) = (l.load_tail(cosines_tail, 0.0), l.load_tail(sines_tail, 0.0));
            let (a, b) = (l.load_tail(first_tail, 0.0), l.load_tail(second_tail, 0.0));
            let (x, y) = turn_halves(l, a, b, cos, sin);
            l.store_tail(x, first_tail);
            l.store_tail(y, second_tail);
        }
    }
}

#[inline(always)]
fn turn_halves<L: Lanes>(l: L, a: L::F, b: L::F, cos: L::F, sin: L::F) -> (L::F, L::F) {
    (l.fnma(b, sin, l.mul(a, cos)), l.fma(a, sin, l.mul(b, cos)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, bits, same_on_all};

    fn plain(style: RopeStyle, dims: usize) -> Rope {
        Rope::new(style, dims, 10000.0, RopeScaling::None, None).unwrap()
    }

    #[test]
    fn rotation_is_its_formula_with_the_same_bits_everywhere() {
        let mut random = Random::new(21);
        for style in [RopeStyle::Norm, RopeStyle::Neox] {
            for (dims, dim) in [(64, 64), (128, 128), (64, 256), (20, 32), (2, 2), (8, 8), (96, 100)] {
                let rope = plain(style, dims);
                let heads = Heads { base: 4, count: 3, stride: dim + 3, dim };
                for position in [0, 1, 77, 1_048_575] {
                    let table = same_on_all(|isa| {
                        let mut table = vec![0.0; rope.table_len()];
                        rope.fill(isa, position, &mut table);
                        table
                    });
                    for wild in [false, true] {
                        let n = 4 + 3 * (dim + 3);
                        let row = if wild { random.wild_row(n) } else { random.row(n) };
                        let found = same_on_all(|isa| {
                            let mut row = row.clone();
                            rope.rotate(isa, &mut row, heads, &table);
                            row
                        });
                        let mut expected: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
                        for head in 0..3 {
                            let head = &mut expected[4 + head * (dim + 3)..][..dims];
                            for i in 0..dims / 2 {
                                let angle =
                                    f64::from(position) * 10000f64.powf(-2.0 * i as f64 / dims as f64);
                                let (i, j) = match style {
                                    RopeStyle::Norm => (2 * i, 2 * i + 1),
                                    RopeStyle::Neox => (i, i + dims / 2),
                                };
                                let (a, b) = (head[i], head[j]);
                                head[i] = a * angle.cos() - b * angle.sin();
                                head[j] = a * angle.sin() + b * angle.cos();
                            }
                        }
                        if !wild {
                            assert_close(&found, &expected, 1e-6, 1.0);
                        }
                        if position == 0 {
                            let zero_is_zero: Vec<f32> = row.iter().map(|x| x + 0.0).collect();
                            let found: Vec<f32> = found.iter().map(|x| x + 0.0).collect();
                            assert_eq!(bits(&found), bits(&zero_is_zero));
                        }
                    }
                }
            }
        }
    }

    /// Values of transformers' `ROPE_INIT_FUNCTIONS`, made by `tools/rope_fixtures.py`: a line of numbers for each case.
    #[test]
    fn scaling_is_that_of_transformers() {
        let fixture = include_str!("../../tests/fixtures/rope_scaling.txt");
        let mut cases = 0;
        for line in fixture.lines().filter(|line| !line.starts_with('#')) {
            let (name, rest) = line.split_once(' ').unwrap();
            let (parameters, values) = rest.split_once(" : ").unwrap();
            let parse = |words: &str| words.split(' ').map(|w| w.parse().unwrap()).collect::<Vec<f64>>();
            let (p, expected) = (parse(parameters), parse(values));
            let (dims, base) = (p[0] as usize, p[1]);
            let (scaling, factors) = match name {
                "linear" => (RopeScaling::Linear { factor: p[2] }, None),
                "yarn" => {
                    let scaling = RopeScaling::Yarn {
                        factor: p[2],
                        original_context: p[3],
                        attention_factor: 1.0,
                        beta_fast: p[4],
                        beta_slow: p[5],
                    };
                    (scaling, None)
                }
                // Conversion to GGUF stores these as rope_freqs: plain frequency / scaled frequency.
                "llama3" => {
                    let factors: Vec<f32> = (0..dims / 2)
                        .map(|i| (base.powf(-2.0 * i as f64 / dims as f64) / expected[1 + i]) as f32)
                        .collect();
                    assert!((factors[dims / 2 - 1] - p[2] as f32).abs() < 1e-3);
                    (RopeScaling::None, Some(factors))
                }
                _ => panic!("{name}"),
            };
            let rope = Rope::new(RopeStyle::Neox, dims, base, scaling, factors.as_deref()).unwrap();
            assert!((rope.magnitude - expected[0]).abs() < 1e-6, "{line}");
            for (i, (found, expected)) in rope.frequencies.iter().zip(&expected[1..]).enumerate() {
                assert!(
                    (found - expected).abs() <= 1e-6 * expected,
                    "{name} pair {i}: {found} for {expected}"
                );
            }
            cases += 1;
        }
        assert!(cases >= 6);
    }

    #[test]
    fn wrong_parameters_are_refused() {
        let rope =
            |dims, base, scaling, factors| Rope::new(RopeStyle::Norm, dims, base, scaling, factors).err();
        assert_eq!(rope(7, 1e4, RopeScaling::None, None), Some(RopeError::Dims { found: 7 }));
        assert_eq!(rope(0, 1e4, RopeScaling::None, None), Some(RopeError::Dims { found: 0 }));
        assert!(matches!(rope(8, f64::NAN, RopeScaling::None, None), Some(RopeError::Parameter { .. })));
        assert!(matches!(
            rope(8, 1e4, RopeScaling::Linear { factor: 0.0 }, None),
            Some(RopeError::Parameter { key: "rope.scaling.factor", .. })
        ));
        assert!(matches!(rope(8, 1e4, RopeScaling::None, Some(&[1.0; 3])), Some(RopeError::Factors { .. })));
        assert!(matches!(
            rope(8, 1e4, RopeScaling::None, Some(&[1.0, 0.0, 1.0, 1.0])),
            Some(RopeError::Factors { .. })
        ));
        assert_eq!(rope(8, 1e4, RopeScaling::None, Some(&[1.0; 4])), None);
    }
}
