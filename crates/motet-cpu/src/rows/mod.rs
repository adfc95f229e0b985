//! Operations on rows that are not matrix products: norms, rotations, activations, recurrences, routing.
//!
//! Each is a safe function that takes an [`Isa`](crate::isa::Isa) and slices, checks their shapes (a wrong one is a defect of
//! the caller and panics), allocates nothing and touches nothing else. The order of its floating-point
//! operations, and every place where it rounds, is in its documentation; it depends on no other row. A caller
//! that splits work between threads calls it on parts.

pub mod elementwise;
