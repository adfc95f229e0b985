//! Products against their definition, bit for bit, and the definition against exact arithmetic.

use bytemuck::Zeroable;
use motet_gguf::Format;

use super::{E2M1_DOUBLED, IQ4_VALUES, Rows};
use crate::activations::{ActivationBlock, BLOCK, quantise};
use crate::isa::Isa;
use crate::lanes::{bf16_to_f32, f16_to_f32};
use crate::panels::blocks::Parts;
use crate::panels::layout::Layout;
use crate::panels::{PANEL, PackedMatrix, PackedShape};
use crate::shared_rows::{RowsMut, Tiles};
use crate::testing::{Random, bits};

/// What the numbers of a test are like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// As in a model.
    Usual,
    /// Codes, sub-scales and activations as large as they can be, each block of one sign.
    Largest,
    /// Scales that are zero, denormal and huge, activations over the whole range of floats.
    Wild,
    /// Any bits at all: infinite and NaN scales, weights and activations too.
    Anything,
}

const FINITE: [Kind; 3] = [Kind::Usual, Kind::Largest, Kind::Wild];

impl Kind {
    fn f16(self, random: &mut Random) -> u16 {
        let bits = random.next() as u16;
        match self {
            Kind::Usual | Kind::Largest => bits & 0x83ff | 0x2000,
            Kind::Wild => *[0, 0x8000, 1, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x3c00]
                .get(random.below(12))
                .unwrap_or(&(bits & 0xbfff)),
            Kind::Anything => bits,
        }
    }

    fn f32(self, random: &mut Random) -> f32 {
        match self {
            Kind::Usual => random.unit(),
            Kind::Largest => {
                if random.next() & 1 == 0 {
                    3.0
                } else {
                    -3.0
                }
            }
            Kind::Wild => {
                let special = [0.0, -0.0, f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX, f32::MIN, 1e-38];
                let scaled = random.unit() * 2f32.powi(random.below(200) as i32 - 100);
                *special.get(random.below(40)).unwrap_or(&scaled)
            }
            // Mostly finite, or a row would be NaN throughout.
            Kind::Anything if random.below(300) > 0 => random.unit(),
            Kind::Anything => f32::from_bits(random.next()),
        }
    }

    /// Activations, rows of whole blocks or not.
    fn activations(self, random: &mut Random, values: &mut [f32]) {
        for block in values.chunks_mut(BLOCK) {
            // Blocks that are huge or tiny as a whole, or of one sign, so that nothing cancels.
            let scale = match self {
                Kind::Wild => 2f32.powi(random.below(220) as i32 - 110),
                _ => 1.0,
            };
            let sign = self.f32(random);
            for x in block {
                *x = match self {
                    Kind::Largest => sign,
                    Kind::Wild if random.below(64) > 0 => random.unit() * scale,
                    _ => self.f32(random),
                };
            }
        }
    }

    /// The bytes of a matrix in its file.
    fn matrix(self, random: &mut Random, shape: &PackedShape) -> Vec<u8> {
        let format = shape.format();
        let mut bytes: Vec<u8> =
            (0..shape.n_out() * shape.row_bytes()).map(|_| random.next() as u8).collect();
        match (shape.layout(), format) {
            (Layout::Float(4), _) => {
                bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&self.f32(random).to_le_bytes()));
            }
            (Layout::Float(_), Format::F16) => {
                bytes.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&self.f16(random).to_le_bytes()));
            }
            (Layout::Float(_), _) => bytes.chunks_exact_mut(2).for_each(|b| {
                b.copy_from_slice(&self.f32(random).to_le_bytes()[2..]);
            }),
            (Layout::Quant(_), _) => {
                for block in bytes.chunks_exact_mut(format.block_bytes()) {
                    if self == Kind::Largest {
                        block.fill(if random.next() & 1 == 0 { 0xff } else { 0x80 });
                    }
                    let mut parts = Parts::EMPTY;
                    parts.split(format, block);
                    (parts.d, parts.min) = (self.f16(random), self.f16(random));
                    if self == Kind::Largest {
                        for sub in parts.subs.as_flattened_mut() {
                            *sub = [0x80, 0x7f, 0xff][random.below(3)];
                        }
                    }
                    if format == Format::MXFP4 {
                        parts.d = match self {
                            Kind::Usual | Kind::Largest => 120 + random.below(8) as u16,
                            Kind::Wild => [0, 1, 2, 3, 127, 200][random.below(6)],
                            Kind::Anything => random.below(256) as u16,
                        };
                    }
                    parts.join(format, block);
                }
            }
        }
        bytes
    }
}

