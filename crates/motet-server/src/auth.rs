//! The API key, where one is set: every path under `/v1` asks for it. Health and metrics hold nothing private.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::body::throw_away;
use crate::errors::ApiError;

/// Lets a request pass that carries `Authorization: Bearer KEY`.
pub(crate) async fn require_key(State(key): State<Arc<str>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
    let given = given.and_then(|value| value.split_at_checked("Bearer ".len()));
    match given {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"Bearer ") && same(token, key.as_bytes()) => {
            next.run(request).await
        }
        _ => {
            let (parts, body) = request.into_parts();
            throw_away(&parts.headers, body).await;
            ApiError::unauthorized().into_response()
        }
    }
}

/// Whether two keys are equal, in a time that tells only their lengths.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
