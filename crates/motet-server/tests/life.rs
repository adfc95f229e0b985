//! From binding to the end: loading, ports, keys, browsers, unknown paths.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::client::{get, head, post, send};
use common::{model, options, start, start_loading};
use motet_engine::Engine;
use motet_server::{Cors, Server, ServerError, ServerOptions};
use serde_json::{Value, json};

#[tokio::test]
async fn while_loading_it_is_alive_and_not_ready() {
    let server = start_loading(options());
    let mut health = get(server.address, "/health").await;
    assert_eq!((health.status, health.json().await), (503, json!({"status": "loading"})));
    let mut livez = get(server.address, "/livez").await;
    assert_eq!((livez.status, livez.json().await), (200, json!({"status": "loading"})));

    let mut chat = post(server.address, "/v1/chat/completions", &json!({"messages": []})).await;
    assert_eq!(chat.status, 503);
    assert_eq!(chat.header("retry-after"), Some("1"));
    assert_eq!(chat.json().await["error"]["code"], "loading");

    let mut models = get(server.address, "/v1/models").await.json().await;
    assert!(models["data"][0]["created"].take().as_u64().unwrap() > 1_700_000_000);
    let tiny = json!({"id": "tiny", "object": "model", "created": null, "owned_by": "motet"});
    assert_eq!(models, json!({"object": "list", "data": [tiny]}));

    server.stop().await;
    server.ended().await.unwrap();
}