/// One element by the definition, read from the file's bytes, and the sum of the magnitudes that were added.
fn quantised_element(format: Format, row: &[u8], x: &[ActivationBlock]) -> (f32, f64) {
    let (mut acc, mut magnitude) = (0f32, 0f64);
    let mut parts = Parts::EMPTY;
    let mut blocks = x.iter();
    for block in row.chunks_exact(format.block_bytes()) {
        parts.split(format, block);
        for b in 0..format.block_len() / BLOCK {
            let x = blocks.next().unwrap();
            let weight = |i: usize| {
                let code = parts.codes[32 * b + i];
                match format {
                    Format::Q4_0 => i32::from(code) - 8,
                    Format::Q5_0 => i32::from(code) - 16,
                    Format::Q8_0 => i32::from(code) - 128,
                    Format::Q3K => i32::from(code) - 4,
                    Format::Q6K => i32::from(code) - 32,
                    Format::IQ4NL | Format::IQ4XS => i32::from(IQ4_VALUES[usize::from(code)]),
                    Format::MXFP4 => i32::from(E2M1_DOUBLED[usize::from(code)]),
                    _ => i32::from(code),
                }
            };
            let sum = |from: usize, w: &dyn Fn(usize) -> i32| -> i32 {
                (from..from + 16).map(|i| w(i) * i32::from(x.quants[i])).sum()
            };
            let (first, last) = (sum(0, &weight), sum(16, &weight));
            let (first_x, last_x) = (sum(0, &|_| 1), sum(16, &|_| 1));
            let (d, min) = (f16_to_f32(parts.d), f16_to_f32(parts.min));
            let [s, m] = parts.subs[b];
            let signed = |byte: u8| i32::from(byte as i8);

            let (product, scale) = match format {
                Format::Q2K => (i32::from(s & 15) * first + i32::from(m & 15) * last, d),
                Format::Q3K | Format::Q6K => (signed(s) * first + signed(m) * last, d),
                Format::Q4K | Format::Q5K => (first + last, d * f32::from(s)),
                Format::IQ4XS => (first + last, d * signed(s) as f32),
                Format::MXFP4 => (first + last, 2f64.powi(i32::from(parts.d) - 128) as f32),
                _ => (first + last, d),
            };
            acc = (product as f32).mul_add(scale * x.d, acc);
            magnitude += f64::from(product).abs() * f64::from(scale).abs() * f64::from(x.d);
            let minimum = match format {
                Format::Q4_1 | Format::Q5_1 => Some((min, first_x + last_x)),
                Format::Q4K | Format::Q5K => Some((-(min * f32::from(m)), first_x + last_x)),
                Format::Q2K => Some((-min, i32::from(s >> 4) * first_x + i32::from(m >> 4) * last_x)),
                _ => None,
            };
            if let Some((min, sum)) = minimum {
                acc = min.mul_add(x.d * sum as f32, acc);
                magnitude += f64::from(min).abs() * f64::from(x.d) * f64::from(sum).abs();
            }
        }
    }
    (acc, magnitude)
}

/// One element by the definition for float weights.
fn float_element(format: Format, row: &[u8], x: &[f32]) -> f32 {
    let weight = |bytes: &[u8]| match format {
        Format::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        Format::F16 => f16_to_f32(u16::from_le_bytes(bytes.try_into().unwrap())),
        _ => bf16_to_f32(u16::from_le_bytes(bytes.try_into().unwrap())),
    };
    row.chunks_exact(format.block_bytes()).zip(x).fold(0.0, |acc, (w, &x)| weight(w).mul_add(x, acc))
}

/// A matrix, rows for it, and their product by the definition.
struct Case {
    shape: PackedShape,
    file: Vec<u8>,
    matrix: PackedMatrix,
    x: Vec<f32>,
    blocks: Vec<ActivationBlock>,
    expected: Vec<f32>,
}

