//! What answers look like, field by field as OpenAI documents them, and what is refused.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;

use common::client::{Response, get, head, post, send};
use common::script::{engine_options, scripted};
use common::{Running, model, options, start, start_with};
use motet_server::ServerOptions;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn serve() -> Running {
    start_with(options(), &scripted(&engine_options()).0).ready().await
}

/// A conversation with one message, and other fields.
fn ask(content: &str, more: Value) -> Value {
    with(json!({"model": "tiny", "messages": [{"role": "user", "content": content}]}), more)
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The answer, without what differs each time: after a check that it is what it must be.
async fn steady(mut response: Response, prefix: &str) -> Value {
    let mut answer = response.json().await;
    assert_eq!(response.status, 200, "{answer}");
    assert_eq!(response.header("content-type"), Some("application/json"));
    take_unsteady(&mut answer, prefix);
    answer
}

fn take_unsteady(answer: &mut Value, prefix: &str) -> (Value, Value) {
    let id = answer["id"].take();
    assert!(id.as_str().unwrap().starts_with(prefix) && id.as_str().unwrap().len() > 20, "{id}");
    let created = answer["created"].take();
    assert!(created.as_u64().unwrap() > 1_700_000_000);
    assert!(answer["seed"].is_i64());
    // Times differ; what they are of does not.
    let ended = answer["choices"].as_array().unwrap().iter().any(|choice| !choice["finish_reason"].is_null());
    let counted = answer["choices"] == json!([]);
    let timings = answer.as_object_mut().unwrap().shift_remove("timings");
    assert_eq!(timings.is_some(), ended || counted, "{answer}");
    assert!(timings.is_none_or(|timings| timings["prompt_ms"].as_f64().unwrap() >= 0.0));
    (id, created)
}

/// Prompt tokens of a message in ChatML: all tokens are bytes but the markers.
fn chatml_tokens(content: &str) -> usize {
    "?user\n".len() + content.len() + "?\n".len() + "?assistant\n".len()
}

#[tokio::test]
async fn a_chat_answer_has_openais_fields() {
    let server = serve().await;
    let response = post(server.address, CHAT, &ask("Say [héllo]", json!({"seed": 7}))).await;
    let prompt = chatml_tokens("Say [héllo]");
    let expected = json!({
        "id": null, "object": "chat.completion", "created": null, "model": "tiny",
        "system_fingerprint": concat!("motet-", env!("CARGO_PKG_VERSION")), "seed": 7,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "héllo", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        "usage": {
            "prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    });
    assert_eq!(steady(response, "chatcmpl-").await, expected);
}

#[tokio::test]
async fn a_text_completion_has_openais_fields() {
    let server = serve().await;
    let body = json!({"prompt": "Say [yes] >", "seed": 7, "max_tokens": 2});
    let expected = json!({
        "id": null, "object": "text_completion", "created": null, "model": "tiny",
        "system_fingerprint": concat!("motet-", env!("CARGO_PKG_VERSION")), "seed": 7,
        "choices": [{"index": 0, "text": "ye", "logprobs": null, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    });
    assert_eq!(steady(post(server.address, COMPLETIONS, &body).await, "cmpl-").await, expected);
    // The same prompt as token ids.
    let ids: Vec<u8> = b"Say [yes] >".to_vec();
    let body = with(body, json!({ "prompt": ids }));
    assert_eq!(steady(post(server.address, COMPLETIONS, &body).await, "cmpl-").await, expected);
}

#[tokio::test]
async fn a_chat_stream_has_openais_chunks() {
    let server = serve().await;
    for include_usage in [false, true] {
        let more = json!({"stream": true, "stream_options": {"include_usage": include_usage}, "seed": 1});
        let mut response = post(server.address, CHAT, &ask("Say [hé]", more)).await;
        assert_eq!(response.status, 200);
        assert_eq!(response.header("content-type"), Some("text/event-stream"));
        assert_eq!(response.header("cache-control"), Some("no-cache"));
        let mut events = response.events().await;
        let unsteady: Vec<_> = events.iter_mut().map(|event| take_unsteady(event, "chatcmpl-")).collect();
        assert!(unsteady.iter().all(|same| *same == unsteady[0]), "id and created stay the same");

        let chunk = |choices: Value, usage: Option<Value>| {
            let mut chunk = json!({
                "id": null, "object": "chat.completion.chunk", "created": null, "model": "tiny",
                "system_fingerprint": concat!("motet-", env!("CARGO_PKG_VERSION")), "seed": 1, "choices": choices,
            });
            if include_usage {
                chunk["usage"] = usage.unwrap_or(Value::Null);
            }
            chunk
        };
        let choice = |delta: Value, reason: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}]);
        let prompt = chatml_tokens("Say [hé]");
        let usage = json!({
            "prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        });
        let mut expected = vec![
            chunk(choice(json!({"role": "assistant", "content": ""}), Value::Null), None),
            chunk(choice(json!({"content": "h"}), Value::Null), None),
            chunk(choice(json!({"content": "é"}), Value::Null), None),
            chunk(choice(json!({}), "stop".into()), None),
        ];
        if include_usage {
            expected.push(chunk(json!([]), Some(usage)));
        }
        assert_eq!(events, expected);
    }
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let server = serve().await;
    let more = json!({"seed": 3, "n": 3, "logprobs": true, "top_logprobs": 2, "stop": ["wo"]});
    let body = ask("[hi # é world]", more);
    let whole = steady(post(server.address, CHAT, &body).await, "chatcmpl-").await;
    let mut streamed = post(server.address, CHAT, &with(body, json!({"stream": true}))).await;
    let mut choices = vec![(String::new(), Vec::<Value>::new(), Value::Null); 3];
    for event in streamed.events().await {
        let choice = &event["choices"][0];
        let (content, logprobs, reason) = &mut choices[choice["index"].as_u64().unwrap() as usize];
        content.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        logprobs.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            *reason = choice["finish_reason"].clone();
        }
    }
    for (index, (content, logprobs, reason)) in choices.into_iter().enumerate() {
        let choice = &whole["choices"][index];
        assert_eq!(content, format!("hi {index} é "));
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["content"], content);
        assert_eq!(choice["logprobs"]["content"], Value::Array(logprobs));
        assert_eq!((&choice["finish_reason"], &reason), (&"stop".into(), &"stop".into()));
    }
    // The prompt counts once, the answers each, with the tokens of the stop string.
    assert_eq!(whole["usage"]["prompt_tokens"], chatml_tokens("[hi # é world]"));
    assert_eq!(whole["usage"]["completion_tokens"], 3 * "hi # é wo".len());
}

#[tokio::test]
async fn chat_logprobs_name_each_token_and_its_rivals() {
    let server = serve().await;
    let more = json!({"logprobs": true, "top_logprobs": 2});
    let answer = steady(post(server.address, CHAT, &ask("[aé]", more)).await, "chatcmpl-").await;
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["refusal"], Value::Null);
    let content = logprobs["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    for (entry, byte) in content.iter().zip("aé".as_bytes()) {
        let text = if byte.is_ascii() { "a".to_string() } else { format!("bytes:\\x{byte:02x}") };
        assert_eq!((&entry["token"], &entry["bytes"]), (&text.into(), &json!([byte])));
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        // The scripted device's likeliest tokens are the chosen one, then the ids that follow.
        let rivals = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(rivals.len(), 2);
        assert_eq!((&rivals[0]["bytes"], &rivals[0]["logprob"]), (&json!([byte]), &json!(0.0)));
        assert_eq!((&rivals[1]["bytes"], &rivals[1]["logprob"]), (&json!([byte + 1]), &json!(-1.0)));
    }
    // Asked for without rivals.
    let answer =
        steady(post(server.address, CHAT, &ask("[a]", json!({"logprobs": true}))).await, "chatcmpl-").await;
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn completion_logprobs_are_columns_and_the_prompt_can_be_echoed() {
    let server = serve().await;
    let body = json!({"prompt": "é[ab]>", "logprobs": 1, "echo": true});
    let answer = steady(post(server.address, COMPLETIONS, &body).await, "cmpl-").await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "é[ab]>ab");
    let logprobs = &choice["logprobs"];
    let tokens = json!(["bytes:\\xc3", "bytes:\\xa9", "[", "a", "b", "]", ">", "a", "b"]);
    assert_eq!(logprobs["tokens"], tokens);
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
    for at in 1..9 {
        assert!(logprobs["token_logprobs"][at].as_f64().unwrap() <= 0.0, "{at}");
        assert_eq!(logprobs["top_logprobs"][at].as_object().unwrap().len(), 1, "{at}");
    }
    assert_eq!(logprobs["top_logprobs"][8], json!({"b": 0.0}));

    // Only scored: nothing is generated.
    let scored = with(body.clone(), json!({"max_tokens": 0}));
    let scored = steady(post(server.address, COMPLETIONS, &scored).await, "cmpl-").await;
    assert_eq!(scored["choices"][0]["text"], "é[ab]>");
    assert_eq!(scored["choices"][0]["finish_reason"], "length");
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let of_prompt = logprobs[column].as_array().unwrap()[..7].to_vec();
        assert_eq!(scored["choices"][0]["logprobs"][column], Value::Array(of_prompt), "{column}");
    }

    // In a stream: the prompt first, then token by token, with the same columns.
    let mut streamed = post(server.address, COMPLETIONS, &with(body, json!({"stream": true}))).await;
    let events = streamed.events().await;
    let texts: Vec<_> = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["é[ab]>", "a", "b", ""]);
    let offsets: Vec<_> =
        events.iter().map(|event| event["choices"][0]["logprobs"]["text_offset"].clone()).collect();
    assert_eq!(offsets, [json!([0, 1, 1, 2, 3, 4, 5]), json!([6]), json!([7]), Value::Null]);
}

