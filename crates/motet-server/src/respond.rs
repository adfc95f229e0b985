//! An answer as a response: whole, or event by event as it comes.
//!
//! The headers of a stream go out at once. While nothing is to be said (a long prompt is being read), a comment goes
//! out every few seconds of wall-clock time where the framing knows comments, so that neither client nor proxy takes
//! the silence for death. An error after the headers is an event of its own, and the last one.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use tokio::time::timeout;

use crate::answer::{Answer, whole};
use crate::errors::ApiError;
use crate::shape::{Event, Events, Framing, Shape};

/// Waits for the whole answer.
///
/// # Errors
/// What ended the answer before its time.
pub(crate) async fn respond_whole(answer: Answer, mut shape: Box<dyn Shape>) -> Result<Response, ApiError> {
    let (choices, tally) = whole(answer).await?;
    let body = shape.whole(choices, &tally);
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Streams an answer.
pub(crate) fn respond_streaming(answer: Answer, mut shape: Box<dyn Shape>, silence: Duration) -> Response {
    let framing = shape.framing();
    let mut events = Events::default();
    shape.open(&mut events);
    let script = Script { answer, shape, events, silence, over: false };
    let bytes = unfold(script, async |mut script| Some((Ok::<_, Infallible>(script.next().await?), script)));
    let mut response = Body::from_stream(bytes).into_response();
    let headers = response.headers_mut();
    let kind = match framing {
        Framing::ServerSentEvents => "text/event-stream",
        Framing::JsonLines => "application/x-ndjson",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks nginx not to collect the events.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// What is still to be said of an answer.
struct Script {
    answer: Answer,
    shape: Box<dyn Shape>,
    events: Events,
    silence: Duration,
    over: bool,
}

impl Script {
    /// The next bytes; `None` after the last.
    async fn next(&mut self) -> Option<Bytes> {
        let framing = self.shape.framing();
        loop {
            if let Some(event) = self.events.pop() {
                return Some(written(event, framing));
            }
            if self.over {
                return None;
            }
            match timeout(self.silence, self.answer.next()).await {
                Err(_) if framing == Framing::ServerSentEvents => {
                    return Some(Bytes::from_static(b": working\n\n"));
                }
                Err(_) => {}
                Ok(Some(Ok(part))) => self.shape.part(part, self.answer.tally(), &mut self.events),
                Ok(Some(Err(error))) => {
                    self.shape.fail(&error, &mut self.events);
                    self.over = true;
                }
                Ok(None) => {
                    self.shape.close(self.answer.tally(), &mut self.events);
                    self.over = true;
                }
            }
        }
    }
}

/// An event as it goes over the wire. JSON of ours has no line ends, so an event has one line of data.
fn written(event: Event, framing: Framing) -> Bytes {
    let Event { name, data } = event;
    Bytes::from(match (framing, name) {
        (Framing::JsonLines, _) => data + "\n",
        (Framing::ServerSentEvents, None) => format!("data: {data}\n\n"),
        (Framing::ServerSentEvents, Some(name)) => format!("event: {name}\ndata: {data}\n\n"),
    })
}