impl Case {
    fn new(kind: Kind, format: Format, n_out: usize, k: usize, rows: usize) -> Case {
        let mut random =
            Random::new((n_out * 1_000_003 + k * 1009 + rows * 31) as u64 + u64::from(format.ggml_type()));
        let shape = PackedShape::new(format, n_out, k).unwrap();
        let file = kind.matrix(&mut random, &shape);
        let matrix = PackedMatrix::pack(shape, &file).unwrap();
        let mut x = vec![0.0; rows * k];
        kind.activations(&mut random, &mut x);
        let mut blocks =
            vec![ActivationBlock::zeroed(); if shape.takes_quantised() { rows * k / BLOCK } else { 0 }];
        if shape.takes_quantised() {
            quantise(Isa::Scalar, &x, &mut blocks);
        }
        let mut expected = Vec::new();
        for m in 0..rows {
            for row in file.chunks_exact(shape.row_bytes()) {
                expected.push(if shape.takes_quantised() {
                    quantised_element(format, row, &blocks[m * k / BLOCK..][..k / BLOCK]).0
                } else {
                    float_element(format, row, &x[m * k..][..k])
                });
            }
        }
        Case { shape, file, matrix, x, blocks, expected }
    }

    /// The rows `first .. first + count` as the kernels take them.
    fn rows(&self, first: usize, count: usize) -> Rows<'_> {
        let k = self.shape.k();
        if self.shape.takes_quantised() {
            Rows::quantised(&self.blocks[first * k / BLOCK..][..count * k / BLOCK], count, k)
        } else {
            Rows::float(&self.x[first * k..][..count * k], count, k, k)
        }
    }

    /// Checks a product of some panels and rows, and that nothing beside its rectangle is written.
    fn check(&self, isa: Isa, panels: std::ops::Range<usize>, first: usize, count: usize) {
        let channels = self.shape.channels(panels.clone());
        let stride = channels.len() + 3;
        let mut out = vec![123.0; count * stride];
        let rectangle = RowsMut::new(&mut out, count, channels.len(), stride);
        self.matrix.multiply(isa, panels.clone(), self.rows(first, count), rectangle);
        for (m, out) in out.chunks_exact(stride).enumerate() {
            let (product, beside) = out.split_at(channels.len());
            let expected = &self.expected[(first + m) * self.shape.n_out()..][channels.clone()];
            assert_eq!(
                bits(product),
                bits(expected),
                "{isa} {} panels {panels:?} rows {first} + {count}: row {m}\n{product:?}\n{expected:?}",
                self.shape.format()
            );
            assert_eq!(beside, [123.0; 3]);
        }
    }
}

/// A K that tells wrong offsets apart but stays small.
fn some_k(format: Format) -> usize {
    match format.block_len() {
        1 => 67,
        32 => 5 * 32,
        _ => 2 * 256,
    }
}

#[test]
fn every_format_and_number_of_rows_has_the_bits_of_the_definition() {
    for format in Format::ALL {
        for kind in FINITE {
            let case = Case::new(kind, format, 37, some_k(format), 33);
            assert!(kind != Kind::Usual || case.expected.iter().all(|y| y.is_finite() && *y != 0.0));
            for isa in Isa::available() {
                for count in 1..=33 {
                    case.check(isa, 0..3, 0, count);
                }
            }
        }
    }
}

#[test]
fn any_panels_and_rows_have_the_same_bits() {
    let mut random = Random::new(5);
    for format in Format::ALL {
        let case = Case::new(Kind::Usual, format, 9 * PANEL + 1, some_k(format), 12);
        for isa in Isa::available() {
            for _ in 0..20 {
                let from = random.below(10);
                let to = from + random.below(11 - from);
                let first = random.below(12);
                case.check(isa, from..to, first, random.below(13 - first));
            }
        }
    }
}

#[test]
fn every_length_of_rows_has_the_bits_of_the_definition() {
    for format in Format::ALL {
        let step = format.block_len();
        for n in [1, 2, 3, 8, 9] {
            let case = Case::new(Kind::Usual, format, 16, n * step, 3);
            Isa::available().into_iter().for_each(|isa| case.check(isa, 0..1, 0, 3));
        }
    }
}

#[test]
fn what_is_not_finite_is_not_finite_everywhere() {
    for format in Format::ALL {
        let case = Case::new(Kind::Anything, format, 32, some_k(format), 9);
        for isa in Isa::available() {
            for count in [1, 2, 9] {
                case.check(isa, 0..2, 0, count);
            }
        }
    }
    // A row with one NaN is NaN in every channel, and its neighbours don't know.
    for format in Format::ALL {
        let mut case = Case::new(Kind::Usual, format, 16, some_k(format), 3);
        let k = case.shape.k();
        case.x[k + 40] = f32::NAN;
        if case.shape.takes_quantised() {
            quantise(Isa::Scalar, &case.x, &mut case.blocks);
        }
        case.expected[16..32].fill(f32::NAN);
        Isa::available().into_iter().for_each(|isa| case.check(isa, 0..1, 0, 3));
    }
}

