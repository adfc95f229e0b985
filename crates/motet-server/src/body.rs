//! Reading a request's body: all of it, at most so many bytes, in at most so much time.

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

/// Reads a body.
///
/// # Errors
/// 413 where it is too large, 408 where it does not come, 400 where it breaks off.
pub(crate) async fn read_body(
    headers: &HeaderMap,
    body: Body,
    options: &ServerOptions,
) -> Result<Vec<u8>, ApiError> {
    let limit = options.max_body;
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        throw_away(headers, body).await;
        return Err(ApiError::body_too_large(limit));
    }
    match timeout(options.body_timeout, collect(body, announced, limit)).await {
        Err(_) => Err(ApiError::body_too_slow()),
        Ok(Err(error)) => Err(error),
        Ok(Ok((bytes, None))) => Ok(bytes),
        Ok(Ok((bytes, Some(rest)))) => {
            drop(bytes);
            throw_away(headers, rest).await;
            Err(ApiError::body_too_large(limit))
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

/// The bytes of a body; with the rest of it where there are too many.
async fn collect(
    mut body: Body,
    announced: usize,
    limit: usize,
) -> Result<(Vec<u8>, Option<Body>), ApiError> {
    let mut bytes = Vec::with_capacity(announced);
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|_| ApiError::invalid(None, "The body broke off before its end.".to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Ok((bytes, Some(body)));
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, None))
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
