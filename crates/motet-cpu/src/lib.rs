//! A device that runs networks on the CPU: the definition of every operation on rows, and faster ways to the same bits.

pub mod activations;
pub mod arena;
pub mod attention;
pub mod device;
pub mod isa;
pub mod kv;
pub mod lanes;
pub mod math;
pub mod matmul;
pub mod panels;
pub mod pool;
pub mod rows;
pub mod sampling;
mod session_state;
pub mod shared_rows;
mod stage;
#[cfg(test)]
mod testing;
mod weights;
pub mod worker_scratch;
mod workspace;

pub use device::{CpuDevice, CpuOptions};
pub use isa::Isa;