#[test]
fn a_selection_of_rows_is_those_rows() {
    let selection = [4, 0, 4, 9, 2, 1, 1, 8, 7, 3, 5];
    for format in [Format::F16, Format::Q4K] {
        let case = Case::new(Kind::Usual, format, 16, some_k(format), 10);
        for isa in Isa::available() {
            let mut out = vec![0.0; selection.len() * 16];
            let rows = case.rows(0, 10).select(&selection);
            case.matrix.multiply(isa, 0..1, rows, RowsMut::new(&mut out, selection.len(), 16, 16));
            for (row, out) in selection.iter().zip(out.chunks_exact(16)) {
                assert_eq!(out, &case.expected[*row as usize * 16..][..16], "{isa} {format} row {row}");
            }
        }
    }
}

#[test]
fn threads_that_share_the_output_have_the_same_bits() {
    let case = Case::new(Kind::Usual, Format::Q8_0, 100, 96, 5);
    for isa in Isa::available() {
        let mut out = vec![0.0; 5 * 100];
        let tiles = Tiles::new([Some(RowsMut::new(&mut out, 5, 100, 100))], 2 * PANEL, 3);
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (tiles, case) = (&tiles, &case);
                scope.spawn(move || {
                    while let Some(tile) = tiles.take(worker) {
                        let panels = tile.columns.start / PANEL..tile.columns.end.div_ceil(PANEL);
                        case.matrix.multiply(isa, panels, case.rows(0, 5), tile.out);
                    }
                });
            }
        });
        assert_eq!(out, case.expected, "{isa}");
    }
}

/// The definition itself: products of dequantised weights and dequantised activations in f64, within what
/// rounding can do. Each block rounds a product of scales and one or two sums; the weights' own dequantising
/// rounds once.
#[test]
fn products_are_those_of_the_dequantised_numbers() {
    for format in Format::ALL {
        for kind in [Kind::Usual, Kind::Largest] {
            let case = Case::new(kind, format, 20, 2 * some_k(format), 4);
            let k = case.shape.k();
            let mut weights = vec![0.0; k];
            for (n, row) in case.file.chunks_exact(case.shape.row_bytes()).enumerate() {
                format.dequantize(row, &mut weights);
                for m in 0..4 {
                    let (x, steps, mut magnitude): (Vec<f64>, _, _) = if case.shape.takes_quantised() {
                        let blocks = &case.blocks[m * k / BLOCK..][..k / BLOCK];
                        let exact = |b: &ActivationBlock| b.quants.map(|q| f64::from(b.d) * f64::from(q));
                        let magnitude = quantised_element(format, row, blocks).1;
                        (blocks.iter().flat_map(exact).collect(), 3 * k / BLOCK, magnitude)
                    } else {
                        (case.x[m * k..][..k].iter().map(|&x| f64::from(x)).collect(), k, 0.0)
                    };
                    let products = || weights.iter().zip(&x).map(|(&w, &x)| f64::from(w) * x);
                    let exact: f64 = products().sum();
                    magnitude += products().map(f64::abs).sum::<f64>();
                    let bound = (steps + 4) as f64 * 2f64.powi(-24) * magnitude;
                    let found = f64::from(case.expected[m * case.shape.n_out() + n]);
                    assert!((found - exact).abs() <= bound, "{format} {found} {exact} ± {bound}");
                    assert!(bound < 1e-3 * magnitude, "a bound that says nothing");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "take float rows")]
fn quantised_rows_for_float_weights_are_refused() {
    let case = Case::new(Kind::Usual, Format::F32, 16, 32, 1);
    let blocks = [ActivationBlock::zeroed()];
    let mut out = [0.0; 16];
    case.matrix.multiply(
        Isa::Scalar,
        0..1,
        Rows::quantised(&blocks, 1, 32),
        RowsMut::new(&mut out, 1, 16, 16),
    );
}

#[test]
#[should_panic(expected = "columns for panels")]
fn an_output_of_the_wrong_width_is_refused() {
    let case = Case::new(Kind::Usual, Format::F32, 24, 32, 1);
    let mut out = [0.0; 32];
    case.matrix.multiply(Isa::Scalar, 0..2, case.rows(0, 1), RowsMut::new(&mut out, 1, 32, 32));
}