#[tokio::test]
async fn several_prompts_are_answered_each_under_its_own_index() {
    let server = serve().await;
    for prompts in [json!(["[one#]>", "[two#]>"]), json!([b"[one#]>".to_vec(), b"[two#]>".to_vec()])] {
        let body = json!({"prompt": prompts, "n": 2});
        let answer = steady(post(server.address, COMPLETIONS, &body).await, "cmpl-").await;
        let choices: Vec<_> =
            answer["choices"].as_array().unwrap().iter().map(|c| (&c["index"], &c["text"])).collect();
        let (zero, one, two, three) = (json!(0), json!(1), json!(2), json!(3));
        let texts = ["one0", "one1", "two0", "two1"].map(Value::from);
        assert_eq!(choices, [(&zero, &texts[0]), (&one, &texts[1]), (&two, &texts[2]), (&three, &texts[3])]);
        assert_eq!(answer["usage"]["prompt_tokens"], 14);
    }
}

#[tokio::test]
async fn thinking_comes_apart_from_the_answer() {
    let (engine, _) = scripted(&engine_options());
    let server = start(options(), model(true), async { Ok::<_, std::io::Error>(engine) }).ready().await;
    let body = ask("[hm</think>\n\nyes]", json!({}));
    let answer = steady(post(server.address, CHAT, &body).await, "chatcmpl-").await;
    let message = json!({"role": "assistant", "content": "yes", "reasoning_content": "hm", "reasoning": "hm",
        "refusal": null});
    assert_eq!(answer["choices"][0]["message"], message);
    // "hm", the tag and two line ends.
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 5);

    let mut streamed = post(server.address, CHAT, &with(body, json!({"stream": true}))).await;
    let deltas: Vec<_> =
        streamed.events().await.iter().map(|event| event["choices"][0]["delta"].clone()).collect();
    let expected = [
        json!({"role": "assistant", "content": ""}),
        json!({"reasoning_content": "h", "reasoning": "h"}),
        json!({"reasoning_content": "m", "reasoning": "m"}),
        json!({"content": "y"}),
        json!({"content": "e"}),
        json!({"content": "s"}),
        json!({}),
    ];
    assert_eq!(deltas, expected);
}

