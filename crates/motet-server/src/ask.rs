//! From a request of the interface to requests of the engine, and from the answer back to a response.
//!
//! Chat and text completions differ in what their prompt is and in how a choice looks; everything between is here.

use std::sync::Arc;

use axum::extract::Request as HttpRequest;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, body::Body};
use motet_engine::{Cut, CutMaker, Request};
use motet_text::{Detokenizer, ReasoningSplit, Stops, Tokenizer};
use serde::Serialize;

use crate::answer::{Answer, Echo, Part, Share, Whole, whole};
use crate::app::{App, Model, now};
use crate::body::read_body;
use crate::errors::ApiError;
use crate::fields::{self, Fields};
use crate::params::{Params, random};
use crate::shapes::{Head, Reply};
use crate::sse;
use crate::voice::Voice;

/// Requests that are understood at once; a prompt is gone over by one thread.
pub(crate) const READERS: usize = 2;

/// What understanding a request takes for each byte of its body, about: its JSON, messages for the template, the
/// prompt, its tokens.
pub(crate) const READING: usize = 8;

/// Values that a body may hold, beside the tokens of a prompt: some hundred bytes each when they are read.
const MAX_VALUES: usize = 1 << 17;

/// A request that is understood: nothing of it can fail any more but the engine's taking it.
pub(crate) struct Ask<S> {
    pub(crate) params: Params,
    pub(crate) prompts: Vec<Prompt>,
    /// Log-probabilities of the answer's tokens, and of this many rivals.
    pub(crate) logprobs: Option<u8>,
    /// The field that holds the prompt.
    pub(crate) param: &'static str,
    /// How the choices of the response look.
    pub(crate) shape: S,
}

/// One prompt.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) marks: Vec<usize>,
    pub(crate) split: ReasoningSplit,
    pub(crate) echo: Option<Echo>,
}

/// How an answer looks in one of the two interfaces.
pub(crate) trait Shape: Send + Sync + 'static {
    /// A choice of a whole answer.
    type Choice: Serialize;
    /// A choice of a chunk.
    type Chunk: Serialize + Send;
    /// Prefix of the answer's id.
    const ID: &'static str;
    /// What `object` says of a whole answer, and of a chunk.
    const OBJECTS: [&'static str; 2];

    /// A whole choice.
    fn choice(&self, index: u32, whole: Whole) -> Self::Choice;
    /// A chunk for a part; none where the interface has nothing to say.
    fn chunk(&mut self, part: Part) -> Option<Self::Chunk>;
}

/// Reads a body into an [`Ask`].
type Understand<S> = fn(&Model, &Fields<'_>) -> Result<Ask<S>, ApiError>;

/// Answers a request of either interface; `understand` reads it.
///
/// # Errors
/// Everything that can be wrong with a request, before any header of a stream is out.
pub(crate) async fn answer<S: Shape>(
    app: Arc<App>,
    request: HttpRequest,
    understand: Understand<S>,
) -> Result<Response, ApiError> {
    let (parts, body): (_, Body) = request.into_parts();
    // Also where it will be refused: a client reads no error before it has written its request.
    let body = read_body(&parts.headers, body, &app.options, &app.bodies).await?;
    check_origin(&parts.headers)?;
    let limits = app.ready()?.limits();
    let model = app.model.clone();
    // The semaphore is never closed.
    let reader = app.readers.clone().acquire_owned().await;
    // A long prompt takes a while to parse, render and tokenise: not on a thread that others' streams wait for.
    let ask = tokio::task::spawn_blocking(move || {
        let _reader = reader;
        let body = fields::parse(body.bytes(), MAX_VALUES + limits.context)?;
        let fields = Fields::of(&body);
        check_model(&model, &fields)?;
        let ask = understand(&model, &fields)?;
        check_choices(&ask, limits.queue)?;
        Ok(ask)
    });
    let ask = ask
        .await
        .map_err(|_| ApiError::failed("internal_error", "Reading the request failed.".to_string()))??;

    let Ask { params, prompts, logprobs, param, mut shape } = ask;
    let streaming = params.stream.is_some();
    let head = Head {
        id: format!("{}-{:016x}{:016x}", S::ID, random(), random()),
        object: S::OBJECTS[usize::from(streaming)],
        created: now(),
        model: app.model.name.clone(),
        system_fingerprint: concat!("motet-", env!("CARGO_PKG_VERSION")),
        seed: params.seed,
    };
    let stream_options = params.stream;
    let (requests, shares) = engine_requests(&app.model.tokenizer, params, prompts, logprobs);
    let under_way = app.begin_answer();
    let streams = app.submit(requests, param)?;
    let answer = Answer::new(streams, shares, under_way);

    if let Some(options) = stream_options {
        return Ok(sse::respond(answer, head, options, app.options.comment_interval, move |part| {
            shape.chunk(part)
        }));
    }
    let (wholes, usage) = whole(answer).await?;
    let choices: Vec<_> = (0..).zip(wholes).map(|(index, whole)| shape.choice(index, whole)).collect();
    Ok(Json(Reply { head: &head, choices, usage: Some(Some(usage)) }).into_response())
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
fn check_choices<S>(ask: &Ask<S>, most: usize) -> Result<(), ApiError> {
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

/// The model of the request is the one that is served, or none is named.
fn check_model(model: &Model, body: &Fields<'_>) -> Result<(), ApiError> {
    match body.text("model")? {
        Some(name) if !model.answers_to(name) => Err(ApiError::no_model(name, &model.name)),
        _ => Ok(()),
    }
}

/// A request for each prompt, and what turns its tokens into text.
fn engine_requests(
    tokenizer: &Arc<Tokenizer>,
    params: Params,
    prompts: Vec<Prompt>,
    logprobs: Option<u8>,
) -> (Vec<Request>, Vec<Share>) {
    let Params { sampling, choices, max_tokens, stops, ignore_eos, .. } = params;
    let watch = Stops::new(stops.clone());
    let request = |prompt: Prompt| {
        let scores_of_prompt = prompt.echo.as_ref().filter(|echo| !echo.scores.is_empty());
        let request = Request {
            marks: prompt.marks,
            sampling: sampling.clone(),
            choices,
            max_tokens,
            end_tokens: if ignore_eos { Vec::new() } else { tokenizer.ends().to_vec() },
            cut: (!stops.is_empty()).then(|| cut_at(tokenizer, &watch)),
            logprobs,
            prompt_logprobs: scores_of_prompt.and(logprobs),
            ..Request::new(prompt.tokens)
        };
        let voice = || Voice::new(tokenizer, watch.clone(), prompt.split.clone());
        let voices = std::iter::repeat_with(voice).take(choices as usize).collect();
        (request, Share { voices, echo: prompt.echo })
    };
    prompts.into_iter().map(request).unzip()
}

/// Ends an answer with the token that completes a stop string.
struct StopCut {
    detokenizer: Detokenizer,
    stops: Stops,
}

impl Cut for StopCut {
    fn push(&mut self, token: u32) -> bool {
        self.stops.push(self.detokenizer.push(token)).hit.is_some()
    }
}

fn cut_at(tokenizer: &Arc<Tokenizer>, stops: &Stops) -> CutMaker {
    let (detokenizer, stops) = (tokenizer.stream(), stops.clone());
    Box::new(move || Box::new(StopCut { detokenizer: detokenizer.clone(), stops: stops.clone() }))
}
