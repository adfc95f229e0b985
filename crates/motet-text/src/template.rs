//! Chat templates: messages to one prompt, as the model's makers meant it.
//!
//! Templates are Jinja as Hugging Face's transformers renders it (`trim_blocks`, `lstrip_blocks`, loop controls,
//! Python's methods, `tojson`, `raise_exception`, `strftime_now`). A template that fails is an error with the
//! template's own message; a prompt is never made up in its place.

use std::error::Error as _;
use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use motet_gguf::Metadata;
use serde_json::Value as Json;

use crate::json::{escape_beyond_ascii, to_json};
use crate::{TextError, Tokenizer};

/// What is used where the file has no template.
const CHATML: &str = "\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Steps after which a template is taken to run for ever.
const FUEL: u64 = 20_000_000;

/// How many of the newest messages get a [mark](Rendered::marks), besides the first.
const MARKED: usize = 15;

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    is_default: bool,
    tokens: Vec<(&'static str, String)>,
}

/// What a template is given.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conversation<'a> {
    /// Messages in OpenAI's shape (`role`, `content`, `tool_calls`, …), oldest first.
    pub messages: &'a [Json],
    /// Tools in OpenAI's shape.
    pub tools: Option<&'a [Json]>,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// The request's `chat_template_kwargs`: more variables, which may not replace the ones above.
    pub kwargs: Option<&'a serde_json::Map<String, Json>>,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt. Special tokens stand in it by name.
    pub prompt: String,
    /// Byte offsets in the prompt at which messages end, ascending: those of the first and the newest ones, as far as
    /// the conversation up to there renders to a true prefix of the prompt.
    pub marks: Vec<usize>,
}

