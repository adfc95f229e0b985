//! Errors as the clients of each interface expect them, with the right status: OpenAI's
//! `{"error": {"message", "type", "param", "code"}}`, and what [`speak`] makes of it for the others.
//!
//! A message says what was expected and what was found; it never repeats a prompt.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use crate::metrics::PATHS;

/// One error of the interface.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
    /// Seconds after which the same request may succeed.
    retry_after: Option<u64>,
    /// Where a prompt is too long: its tokens, and those that there is room for.
    too_long: Option<Box<(usize, usize)>>,
}

/// Whose interface a request speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Api {
    /// The interface that a path belongs to.
    pub(crate) fn of(path: &str) -> Api {
        let path = path.strip_prefix("/v1").unwrap_or(path);
        if path == "/messages" || path.starts_with("/messages/") {
            Api::Anthropic
        } else if path.starts_with("/api/") {
            Api::Ollama
        } else {
            Api::OpenAi
        }
    }
}

/// Lets errors be told in the words of the interface that was asked, wherever they were found.
pub(crate) async fn speak(request: Request, next: Next) -> Response {
    let api = Api::of(request.uri().path());
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>() {
        Some(error) if api != Api::OpenAi => error.clone().response(api),
        _ => response,
    }
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
        ApiError {
            status,
            body: ErrorBody { message, r#type, param: None, code: None },
            retry_after: None,
            too_long: None,
        }
    }

    /// 400: the request is wrong, at `param` if that can be said.
    pub(crate) fn invalid(param: Option<String>, message: String) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        ApiError { body: ErrorBody { param, ..error.body }, ..error }
    }

    /// 400 `context_length_exceeded`: the prompt has more tokens than the context has room for.
    pub(crate) fn too_long(param: &str, prompt: usize, context: usize) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens, and the prompt has {prompt}, which leaves no room for an answer. Shorten the prompt."
        );
        let error = ApiError::invalid(Some(param.to_string()), message).code("context_length_exceeded");
        ApiError { too_long: Some(Box::new((prompt, context))), ..error }
    }

    /// 400 `context_length_exceeded`: the answer and its prompt have no room even alone.
    pub(crate) fn never_fits(param: &str, message: String) -> ApiError {
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

    /// The machine-readable name.
    pub(crate) fn name(&self) -> Option<&'static str> {
        self.body.code
    }

    /// What it says.
    pub(crate) fn message(&self) -> &str {
        &self.body.message
    }

    /// The object as Anthropic's clients expect it: they read the type, and of a prompt that is too long how much.
    pub(crate) fn of_anthropic(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        };
        let message = match self.too_long.as_deref() {
            Some((prompt, context)) => format!("prompt is too long: {prompt} tokens > {context} maximum"),
            None => self.body.message.clone(),
        };
        json!({ "type": "error", "error": { "type": kind, "message": message } })
    }

    /// The object as Ollama's clients expect it.
    pub(crate) fn of_ollama(&self) -> Value {
        json!({ "error": self.body.message })
    }

    /// The response in the words of an interface.
    fn response(self, api: Api) -> Response {
        // Anthropic's name for "not now" is a status of its own.
        let status = match (api, self.status) {
            (Api::Anthropic, StatusCode::SERVICE_UNAVAILABLE) => {
                StatusCode::from_u16(529).unwrap_or(self.status)
            }
            (_, status) => status,
        };
        let mut response = match api {
            Api::OpenAi => (status, Json(self.envelope())).into_response(),
            Api::Anthropic => (status, Json(self.of_anthropic())).into_response(),
            Api::Ollama => (status, Json(self.of_ollama())).into_response(),
        };
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
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
        self.response(Api::OpenAi)
    }
}
