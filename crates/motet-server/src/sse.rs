//! An answer as server-sent events: a chunk for each part, then the usage if it was asked for, then `[DONE]`.
//!
//! The headers go out at once. While nothing is to be said (a long prompt is being read), a comment goes out every few
//! seconds of wall-clock time, so that neither client nor proxy takes the silence for death. An error after the
//! headers is an event of its own, and the last one.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde::Serialize;

use crate::answer::{Answer, Part};
use crate::errors::ApiError;
use crate::params::StreamOptions;
use crate::shapes::{Head, Reply};

/// Streams an answer; `chunk` gives the shape of a part.
pub(crate) fn respond<C, F>(
    answer: Answer,
    head: Head,
    options: StreamOptions,
    comment_interval: Duration,
    chunk: F,
) -> Response
where
    C: Serialize + Send,
    F: FnMut(Part) -> Option<C> + Send + 'static,
{
    let script = Script { answer, head, include_usage: options.include_usage, chunk, stage: Stage::Parts };
    let events = unfold(script, |mut script| async move {
        let event = script.next().await?;
        Some((Ok::<_, Infallible>(event), script))
    });
    let keep_alive = KeepAlive::new().interval(comment_interval).text("working");
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Asks nginx not to collect the events.
    response
        .headers_mut()
        .insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// What is still to be said of an answer.
struct Script<F> {
    answer: Answer,
    head: Head,
    include_usage: bool,
    chunk: F,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    Parts,
    Done,
    Over,
}

impl<F> Script<F> {
    /// The next event; `None` after the last.
    async fn next<C>(&mut self) -> Option<Event>
    where
        C: Serialize,
        F: FnMut(Part) -> Option<C>,
    {
        let (head, include_usage) = (&self.head, self.include_usage);
        while let Stage::Parts = self.stage {
            match self.answer.next().await {
                Some(Ok(part)) => {
                    let Some(choice) = (self.chunk)(part) else { continue };
                    return Some(json(&Reply {
                        head,
                        choices: vec![choice],
                        usage: include_usage.then_some(None),
                    }));
                }
                Some(Err(error)) => {
                    self.stage = Stage::Over;
                    return Some(json(&error.envelope()));
                }
                None => self.stage = Stage::Done,
            }
            if include_usage {
                let usage = Some(Some(self.answer.usage()));
                return Some(json(&Reply::<C> { head, choices: Vec::new(), usage }));
            }
        }
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Done => Some(Event::default().data("[DONE]")),
            Stage::Parts | Stage::Over => None,
        }
    }
}

/// An event with an object.
fn json(object: &impl Serialize) -> Event {
    Event::default().json_data(object).unwrap_or_else(|_| {
        // Our own shapes are always JSON.
        let error = ApiError::failed("internal_error", "A chunk could not be written.".to_string());
        Event::default().json_data(error.envelope()).unwrap_or_default()
    })
}