#[tokio::test]
async fn the_seed_of_an_answer_is_returned_and_drawn_where_none_is_given() {
    let server = serve().await;
    let seed = async |more| {
        let answer = post(server.address, CHAT, &ask("[a]", more)).await.json().await;
        answer["seed"].as_i64().unwrap()
    };
    assert_eq!(seed(json!({"seed": -9007199254740993i64})).await, -9007199254740993);
    let (first, second) = (seed(json!({})).await, seed(json!({})).await);
    assert_ne!(first, second);
    assert!((0..1 << 53).contains(&first));
}

#[tokio::test]
async fn the_list_of_models_tells_the_context() {
    let server = serve().await;
    let models = get(server.address, "/v1/models").await.json().await;
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (&"tiny".into(), &1024.into())
    );
}

#[tokio::test]
async fn cached_tokens_are_told() {
    let server = serve().await;
    let content = format!("[ok]{}", "x".repeat(200));
    let cached = async || {
        let answer = post(server.address, CHAT, &ask(&content, json!({}))).await.json().await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached().await, 0);
    // Full pages of 64 positions of a prompt of 200 and some.
    assert_eq!(cached().await, 192);
}

#[tokio::test]
async fn what_the_answer_stops_at() {
    let server = serve().await;
    let said = async |more: Value| {
        let answer = post(server.address, CHAT, &ask("[one, two, three]", more)).await.json().await;
        let choice = &answer["choices"][0];
        let text = |value: &Value| value.as_str().unwrap().to_string();
        (text(&choice["message"]["content"]), text(&choice["finish_reason"]))
    };
    let both = |text: &str, reason: &str| (text.to_string(), reason.to_string());
    assert_eq!(said(json!({})).await, both("one, two, three", "stop"));
    assert_eq!(said(json!({"stop": ", t"})).await, both("one", "stop"));
    assert_eq!(said(json!({"stop": ["three", "two"]})).await, both("one, ", "stop"));
    assert_eq!(said(json!({"stop": "never"})).await, both("one, two, three", "stop"));
    assert_eq!(said(json!({"max_tokens": 3})).await, both("one", "length"));
    assert_eq!(said(json!({"max_completion_tokens": 3, "max_tokens": 5})).await, both("one", "length"));
    // Held back for a stop string that did not come.
    assert_eq!(said(json!({"max_tokens": 4, "stop": ", x"})).await, both("one,", "length"));
    // The end token is not the end, until the limit is.
    let (text, reason) = said(json!({"ignore_eos": true, "max_tokens": 20})).await;
    assert_eq!((text.as_str(), reason.as_str()), ("one, two, three", "length"));
}

