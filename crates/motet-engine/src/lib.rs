//! Conversations: several at once on one engine, each with exactly the tokens it would have got alone.
//!
//! A front end submits a [`Request`] to the [`Engine`] and reads its [`Stream`]. Behind the façade one thread fills
//! batches from all sessions and drives a device through the contract of `motet-model`. This crate knows no
//! arithmetic, no text and no HTTP.

pub mod clock;
pub mod plan;
pub mod scripted;

mod checkpoints;
mod costs;
mod engine;
mod metrics;
mod pages;
mod prefix;
mod queue;
mod request;
mod sampling;
mod scheduler;
mod session;
mod stream;

pub use engine::{Driver, Engine, Health, Turn};
pub use metrics::{Histogram, MetricsSnapshot};
pub use plan::{Machine, Options, Plan, PlanError, Workspace};
pub use request::{Cut, CutMaker, EngineLimits, MAX_TOP, Request, SubmitError};
pub use sampling::{MAX_BIAS, SamplingOptions};
pub use stream::{Event, FinishReason, Scored, Stream, StreamError, Usage};
