//! What all handlers share: the model's text side, the engine once it is there, and how many answers are under way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use motet_engine::{Engine, Request, Stream, SubmitError};
use motet_text::{ChatTemplate, Tokenizer};
use tokio::sync::{Semaphore, watch};

use crate::ask::READERS;
use crate::body::Bodies;
use crate::errors::ApiError;
use crate::metrics::HttpCounters;
use crate::server::ServerOptions;

/// The text side of the model that is served.
#[derive(Debug)]
pub struct Model {
    /// The name it is served under.
    pub name: String,
    /// Other names a request may use: the file's stem, an alias.
    pub aliases: Vec<String>,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to a prompt.
    pub template: ChatTemplate,
}

impl Model {
    /// Whether a request for `name` means this model; Ollama's clients add a tag to each name.
    pub(crate) fn answers_to(&self, name: &str) -> bool {
        let is = |name: &str| self.name == name || self.aliases.iter().any(|alias| alias == name);
        is(name) || name.strip_suffix(":latest").is_some_and(is)
    }
}

/// The state behind all handlers.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) model: Arc<Model>,
    /// Seconds since 1970 at which the server began.
    pub(crate) created: u64,
    pub(crate) counters: HttpCounters,
    pub(crate) bodies: Arc<Bodies>,
    /// A permit for each request that is being understood.
    pub(crate) readers: Arc<Semaphore>,
    engine: OnceLock<Engine>,
    draining: AtomicBool,
    answers: watch::Sender<usize>,
}

/// Where the server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Loading,
    Serving,
    Draining,
}

impl App {
    pub(crate) fn new(options: ServerOptions, model: Arc<Model>) -> App {
        App {
            options,
            model,
            created: now(),
            counters: HttpCounters::default(),
            bodies: Arc::default(),
            readers: Arc::new(Semaphore::new(READERS)),
            engine: OnceLock::new(),
            draining: AtomicBool::new(false),
            answers: watch::Sender::new(0),
        }
    }

    /// Whether a request for `name` is answered.
    pub(crate) fn serves(&self, name: &str) -> bool {
        self.options.any_model || self.model.answers_to(name)
    }

    /// Hands the engine in; from now on requests are taken.
    pub(crate) fn start(&self, engine: Engine) {
        // A second engine cannot come: `serve` has one.
        let _ = self.engine.set(engine);
    }

    /// No new requests from now on; those under way go on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        if let Some(engine) = self.engine.get() {
            engine.drain();
        }
    }

    /// The phase.
    pub(crate) fn phase(&self) -> Phase {
        if self.draining.load(Ordering::Acquire) {
            Phase::Draining
        } else if self.engine.get().is_none() {
            Phase::Loading
        } else {
            Phase::Serving
        }
    }

    /// The engine, in whatever phase.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        self.engine.get()
    }

    /// The engine, if requests are taken.
    ///
    /// # Errors
    /// 503 while loading and while draining.
    pub(crate) fn ready(&self) -> Result<&Engine, ApiError> {
        match (self.phase(), self.engine.get()) {
            (Phase::Draining, _) => Err(draining()),
            (_, Some(engine)) => Ok(engine),
            (_, None) => Err(ApiError::unavailable("loading", "The model is still loading.".to_string(), 1)),
        }
    }

    /// Submits all requests or none. `param` is the field that holds the prompt.
    ///
    /// # Errors
    /// 400 where a request is wrong or too long, 503 where there is no room for it now.
    pub(crate) fn submit(
        &self,
        requests: Vec<Request>,
        param: &'static str,
    ) -> Result<Vec<Stream>, ApiError> {
        let engine = self.ready()?;
        let submit = |request| engine.submit(request).map_err(|error| refusal(&error, param));
        requests.into_iter().map(submit).collect()
    }

    /// Counts an answer until the guard is dropped.
    pub(crate) fn begin_answer(self: &Arc<Self>) -> AnswerGuard {
        self.answers.send_modify(|count| *count += 1);
        AnswerGuard(self.clone())
    }

    /// How many answers are under way.
    pub(crate) fn answers_under_way(&self) -> usize {
        *self.answers.borrow()
    }

    /// Returns when no answer is under way.
    pub(crate) async fn all_answered(&self) {
        // The sender lives as long as `self`: waiting cannot fail.
        let _ = self.answers.subscribe().wait_for(|&count| count == 0).await;
    }
}

/// An answer under way.
pub(crate) struct AnswerGuard(Arc<App>);

impl Drop for AnswerGuard {
    fn drop(&mut self) {
        self.0.answers.send_modify(|count| *count -= 1);
    }
}

fn draining() -> ApiError {
    ApiError::unavailable("draining", "The server is shutting down and takes no new requests.".to_string(), 5)
}

/// Why the engine did not take a request, in the interface's words.
fn refusal(error: &SubmitError, param: &'static str) -> ApiError {
    match error {
        SubmitError::TooLong { prompt, context } => ApiError::too_long(param, *prompt, *context),
        SubmitError::NeverFits { .. } => ApiError::never_fits(param, sentence(error)),
        SubmitError::QueueFull { retry_after, .. } => {
            let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
            ApiError::unavailable("queue_full", sentence(error), seconds.max(1))
        }
        SubmitError::Invalid { field, what } => {
            ApiError::invalid(Some((*field).to_string()), format!("'{field}' is invalid: {what}."))
        }
        SubmitError::Draining => draining(),
        SubmitError::Closed => ApiError::unavailable("engine_closed", sentence(error), 5),
    }
}

/// An error as a sentence.
pub(crate) fn sentence(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| format!("{}{}.", first.to_uppercase(), chars.as_str()))
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