async fn refused(address: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    let mut response = post(address, path, body).await;
    let error = response.json().await;
    let fields: Vec<_> = error["error"].as_object().unwrap().keys().collect();
    assert_eq!(fields, ["message", "type", "param", "code"], "{error}");
    (response.status, error["error"].clone())
}

#[tokio::test]
async fn an_over_long_prompt_is_always_the_context_length_error() {
    let server = serve().await;
    let long = "x".repeat(1100);
    for (path, body, param) in [
        (CHAT, ask(&long, json!({})), "messages"),
        (CHAT, ask(&long, json!({"stream": true, "max_tokens": 1})), "messages"),
        (COMPLETIONS, json!({ "prompt": long }), "prompt"),
        (COMPLETIONS, json!({"prompt": vec![1; 1024], "stream": true}), "prompt"),
        (COMPLETIONS, json!({"prompt": ["ok", long]}), "prompt"),
    ] {
        let (status, error) = refused(server.address, path, &body).await;
        assert_eq!(status, 400);
        assert_eq!((&error["code"], &error["param"]), (&"context_length_exceeded".into(), &param.into()));
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"].as_str().unwrap().contains("maximum context length is 1024 tokens"),
            "{error}"
        );
    }
    // A prompt that fits leaves what is left.
    let body = json!({"prompt": vec![u32::from(b'x'); 1000]});
    let answer = post(server.address, COMPLETIONS, &body).await.json().await;
    assert_eq!(answer["usage"]["total_tokens"], 1024);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn what_is_wrong_is_refused_before_any_header_of_a_stream() {
    let server = serve().await;
    let image = json!([{"type": "image_url", "image_url": {"url": "data:,"}}]);
    for (path, body, status, param, code) in [
        (CHAT, json!({}), 400, json!("messages"), Value::Null),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": image}]}),
            400,
            json!("messages[0].content[0].type"),
            json!("unsupported_value"),
        ),
        (CHAT, ask("hi", json!({"model": "gpt-4"})), 404, json!("model"), json!("model_not_found")),
        (CHAT, ask("hi", json!({"model": 4})), 400, json!("model"), Value::Null),
        (CHAT, ask("hi", json!({"top_logprobs": 2})), 400, json!("top_logprobs"), Value::Null),
        (
            CHAT,
            ask("hi", json!({"logprobs": true, "top_logprobs": 21})),
            400,
            json!("top_logprobs"),
            Value::Null,
        ),
        (CHAT, ask("hi", json!({"logprobs": 3})), 400, json!("logprobs"), Value::Null),
        (CHAT, ask("hi", json!({"typical_p": 0.5})), 400, json!("typical_p"), json!("unsupported_value")),
        (CHAT, ask("hi", json!({"n": 9})), 400, json!("n"), Value::Null),
        // More answers than may ever wait: not a 503, since they would not fit later either.
        (COMPLETIONS, json!({"prompt": ["a", "b", "c"], "n": 3}), 400, json!("n"), Value::Null),
        (CHAT, ask("hi", json!({"max_tokens": 0})), 400, json!("max_tokens"), Value::Null),
        (
            CHAT,
            ask("hi", json!({"response_format": {"type": "json_object"}})),
            400,
            json!("response_format"),
            json!("unsupported_value"),
        ),
        (COMPLETIONS, json!({}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": ""}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": []}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": [[]]}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": [1, "a"]}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": ["a", 1]}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": [1, 260]}), 400, json!("prompt"), Value::Null),
        (COMPLETIONS, json!({"prompt": [[1], [-1]]}), 400, json!("prompt[1]"), Value::Null),
        (COMPLETIONS, json!({"prompt": vec!["a"; 129]}), 400, json!("prompt"), Value::Null),
        (
            COMPLETIONS,
            json!({"prompt": "a", "suffix": "b"}),
            400,
            json!("suffix"),
            json!("unsupported_value"),
        ),
        (
            COMPLETIONS,
            json!({"prompt": "a", "best_of": 2}),
            400,
            json!("best_of"),
            json!("unsupported_value"),
        ),
        (COMPLETIONS, json!({"prompt": "a", "logprobs": true}), 400, json!("logprobs"), Value::Null),
    ] {
        for stream in [false, true] {
            let (found, error) =
                refused(server.address, path, &with(body.clone(), json!({ "stream": stream }))).await;
            assert_eq!(
                (found, &error["param"], &error["code"]),
                (status, &param, &code),
                "{path} {body} {error}"
            );
        }
    }
}

