//! Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and the right status.
//!
//! A message says what was expected and what was found; it never repeats a prompt.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::metrics::PATHS;

/// One error of the interface.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
    /// Seconds after which the same request may succeed.
    retry_after: Option<u64>,
}

/// The object under `error`.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ErrorBody {
    message: String,
    r#type: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

/// The envelope.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a> {
    error: &'a ErrorBody,
}

impl ApiError {
    fn new(status: StatusCode, r#type: &'static str, message: String) -> ApiError {
        ApiError { status, body: ErrorBody { message, r#type, param: None, code: None }, retry_after: None }
    }

    /// 400: the request is wrong, at `param` if that can be said.
    pub(crate) fn invalid(param: Option<String>, message: String) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        ApiError { body: ErrorBody { param, ..error.body }, ..error }
    }

    /// 400 `context_length_exceeded`.
    pub(crate) fn too_long(param: &str, message: String) -> ApiError {
        ApiError::invalid(Some(param.to_string()), message).code("context_length_exceeded")
    }

    /// 401: the key is missing or wrong.
    pub(crate) fn unauthorized() -> ApiError {
        let message = "This server needs its API key in the header 'Authorization: Bearer KEY'.";
        ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message.to_string())
            .code("invalid_api_key")
    }

    /// 404: nothing is served under this path.
    pub(crate) fn no_route(method: &str, path: &str) -> ApiError {
        let message =
            format!("There is nothing at {method} {}; this server has {}.", shown(path), PATHS.join(", "));
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code("unknown_url")
    }

    /// 404: another model than the one that is served.
    pub(crate) fn no_model(asked: &str, served: &str) -> ApiError {
        let asked = shown(asked);
        let message = format!("The model '{asked}' does not exist here; this server serves '{served}'.");
        let error = ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        ApiError { body: ErrorBody { param: Some("model".to_string()), ..error.body }, ..error }
            .code("model_not_found")
    }

    /// 405: the path exists, the method does not.
    pub(crate) fn no_method(method: &str, path: &str) -> ApiError {
        let message = format!("{} does not take {method}.", shown(path));
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
            .code("method_not_allowed")
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn body_too_slow() -> ApiError {
        let message = "The body did not arrive in time.".to_string();
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message).code("request_timeout")
    }

    /// 413: the body is larger than `limit` bytes.
    pub(crate) fn body_too_large(limit: usize) -> ApiError {
        let message = format!("The body is larger than the {limit} bytes that this server takes.");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).code("body_too_large")
    }

    /// 413: the body holds more than `most` values.
    pub(crate) fn too_many_values(most: usize) -> ApiError {
        let message = format!("The body holds more than the {most} values that this server takes.");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).code("body_too_large")
    }

    /// 415: a web page's request that its browser did not ask leave for.
    pub(crate) fn not_json() -> ApiError {
        let message = "A web page must send its request with 'Content-Type: application/json'.".to_string();
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
            .code("unsupported_media_type")
    }

    /// 503: the bodies that are held are too large together.
    pub(crate) fn too_many_bodies() -> ApiError {
        let message = "Too many large requests are being read at once; try again in 1 s.".to_string();
        ApiError::unavailable("busy", message, 1)
    }

    /// 500: the engine failed at this request.
    pub(crate) fn failed(code: &'static str, message: String) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).code(code)
    }

    /// 503: not now; the same request may succeed later.
    pub(crate) fn unavailable(code: &'static str, message: String, retry_after: u64) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).code(code);
        ApiError { retry_after: Some(retry_after), ..error }
    }

    /// Gives the error its machine-readable name.
    pub(crate) fn code(self, code: &'static str) -> ApiError {
        ApiError { body: ErrorBody { code: Some(code), ..self.body }, ..self }
    }

    /// The JSON object, for an event of a stream whose headers are already out.
    pub(crate) fn envelope(&self) -> Envelope<'_> {
        Envelope { error: &self.body }
    }
}

/// A name that a client sent, as far as it helps to see it.
pub(crate) fn shown(name: &str) -> String {
    const CHARACTERS: usize = 80;
    let mut shown: String = name.chars().take(CHARACTERS).flat_map(char::escape_debug).collect();
    if name.chars().nth(CHARACTERS).is_some() {
        shown.push('…');
    }
    shown
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.envelope())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
