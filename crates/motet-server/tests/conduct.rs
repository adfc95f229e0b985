//! How the server behaves while answers are under way: clients that leave, silence, errors, overflow, the end.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::client::{Response, get, head, post, send};
use common::script::{engine_options, hold, scripted, slow};
use common::{Running, options, start_with};
use motet_engine::{Drafts, Engine, Health, MetricsSnapshot, Options};
use motet_server::ServerOptions;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const CHAT: &str = "/v1/chat/completions";

/// "At once", on a machine that has other things to do.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A message without brackets: the answer goes on and on.
fn endless(more: Value) -> Value {
    ask("on and on", more)
}

fn ask(content: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": content}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Sends a question and does not wait for the answer.
async fn send_chat(server: &Running, body: &Value) -> TcpStream {
    send(server.address, "POST", CHAT, "", body.to_string().as_bytes()).await
}

/// Waits until the engine's counters are so.
async fn until(engine: &Engine, what: &str, is: impl Fn(&MetricsSnapshot) -> bool) {
    let begun = Instant::now();
    while !is(&engine.metrics()) {
        assert!(begun.elapsed() < AT_ONCE, "not in time: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until a request is answered so.
async fn becomes(status: u16, what: &str, ask: impl AsyncFn() -> u16) {
    let begun = Instant::now();
    while ask().await != status {
        assert!(begun.elapsed() < AT_ONCE, "not in time: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

fn at_rest(metrics: &MetricsSnapshot) -> bool {
    metrics.num_requests_running == 0 && metrics.num_requests_waiting == 0 && metrics.kv_cache_usage == 0.0
}

#[tokio::test]
async fn a_client_that_leaves_while_its_answer_is_written_is_not_computed_for() {
    let (engine, _) = slow(&engine_options(), Duration::from_millis(5));
    let server = start_with(options(), &engine).ready().await;
    for stream in [true, false] {
        let before = engine.metrics().finished_abort;
        let socket = send_chat(&server, &endless(json!({ "stream": stream }))).await;
        if stream {
            let mut response = head(socket).await;
            for _ in 0..5 {
                response.event().await.unwrap();
            }
            drop(response);
        } else {
            let so_far = engine.metrics().generation_tokens;
            until(&engine, "decoding", |m| m.generation_tokens > so_far + 5).await;
            drop(socket);
        }
        until(&engine, "the answer is given up", |m| m.finished_abort == before + 1 && at_rest(m)).await;
        // Far from the about 1000 tokens that the context has room for.
        assert!(engine.metrics().generation_tokens < 1500);
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_its_prompt_is_read_is_not_computed_for() {
    let chunks = Options { prefill_chunk: Some(8), ..engine_options() };
    let (engine, _) = slow(&chunks, Duration::from_millis(10));
    let server = start_with(options(), &engine).ready().await;
    for (round, stream) in [(1, true), (2, false)] {
        let computed = engine.metrics().prompt_tokens_computed;
        let long = format!("{round}{}", "x".repeat(950));
        let socket = send_chat(&server, &ask(&long, json!({ "stream": stream }))).await;
        until(&engine, "reading", |m| m.prompt_tokens_computed > computed + 16).await;
        drop(socket);
        until(&engine, "the prompt is given up", |m| m.finished_abort == round && at_rest(m)).await;
        assert!(engine.metrics().prompt_tokens_computed < computed + 900);
        assert_eq!(engine.metrics().generation_tokens, 0);
    }
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_gives_its_place_back() {
    let narrow = Options { sessions: 1, queue: 1, ..engine_options() };
    let (engine, control) = scripted(&narrow);
    let server = start_with(options(), &engine).ready().await;
    let held = hold(&control);
    let running = send_chat(&server, &ask("[first]", json!({}))).await;
    until(&engine, "the first runs", |m| m.num_requests_running == 1).await;
    for stream in [true, false] {
        let third = ask("[third]", json!({"stream": true}));
        let status = async || post(server.address, CHAT, &third).await.status;
        // The second takes the one place in the queue (unless a third was there just then).
        let mut waiting = send_chat(&server, &ask("[second]", json!({ "stream": stream }))).await;
        loop {
            sleep(Duration::from_millis(50)).await;
            if status().await == 503 {
                break;
            }
            waiting = send_chat(&server, &ask("[second]", json!({ "stream": stream }))).await;
        }
        drop(waiting);
        // The engine's thread is in a step all the while: the place is free as soon as the stream is dropped.
        becomes(200, "the second's place is free", status).await;
    }
    drop(held);
    let mut first = head(running).await;
    assert_eq!(first.json().await["choices"][0]["message"]["content"], "first");
    until(&engine, "nothing left", at_rest).await;
}

#[tokio::test]
async fn headers_come_at_once_and_comments_while_nothing_is_said() {
    let (engine, control) = scripted(&engine_options());
    let quick = ServerOptions { comment_interval: Duration::from_millis(50), ..options() };
    let server = start_with(quick, &engine).ready().await;
    let held = hold(&control);
    let mut response =
        timeout(AT_ONCE, post(server.address, CHAT, &ask("[a]", json!({"stream": true})))).await.unwrap();
    assert_eq!(response.status, 200);
    assert_eq!(response.header("x-accel-buffering"), Some("no"));
    for _ in 0..3 {
        assert_eq!(response.line().await.unwrap(), ": working");
    }
    drop(held);
    let said: Vec<_> =
        response.events().await.iter().map(|event| event["choices"][0]["delta"].clone()).collect();
    assert_eq!(said, [json!({"role": "assistant", "content": ""}), json!({"content": "a"}), json!({})]);
}

/// The error that ends a stream after `[DONE]` could not come, or that is the whole response.
async fn error_of(mut response: Response, stream: bool) -> (u16, Value) {
    if !stream {
        return (response.status, response.json().await["error"].clone());
    }
    assert_eq!(response.status, 200);
    let mut last = None;
    while let Some(event) = response.event().await {
        assert!(last.is_none_or(|last: Value| last["error"].is_null()), "something after an error");
        last = Some(serde_json::from_str(&event).unwrap());
    }
    (200, last.unwrap()["error"].clone())
}

#[tokio::test]
async fn an_engine_that_fails_ends_the_answer_with_an_error_and_goes_on() {
    let (engine, control) = scripted(&engine_options());
    let server = start_with(options(), &engine).ready().await;
    for stream in [true, false] {
        for (code, status) in [("device_failed", 500), ("non_finite", 500)] {
            if code == "device_failed" {
                control.panic_next()
            } else {
                control.fault_next(0, 0)
            }
            let response =
                post(server.address, CHAT, &endless(json!({"stream": stream, "max_tokens": 5}))).await;
            let (found, error) = error_of(response, stream).await;
            assert_eq!((found, &error["code"]), (if stream { 200 } else { status }, &code.into()), "{error}");
            assert_eq!((&error["type"], &error["param"]), (&"server_error".into(), &Value::Null));
            assert!(error["message"].is_string());
            let mut well = post(server.address, CHAT, &ask("[well]", json!({}))).await;
            assert_eq!(well.json().await["choices"][0]["message"]["content"], "well");
        }
    }
    assert_eq!(get(server.address, "/health").await.status, 200);
}

#[tokio::test]
async fn an_engine_that_is_closed_ends_all_answers() {
    for stream in [true, false] {
        let (engine, control) = scripted(&engine_options());
        let server = start_with(options(), &engine).ready().await;
        let held = hold(&control);
        let socket = send_chat(&server, &endless(json!({ "stream": stream }))).await;
        until(&engine, "running", |m| m.num_requests_running == 1).await;
        // It waits for the step.
        let handle = engine.clone();
        let closing = tokio::task::spawn_blocking(move || handle.close());
        while engine.health() != Health::Closed {
            sleep(Duration::from_millis(2)).await;
        }
        drop(held);
        closing.await.unwrap();
        let (status, error) = error_of(head(socket).await, stream).await;
        assert_eq!((status, &error["code"]), (if stream { 200 } else { 503 }, &"engine_closed".into()));
        let mut refused = post(server.address, CHAT, &ask("[late]", json!({}))).await;
        assert_eq!((refused.status, &refused.json().await["error"]["code"]), (503, &"engine_closed".into()));
        // An engine that ended by itself will not come back.
        assert_eq!(get(server.address, "/health").await.status, 503);
        assert_eq!(get(server.address, "/livez").await.status, 503);
    }
}

#[tokio::test]
async fn a_full_queue_is_a_503_that_says_when_to_come_back() {
    let narrow = Options { sessions: 1, queue: 2, ..engine_options() };
    let (engine, control) = scripted(&narrow);
    let server = start_with(options(), &engine).ready().await;
    let held = hold(&control);
    let mut answers = Vec::new();
    let mut refusals = 0;
    for number in 0..6 {
        let body = ask(&format!("[{number}]"), json!({"stream": true}));
        let mut response = post(server.address, CHAT, &body).await;
        if response.status == 200 {
            answers.push((number, response));
            continue;
        }
        refusals += 1;
        assert_eq!(response.status, 503);
        assert!(response.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
        let error = response.json().await["error"].clone();
        assert_eq!((&error["code"], &error["type"]), (&"queue_full".into(), &"server_error".into()));
    }
    // Two wait; one may have begun to run.
    assert!((3..=4).contains(&refusals), "{refusals} refused");
    drop(held);
    for (number, mut response) in answers {
        let events = response.events().await;
        assert_eq!(events[1]["choices"][0]["delta"]["content"], number.to_string());
    }
    until(&engine, "nothing left", at_rest).await;
    assert_eq!(engine.metrics().rejected_queue_full, refusals);
}

#[tokio::test]
async fn a_step_that_does_not_end_ends_all_answers_and_the_server_is_neither_ready_nor_alive() {
    let watched = Options { sessions: 2, watchdog: Some(Duration::from_millis(500)), ..engine_options() };
    let (engine, control) = slow(&watched, Duration::from_millis(1));
    let server = start_with(options(), &engine).ready().await;
    // Idle for longer than a step may take.
    sleep(Duration::from_millis(700)).await;
    assert_eq!(get(server.address, "/health").await.status, 200);
    let mut spoken = post(server.address, CHAT, &endless(json!({"stream": true}))).await;
    spoken.event().await.unwrap();
    let held = hold(&control);
    // One more that runs or waits for the step, and two in the queue; of each kind one.
    let mut streams = vec![spoken];
    for _ in 0..2 {
        streams.push(post(server.address, CHAT, &ask("[late]", json!({"stream": true}))).await);
    }
    let whole = send_chat(&server, &ask("[late]", json!({}))).await;
    for (response, streamed) in streams.into_iter().map(|s| (s, true)).chain([(head(whole).await, false)]) {
        let (status, error) = error_of(response, streamed).await;
        assert_eq!((status, &error["code"]), (if streamed { 200 } else { 503 }, &"engine_stalled".into()));
        assert_eq!(error["message"], "A step has not ended within 500ms; the engine has stopped.");
    }
    for released in [false, true] {
        for path in ["/health", "/livez"] {
            let mut health = get(server.address, path).await;
            assert_eq!((health.status, health.json().await), (503, json!({"status": "stalled"})), "{path}");
        }
        let mut refused = post(server.address, CHAT, &ask("[late]", json!({}))).await;
        assert_eq!((refused.status, &refused.json().await["error"]["code"]), (503, &"engine_closed".into()));
        if !released {
            // Even if the step ends after all.
            control.resume();
            sleep(Duration::from_millis(50)).await;
        }
    }
    drop(held);
}

#[tokio::test]
async fn draining_lets_answers_finish_and_takes_no_more() {
    static TOLD: AtomicUsize = AtomicUsize::new(0);
    let on_drain: Option<fn(usize)> = Some(|answers| TOLD.store(answers, Ordering::Relaxed));
    let (engine, control) = scripted(&engine_options());
    let server = start_with(ServerOptions { on_drain, ..options() }, &engine).ready().await;
    let held = hold(&control);
    let whole = send_chat(&server, &ask("[whole]", json!({}))).await;
    // It is certainly under way when it runs, and the next one when its headers are here.
    until(&engine, "running", |m| m.num_requests_running == 1).await;
    let mut streamed = post(server.address, CHAT, &ask("[stream]", json!({"stream": true}))).await;
    server.stop().await;
    becomes(503, "draining", async || get(server.address, "/health").await.status).await;
    let health = get(server.address, "/health").await.json().await;
    assert_eq!(health, json!({"status": "draining"}));
    assert_eq!(TOLD.load(Ordering::Relaxed), 2);
    let mut livez = get(server.address, "/livez").await;
    assert_eq!((livez.status, livez.json().await), (200, json!({"status": "draining"})));
    let mut refused = post(server.address, CHAT, &ask("[late]", json!({}))).await;
    assert!(refused.header("retry-after").is_some());
    assert_eq!((refused.status, &refused.json().await["error"]["code"]), (503, &"draining".into()));
    assert!(!server.has_ended());

    drop(held);
    let whole = head(whole).await.json().await;
    assert_eq!(whole["choices"][0]["message"]["content"], "whole", "{whole}");
    let text: String =
        streamed.events().await.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "stream");
    timeout(AT_ONCE, server.ended()).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_broken_off_with_an_error() {
    for twice in [false, true] {
        let (engine, _) = slow(&engine_options(), Duration::from_millis(20));
        let patience = Duration::from_millis(if twice { 3_600_000 } else { 200 });
        let server =
            start_with(ServerOptions { drain_timeout: patience, ..options() }, &engine).ready().await;
        let mut response = post(server.address, CHAT, &endless(json!({"stream": true}))).await;
        response.event().await.unwrap();
        server.stop().await;
        if twice {
            server.stop().await;
        }
        let (_, error) = error_of(response, true).await;
        assert_eq!(error["code"], "engine_closed");
        timeout(AT_ONCE, server.ended()).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_step_that_never_ends_does_not_keep_the_server() {
    let (engine, control) = scripted(&engine_options());
    let patience = ServerOptions { drain_timeout: Duration::from_millis(100), ..options() };
    let server = start_with(patience, &engine).ready().await;
    let held = hold(&control);
    let _waiting = send_chat(&server, &ask("[late]", json!({}))).await;
    until(&engine, "running", |m| m.num_requests_running == 1).await;
    server.stop().await;
    timeout(AT_ONCE, server.ended()).await.unwrap().unwrap();
    drop(held);
}

#[tokio::test]
async fn neither_metrics_nor_health_tell_what_was_asked_or_answered() {
    let server = start_with(options(), &scripted(&engine_options()).0).ready().await;
    let body = ask("CANARY-ASKED [CANARY-ANSWERED]", json!({"user": "CANARY-USER", "stop": "CANARY-STOP"}));
    let mut answer = post(server.address, CHAT, &body).await;
    assert_eq!(answer.json().await["choices"][0]["message"]["content"], "CANARY-ANSWERED");
    for path in ["/metrics", "/health", "/livez", "/v1/models"] {
        let text = String::from_utf8(get(server.address, path).await.bytes().await).unwrap();
        assert!(!text.contains("CANARY"), "{path}: {text}");
    }
}

/// The one sample of that name and those labels.
fn value(scrape: &str, sample: &str) -> f64 {
    let labels = "engine=\"0\",model_name=\"tiny\"";
    let name = sample.replacen('{', &format!("{{{labels},"), 1);
    let name = if sample.contains('{') { name } else { format!("{sample}{{{labels}}}") };
    let lines: Vec<_> = scrape.lines().filter_map(|line| line.strip_prefix(&format!("{name} "))).collect();
    assert_eq!(lines.len(), 1, "{name} in\n{scrape}");
    lines[0].parse().unwrap()
}

#[tokio::test]
async fn drafts_are_counted_in_the_scrape_and_in_the_usage() {
    let (engine, _) = scripted(&Options { drafts: Drafts::Exactly(2), ..engine_options() });
    let server = start_with(options(), &engine).ready().await;
    // Each answered letter stands in the question, followed by those that are answered next.
    let answer = post(server.address, CHAT, &ask("[defghijklm]", json!({}))).await.json().await;
    assert_eq!(answer["choices"][0]["message"]["content"], "defghijklm");
    let details = &answer["usage"]["completion_tokens_details"];
    // Behind the first letter three times two drafts are right; behind the tenth "]" is not.
    assert_eq!((&details["drafted_tokens"], &details["accepted_draft_tokens"]), (&json!(8), &json!(6)));
    let scrape = String::from_utf8(get(server.address, "/metrics").await.bytes().await).unwrap();
    for (sample, expected) in [
        ("vllm:spec_decode_num_drafts_total", 4.0),
        ("vllm:spec_decode_num_draft_tokens_total", 8.0),
        ("vllm:spec_decode_num_accepted_tokens_total", 6.0),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"}", 3.0),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"1\"}", 3.0),
        // Six of eight in one answer.
        ("motet:request_draft_acceptance_bucket{le=\"0.7\"}", 0.0),
        ("motet:request_draft_acceptance_bucket{le=\"0.8\"}", 1.0),
        ("motet:request_draft_acceptance_sum", 0.75),
        ("motet:drafts_fallen_out_total", 0.0),
    ] {
        assert_eq!(value(&scrape, sample), expected, "{sample}");
    }
    assert!(!scrape.contains("position=\"2\""), "no more than two drafts are ever made");
}

#[tokio::test]
async fn the_scrape_says_how_long_each_stage_was_at_work() {
    let stages = Options { stages: "2".parse().unwrap(), ..engine_options() };
    let (engine, control) = slow(&stages, Duration::from_millis(5));
    // The first stage hesitates in the first step.
    control.stall_next(Duration::from_millis(300));
    let server = start_with(options(), &engine).ready().await;
    post(server.address, CHAT, &ask("[abc]", json!({}))).await.json().await;
    until(&engine, "nothing left", at_rest).await;
    let scrape = String::from_utf8(get(server.address, "/metrics").await.bytes().await).unwrap();
    let busy =
        ["0", "1"].map(|n| value(&scrape, &format!("motet:stage_busy_seconds_total{{stage=\"{n}\"}}")));
    // Four steps: "a" behind the prompt, "b", "c", the end.
    assert!(busy[0] >= 0.3 + 4.0 * 0.005 && (4.0 * 0.005..busy[0]).contains(&busy[1]), "{busy:?}");
    assert!(!scrape.contains("stage=\"2\""));
}

#[tokio::test]
async fn the_scrape_has_vllms_names_and_counts() {
    let (engine, _) = scripted(&engine_options());
    let server = start_with(options(), &engine).ready().await;
    post(server.address, CHAT, &ask("[abc]", json!({}))).await.json().await;
    post(server.address, CHAT, &endless(json!({"max_tokens": 4, "n": 2}))).await.json().await;
    until(&engine, "nothing left", at_rest).await;
    let scrape = String::from_utf8(get(server.address, "/metrics").await.bytes().await).unwrap();
    for (sample, expected) in [
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_requests_waiting", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
        ("vllm:cache_config_info{block_size=\"64\",num_gpu_blocks=\"64\"}", 1.0),
        ("vllm:generation_tokens_total", 4.0 + 8.0),
        ("vllm:request_success_total{finished_reason=\"stop\"}", 1.0),
        ("vllm:request_success_total{finished_reason=\"length\"}", 2.0),
        ("vllm:request_success_total{finished_reason=\"abort\"}", 0.0),
        ("vllm:time_to_first_token_seconds_count", 3.0),
        ("vllm:time_to_first_token_seconds_bucket{le=\"+Inf\"}", 3.0),
        ("vllm:request_generation_tokens_sum", 12.0),
        ("vllm:request_generation_tokens_bucket{le=\"5\"}", 3.0),
        ("vllm:request_generation_tokens_bucket{le=\"2\"}", 0.0),
    ] {
        assert_eq!(value(&scrape, sample), expected, "{sample}");
    }
    // Every sample belongs to a family that was declared before it, and each family once.
    let mut families = std::collections::BTreeSet::new();
    for line in scrape.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            assert!(["gauge", "counter", "histogram"].contains(&kind));
            assert!(families.insert(name), "{name} twice");
        } else if !line.starts_with('#') {
            let name = line.split('{').next().unwrap();
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            assert!(
                families.contains(name) || family.is_some_and(|family| families.contains(family)),
                "{name}"
            );
        }
    }
}
