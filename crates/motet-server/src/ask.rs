//! From a request of any interface to requests of the engine, and from the answer back to a response.
//!
//! The interfaces differ in how they write a request ([`Ask`] is what all of them come to) and how an answer looks
//! ([`Shape`]); everything between is here.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request as HttpRequest;
use axum::http::{HeaderMap, header};
use axum::response::Response;
use motet_engine::Request;
use motet_text::{Stops, Tokenizer};

use crate::answer::{Answer, Echo, Share};
use crate::app::App;
use crate::body::read_body;
use crate::errors::ApiError;
use crate::fields::{self, Fields};
use crate::hearing::Hearing;
use crate::params::Params;
use crate::reader::AnswerReader;
use crate::respond::{respond_streaming, respond_whole};
use crate::shape::Shape;
use crate::voice::Voice;

/// Requests that are understood at once; a prompt is gone over by one thread.
pub(crate) const READERS: usize = 2;

/// What understanding a request takes for each byte of its body, about: its JSON, messages for the template, the
/// prompt, its tokens.
pub(crate) const READING: usize = 8;

/// Values that a body may hold, beside the tokens of a prompt: some hundred bytes each when they are read.
const MAX_VALUES: usize = 1 << 17;

/// A request that is understood: nothing of it can fail any more but the engine's taking it.
pub(crate) struct Ask {
    pub(crate) params: Params,
    pub(crate) prompts: Vec<Prompt>,
    /// Log-probabilities of the answer's tokens, and of this many rivals.
    pub(crate) logprobs: Option<u8>,
    /// The field that holds the prompt.
    pub(crate) param: &'static str,
    /// Whether the answer is streamed.
    pub(crate) stream: bool,
    /// How the answer looks.
    pub(crate) shape: Box<dyn Shape>,
}

/// One prompt.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) marks: Vec<usize>,
    /// Reads the answers to it.
    pub(crate) reader: AnswerReader,
    pub(crate) echo: Option<Echo>,
}

impl Prompt {
    /// What is left if only so many of its last tokens are kept.
    fn of_the_last(mut self, tokens: Option<usize>) -> Prompt {
        let cut = self.tokens.len().saturating_sub(tokens.unwrap_or(usize::MAX));
        self.tokens.drain(..cut);
        self.marks = self.marks.iter().filter_map(|mark| mark.checked_sub(cut)).collect();
        self
    }
}

/// Answers a request of any interface; `understand` reads it.
///
/// # Errors
/// Everything that can be wrong with a request, before any header of a stream is out.
pub(crate) async fn answer(
    app: Arc<App>,
    request: HttpRequest,
    understand: fn(&App, &Fields<'_>) -> Result<Ask, ApiError>,
) -> Result<Response, ApiError> {
    let ask = read(&app, request, move |app, fields| {
        let ask = understand(app, fields)?;
        check_choices(&ask, app.ready()?.limits().queue)?;
        Ok(ask)
    });
    let Ask { params, prompts, logprobs, param, stream, shape } = ask.await?;
    let (requests, shares) = engine_requests(&app.model.tokenizer, params, prompts, logprobs);
    let under_way = app.begin_answer();
    let streams = app.submit(requests, param)?;
    let answer = Answer::new(streams, shares, under_way);
    if stream {
        Ok(respond_streaming(answer, shape, app.options.comment_interval))
    } else {
        respond_whole(answer, shape).await
    }
}

/// Reads the body of a request and understands it, on a thread that nobody's stream waits for: a long prompt takes a
/// while to parse, render and tokenise.
///
/// # Errors
/// What is wrong with the body, and what `understand` says.
pub(crate) async fn read<T: Send + 'static>(
    app: &Arc<App>,
    request: HttpRequest,
    understand: impl FnOnce(&App, &Fields<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (parts, body): (_, Body) = request.into_parts();
    // Also where it will be refused: a client reads no error before it has written its request.
    let body = read_body(&parts.headers, body, &app.options, &app.bodies).await?;
    check_origin(&parts.headers)?;
    let limits = app.ready()?.limits();
    let app = app.clone();
    // The semaphore is never closed.
    let reader = app.readers.clone().acquire_owned().await;
    let understood = tokio::task::spawn_blocking(move || {
        let _reader = reader;
        let body = fields::parse(body.bytes(), MAX_VALUES + limits.context)?;
        let fields = Fields::of(&body);
        check_model(&app, &fields)?;
        understand(&app, &fields)
    });
    understood
        .await
        .map_err(|_| ApiError::failed("internal_error", "Reading the request failed.".to_string()))?
}

/// A browser lets any page send what a form could send; for JSON it asks this server first, which then knows the page
/// ([`Cors`](crate::Cors)). Programs that are no browsers send no origin, and any type they like.
fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let of_a_page = headers.contains_key(header::ORIGIN);
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if of_a_page && !kind.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::not_json());
    }
    Ok(())
}

/// A request that asks for more answers than may wait would be refused for ever.
fn check_choices(ask: &Ask, most: usize) -> Result<(), ApiError> {
    let choices = ask.prompts.len() * ask.params.choices as usize;
    if choices <= most {
        return Ok(());
    }
    let message = format!(
        "The request asks for {choices} answers ({} prompts, 'n' {}); this server takes {most} at most.",
        ask.prompts.len(),
        ask.params.choices
    );
    Err(ApiError::invalid(Some("n".to_string()), message))
}

/// The model of the request is the one that is served, or none is named, or all names mean it.
fn check_model(app: &App, body: &Fields<'_>) -> Result<(), ApiError> {
    match body.text("model")? {
        Some(name) if !app.serves(name) => Err(ApiError::no_model(name, &app.model.name)),
        _ => Ok(()),
    }
}

/// A request for each prompt, and what hears its answers.
fn engine_requests(
    tokenizer: &Arc<Tokenizer>,
    params: Params,
    prompts: Vec<Prompt>,
    logprobs: Option<u8>,
) -> (Vec<Request>, Vec<Share>) {
    let Params { sampling, choices, max_tokens, stops, show_stop, ends, limits, keep_last, .. } = params;
    let watch = Stops::new(stops.clone());
    let request = |prompt: Prompt| {
        let Prompt { tokens, marks, reader, echo } = prompt.of_the_last(keep_last);
        let hearing = Hearing::new(tokenizer, reader).until(watch.clone(), limits.at_least, show_stop);
        let scores_of_prompt = echo.as_ref().filter(|echo| !echo.scores.is_empty());
        let request = Request {
            marks,
            sampling: sampling.clone(),
            choices,
            max_tokens,
            end_tokens: ends.clone(),
            cut: (!stops.is_empty()).then(|| hearing.cut()),
            constraint: limits.clone().around(None, &ends, tokenizer.vocab_len()),
            logprobs,
            prompt_logprobs: scores_of_prompt.and(logprobs),
            ..Request::new(tokens)
        };
        let voices = std::iter::repeat_with(|| Voice::new(hearing.clone())).take(choices as usize).collect();
        let share = Share { prompt: request.prompt.len(), voices, echo };
        (request, share)
    };
    prompts.into_iter().map(request).unzip()
}
