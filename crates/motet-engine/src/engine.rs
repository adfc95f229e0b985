//! The façade: what front ends see of the engine.
//!
//! A handle only puts requests into the bounded queue, reads counters and asks for the end; everything else happens
//! on the engine's own thread.

use crate::clock::Clock;
use crate::metrics::MetricsSnapshot;
use crate::queue::{Queue, Waiting};
use crate::request::{EngineLimits, Request, SubmitError};
use crate::stream::Stream;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// How the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Weights are being read. Requests may be submitted; they wait.
    Loading,
    /// Running or idle.
    Ready,
    /// Running answers finish; nothing new is taken.
    Draining,
    /// Rows are ready, but no step has ended for too long.
    Overdue {
        /// How long ago the last step ended.
        since: Duration,
    },
    /// The engine's thread has ended.
    Closed,
}

/// A handle to an engine. Clones are the same engine; it is closed when the last one is dropped.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

/// What handles and the engine's thread share.
pub(crate) struct Shared {
    pub(crate) limits: EngineLimits,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) queue: Queue,
    pub(crate) metrics: Mutex<MetricsSnapshot>,
}

impl Engine {
    /// Puts a request into the queue after checking all of it. Dropping the stream cancels it.
    ///
    /// # Errors
    /// Any [`SubmitError`]; nothing was started then.
    pub fn submit(&self, request: Request) -> Result<Stream, SubmitError> {
        let taken = self.take(request);
        if let Err(error) = &taken {
            let mut metrics = self.shared.metrics.lock();
            match error {
                SubmitError::QueueFull { .. } => metrics.rejected_queue_full += 1,
                SubmitError::TooLong { .. } | SubmitError::NeverFits { .. } => metrics.rejected_too_long += 1,
                SubmitError::Invalid { .. } => metrics.rejected_invalid += 1,
                SubmitError::Draining | SubmitError::Closed => metrics.rejected_closed += 1,
            }
        }
        taken
    }

    fn take(&self, request: Request) -> Result<Stream, SubmitError> {
        request.check(&self.shared.limits)?;
        let (waiting, stream) = Waiting::new(request, &self.shared.limits, self.shared.clock.now());
        self.shared.queue.push(waiting)?;
        Ok(stream)
    }

    /// What requests are checked against.
    pub fn limits(&self) -> EngineLimits {
        self.shared.limits
    }

    /// A copy of all counters.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.shared.metrics.lock().clone()
    }

    /// Whether it takes requests and makes progress.
    pub fn health(&self) -> Health {
        self.shared.queue.health(self.shared.clock.now())
    }

    /// Takes no new requests; those in the queue and those running finish.
    pub fn drain(&self) {
        self.shared.queue.drain();
    }

    /// Ends all streams with `EngineClosed` and stops the engine's thread after the step it is in.
    pub fn close(&self) {
        self.shared.queue.close();
    }
}
