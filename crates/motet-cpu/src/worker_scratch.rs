//! Scratch floats of which each worker of a region has its own part.
//!
//! The parts lie in one slice of the stage's workspace; nothing is allocated. A part is lent to one borrower at a
//! time, and that is checked, not assumed.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

/// Floats between two flags, so that they lie on cache lines of their own.
const FLAG_STRIDE: usize = 32;

/// A slice cut into equal parts, one for each worker.
#[derive(Debug)]
pub struct WorkerScratch<'a> {
    /// One flag per worker: 1 while its part is lent.
    flags: &'a [AtomicU32],
    parts: *mut f32,
    part_len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: exclusive access to plain floats, of which `lend` gives each part to one borrower at a time.
unsafe impl Sync for WorkerScratch<'_> {}
// SAFETY: as above; exclusive access to plain floats may move to another thread.
unsafe impl Send for WorkerScratch<'_> {}

impl<'a> WorkerScratch<'a> {
    /// The floats that parts of `part_len` floats for `workers` workers take.
    #[must_use]
    pub const fn floats(workers: usize, part_len: usize) -> usize {
        workers * (FLAG_STRIDE + part_len)
    }

    /// Cuts `floats` into parts; what they held is lost.
    ///
    /// # Panics
    /// If it is shorter than [`WorkerScratch::floats`].
    #[must_use]
    pub fn new(floats: &'a mut [f32], workers: usize, part_len: usize) -> Self {
        let needed = Self::floats(workers, part_len);
        assert!(floats.len() >= needed, "{} floats of scratch where {needed} are needed", floats.len());
        let (flags, parts) = floats.split_at_mut(workers * FLAG_STRIDE);
        flags.fill(0.0);
        // SAFETY: f32 and AtomicU32 have the same size and alignment and no invalid bits, and the slice is ours for
        // 'a. +0.0 is the integer 0.
        let flags =
            unsafe { std::slice::from_raw_parts(flags.as_mut_ptr().cast::<AtomicU32>(), flags.len()) };
        Self { flags, parts: parts.as_mut_ptr(), part_len, borrow: PhantomData }
    }

    /// As [`WorkerScratch::new`], with parts as long as the floats allow: none at all for no floats.
    ///
    /// # Panics
    /// If there are some floats, but not enough for the flags.
    #[must_use]
    pub fn whole(floats: &'a mut [f32], workers: usize) -> Self {
        let workers = if floats.is_empty() { 0 } else { workers };
        let part_len = (floats.len() / workers.max(1)).saturating_sub(FLAG_STRIDE);
        Self::new(floats, workers, part_len)
    }

    /// The part of `worker`, until the loan is dropped. It holds whatever the last borrower left.
    ///
    /// # Panics
    /// If there is no such worker, or its part is lent.
    #[must_use]
    pub fn lend(&self, worker: usize) -> Loan<'_> {
        let flag = &self.flags[worker * FLAG_STRIDE];
        assert_eq!(flag.swap(1, Ordering::Acquire), 0, "the scratch of worker {worker} is lent already");
        // SAFETY: `new` checked that all parts lie in the slice. The flag keeps every other borrower from this
        // part until the loan is dropped.
        let part =
            unsafe { std::slice::from_raw_parts_mut(self.parts.add(worker * self.part_len), self.part_len) };
        Loan { part, flag }
    }
}

/// One worker's part, returned when dropped.
#[derive(Debug)]
pub struct Loan<'a> {
    part: &'a mut [f32],
    flag: &'a AtomicU32,
}

impl Deref for Loan<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.part
    }
}

impl DerefMut for Loan<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.part
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.flag.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_come_back() {
        let mut floats = vec![f32::NAN; WorkerScratch::floats(3, 5) + 1];
        let scratch = WorkerScratch::new(&mut floats, 3, 5);
        {
            let mut parts = [0, 1, 2].map(|worker| scratch.lend(worker));
            for (i, part) in parts.iter_mut().enumerate() {
                part.fill(i as f32);
            }
            for (i, part) in parts.iter().enumerate() {
                assert_eq!(**part, [i as f32; 5]);
            }
        }
        assert_eq!(*scratch.lend(1), [1.0; 5]);
        assert!(floats.last().unwrap().is_nan());
    }

    #[test]
    #[should_panic(expected = "lent already")]
    fn a_part_is_lent_once() {
        let mut floats = vec![0.0; WorkerScratch::floats(2, 4)];
        let scratch = WorkerScratch::new(&mut floats, 2, 4);
        let _first = scratch.lend(1);
        let _second = scratch.lend(1);
    }

    #[test]
    #[should_panic(expected = "are needed")]
    fn too_few_floats_are_refused() {
        let _ = WorkerScratch::new(&mut [0.0; 8], 1, 4);
    }
}
