//! The API key, where one is set: every path under `/v1` asks for it. Health and metrics hold nothing private.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::body::throw_away;
use crate::errors::ApiError;

/// Lets a request pass that carries `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.
pub(crate) async fn require_key(State(key): State<Arc<str>>, request: Request, next: Next) -> Response {
    if is_let_in(request.headers(), key.as_bytes()) {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    throw_away(&parts.headers, body).await;
    ApiError::unauthorized().into_response()
}

fn is_let_in(headers: &HeaderMap, key: &[u8]) -> bool {
    let bearer =
        headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().split_at_checked("Bearer ".len()));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer ")).map(|(_, token)| token);
    let plain = headers.get("x-api-key").map(|value| value.as_bytes());
    [bearer, plain].into_iter().flatten().any(|given| same(given, key))
}

/// Whether two keys are equal, in a time that tells only their lengths.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
