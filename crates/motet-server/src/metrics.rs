//! `GET /metrics`: what the engine counts, in Prometheus's text format (version 0.0.4), under the names that routers
//! and dashboards for vLLM already read; motet's own facts are under `motet:`.
//!
//! No text of anybody's ever comes in here.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use motet_engine::{Histogram, MetricsSnapshot};

use crate::app::App;

/// Requests by path and status.
#[derive(Debug, Default)]
pub(crate) struct HttpCounters(Mutex<BTreeMap<(&'static str, u16), u64>>);

impl HttpCounters {
    fn count(&self, path: &str, status: StatusCode) {
        // Only paths that exist: what clients make up must not fill the memory.
        let known = PATHS.iter().find(|known| path == **known);
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((known.unwrap_or(&"other"), status.as_u16())).or_default() += 1;
    }
}

/// The paths there are; each is counted by name.
pub(crate) const PATHS: [&str; 6] =
    ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/livez", "/metrics"];

/// Counts requests when their headers go out.
pub(crate) async fn count_requests(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_string();
    let response = next.run(request).await;
    app.counters.count(&path, response.status());
    response
}

/// The scrape.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut scrape = Scrape::new(&app.model.name);
    if let Some(engine) = app.engine() {
        write_engine(&mut scrape, &engine.metrics());
    }
    let counts = app.counters.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    scrape.family("motet:http_requests_total", "counter", "HTTP requests by path and status.");
    for ((path, status), count) in counts {
        scrape.sample("motet:http_requests_total", &[("path", path), ("status", &status.to_string())], count);
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], scrape.text).into_response()
}

