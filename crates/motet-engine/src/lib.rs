//! Conversations: several at once on one engine, each with exactly the tokens it would have got alone.
//!
//! A front end submits a [`Request`] to the [`Engine`] and reads its [`Stream`]. Behind the façade one thread fills
//! batches from all sessions and drives a device through the contract of `motet-model`. This crate knows no
//! arithmetic, no text and no HTTP.
//!
//! The rooms, in the order data flows: `request` and `stream` (what goes in and comes out), `queue` (the one bounded
//! queue), `engine` (façade and thread), `watchdog` (whether that thread still gets anywhere), `scheduler` (which rows
//! run, what their answers mean), `drafts` (what may come next), `appetite` (how much of it pays) and `agreement`
//! (whether it still comes true), `constraint` (what may come), `session` and `sampling` (one conversation), `prefix`,
//! `pages` and `checkpoints` (what is remembered of whom), `costs` (how long rows take), `metrics`; and [`plan`], which
//! sizes all of it beforehand, and [`scripted`], a device to test it on.
//!
//! ```
//! use motet_engine::scripted::{Script, Scripted, Sketch};
//! use motet_engine::{Event, Options, Request};
//!
//! let device = Scripted::new(Script::Random { end: None, mean: 100 });
//! let engine = device.start(&Sketch::default(), &Options::default())?;
//! let mut stream = engine.submit(Request { max_tokens: Some(3), ..Request::new(vec![7, 8, 9]) })?;
//! let mut tokens = Vec::new();
//! while let Some(event) = stream.blocking_next() {
//!     if let Event::Token { scored, .. } = event {
//!         tokens.push(scored.token);
//!     }
//! }
//! assert_eq!(tokens.len(), 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod clock;
pub mod plan;
pub mod scripted;

mod agreement;
mod appetite;
mod checkpoints;
mod constraint;
mod costs;
mod drafts;
mod engine;
mod metrics;
mod pages;
mod pipeline;
mod prefix;
mod queue;
mod request;
mod sampling;
mod scheduler;
mod session;
mod stream;
mod watchdog;

pub use agreement::FallenOut;
pub use constraint::{Advance, Broken, Constraint, ConstraintMaker};
pub use drafts::{Drafts, DraftsError, MAX_DRAFTS, UnknownDrafts};
pub use engine::{Driver, Engine, Health, Turn};
pub use metrics::{Histogram, MetricsSnapshot};
pub use plan::{Line, Machine, Options, Plan, PlanError, Workspace};
pub use request::{Cut, CutMaker, EngineLimits, MAX_TOP, Request, SubmitError};
pub use sampling::{MAX_BIAS, SamplingOptions};
pub use stream::{Event, FinishReason, Scored, Stream, StreamError, Usage};
