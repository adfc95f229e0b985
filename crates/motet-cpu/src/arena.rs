//! Large stretches of memory: packed weights, pages, recurrent states, row buffers. One mapping each.

use std::io;
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use crate::pool::{Pool, WorkerPanic};

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// One zeroed, page-aligned range of memory, on huge pages where the system has them (measured: 1.4 times the
/// read bandwidth of small ones). Pages that are never written take no memory.
#[derive(Debug)]
pub struct Arena(MmapMut);

impl Arena {
    /// Matrices start at a multiple of this many bytes.
    pub const ALIGNMENT: usize = 64;

    /// Maps `bytes` bytes, rounded up to whole cache lines, at least one.
    ///
    /// # Errors
    /// The system's, when it refuses that much memory.
    pub fn allocate(bytes: usize) -> io::Result<Arena> {
        let map = MmapOptions::new()
            .len(bytes.next_multiple_of(Self::ALIGNMENT).max(Self::ALIGNMENT))
            .map_anon()?;
        // Only a hint: a kernel without huge pages refuses it, and small pages work as well.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Arena(map))
    }

    /// Has all workers touch the huge pages of an arena that holds nothing yet, each at its own: who touches one first
    /// waits until the system has cleared it (in a virtual machine also until the host has given it back), and others
    /// that touch it wait as well.
    ///
    /// # Errors
    /// A worker's panic.
    pub(crate) fn touch(&mut self, pool: &mut Pool) -> Result<(), WorkerPanic> {
        let pages = self.0.len().div_ceil(HUGE);
        let parts = Mutex::new(self.0.chunks_mut(HUGE));
        pool.run(pages, |_, _| {
            let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            if let Some(page) = next {
                page[0] = 0;
            }
        })
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// All of it, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