#[tokio::test]
async fn a_template_that_refuses_is_a_400_with_its_own_words() {
    let (engine, _) = scripted(&engine_options());
    let plain = model(false);
    let source = "{{ raise_exception('roles must alternate') }}";
    let strict = motet_server::Model {
        name: plain.name.clone(),
        aliases: Vec::new(),
        tokenizer: plain.tokenizer.clone(),
        template: motet_text::ChatTemplate::new(Some(source), None, None).unwrap(),
    };
    let engine = async { Ok::<_, std::io::Error>(engine) };
    let server = start(options(), std::sync::Arc::new(strict), engine).ready().await;
    let (status, error) = refused(server.address, CHAT, &ask("hi", json!({}))).await;
    assert_eq!(
        (status, &error["code"], &error["param"]),
        (400, &"template_error".into(), &"messages".into())
    );
    assert!(error["message"].as_str().unwrap().ends_with("roles must alternate"), "{error}");
}

#[tokio::test]
async fn the_template_sees_tools_and_variables() {
    let (engine, _) = scripted(&engine_options());
    let plain = model(false);
    let source = "[{{ tools | length if tools else 0 }} {{ tone }} {{ reasoning_effort }}]<|im_start|>assistant{{ '\n' }}";
    let shows = motet_server::Model {
        name: plain.name.clone(),
        aliases: Vec::new(),
        tokenizer: plain.tokenizer.clone(),
        template: motet_text::ChatTemplate::new(Some(source), None, None).unwrap(),
    };
    let engine = async { Ok::<_, std::io::Error>(engine) };
    let server = start(options(), std::sync::Arc::new(shows), engine).ready().await;
    let said = async |more| {
        let answer = post(server.address, CHAT, &ask("hi", more)).await.json().await;
        answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_string()
    };
    let tools = json!([{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}]);
    let variables = json!({"tone": "dry"});
    let more = json!({"tools": tools, "chat_template_kwargs": variables, "reasoning_effort": "low"});
    assert_eq!(said(more).await, "1 dry low");
    assert_eq!(said(json!({"tools": tools, "tool_choice": "none"})).await, "0  ");
}

