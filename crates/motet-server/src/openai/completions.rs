//! `POST /v1/completions`: a prompt goes on, without a template.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use motet_text::{Special, Tokenizer};
use serde_json::Value;

use crate::answer::{Echo, Part, Tally, Whole};
use crate::app::App;
use crate::ask::{self, Ask, Prompt};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::openai::chat::{StreamUsage, finite, read_stream};
use crate::openai::shapes::{Head, Reply, Rivals, TextChoice, TextLogprobs, finish_reason, token_text};
use crate::params::{MAX_TOP, read_params, token_ids};
use crate::reader::{AnswerReader, Said};
use crate::shape::{Events, Shape, json};
use crate::voice::{Piece, Score};

/// Prompts a request may hold.
const MAX_PROMPTS: usize = 128;

/// Completes one prompt or several.
pub(crate) async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    ask::answer(app, request, understand).await
}

fn understand(app: &App, fields: &Fields<'_>) -> Result<Ask, ApiError> {
    let tokenizer = &app.model.tokenizer;
    let params = read_params(fields, tokenizer, 0)?;
    let logprobs = fields.integer("logprobs", 0..=MAX_TOP)?.map(|top| top as u8);
    let streaming = read_stream(fields)?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(fields
            .unsupported("suffix", "'suffix' is not supported: text cannot be inserted on this server."));
    }
    if fields.integer("best_of", 1..=i64::MAX)?.is_some_and(|best_of| best_of != i64::from(params.choices)) {
        return Err(fields.unsupported("best_of", "'best_of' must equal 'n': all answers are returned."));
    }
    let prompt = |given: Given<'_>| {
        let echo = echo.then(|| echo_of(tokenizer, &given, logprobs.is_some()));
        Prompt { tokens: given.tokens, marks: Vec::new(), reader: AnswerReader::plain(), echo }
    };
    let prompts: Vec<Prompt> = read_prompts(tokenizer, fields)?.into_iter().map(prompt).collect();
    let choices = prompts.len() * params.choices as usize;
    let shape = TextShape {
        head: Head::new("cmpl", "text_completion", app, &params),
        tokenizer: tokenizer.clone(),
        logprobs: logprobs.is_some(),
        usage: streaming.unwrap_or_default(),
        echoed: vec![0; choices],
    };
    Ok(Ask {
        params,
        prompts,
        logprobs,
        param: "prompt",
        stream: streaming.is_some(),
        shape: Box::new(shape),
    })
}

/// A prompt as it came.
struct Given<'a> {
    /// `None` where it came as token ids.
    text: Option<&'a str>,
    tokens: Vec<u32>,
}

/// The prompts: a text, its token ids, or a list of either.
fn read_prompts<'a>(tokenizer: &Tokenizer, fields: &Fields<'a>) -> Result<Vec<Given<'a>>, ApiError> {
    let wrong = || fields.must_be("prompt", "a string, an array of token ids, or an array of either");
    let text =
        |text: &'a str| Given { text: Some(text), tokens: tokenizer.encode_prompt(text, Special::Parse) };
    let ids = |values, place: &str| {
        let tokens = token_ids(values, tokenizer.vocab_len(), place)?;
        Ok(Given { text: None, tokens })
    };
    let prompts = match fields.get("prompt") {
        Some(Value::String(prompt)) => vec![text(prompt)],
        Some(Value::Array(values)) => match values.first() {
            Some(Value::Number(_)) => vec![ids(values, "prompt")?],
            _ if values.len() > MAX_PROMPTS => {
                let what = format!("may hold {MAX_PROMPTS} prompts at most, but holds {}", values.len());
                return Err(fields.wrong("prompt", &what));
            }
            _ => {
                let read = |(index, value): (usize, &'a Value)| match value {
                    Value::String(prompt) => Ok(text(prompt)),
                    Value::Array(values) => ids(values, &format!("prompt[{index}]")),
                    _ => Err(wrong()),
                };
                values.iter().enumerate().map(read).collect::<Result<_, _>>()?
            }
        },
        _ => return Err(wrong()),
    };
    if prompts.is_empty() || prompts.iter().any(|prompt| prompt.tokens.is_empty()) {
        let message = "'prompt' must hold at least one token, but is empty.".to_string();
        return Err(ApiError::invalid(Some("prompt".to_string()), message));
    }
    Ok(prompts)
}

