//! A buffer, and the plainest way to read all of it.

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line([u64; 8]);

/// Memory that was written once, on huge pages where the system gives them.
pub struct Buffer(Vec<Line>);

impl Buffer {
    /// At least `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        let lines = bytes.div_ceil(size_of::<Line>());
        let mut memory = Vec::with_capacity(lines);
        huge_pages(&mut memory);
        memory.extend((0..lines as u64).map(|i| Line([i; 8])));
        Self(memory)
    }

    /// The lines that belong to one of several threads.
    pub fn part(&self, thread: usize, threads: usize) -> &[Line] {
        let lines = self.0.len();
        &self.0[lines * thread / threads..lines * (thread + 1) / threads]
    }
}

/// Asks for huge pages before the memory is first touched; they matter for the bandwidth, so the limit has them.
#[cfg(target_os = "linux")]
fn huge_pages(memory: &mut Vec<Line>) {
    const HUGE: usize = 2 << 20;
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
    }
    let spare = memory.spare_capacity_mut();
    let (length, address) = (size_of_val(spare), spare.as_mut_ptr().cast::<u8>());
    let ahead = address.align_offset(HUGE);
    if ahead < length {
        // SAFETY: the range lies in memory of this vector's own; the advice changes neither its contents nor who
        // may use it, and a refusal is harmless.
        unsafe { madvise(address.add(ahead), length - ahead, MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn huge_pages(_: &mut Vec<Line>) {}

/// The sum of all words: every byte is loaded, and next to nothing is done with it.
pub fn sum(lines: &[Line]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has AVX-512 F.
            return unsafe { sum_avx512(lines) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { sum_avx2(lines) };
        }
    }
    plain(lines)
}

/// The compiler's vectors of whatever the caller may use.
#[inline(always)]
fn plain(lines: &[Line]) -> u64 {
    let mut sums = [[0u64; 8]; 4];
    let (fours, rest) = lines.as_chunks::<4>();
    for four in fours {
        for (sum, line) in sums.iter_mut().zip(four) {
            for (s, word) in sum.iter_mut().zip(line.0) {
                *s = s.wrapping_add(word);
            }
        }
    }
    let rest = rest.iter().flat_map(|line| line.0);
    sums.into_iter().flatten().chain(rest).fold(0, u64::wrapping_add)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(lines: &[Line]) -> u64 {
    use std::arch::x86_64::{
        _mm512_add_epi64, _mm512_load_si512, _mm512_reduce_add_epi64, _mm512_setzero_si512,
    };
    let mut sums = [_mm512_setzero_si512(); 8];
    let (eights, rest) = lines.as_chunks::<8>();
    for eight in eights {
        for (sum, line) in sums.iter_mut().zip(eight) {
            // SAFETY: a line has 64 bytes and is aligned to 64.
            *sum = _mm512_add_epi64(*sum, unsafe { _mm512_load_si512(line.0.as_ptr().cast()) });
        }
    }
    sums.into_iter().fold(plain(rest), |all, sum| all.wrapping_add(_mm512_reduce_add_epi64(sum) as u64))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(lines: &[Line]) -> u64 {
    plain(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_read_once() {
        let buffer = Buffer::new(64 * 1003 - 5);
        // 8 words in each of 1,003 lines, numbered from 0.
        let expected = 8 * (1002 * 1003 / 2);
        for threads in [1, 2, 3] {
            let parts = (0..threads).map(|thread| buffer.part(thread, threads));
            assert_eq!(parts.clone().map(sum).sum::<u64>(), expected);
            assert_eq!(parts.map(plain).sum::<u64>(), expected);
        }
    }
}