impl ChatTemplate {
    /// The template of a model file, or ChatML where it has none.
    ///
    /// # Errors
    /// A key of the wrong type; a syntax error in the template.
    pub fn from_gguf(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<ChatTemplate, TextError> {
        let source = metadata.optional::<&str>("tokenizer.chat_template")?;
        let name = |id: Option<u32>| id.map(|id| String::from_utf8_lossy(tokenizer.piece(id)).into_owned());
        ChatTemplate::new(source, name(tokenizer.bos()).as_deref(), name(tokenizer.eos()).as_deref())
    }

    /// A template from its text (ChatML if there is none) and the names of the tokens it may use.
    ///
    /// # Errors
    /// A syntax error in the template.
    pub fn new(
        source: Option<&str>,
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<ChatTemplate, TextError> {
        let is_default = source.is_none();
        let source = without_generation_tags(source.unwrap_or(CHATML));
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment
            .set_syntax(syntax.map_err(|error| TextError::TemplateSyntax { message: message_of(&error) })?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_test("iterable", is_iterable);
        environment.add_test("sequence", is_sequence);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned("chat template", source.clone())
            .map_err(|error| TextError::TemplateSyntax { message: message_of(&error) })?;
        let tokens = [("bos_token", bos), ("eos_token", eos)];
        let tokens = tokens.into_iter().filter_map(|(name, text)| Some((name, text?.to_owned()))).collect();
        Ok(ChatTemplate { environment, source, is_default, tokens })
    }

    /// Whether this is ChatML in place of a template that the file does not have.
    pub fn is_default(&self) -> bool {
        self.is_default
    }

    /// Whether the template knows `<think>`, so that answers to it may hold reasoning.
    pub fn has_reasoning(&self) -> bool {
        self.source.contains("<think>")
    }

    /// Renders a conversation, and marks where its messages end.
    ///
    /// # Errors
    /// [`TextError::Template`] with the template's own message.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<Rendered, TextError> {
        let messages: Vec<Value> =
            conversation.messages.iter().map(|message| Value::from(Serde(self.readable(message)))).collect();
        let prompt = self
            .render_first(&messages, conversation, conversation.add_generation_prompt)
            .map_err(|error| TextError::Template { message: message_of(&error) })?;

        let mut marks = Vec::new();
        let newest = messages.len().saturating_sub(MARKED).max(2);
        for count in (1..=messages.len()).filter(|&count| count == 1 || count >= newest) {
            let Ok(beginning) = self.render_first(&messages[..count], conversation, false) else { continue };
            let last = marks.last().copied().unwrap_or(0);
            if beginning.len() > last && prompt.starts_with(&beginning) {
                marks.push(beginning.len());
            }
        }
        Ok(Rendered { prompt, marks })
    }

    /// A message of OpenAI's API as templates expect it: a developer is the system where the template knows no
    /// developers, a list of text parts is one text, and the arguments of tool calls are JSON, not text that holds it.
    fn readable(&self, message: &Json) -> Json {
        let mut message = message.clone();
        if message["role"] == "developer" && !self.source.contains("developer") {
            message["role"] = "system".into();
        }
        let text =
            |part: &Json| (part["type"] == "text").then(|| part["text"].as_str().map(str::to_owned))?;
        let parts = message["content"].as_array().filter(|parts| !parts.is_empty());
        if let Some(parts) = parts.and_then(|parts| parts.iter().map(text).collect::<Option<Vec<String>>>()) {
            message["content"] = parts.join("\n").into();
        }
        let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
        for call in calls.into_iter().flatten() {
            let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
            let parsed = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
            if let Some(parsed @ Json::Object(_)) = parsed {
                *arguments = parsed;
            }
        }
        message
    }

    fn render_first(
        &self,
        messages: &[Value],
        conversation: &Conversation<'_>,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let given = [
            ("messages", Value::from(messages.to_vec())),
            ("tools", conversation.tools.map_or(Value::from(()), |tools| Value::from(Serde(tools)))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        let tokens = self.tokens.iter().map(|(name, text)| (*name, Value::from(text.as_str())));
        let kwargs = conversation.kwargs.into_iter().flatten();
        let kwargs = kwargs.map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        // Of equal names the last one counts.
        let context = Value::from_pairs(tokens.chain(kwargs).chain(given));
        self.environment.get_template("chat template")?.render(context)
    }
}

/// `{% generation %}` and `{% endgeneration %}` only mark text for training; blocks of a condition that holds stand in.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        let Some((inside, after)) = tag.split_once("%}") else { break };
        out.push_str(before);
        match inside.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => out.push_str(&inside.replace("endgeneration", "endif")),
            _ => out.push_str(inside),
        }
        out.push_str("%}");
        rest = after;
    }
    out + rest
}

/// Marks an error as the template's own.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(Raised(message.to_owned())))
}

/// The template's own message, or what went wrong in it and where.
fn message_of(error: &Error) -> String {
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(Raised(message)) = source.downcast_ref() {
            return message.clone();
        }
        cause = source.source();
    }
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    error.line().map_or(what.clone(), |line| format!("{what} (line {line} of the template)"))
}

/// The time of day in this place, by strftime's rules.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now = jiff::Zoned::now();
    jiff::fmt::strtime::format(format, &now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

/// `tojson` of transformers: Python's `json.dumps`, with its spaces, and nothing escaped for HTML.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut json: Json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}")))?;
    if sort_keys {
        json.sort_all_objects();
    }
    let separators =
        separators.as_deref().and_then(|pair| Some((pair.first()?.as_str(), pair.get(1)?.as_str())));
    let text = to_json(&json, indent, separators);
    Ok(if ascii { escape_beyond_ascii(&text) } else { text })
}

/// Jinja's test: None cannot be iterated, text and what is undefined can.
fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Bytes, Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Seq | Map | Iterable | String | Bytes | Undefined)
}

/// Jinja's test: what has a length and items, which text and mappings have too.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Bytes, Map, Seq, String, Undefined};
    matches!(value.kind(), Seq | Map | String | Bytes | Undefined)
}
