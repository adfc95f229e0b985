//! How fast matrix products are, beside what the machine can do at all.
//!
//! `cargo run --release -p motet-cpu --example matmul_speed [FORMAT…]`, one thread. For each format: bytes per
//! second of packing, of weights with one row beside a plain read of as many bytes, and multiply-adds (counted as two
//! operations) per second with 8 and 512 rows beside the peak of the instruction. The machine's speed drifts:
//! compare figures of one run only.

#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use motet_cpu::activations::{ActivationBlock, BLOCK, quantise};
use motet_cpu::isa::Isa;
use motet_cpu::matmul::Rows;
use motet_cpu::panels::{PackedMatrix, PackedShape};
use motet_cpu::shared_rows::RowsMut;
use motet_gguf::Format;

const K: usize = 2048;
/// Weights of a matrix: far more than the second-level cache, and long enough to time.
const BYTES: usize = 48 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let isa = Isa::from_env()?;
    println!("{isa}: multiply peak {:.0} Gop/s", peak());
    println!(
        "format    packed MB   packing GB/s   read GB/s   1 row GB/s   8 rows (× 1 row)   Gop/s 8   Gop/s 512"
    );
    for format in Format::ALL {
        if wanted.is_empty() || wanted.iter().any(|name| name.eq_ignore_ascii_case(format.name())) {
            measure(isa, format)?;
        }
    }
    Ok(())
}

fn measure(isa: Isa, format: Format) -> Result<(), Box<dyn std::error::Error>> {
    let panel = PackedShape::new(format, 16, K)?.bytes();
    let n_out = BYTES / panel * 16;
    let shape = PackedShape::new(format, n_out, K)?;
    let rows = vec![0x11; n_out * shape.row_bytes()];
    let start = Instant::now();
    let matrix = PackedMatrix::pack(shape, &rows)?;
    let packing = start.elapsed();
    let twin = vec![1u8; shape.bytes()];

    let x: Vec<f32> = (0..512 * K).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect();
    let mut blocks = vec![ActivationBlock::zeroed(); 512 * K / BLOCK];
    quantise(isa, &x, &mut blocks);
    let mut out = vec![0.0; 512 * n_out];
    let mut product = |rows: usize, panels: usize| {
        let x = if shape.takes_quantised() {
            Rows::quantised(&blocks[..rows * K / BLOCK], rows, K)
        } else {
            Rows::float(&x[..rows * K], rows, K, K)
        };
        let width = shape.channels(0..panels).len();
        matrix.multiply(isa, 0..panels, x, RowsMut::new(&mut out, rows, width, width));
    };
    let all = shape.panel_count();
    let some = 8;
    let read = best(|| {
        black_box(sum(&twin));
    });
    let one = best(|| product(1, all));
    let eight = best(|| product(8, all));
    let many = best(|| product(512, some));

    let bytes = shape.bytes() as f64;
    let ops = |rows: usize, panels: usize, time: Duration| {
        2.0 * (rows * K * panels * 16) as f64 / time.as_secs_f64() / 1e9
    };
    println!(
        "{:8} {:10.1} {:14.2} {:11.1} {:12.1} {:18.2} {:9.0} {:11.0}",
        format.name(),
        bytes / 1e6,
        bytes / packing.as_secs_f64() / 1e9,
        bytes / read.as_secs_f64() / 1e9,
        bytes / one.as_secs_f64() / 1e9,
        eight.as_secs_f64() / one.as_secs_f64(),
        ops(8, all, eight),
        ops(512, some, many),
    );
    Ok(())
}

/// The shortest of several runs.
fn best(mut run: impl FnMut()) -> Duration {
    let start = Instant::now();
    let mut best = Duration::MAX;
    let mut runs = 0;
    while runs < 3 || start.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed());
        runs += 1;
    }
    best
}

/// A plain read of all bytes.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in bytemuck::cast_slice::<u8, [u8; 256]>(&bytes[..bytes.len() / 256 * 256]) {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Operations per second of nothing but the instruction that kernels are made of (AVX-512 VNNI only, or else 0).
#[cfg(target_arch = "x86_64")]
fn peak() -> f64 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn run(iterations: usize) -> i32 {
        let mut acc = [_mm512_setzero_si512(); 16];
        let (w, x) = (_mm512_set1_epi32(black_box(0x0102_0304)), _mm512_set1_epi32(black_box(0x0101_0101)));
        for _ in 0..iterations {
            for acc in &mut acc {
                *acc = _mm512_dpbusd_epi32(*acc, w, x);
            }
        }
        let mut sum = _mm512_setzero_si512();
        for acc in acc {
            sum = _mm512_add_epi32(sum, acc);
        }
        _mm512_reduce_add_epi32(sum)
    }

    if !Isa::Avx512.is_available() {
        return 0.0;
    }
    let iterations = 1 << 20;
    let time = best(|| {
        // SAFETY: available, as just checked.
        black_box(unsafe { run(black_box(iterations)) });
    });
    (iterations * 16 * 16 * 4 * 2) as f64 / time.as_secs_f64() / 1e9
}

#[cfg(not(target_arch = "x86_64"))]
fn peak() -> f64 {
    0.0
}
