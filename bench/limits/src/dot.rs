//! The widest integer dot product of this CPU, kept busy from registers.

use std::hint::black_box;

/// Steps of a run.
const STEPS: usize = 100_000;
/// Sums that do not wait for one another: more than latency times throughput of any CPU so far.
#[cfg(target_arch = "x86_64")]
const SUMS: usize = 12;

/// A way to multiply and add.
#[derive(Clone, Copy, Debug)]
pub enum Kernel {
    /// `vpdpbusd` on 64 pairs of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// `vpdpbusd` on 32 pairs of bytes.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// `vpmaddubsw`, `vpmaddwd` and `vpaddd` on 32 pairs of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of a loop.
    Scalar,
}

impl Kernel {
    /// The widest that this CPU has.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
                return Self::Avx512Vnni;
            }
            if is_x86_feature_detected!("avx2") {
                return if is_x86_feature_detected!("avxvnni") { Self::AvxVnni } else { Self::Avx2 };
            }
        }
        Self::Scalar
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            Self::Scalar => "scalar",
        }
    }

    /// Runs it; the operations that were done, two for each multiply-add.
    pub fn run(self) -> f64 {
        let (multiply_adds, sum) = match self {
            // SAFETY: `best` chose what the CPU has.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => (STEPS * SUMS * 64, unsafe { avx512_vnni() }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => (STEPS * SUMS * 32, unsafe { avx_vnni() }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => (STEPS * SUMS * 32, unsafe { avx2() }),
            Self::Scalar => (STEPS * 64, scalar()),
        };
        black_box(sum);
        2.0 * multiply_adds as f64
    }
}

/// Bytes that the compiler does not know.
fn bytes() -> ([u8; 64], [i8; 64]) {
    (black_box([3; 64]), black_box([-1; 64]))
}

fn scalar() -> i32 {
    let (x, y) = bytes();
    let mut sums = [0i32; 64];
    for _ in 0..STEPS {
        let (x, y) = (black_box(&x), black_box(&y));
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += i32::from(x) * i32::from(y);
        }
    }
    sums.iter().sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn avx512_vnni() -> i32 {
    use std::arch::x86_64::{_mm512_dpbusd_epi32, _mm512_reduce_add_epi32, _mm512_set1_epi32};
    let x = _mm512_set1_epi32(black_box(0x0303_0303));
    let y = _mm512_set1_epi32(black_box(-1));
    let mut sums: [_; SUMS] = std::array::from_fn(|i| _mm512_set1_epi32(black_box(i as i32)));
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, x, y);
        }
    }
    sums.into_iter().fold(0, |all, sum| all.wrapping_add(_mm512_reduce_add_epi32(sum)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avxvnni")]
fn avx_vnni() -> i32 {
    use std::arch::x86_64::{_mm256_dpbusd_avx_epi32, _mm256_extract_epi32, _mm256_set1_epi32};
    let x = _mm256_set1_epi32(black_box(0x0303_0303));
    let y = _mm256_set1_epi32(black_box(-1));
    let mut sums: [_; SUMS] = std::array::from_fn(|i| _mm256_set1_epi32(black_box(i as i32)));
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, x, y);
        }
    }
    sums.into_iter().fold(0, |all, sum| all.wrapping_add(_mm256_extract_epi32::<0>(sum)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2() -> i32 {
    use std::arch::x86_64::{
        _mm256_add_epi32, _mm256_extract_epi32, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi16,
        _mm256_set1_epi32, _mm256_xor_si256,
    };
    let y = _mm256_set1_epi32(black_box(-1));
    let ones = _mm256_set1_epi16(black_box(1));
    let mut sums: [_; SUMS] = std::array::from_fn(|i| _mm256_set1_epi32(black_box(i as i32)));
    for _ in 0..STEPS {
        for sum in &mut sums {
            // The sum itself is one of the factors, lest the product be taken out of the loop.
            let product = _mm256_maddubs_epi16(*sum, y);
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(product, ones));
        }
    }
    sums.into_iter().fold(0, |all, sum| all.wrapping_add(_mm256_extract_epi32::<0>(_mm256_xor_si256(sum, y))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sums_are_those_of_the_steps() {
        // Four pairs of 3 × -1 for each sum of 32 bits and step; the sums begin at their numbers.
        let steps = STEPS as i32 * 4 * -3;
        assert_eq!(scalar(), STEPS as i32 * 64 * -3);
        #[cfg(target_arch = "x86_64")]
        {
            let begin: i32 = (0..SUMS as i32).sum();
            if is_x86_feature_detected!("avxvnni") {
                // SAFETY: detected.
                assert_eq!(unsafe { avx_vnni() }, steps * SUMS as i32 + begin);
            }
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
                // SAFETY: detected.
                assert_eq!(unsafe { avx512_vnni() }, (steps * SUMS as i32 + begin).wrapping_mul(16));
            }
        }
    }
}
