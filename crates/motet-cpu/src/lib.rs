//! A device that runs networks on the CPU: the definition of every operation on rows, and faster ways to the same bits.

pub mod activations;
pub mod attention;
pub mod isa;
pub mod kv;
pub mod lanes;
pub mod math;
pub mod matmul;
pub mod panels;
pub mod pool;
pub mod rows;
pub mod sampling;
pub mod shared_rows;
#[cfg(test)]
mod testing;
pub mod worker_scratch;
