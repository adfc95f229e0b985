//! Conversations: several at once on one engine, each with exactly the tokens it would have got alone.
//!
//! A front end submits a [`Request`] to the [`Engine`] and reads its [`Stream`]. Behind the façade one thread fills
//! batches from all sessions and drives a device through the contract of `motet-model`. This crate knows no
//! arithmetic, no text and no HTTP.

#![allow(dead_code)] // the scheduler that uses all of it comes with the next commit

pub mod clock;

mod engine;
mod metrics;
mod queue;
mod request;
mod sampling;
mod stream;

pub use engine::{Engine, Health};
pub use metrics::{Histogram, MetricsSnapshot};
pub use request::{Cut, CutMaker, EngineLimits, MAX_TOP, Request, SubmitError};
pub use sampling::{MAX_BIAS, SamplingOptions};
pub use stream::{Event, FinishReason, Scored, Stream, StreamError, Usage};