/// What is repeated of a prompt.
fn echo_of(tokenizer: &Tokenizer, given: &Given<'_>, scored: bool) -> Echo {
    let bytes: Vec<u8> = given.tokens.iter().flat_map(|&token| tokenizer.piece(token)).copied().collect();
    let text = given.text.map_or_else(|| String::from_utf8_lossy(&bytes).into_owned(), str::to_string);
    if !scored {
        return Echo::new(text, Vec::new());
    }
    let chars = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte & 0xc0 != 0x80).count();
    // The tokens may spell more than the text: a beginning-of-sequence token or a space before it.
    let before = chars(&bytes).saturating_sub(text.chars().count());
    let mut so_far = 0;
    let score = |&token: &u32| {
        let offset = so_far;
        so_far += chars(tokenizer.piece(token));
        Score { token, logprob: None, top: Vec::new(), offset: offset.saturating_sub(before) }
    };
    let scores = given.tokens.iter().map(score).collect();
    Echo::new(text, scores)
}

struct TextShape {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    /// Whether log-probabilities were asked for.
    logprobs: bool,
    usage: StreamUsage,
    /// For each choice, the characters of its text that are its prompt.
    echoed: Vec<usize>,
}

impl Shape for TextShape {
    fn part(&mut self, part: Part, tally: &Tally, events: &mut Events) {
        let mut logprobs = TextLogprobs::default();
        let (index, text, finish_reason) = match part {
            Part::Started { .. } | Part::Begin { echo: None, .. } => return,
            Part::Begin { index, echo: Some(echo) } => {
                self.append(&mut logprobs, &echo.scores, 0);
                self.echoed[index as usize] = echo.text.chars().count();
                (index, echo.text.clone(), None)
            }
            Part::Goes { index, piece: Piece { said, scores } } => {
                self.append(&mut logprobs, &scores, self.echoed[index as usize]);
                let text = said.into_iter().filter_map(|said| match said {
                    Said::Text(text) => Some(text),
                    // A completion is read plainly: it has text only.
                    _ => None,
                });
                (index, text.collect(), None)
            }
            Part::End { index, reason } => (index, String::new(), Some(finish_reason(&reason))),
        };
        let timings = finish_reason.map(|_| tally.into());
        let logprobs = (self.logprobs && finish_reason.is_none()).then_some(logprobs);
        let choices = vec![TextChoice { text, index, logprobs, finish_reason }];
        events.push(&Reply { head: &self.head, choices, usage: self.usage.so_far(tally), timings });
    }

    fn close(&mut self, tally: &Tally, events: &mut Events) {
        if self.usage.at_the_end {
            let usage = Some(Some(tally.into()));
            let timings = Some(tally.into());
            events.push(&Reply::<TextChoice> { head: &self.head, choices: Vec::new(), usage, timings });
        }
        events.push_word("[DONE]");
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.push(&error.envelope());
    }

    fn whole(&mut self, choices: Vec<Whole>, tally: &Tally) -> String {
        let choices = (0..).zip(choices).map(|(index, whole)| self.choice(index, &whole)).collect();
        json(&Reply {
            head: &self.head,
            choices,
            usage: Some(Some(tally.into())),
            timings: Some(tally.into()),
        })
    }
}

impl TextShape {
    fn choice(&self, index: u32, whole: &Whole) -> TextChoice {
        let echo = whole.echo.as_deref();
        let echoed = echo.map_or("", |echo| &echo.text);
        let mut logprobs = TextLogprobs::default();
        self.append(&mut logprobs, echo.map_or(&[], |echo| &echo.scores), 0);
        self.append(&mut logprobs, &whole.scores, echoed.chars().count());
        TextChoice {
            text: echoed.to_string() + &whole.text(),
            index,
            logprobs: self.logprobs.then_some(logprobs),
            finish_reason: Some(finish_reason(&whole.reason)),
        }
    }

    /// Appends scores of tokens whose offsets count from `before`.
    fn append(&self, columns: &mut TextLogprobs, scores: &[Score], before: usize) {
        let text = |token| token_text(self.tokenizer.piece(token));
        for score in scores {
            columns.tokens.push(text(score.token));
            columns.token_logprobs.push(score.logprob.map(finite));
            let rivals =
                || score.top.iter().map(|&(rival, logprob)| (text(rival), finite(logprob))).collect();
            columns.top_logprobs.push(score.logprob.map(|_| Rivals(rivals())));
            columns.text_offset.push(before + score.offset);
        }
    }
}
