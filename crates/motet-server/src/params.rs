//! The parameters that chat and text completions share, each checked against its range.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use motet_engine::SamplingOptions;
use serde_json::Value;

use crate::errors::{ApiError, shown};
use crate::fields::{Fields, whole};

/// Stop strings a request may name, and the bytes each may have.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// Answers a request may ask for.
const MAX_CHOICES: i64 = 128;

/// Rivals of a token whose log-probabilities may be asked for.
pub(crate) const MAX_TOP: i64 = 20;

/// How to answer, apart from the prompt.
#[derive(Debug)]
pub(crate) struct Params {
    pub(crate) sampling: SamplingOptions,
    /// The seed as the client sees it.
    pub(crate) seed: i64,
    pub(crate) choices: u32,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    pub(crate) ignore_eos: bool,
    /// `None`: the whole answer at once. `Some`: chunks.
    pub(crate) stream: Option<StreamOptions>,
}

/// How to stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamOptions {
    /// Whether a last chunk counts the tokens.
    pub(crate) include_usage: bool,
}

/// Reads the parameters. `vocab` is the number of token ids there are; `least_tokens` the least `max_tokens`.
///
/// # Errors
/// 400 that names the parameter.
pub(crate) fn read_params(body: &Fields<'_>, vocab: usize, least_tokens: i64) -> Result<Params, ApiError> {
    refuse_what_is_not_done(body)?;
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
    let limit = |field| body.integer(field, least_tokens..=i64::MAX);
    let max_tokens = limit("max_completion_tokens")?.or(limit("max_tokens")?);
    Ok(Params {
        sampling,
        seed,
        choices: body.integer("n", 1..=MAX_CHOICES)?.unwrap_or(1) as u32,
        max_tokens: max_tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX)),
        stops: read_stops(body)?,
        ignore_eos: body.flag("ignore_eos")?.unwrap_or(false),
        stream: read_stream(body)?,
    })
}

/// What would change the answer, and cannot be done, is refused and never dropped.
fn refuse_what_is_not_done(body: &Fields<'_>) -> Result<(), ApiError> {
    if let Some(format) = body.get("response_format") {
        let format = Fields::inside(format, "response_format".to_string())?;
        if format.text("type")? != Some("text") {
            let message =
                "'response_format.type' must be 'text': answers cannot be held to a format on this server.";
            return Err(format.unsupported("type", message));
        }
    }
    // The names that other servers give to the same wish.
    for field in [
        "grammar",
        "json_schema",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
    ] {
        if body.get(field).is_some() {
            let message =
                format!("'{field}' is not supported: answers cannot be held to a format on this server.");
            return Err(body.unsupported(field, message));
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
fn read_stops(body: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let stops = match body.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(stops)) => stops.as_slice(),
        Some(stop) => std::slice::from_ref(stop),
    };
    if stops.len() > MAX_STOPS {
        let what = format!("may hold {MAX_STOPS} strings at most, but holds {}", stops.len());
        return Err(body.wrong("stop", &what));
    }
    let read = |stop: &Value| match stop.as_str() {
        Some(stop) if (1..=MAX_STOP_BYTES).contains(&stop.len()) => Ok(stop.to_string()),
        Some(stop) => {
            let what =
                format!("may hold strings of 1 to {MAX_STOP_BYTES} bytes, but holds one of {}", stop.len());
            Err(body.wrong("stop", &what))
        }
        None => Err(body.must_be("stop", "a string or an array of strings")),
    };
    stops.iter().map(read).collect()
}

/// `stream` and `stream_options`.
fn read_stream(body: &Fields<'_>) -> Result<Option<StreamOptions>, ApiError> {
    let stream = body.flag("stream")?.unwrap_or(false);
    let Some(options) = body.get("stream_options") else {
        return Ok(stream.then_some(StreamOptions { include_usage: false }));
    };
    if !stream {
        let message = "'stream_options' is only allowed when 'stream' is true.".to_string();
        return Err(ApiError::invalid(Some("stream_options".to_string()), message));
    }
    let options = Fields::inside(options, "stream_options".to_string())?;
    Ok(Some(StreamOptions { include_usage: options.flag("include_usage")?.unwrap_or(false) }))
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
    use crate::vocabulary::VOCAB;

    fn read(body: &Value) -> Result<Params, ApiError> {
        read_params(&Fields::of(body.as_object().unwrap()), VOCAB, 1)
    }

    #[test]
    fn without_parameters_the_answer_is_openais_default() {
        let params = read(&json!({})).unwrap();
        let sampling =
            SamplingOptions { seed: Some(params.seed.cast_unsigned()), ..SamplingOptions::default() };
        assert_eq!(params.sampling, sampling);
        assert_eq!((params.choices, params.max_tokens, params.stops.len()), (1, None, 0));
        assert!(params.stream.is_none());
        // A seed is drawn, another one each time, that JavaScript's numbers hold.
        assert_ne!(params.seed, read(&json!({})).unwrap().seed);
        assert!((0..1 << 53).contains(&params.seed));
    }

    #[test]
    fn parameters_arrive() {
        let params = read(&json!({
            "seed": -7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repeat_penalty": 1.1,
            "frequency_penalty": -0.5, "presence_penalty": 0.25, "logit_bias": {"5": -100, "259": 3.5}, "n": 3,
            "max_tokens": 10, "max_completion_tokens": 20, "stop": ["a", "b"], "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true}, "user": "somebody", "metadata": {"a": 1}, "what": ["ever"],
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
        assert!(params.ignore_eos && params.stream.unwrap().include_usage);
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
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
            (json!({"stream": true, "stream_options": []}), "stream_options"),
            (json!({"stream_options": {"include_usage": true}}), "stream_options"),
            (json!({"response_format": {"type": "json_object"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "response_format.type"),
            (json!({"response_format": "json"}), "response_format"),
            (json!({"guided_json": {}}), "guided_json"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
        ] {
            let error = serde_json::to_value(read(&body).unwrap_err().envelope()).unwrap();
            assert_eq!(error["error"]["param"], param, "{body}");
            assert_eq!(error["error"]["type"], "invalid_request_error");
        }
        for fine in [
            json!({"response_format": {"type": "text"}}),
            json!({"response_format": null}),
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