/// Of the right type, and yet wrong: the message says what is.
#[tokio::test]
async fn a_wrong_value_is_told_from_a_wrong_type() {
    let server = serve().await;
    let long = "x".repeat(100_000);
    for (more, message) in [
        (json!({"stop": ""}), "'stop' may hold strings of 1 to 1024 bytes, but holds one of 0."),
        (json!({"stop": ["a", 5]}), "'stop' must be a string or an array of strings, but is an array."),
        (json!({"stop": vec!["a"; 65]}), "'stop' may hold 64 strings at most, but holds 65."),
        (
            json!({"logit_bias": {"260": 1}}),
            "'logit_bias' must have token ids below 260 as keys, but has '260'.",
        ),
        (
            json!({"logit_bias": {"7": 101}}),
            "'logit_bias' must map token ids to numbers from -100 to 100, but does not for 7.",
        ),
        (json!({"seed": 1.5}), "'seed' must be a whole number of 64 bits, but is 1.5."),
        (
            json!({"messages": [{"role": "robot", "content": "hi"}]}),
            "'messages[0].role' must be one of system, developer, user, assistant, tool, but is 'robot'.",
        ),
    ] {
        let (status, error) = refused(server.address, CHAT, &with(ask("hi", json!({})), more)).await;
        assert_eq!((status, &error["message"]), (400, &message.into()));
    }
    // What a client makes up is not sent back to it at any length.
    for body in [
        ask("hi", json!({"model": long})),
        json!({"messages": [{"role": long, "content": "hi"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": long}]}]}),
        ask("hi", json!({"logit_bias": {"x".repeat(100_000): 1}})),
    ] {
        let (_, error) = refused(server.address, CHAT, &body).await;
        assert!(error["message"].as_str().unwrap().len() < 300, "{error}");
    }
}

/// A page may make a browser send what a form could send, without asking. The server does not compute for it.
#[tokio::test]
async fn a_page_that_did_not_ask_leave_is_not_answered() {
    let server = serve().await;
    let body = ask("[hi]", json!({})).to_string();
    let status = async |headers: &str| {
        head(send(server.address, "POST", CHAT, headers, body.as_bytes()).await).await.status
    };
    let origin = "Origin: https://elsewhere.example\r\n";
    assert_eq!(status(&format!("{origin}Content-Type: text/plain\r\n")).await, 415);
    assert_eq!(status(origin).await, 415);
    // For this a browser has asked; whether the page may see the answer is the browser's affair.
    assert_eq!(status(&format!("{origin}Content-Type: application/json; charset=utf-8\r\n")).await, 200);
    // What is no browser may say what it likes: `curl -d` says that it is a form.
    assert_eq!(status("Content-Type: application/x-www-form-urlencoded\r\n").await, 200);
}

#[tokio::test]
async fn bodies_that_are_too_large_together_are_told_to_come_back() {
    let limits = ServerOptions { max_body: 3000, max_bodies: 4000, ..options() };
    let server = start_with(limits, &scripted(&engine_options()).0).ready().await;
    let body = ask(&format!("[hi]{}", "x".repeat(400)), json!({})).to_string();
    // Holds 2,900 of 3,000 bytes and does not go on.
    let mut slow = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let part = format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: 3000\r\n\r\n{}", " ".repeat(2900));
    tokio::io::AsyncWriteExt::write_all(&mut slow, part.as_bytes()).await.unwrap();
    let ask = async |body: &[u8]| head(send(server.address, "POST", CHAT, "", body).await).await;
    let padded = [body.as_bytes(), &b" ".repeat(1200 - body.len())].concat();
    let mut refused = loop {
        let response = ask(&padded).await;
        // Until the server has read what the slow one sent.
        if response.status != 200 {
            break response;
        }
    };
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json().await["error"]["code"], "busy");
    // There is room for a small one, and for the large one when the slow one has left.
    assert_eq!(ask(body.as_bytes()).await.status, 200);
    drop(slow);
    while ask(&padded).await.status != 200 {}
}

#[tokio::test]
async fn bodies_that_are_no_requests() {
    let server = start_with(ServerOptions { max_body: 4096, ..options() }, &scripted(&engine_options()).0);
    let server = server.ready().await;
    let send_raw = async |headers: &str, body: &[u8]| {
        let mut response = head(send(server.address, "POST", CHAT, headers, body).await).await;
        (response.status, response.json().await["error"].clone())
    };
    let (status, error) = send_raw("", b"{\"messages\": [}").await;
    assert_eq!(status, 400);
    assert_eq!(error["message"], "The body is not valid JSON: expected value at line 1 column 15.");
    let (status, error) = send_raw("", b" ").await;
    assert_eq!((status, &error["message"]), (400, &"The body is empty; it must be a JSON object.".into()));

    let (status, error) = send_raw("", &vec![b' '; 4097]).await;
    assert_eq!((status, &error["code"]), (413, &"body_too_large".into()));
    // Larger than the buffers between the two ends: the client writes it all and then reads the error.
    assert_eq!(send_raw("", &vec![b' '; 32 << 20]).await.0, 413);
    // One that waits for the word to go on, and writes nothing.
    let head_only = "Expect: 100-continue\r\nContent-Length: 5000\r\n";
    let socket = send(server.address, "PUT", CHAT, "", b"").await;
    drop(socket);
    let mut socket = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let request = format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{head_only}\r\n");
    tokio::io::AsyncWriteExt::write_all(&mut socket, request.as_bytes()).await.unwrap();
    assert_eq!(head(socket).await.status, 413);
    // In chunks, without a length.
    let chunks = format!("{:x}\r\n{}\r\n0\r\n\r\n", 5000, " ".repeat(5000));
    let mut socket = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}"
    );
    tokio::io::AsyncWriteExt::write_all(&mut socket, request.as_bytes()).await.unwrap();
    assert_eq!(head(socket).await.status, 413);
}