fn write_engine(scrape: &mut Scrape, of: &MetricsSnapshot) {
    scrape.gauge(
        "vllm:num_requests_running",
        "Sessions that have a place in the engine.",
        of.num_requests_running,
    );
    scrape.gauge("vllm:num_requests_waiting", "Choices in the queue.", of.num_requests_waiting);
    scrape.gauge("vllm:kv_cache_usage_perc", "KV pages in use; 1 is all of them.", of.kv_cache_usage);
    let blocks = [("block_size", of.block_size.to_string()), ("num_gpu_blocks", of.num_blocks.to_string())];
    scrape.family("vllm:cache_config_info", "gauge", "The shape of the KV cache.");
    scrape.sample(
        "vllm:cache_config_info",
        &blocks.each_ref().map(|(name, value)| (*name, value.as_str())),
        1,
    );
    scrape.gauge("motet:cached_pages", "KV pages that only the prefix cache holds.", of.cached_pages);
    scrape.gauge("motet:checkpoints_used", "Checkpoints of recurrent state in use.", of.checkpoints_used);

    scrape.counter("vllm:num_preemptions", "Sessions that stepped back into the queue.", of.num_preemptions);
    scrape.counter("vllm:prompt_tokens", "Tokens of the prompts of started requests.", of.prompt_tokens);
    scrape.counter_by(
        "vllm:prompt_tokens_by_source",
        "Tokens of prompts, by where their state came from.",
        "source",
        &[("local_compute", of.prompt_tokens_computed), ("local_cache_hit", of.prompt_tokens_cached)],
    );
    scrape.counter(
        "vllm:prompt_tokens_cached",
        "Tokens of prompts that were not read again.",
        of.prompt_tokens_cached,
    );
    scrape.counter(
        "vllm:prompt_tokens_recomputed",
        "Tokens that were read again after stepping back.",
        of.prompt_tokens_recomputed,
    );
    scrape.counter("vllm:generation_tokens", "Tokens of answers.", of.generation_tokens);
    scrape.counter_by(
        "vllm:request_success",
        "Choices that ended, by why.",
        "finished_reason",
        &[
            ("stop", of.finished_stop),
            ("length", of.finished_length),
            ("abort", of.finished_abort),
            ("error", of.finished_error),
        ],
    );
    scrape.counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        of.prefix_cache_queries,
    );
    scrape.counter("vllm:prefix_cache_hits", "Tokens found there.", of.prefix_cache_hits);
    scrape.counter_by(
        "vllm:admission_rejections",
        "Requests that were not taken, by why.",
        "reason",
        &[
            ("queue_full", of.rejected_queue_full),
            ("too_long", of.rejected_too_long),
            ("invalid", of.rejected_invalid),
            ("closed", of.rejected_closed),
        ],
    );
    scrape.counter("vllm:spec_decode_num_drafts", "Rows with drafts behind them.", of.num_drafts);
    scrape.counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.", of.num_draft_tokens);
    scrape.counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts that were chosen.",
        of.num_accepted_tokens,
    );
    let positions: Vec<String> = (0..of.draft_limit).map(|position| position.to_string()).collect();
    let by_position = positions.iter().map(String::as_str).zip(of.accepted_per_position);
    scrape.counter_by(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were chosen, by their number in their step.",
        "position",
        &by_position.collect::<Vec<_>>(),
    );
    scrape.counter(
        "motet:drafts_fallen_out",
        "Times that drafts stopped agreeing with the model.",
        of.drafts_fallen_out,
    );
    scrape.counter("motet:steps", "Steps of the engine.", of.steps);
    scrape.counter("motet:failed_steps", "Steps that failed.", of.failed_steps);
    let stages: Vec<String> = (0..of.stage_busy.len()).map(|stage| stage.to_string()).collect();
    let busy = stages.iter().map(String::as_str).zip(of.stage_busy.iter().map(Duration::as_secs_f64));
    scrape.counter_by(
        "motet:stage_busy_seconds",
        "Time that each stage has been at work, by its number from 0.",
        "stage",
        &busy.collect::<Vec<_>>(),
    );

    let histograms = [
        ("vllm:request_prompt_tokens", "Tokens of a prompt.", &of.request_prompt_tokens),
        ("vllm:request_generation_tokens", "Tokens of an answer.", &of.request_generation_tokens),
        ("vllm:request_params_max_tokens", "max_tokens of a request.", &of.request_params_max_tokens),
        (
            "vllm:request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were computed.",
            &of.request_prefill_kv_computed_tokens,
        ),
        ("vllm:request_params_n", "n of a request.", &of.request_params_n),
        ("vllm:request_num_preemptions", "Times a session stepped back.", &of.request_num_preemptions),
        ("vllm:iteration_tokens_total", "Rows of a step.", &of.iteration_tokens),
        ("vllm:time_to_first_token_seconds", "From arrival to the first token.", &of.time_to_first_token),
        (
            "vllm:inter_token_latency_seconds",
            "Between two steps with tokens of an answer.",
            &of.inter_token_latency,
        ),
        (
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer.",
            &of.time_per_output_token,
        ),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end.", &of.e2e_latency),
        ("vllm:request_queue_time_seconds", "In the queue.", &of.queue_time),
        ("vllm:request_inference_time_seconds", "From the start to the end.", &of.inference_time),
        ("vllm:request_prefill_time_seconds", "From the start to the first token.", &of.prefill_time),
        ("vllm:request_decode_time_seconds", "From the first token to the end.", &of.decode_time),
        (
            "motet:request_draft_acceptance",
            "Drafts of an answer that were chosen, 0 to 1.",
            &of.draft_acceptance,
        ),
        ("motet:step_seconds", "A step of the engine.", &of.step_seconds),
    ];
    for (name, help, histogram) in histograms {
        scrape.histogram(name, help, histogram);
    }
}

/// Text in Prometheus's format. Every sample has the labels `engine` and `model_name`.
struct Scrape {
    text: String,
    labels: String,
}

impl Scrape {
    fn new(model: &str) -> Scrape {
        let model = model.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n");
        Scrape { text: String::new(), labels: format!("engine=\"0\",model_name=\"{model}\"") }
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let _ = write!(self.text, "{name}{{{}", self.labels);
        for (label, value) in labels {
            let _ = write!(self.text, ",{label}=\"{value}\"");
        }
        let _ = writeln!(self.text, "}} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, &[], value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        let name = format!("{name}_total");
        self.family(&name, "counter", help);
        self.sample(&name, &[], value);
    }

    fn counter_by(&mut self, name: &str, help: &str, label: &str, values: &[(&str, impl Display)]) {
        let name = format!("{name}_total");
        self.family(&name, "counter", help);
        for (which, value) in values {
            self.sample(&name, &[(label, which)], value);
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".to_string()]);
        let mut so_far = 0;
        for (bound, count) in bounds.zip(&histogram.counts) {
            so_far += count;
            self.sample(&format!("{name}_bucket"), &[("le", &bound)], so_far);
        }
        self.sample(&format!("{name}_sum"), &[], histogram.sum);
        self.sample(&format!("{name}_count"), &[], so_far);
    }
}
