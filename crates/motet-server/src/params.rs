//! The parameters that all interfaces share, under OpenAI's names and those that other servers gave them, each checked
//! against its range.
//!
//! What would change the answer and can't be done here is refused by its name, never dropped.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use motet_engine::SamplingOptions;
use motet_text::{Special, Tokenizer};
use serde_json::Value;

use crate::errors::{ApiError, shown};
use crate::fields::{Fields, whole};
use crate::limits::{MAX_BAD_WORDS, TokenLimits};

/// Stop strings a request may name, and the bytes each may have.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// Tokens that a request may let end an answer.
const MAX_ENDS: usize = 256;

/// Answers a request may ask for.
const MAX_CHOICES: i64 = 128;

/// Rivals of a token whose log-probabilities may be asked for.
pub(crate) const MAX_TOP: i64 = 20;

/// How to answer, apart from the prompt.
#[derive(Debug, Clone)]
pub(crate) struct Params {
    pub(crate) sampling: SamplingOptions,
    /// The seed as the client sees it.
    pub(crate) seed: i64,
    pub(crate) choices: u32,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    /// Whether a stop string that was hit is part of the answer.
    pub(crate) show_stop: bool,
    /// Tokens that end an answer.
    pub(crate) ends: Vec<u32>,
    /// What tokens may come, grammars apart.
    pub(crate) limits: TokenLimits,
    /// Of a longer prompt so many of the last tokens are kept.
    pub(crate) keep_last: Option<usize>,
}

/// Reads the parameters; `least_tokens` is the least `max_tokens`.
///
/// # Errors
/// 400 that names the parameter.
pub(crate) fn read_params(
    body: &Fields<'_>,
    tokenizer: &Tokenizer,
    least_tokens: i64,
) -> Result<Params, ApiError> {
    refuse_what_is_not_done(body)?;
    let vocab = tokenizer.vocab_len();
    let seed = body.integer("seed", i64::MIN..=i64::MAX)?.unwrap_or_else(random_seed);
    let number = |field, range, usual: f64| Ok(body.number(field, range)?.unwrap_or(usual) as f32);
    let repetition =
        if body.get("repetition_penalty").is_some() { "repetition_penalty" } else { "repeat_penalty" };
    let sampling = SamplingOptions {
        seed: Some(seed.cast_unsigned()),
        temperature: number("temperature", 0.0..=2.0, 1.0)?,
        top_k: body.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0).max(0) as u32,
        top_p: number("top_p", 0.0..=1.0, 1.0)?,
        min_p: number("min_p", 0.0..=1.0, 0.0)?,
        repetition_penalty: number(repetition, 0.01..=100.0, 1.0)?,
        frequency_penalty: number("frequency_penalty", -2.0..=2.0, 0.0)?,
        presence_penalty: number("presence_penalty", -2.0..=2.0, 0.0)?,
        logit_bias: read_logit_bias(body, vocab)?,
    };
    let limit = |field, least| body.integer(field, least..=i64::MAX);
    let max_tokens = limit("max_completion_tokens", least_tokens)?.or(limit("max_tokens", least_tokens)?);
    // llama.cpp's name, with -1 for no limit.
    let max_tokens = max_tokens.or(limit("n_predict", -1)?.filter(|&tokens| tokens >= least_tokens));
    let mut ends =
        if body.flag("ignore_eos")?.unwrap_or(false) { Vec::new() } else { tokenizer.ends().to_vec() };
    ends.extend(read_tokens(body, "stop_token_ids", vocab, MAX_ENDS)?.unwrap_or_default());
    Ok(Params {
        sampling,
        seed,
        choices: body.integer("n", 1..=MAX_CHOICES)?.unwrap_or(1) as u32,
        max_tokens: max_tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX)),
        stops: read_stops(body, "stop")?,
        show_stop: body.flag("include_stop_str_in_output")?.unwrap_or(false),
        limits: TokenLimits {
            at_least: body.integer("min_tokens", 0..=i64::MAX)?.unwrap_or(0) as usize,
            allowed: read_tokens(body, "allowed_token_ids", vocab, vocab)?,
            bad_words: read_bad_words(body, tokenizer)?,
        },
        ends,
        keep_last: body.integer("truncate_prompt_tokens", -1..=i64::MAX)?.and_then(|last| match last {
            0.. => Some(usize::try_from(last).unwrap_or(usize::MAX)),
            _ => None,
        }),
    })
}

