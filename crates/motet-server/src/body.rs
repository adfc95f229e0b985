//! Reading a request's body: all of it, at most so many bytes, in at most so much time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::errors::ApiError;
use crate::server::ServerOptions;

/// How much of a body that is not wanted is read and thrown away, and for how long.
const DISCARDED: usize = 256 << 20;
const DISCARDING: Duration = Duration::from_secs(10);

/// Counts the bytes of all bodies that are held.
#[derive(Debug, Default)]
pub(crate) struct Bodies(AtomicUsize);

/// The bytes of a body, counted while it is held.
#[derive(Debug)]
pub(crate) struct HeldBody {
    bytes: Vec<u8>,
    bodies: Arc<Bodies>,
}

impl HeldBody {
    /// The body.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes in more of it, unless all bodies together are too many bytes then.
    fn extend(&mut self, data: &[u8], most: usize) -> Result<(), ApiError> {
        let count = &self.bodies.0;
        let more = |held: usize| held.checked_add(data.len()).filter(|&held| held <= most);
        count
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .map_err(|_| ApiError::too_many_bodies())?;
        self.bytes.extend_from_slice(data);
        Ok(())
    }
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        self.bodies.0.fetch_sub(self.bytes.len(), Ordering::AcqRel);
    }
}

/// Reads a body.
///
/// # Errors
/// 413 where it is too large, 408 where it does not come, 400 where it breaks off, 503 where too much is held already.
pub(crate) async fn read_body(
    headers: &HeaderMap,
    body: Body,
    options: &ServerOptions,
    bodies: &Arc<Bodies>,
) -> Result<HeldBody, ApiError> {
    let limit = options.max_body;
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        throw_away(headers, body).await;
        return Err(ApiError::body_too_large(limit));
    }
    let held = HeldBody { bytes: Vec::with_capacity(announced), bodies: bodies.clone() };
    match timeout(options.body_timeout, collect(body, held, options)).await {
        Err(_) => Err(ApiError::body_too_slow()),
        Ok(Ok(held)) => Ok(held),
        Ok(Err((error, rest))) => {
            if let Some(rest) = rest {
                throw_away(headers, rest).await;
            }
            Err(error)
        }
    }
}

/// Reads a body for nothing, before an error is sent: a client that is still writing does not read it, and loses it
/// when the connection closes.
pub(crate) async fn throw_away(headers: &HeaderMap, body: Body) {
    // Who waits to be told to go on has written nothing yet.
    if !headers.contains_key(header::EXPECT) {
        let _ = timeout(DISCARDING, discard(body)).await;
    }
}

/// The bytes of a body, or what is wrong with it and the rest of it.
async fn collect(
    mut body: Body,
    mut held: HeldBody,
    options: &ServerOptions,
) -> Result<HeldBody, (ApiError, Option<Body>)> {
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return Err((ApiError::invalid(None, "The body broke off before its end.".to_string()), None));
        };
        let Ok(data) = frame.into_data() else { continue };
        if held.bytes.len() + data.len() > options.max_body {
            return Err((ApiError::body_too_large(options.max_body), Some(body)));
        }
        if let Err(error) = held.extend(&data, options.max_bodies) {
            return Err((error, Some(body)));
        }
    }
    Ok(held)
}

async fn discard(mut body: Body) {
    let mut left = DISCARDED;
    while let Some(Ok(frame)) = body.frame().await {
        let length = frame.data_ref().map_or(0, |data| data.len());
        match left.checked_sub(length) {
            Some(less) => left = less,
            None => return,
        }
    }
}
