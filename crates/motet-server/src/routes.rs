//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};

use crate::app::App;
use crate::errors::ApiError;
use crate::openai::{chat, completions, models};
use crate::{auth, errors, health, metrics};

/// All routes. The layers from the outside in: browsers' preflights, counting, the key.
pub(crate) fn routes(app: Arc<App>) -> Router {
    let mut keyed = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one));
    if let Some(key) = &app.options.api_key {
        keyed = keyed.route_layer(from_fn_with_state(Arc::from(key.as_str()), auth::require_key));
    }
    keyed
        .route("/health", get(health::health))
        .route("/livez", get(health::livez))
        .route("/metrics", get(metrics::metrics))
        .fallback(async |method: Method, uri: Uri| ApiError::no_route(method.as_str(), uri.path()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::no_method(method.as_str(), uri.path())
        })
        .layer(from_fn(errors::speak))
        .layer(from_fn_with_state(app.clone(), metrics::count_requests))
        .layer(app.options.cors.layer())
        .with_state(app)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use motet_engine::Options;
    use motet_engine::scripted::{Script, Scripted, Sketch};
    use motet_text::ChatTemplate;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tower::ServiceExt;

    use super::*;
    use crate::app::Model;
    use crate::server::ServerOptions;
    use crate::vocabulary::{self, END, VOCAB};

    /// All routes over an engine whose answers are short.
    fn served() -> Router {
        let sketch = Sketch { vocab: VOCAB, context: 256, ..Sketch::default() };
        let options = Options { context: Some(256), ..Options::default() };
        let engine =
            Scripted::new(Script::Random { end: Some(END), mean: 8 }).start(&sketch, &options).unwrap();
        engine.wait_until_loaded().unwrap();
        let model = Model {
            name: "tiny".to_string(),
            aliases: Vec::new(),
            tokenizer: vocabulary::bytes(),
            template: ChatTemplate::new(None, None, None).unwrap(),
        };
        let app = Arc::new(App::new(ServerOptions::default(), Arc::new(model)));
        app.start(engine);
        routes(app)
    }

    /// A value that may be what a field wants, or anything else.
    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-3i64..300).prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            (-3.0..3.0).prop_map(Value::from),
            "[a-z\\[\\]#<>|é😀\\\\\"{}% ]{0,12}".prop_map(Value::from),
            prop::sample::select(vec![
                "user",
                "assistant",
                "tool",
                "text",
                "function",
                "auto",
                "none",
                "tiny",
                "<|im_end|>"
            ])
            .prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 6, |inner| {
            let key = prop::sample::select(vec![
                "role",
                "content",
                "type",
                "text",
                "function",
                "name",
                "arguments",
                "tool_calls",
                "include_usage",
                "7",
                "259",
                "260",
                "x",
                "",
            ]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key, inner), 0..6).prop_map(|fields| fields
                    .into_iter()
                    .map(|(k, v)| (k.to_string(), v))
                    .collect::<Value>()),
            ]
        })
    }

    /// A body with fields that exist, right and wrong.
    fn body() -> impl Strategy<Value = Value> {
        let field = prop::sample::select(vec![
            "messages",
            "prompt",
            "model",
            "stream",
            "stream_options",
            "n",
            "seed",
            "stop",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_tokens",
            "max_completion_tokens",
            "logprobs",
            "top_logprobs",
            "logit_bias",
            "echo",
            "suffix",
            "best_of",
            "tools",
            "tool_choice",
            "response_format",
            "chat_template_kwargs",
            "ignore_eos",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "repeat_penalty",
            "modalities",
            "reasoning_effort",
            "functions",
            "user",
        ]);
        let fields = prop::collection::vec((field, anything()), 0..4);
        (fields, any::<bool>(), any::<bool>()).prop_map(|(fields, messages, prompt)| {
            let mut body = json!({});
            if messages {
                body["messages"] = json!([{"role": "user", "content": "hi"}]);
            }
            if prompt {
                body["prompt"] = "hi".into();
            }
            for (name, value) in fields {
                body[name] = value;
            }
            body
        })
    }

    async fn status_and_body(router: &Router, path: &str, body: Vec<u8>) -> (StatusCode, Vec<u8>) {
        let request = Request::post(path).body(Body::from(body)).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        (status, axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec())
    }

    /// No body may bring forth an internal error; a refusal is in OpenAI's shape, and an answer is complete.
    fn holds(
        router: &Router,
        runtime: &tokio::runtime::Runtime,
        body: &[u8],
    ) -> Result<StatusCode, TestCaseError> {
        let mut last = StatusCode::OK;
        for path in ["/v1/chat/completions", "/v1/completions"] {
            let (status, answer) = runtime.block_on(status_and_body(router, path, body.to_vec()));
            prop_assert!(
                [200, 400, 404].contains(&status.as_u16()),
                "{status} {:?}",
                String::from_utf8_lossy(&answer)
            );
            if status != StatusCode::OK {
                let error: Value = serde_json::from_slice(&answer).unwrap();
                prop_assert!(error["error"]["message"].is_string(), "{error}");
            } else if answer.starts_with(b"data: ") {
                prop_assert!(answer.ends_with(b"data: [DONE]\n\n"), "{:?}", String::from_utf8_lossy(&answer));
            } else {
                let whole: Value = serde_json::from_slice(&answer).unwrap();
                prop_assert!(whole["choices"][0]["finish_reason"].is_string(), "{whole}");
            }
            last = status;
        }
        Ok(last)
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn no_request_brings_forth_an_internal_error() {
        let (router, runtime) = (served(), runtime());
        let answered = std::cell::Cell::new(0);
        proptest!(ProptestConfig::with_cases(3000), |(body in body())| {
            let status = holds(&router, &runtime, body.to_string().as_bytes())?;
            answered.set(answered.get() + usize::from(status == StatusCode::OK));
        });
        // Not because everything is refused.
        assert!(answered.get() > 300, "{} were answered", answered.get());
    }

    #[test]
    fn no_bytes_bring_forth_an_internal_error() {
        let (router, runtime) = (served(), runtime());
        let broken = (body(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(body, at, byte)| {
            let mut bytes = body.to_string().into_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes
        });
        proptest!(ProptestConfig::with_cases(1000), |(bytes in prop_oneof![broken, prop::collection::vec(any::<u8>(), 0..64)])| {
            holds(&router, &runtime, &bytes)?;
        });
    }
}