impl Params {
    /// Params for an interface that names them in its own way: OpenAI's defaults and a random seed.
    pub(crate) fn usual(tokenizer: &Tokenizer) -> Params {
        let seed = random_seed();
        Params {
            sampling: SamplingOptions { seed: Some(seed.cast_unsigned()), ..SamplingOptions::default() },
            seed,
            choices: 1,
            max_tokens: None,
            stops: Vec::new(),
            show_stop: false,
            ends: tokenizer.ends().to_vec(),
            limits: TokenLimits::default(),
            keep_last: None,
        }
    }
}

/// Fields of other servers that change the answer in a way that is not done here, with the values that change nothing.
const NOT_DONE: &[(&str, &[f64])] = &[
    ("typical_p", &[1.0]),
    ("tfs_z", &[1.0]),
    ("top_a", &[0.0]),
    ("top_n_sigma", &[-1.0, 0.0]),
    ("mirostat", &[0.0]),
    ("mirostat_mode", &[0.0]),
    ("dynatemp_range", &[0.0]),
    ("xtc_probability", &[0.0]),
    ("dry_multiplier", &[0.0]),
    ("smoothing_factor", &[0.0]),
    ("adaptive_target", &[-1.0]),
    ("length_penalty", &[1.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("repeat_last_n", &[-1.0]),
    ("n_keep", &[0.0]),
    ("n_discard", &[0.0]),
    ("n_indent", &[0.0]),
    ("n_probs", &[0.0]),
    ("t_max_predict_ms", &[0.0, -1.0]),
    ("prompt_logprobs", &[]),
];

/// The same, of those that are switches, with the value that changes nothing.
const NOT_SWITCHED: &[(&str, bool)] = &[
    ("use_beam_search", false),
    ("early_stopping", false),
    ("skip_special_tokens", true),
    ("return_tokens_as_token_ids", false),
    ("return_hidden_states", false),
    ("separate_reasoning", true),
    ("post_sampling_probs", false),
    ("no_stop_trim", false),
];

/// The same, of those that are texts, lists or objects, unless they are empty.
const NOT_TAKEN: &[&str] = &[
    "logits_processors",
    "custom_logit_processor",
    "samplers",
    "stop_regex",
    "lora",
    "lora_path",
    "chat_template",
    "vllm_xargs",
    "kv_transfer_params",
    "session_params",
    "control_vectors",
];

fn refuse_what_is_not_done(body: &Fields<'_>) -> Result<(), ApiError> {
    let refuse = |field: &str| {
        let message = format!(
            "'{field}' is not supported by this server, and the answer would not be what was asked for."
        );
        Err(body.unsupported(field, message))
    };
    for (field, neutral) in NOT_DONE {
        if let Some(value) = body.get(field)
            && !value.as_f64().is_some_and(|value| neutral.contains(&value))
        {
            return refuse(field);
        }
    }
    for (field, neutral) in NOT_SWITCHED {
        if body.get(field).is_some_and(|value| value.as_bool() != Some(*neutral)) {
            return refuse(field);
        }
    }
    for field in NOT_TAKEN {
        let empty = |value: &Value| match value {
            Value::String(text) => text.is_empty(),
            Value::Array(values) => values.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        if body.get(field).is_some_and(|value| !empty(value)) {
            return refuse(field);
        }
    }
    if let Some(modalities) = body.list("modalities")?
        && modalities.iter().any(|modality| modality != "text")
    {
        return Err(body
            .unsupported("modalities", "'modalities' must be ['text']: this server answers in text only."));
    }
    Ok(())
}

/// A list of token ids.
fn read_tokens(
    body: &Fields<'_>,
    field: &str,
    vocab: usize,
    most: usize,
) -> Result<Option<Vec<u32>>, ApiError> {
    let Some(values) = body.list(field)? else { return Ok(None) };
    if values.len() > most {
        let what = format!("may hold {most} token ids at most, but holds {}", values.len());
        return Err(body.wrong(field, &what));
    }
    token_ids(values, vocab, &body.name(field)).map(Some)
}

/// Texts that must not come, as the tokens they are made of: alone, and behind a space.
fn read_bad_words(body: &Fields<'_>, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, ApiError> {
    let Some(words) = body.list("bad_words")? else { return Ok(Vec::new()) };
    if words.len() > MAX_BAD_WORDS {
        let what = format!("may hold {MAX_BAD_WORDS} texts at most, but holds {}", words.len());
        return Err(body.wrong("bad_words", &what));
    }
    let mut tokens = Vec::new();
    for word in words {
        let word = word.as_str().filter(|word| (1..=MAX_STOP_BYTES).contains(&word.len()));
        let Some(word) = word else {
            let what = format!("must be an array of texts of 1 to {MAX_STOP_BYTES} bytes");
            return Err(body.wrong("bad_words", &what));
        };
        for spelled in [word.to_owned(), format!(" {}", word.trim_start())] {
            let spelled = tokenizer.encode(&spelled, Special::AsText);
            if !spelled.is_empty() && !tokens.contains(&spelled) {
                tokens.push(spelled);
            }
        }
    }
    Ok(tokens)
}

/// The token ids with their biases.
fn read_logit_bias(body: &Fields<'_>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = body.object("logit_bias")? else { return Ok(Vec::new()) };
    let read = |(token, bias): (&String, &Value)| {
        let id = token.parse::<u32>().ok().filter(|&id| (id as usize) < vocab);
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        match (id, bias) {
            (Some(id), Some(bias)) => Ok((id, bias as f32)),
            (None, _) => {
                let what = format!("must have token ids below {vocab} as keys, but has '{}'", shown(token));
                Err(body.wrong("logit_bias", &what))
            }
            (Some(id), None) => {
                let what = format!("must map token ids to numbers from -100 to 100, but does not for {id}");
                Err(body.wrong("logit_bias", &what))
            }
        }
    };
    biases.iter().map(read).collect()
}

/// The stop strings: one, or a list.
pub(crate) fn read_stops(body: &Fields<'_>, field: &str) -> Result<Vec<String>, ApiError> {
    let stops = match body.get(field) {
        None => return Ok(Vec::new()),
        Some(Value::Array(stops)) => stops.as_slice(),
        Some(stop) => std::slice::from_ref(stop),
    };
    if stops.len() > MAX_STOPS {
        let what = format!("may hold {MAX_STOPS} strings at most, but holds {}", stops.len());
        return Err(body.wrong(field, &what));
    }
    let read = |stop: &Value| match stop.as_str() {
        Some(stop) if (1..=MAX_STOP_BYTES).contains(&stop.len()) => Ok(stop.to_string()),
        Some(stop) => {
            let what =
                format!("may hold strings of 1 to {MAX_STOP_BYTES} bytes, but holds one of {}", stop.len());
            Err(body.wrong(field, &what))
        }
        None => Err(body.must_be(field, "a string or an array of strings")),
    };
    stops.iter().map(read).collect()
}

/// Token ids given as such.
pub(crate) fn token_ids(values: &[Value], vocab: usize, place: &str) -> Result<Vec<u32>, ApiError> {
    let read = |(index, value): (usize, &Value)| {
        let id = whole(value).and_then(|id| u32::try_from(id).ok());
        id.filter(|&id| (id as usize) < vocab).ok_or_else(|| {
            let message = format!("'{place}[{index}]' must be a token id below {vocab}.");
            ApiError::invalid(Some(place.to_string()), message)
        })
    };
    values.iter().enumerate().map(read).collect()
}

/// A seed that JavaScript's numbers hold too: 53 bits.
fn random_seed() -> i64 {
    (random() >> 11).cast_signed()
}

/// A random number, from the keys that the standard library draws for its hash maps.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::vocabulary::{self, VOCAB};

    fn read(body: &Value) -> Result<Params, ApiError> {
        read_params(&Fields::of(body.as_object().unwrap()), &vocabulary::bytes(), 1)
    }

    #[test]
    fn without_parameters_the_answer_is_openais_default() {
        let params = read(&json!({})).unwrap();
        let sampling =
            SamplingOptions { seed: Some(params.seed.cast_unsigned()), ..SamplingOptions::default() };
        assert_eq!(params.sampling, sampling);
        assert_eq!((params.choices, params.max_tokens, params.stops.len()), (1, None, 0));
        assert_eq!(params.ends, vocabulary::bytes().ends());
        // A seed is drawn, another one each time, that JavaScript's numbers hold.
        assert_ne!(params.seed, read(&json!({})).unwrap().seed);
        assert!((0..1 << 53).contains(&params.seed));
    }

    #[test]
    fn parameters_arrive() {
        let params = read(&json!({
            "seed": -7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repeat_penalty": 1.1,
            "frequency_penalty": -0.5, "presence_penalty": 0.25, "logit_bias": {"5": -100, "259": 3.5}, "n": 3,
            "max_tokens": 10, "max_completion_tokens": 20, "stop": ["a", "b"], "ignore_eos": true, "min_tokens": 3,
            "stop_token_ids": [7], "allowed_token_ids": [1, 2], "truncate_prompt_tokens": 5, "user": "somebody", "metadata": {"a": 1}, "what": ["ever"],
        }))
        .unwrap();
        let expected = SamplingOptions {
            seed: Some((-7i64).cast_unsigned()),
            temperature: 0.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.1,
            frequency_penalty: -0.5,
            presence_penalty: 0.25,
            logit_bias: vec![(5, -100.0), (259, 3.5)],
        };
        assert_eq!(params.sampling, expected);
        assert_eq!((params.seed, params.choices, params.max_tokens), (-7, 3, Some(20)));
        assert_eq!(params.stops, ["a", "b"]);
        assert_eq!(params.ends, [7]);
        assert_eq!((params.limits.at_least, params.limits.allowed), (3, Some(vec![1, 2])));
        assert_eq!(params.keep_last, Some(5));
    }

    #[test]
    fn each_parameter_out_of_its_range_is_named() {
        let long = "x".repeat(MAX_STOP_BYTES + 1);
        let many = vec!["x"; MAX_STOPS + 1];
        for (body, param) in [
            (json!({"temperature": 2.1}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"min_p": 2}), "min_p"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"repeat_penalty": -1}), "repeat_penalty"),
            (json!({"frequency_penalty": 3}), "frequency_penalty"),
            (json!({"presence_penalty": -3}), "presence_penalty"),
            (json!({"logit_bias": {"260": 1}}), "logit_bias"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias"),
            (json!({"logit_bias": {"1": 101}}), "logit_bias"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"n": 0}), "n"),
            (json!({"n": 129}), "n"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_completion_tokens": -1}), "max_completion_tokens"),
            (json!({"seed": 1.5}), "seed"),
            (json!({"stop": 5}), "stop"),
            (json!({"stop": ""}), "stop"),
            (json!({"stop": ["a", null]}), "stop"),
            (json!({"stop": long}), "stop"),
            (json!({"stop": many}), "stop"),
            (json!({"ignore_eos": 1}), "ignore_eos"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"min_tokens": -1}), "min_tokens"),
            (json!({"stop_token_ids": [260]}), "stop_token_ids"),
            (json!({"allowed_token_ids": 5}), "allowed_token_ids"),
            (json!({"bad_words": [""]}), "bad_words"),
            (json!({"typical_p": 0.5}), "typical_p"),
            (json!({"mirostat": 2}), "mirostat"),
            (json!({"skip_special_tokens": false}), "skip_special_tokens"),
            (json!({"logits_processors": ["x"]}), "logits_processors"),
        ] {
            let error = serde_json::to_value(read(&body).unwrap_err().envelope()).unwrap();
            assert_eq!(error["error"]["param"], param, "{body}");
            assert_eq!(error["error"]["type"], "invalid_request_error");
        }
        for fine in [
            json!({"typical_p": 1.0, "mirostat": 0, "use_beam_search": false, "samplers": []}),
            json!({"n_predict": -1}),
            json!({"modalities": ["text"]}),
            json!({"stop": []}),
            json!({"stop": null}),
            json!({"top_k": -1}),
            json!({"temperature": 0, "top_p": 1}),
        ] {
            assert!(read(&fine).is_ok(), "{fine}");
        }
    }

    #[test]
    fn token_ids_lie_inside_the_vocabulary() {
        assert_eq!(token_ids(&[json!(0), json!(259)], VOCAB, "prompt"), Ok(vec![0, 259]));
        for wrong in [json!(260), json!(-1), json!(1.5), json!("1"), json!(4294967296u64)] {
            let error = token_ids(&[json!(1), wrong], VOCAB, "prompt").unwrap_err();
            let error = serde_json::to_value(error.envelope()).unwrap();
            assert_eq!(error["error"]["message"], "'prompt[1]' must be a token id below 260.");
        }
    }
}