#[tokio::test]
async fn an_engine_that_cannot_be_made_ends_the_server() {
    let failed = async { Err::<Engine, _>(std::io::Error::other("weights are missing")) };
    let server = start(options(), model(false), failed);
    match server.ended().await {
        Err(error @ ServerError::Load(_)) => assert_eq!(error.to_string(), "weights are missing"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_port_in_use_is_said_before_anything_is_loaded() {
    let first = start_loading(options());
    let again = ServerOptions { port: first.address.port(), ..options() };
    let error = Server::bind(again, model(false)).unwrap_err();
    let port = first.address.port();
    assert_eq!(
        error.to_string(),
        format!("port {port} on 127.0.0.1 is in use; stop what listens there, or choose another with --port")
    );
    // An address of somebody else (TEST-NET-3).
    let elsewhere = ServerOptions { host: "203.0.113.1".to_string(), ..options() };
    assert!(matches!(Server::bind(elsewhere, model(false)), Err(ServerError::Listen { .. })));
}

#[tokio::test]
async fn unknown_paths_methods_and_models_are_told_in_openais_shape() {
    let server = start_loading(options());
    let mut nowhere = get(server.address, "/v1/nowhere").await;
    let error = json!({"error": {
        "message": "There is nothing at GET /v1/nowhere; this server has /v1/chat/completions, /v1/completions, /v1/models, /health, /livez, /metrics.",
        "type": "invalid_request_error", "param": null,
        "code": "unknown_url",
    }});
    assert_eq!((nowhere.status, nowhere.json().await), (404, error));

    let mut wrong = get(server.address, "/v1/chat/completions").await;
    assert_eq!(wrong.status, 405);
    assert_eq!(wrong.header("allow"), Some("POST"));
    assert_eq!(wrong.json().await["error"]["code"], "method_not_allowed");

    for name in ["tiny", "tiny-f32", "some/alias"] {
        let mut one = get(server.address, &format!("/v1/models/{name}")).await;
        assert_eq!((one.status, &one.json().await["id"]), (200, &Value::from("tiny")));
    }
    let mut other = get(server.address, "/v1/models/gpt-4").await;
    assert_eq!(other.status, 404);
    let error = json!({"error": {
        "message": "The model 'gpt-4' does not exist here; this server serves 'tiny'.",
        "type": "invalid_request_error", "param": "model", "code": "model_not_found",
    }});
    assert_eq!(other.json().await, error);

    // A name that is no text, and one that is too long to be repeated.
    let mut no_text = get(server.address, "/v1/models/%ff").await;
    assert_eq!((no_text.status, &no_text.json().await["error"]["code"]), (404, &"model_not_found".into()));
    let mut long = get(server.address, &format!("/v1/models/{}", "x".repeat(5000))).await;
    let message = long.json().await["error"]["message"].as_str().unwrap().to_string();
    assert!(message.starts_with("The model 'xxxx") && message.len() < 200, "{message}");
}

#[tokio::test]
async fn with_a_key_everything_under_v1_asks_for_it_and_health_does_not() {
    let server = start_loading(ServerOptions { api_key: Some("s3cret".to_string()), ..options() });
    for headers in
        ["", "Authorization: Bearer wrong!\r\n", "Authorization: s3cret\r\n", "Authorization: Bearer \r\n"]
    {
        let mut refused = head(send(server.address, "GET", "/v1/models", headers, b"").await).await;
        assert_eq!(refused.status, 401, "{headers}");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        assert_eq!(refused.json().await["error"]["code"], "invalid_api_key");
        let chat = send(server.address, "POST", "/v1/chat/completions", headers, b"{}").await;
        assert_eq!(head(chat).await.status, 401);
    }
    for headers in ["Authorization: Bearer s3cret\r\n", "authorization: bearer s3cret\r\n"] {
        assert_eq!(head(send(server.address, "GET", "/v1/models", headers, b"").await).await.status, 200);
    }
    for path in ["/livez", "/metrics"] {
        assert_eq!(get(server.address, path).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn pages_of_this_machine_may_ask_and_others_may_not() {
    let ask = async |address, origin: &str| {
        let preflight = format!(
            "Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n"
        );
        let preflight = head(send(address, "OPTIONS", "/v1/chat/completions", &preflight, b"").await).await;
        assert_eq!(preflight.status, 200);
        let plain =
            head(send(address, "GET", "/v1/models", &format!("Origin: {origin}\r\n"), b"").await).await;
        let allowed = plain.header("access-control-allow-origin").map(str::to_string);
        assert_eq!(preflight.header("access-control-allow-origin"), allowed.as_deref());
        if allowed.is_some() {
            assert_eq!(preflight.header("access-control-allow-headers"), Some("authorization,content-type"));
        }
        allowed
    };
    let (local, other) = ("http://localhost:3000", "https://chat.example");
    // A key does not stand in the way of a preflight, which cannot carry it.
    let key = Some("key".to_string());
    let server = start_loading(ServerOptions { api_key: key, ..options() });
    assert_eq!(ask(server.address, local).await.as_deref(), Some(local));
    assert_eq!(ask(server.address, other).await, None);

    let server = start_loading(ServerOptions { cors: Cors::Any, ..options() });
    assert_eq!(ask(server.address, other).await.as_deref(), Some("*"));

    let server = start_loading(ServerOptions { cors: "https://chat.example".parse().unwrap(), ..options() });
    assert_eq!(ask(server.address, other).await.as_deref(), Some(other));
    assert_eq!(ask(server.address, local).await, None);

    let server = start_loading(ServerOptions { cors: Cors::None, ..options() });
    assert_eq!(ask(server.address, local).await, None);
}

#[tokio::test]
async fn metrics_count_requests_by_known_paths_only() {
    let server = start_loading(options());
    get(server.address, "/health").await;
    get(server.address, "/health").await;
    get(server.address, "/made/up").await;
    let mut scrape = get(server.address, "/metrics").await;
    assert_eq!(scrape.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let scrape = String::from_utf8(scrape.bytes().await).unwrap();
    let samples: Vec<&str> =
        scrape.lines().filter(|line| line.starts_with("motet:http_requests_total{")).collect();
    assert_eq!(
        samples,
        [
            "motet:http_requests_total{engine=\"0\",model_name=\"tiny\",path=\"/health\",status=\"503\"} 2",
            "motet:http_requests_total{engine=\"0\",model_name=\"tiny\",path=\"other\",status=\"404\"} 1",
        ]
    );
}

#[tokio::test]
async fn a_server_that_is_loading_stops_at_once() {
    let server = start_loading(options());
    let begun = std::time::Instant::now();
    server.stop().await;
    server.ended().await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_refusal_is_read_by_a_client_that_sent_much() {
    let (max_body, max_bodies) = (8 << 20, 16 << 20);
    let api_key = Some("key".to_string());
    let server = start_loading(ServerOptions { api_key, max_body, max_bodies, ..options() });
    let much = vec![b' '; 8 << 20];
    for (headers, status) in [("", 401), ("Authorization: Bearer key\r\n", 503)] {
        let asked = send(server.address, "POST", "/v1/chat/completions", headers, &much).await;
        assert_eq!(head(asked).await.status, status);
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_signal_stops_it() {
    let stop = motet_server::Stop::signals().unwrap();
    let server = Server::bind(options(), model(false)).unwrap();
    let served = tokio::spawn(server.serve(std::future::pending::<Result<Engine, std::io::Error>>(), stop));
    let process = std::process::id().to_string();
    let sent = std::process::Command::new("kill").args(["-TERM", &process]).status().unwrap();
    assert!(sent.success());
    tokio::time::timeout(Duration::from_secs(5), served).await.unwrap().unwrap().unwrap();
}
