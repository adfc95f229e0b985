//! Networks as programs: hyper-parameters, operations, one short file per architecture, and what follows from them
//! without running anything (manifest, layouts, costs); the [`Batch`] and the
//! [`Device`] contract.
//!
//! No arithmetic and no memory of sessions or weights lives here.

pub mod arch;
pub mod batch;
pub mod cost;
pub mod device;
pub mod header;
pub mod layout;
pub mod network;
pub mod program;
pub mod split;

mod builder;

pub use batch::{Batch, Checkpoint, InFlight, PAGE, Segment, Slot};
pub use device::{Device, DeviceError, Footprint, KvFormat, Limits, Observer, Stage};
pub use network::Network;
pub use program::Program;
pub use split::{PartCosts, Split, Stages};
