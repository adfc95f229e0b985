//! What the engine counts, under the names that routers already read (vLLM's, without prefix).
//!
//! One plain struct behind one lock that the engine takes once or twice a step; a scrape is a copy of it. No prompt
//! text, no token ever comes in here.

use crate::drafts::MAX_DRAFTS;
use crate::session::{Session, Times};
use crate::stream::FinishReason;
use std::time::Duration;

const LATENCY: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const SHARES: &[f64] = &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];
const PREEMPTIONS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];

/// Observations by bucket.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// Upper bounds of the buckets but the last, which has none.
    pub bounds: Vec<f64>,
    /// Observations per bucket (not cumulated), one more than bounds.
    pub counts: Vec<u64>,
    /// Sum of all observations.
    pub sum: f64,
}

impl Histogram {
    fn new(bounds: &[f64]) -> Self {
        Self { bounds: bounds.to_vec(), counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Buckets 1-2-5-10-… up to the first bound that holds `most`.
    fn up_to(most: usize) -> Self {
        let mut bounds = Vec::new();
        let steps = (0..).flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(power)));
        for bound in steps {
            bounds.push(bound);
            if bound >= most as f64 {
                break;
            }
        }
        Self::new(&bounds)
    }

    pub(crate) fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|&b| b < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    pub(crate) fn time(&mut self, value: Duration) {
        self.observe(value.as_secs_f64());
    }

    /// All observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// A copy of all counters, gauges and histograms at one moment. Times are in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricsSnapshot {
    /// Gauge `num_requests_running`: sessions with a place.
    pub num_requests_running: usize,
    /// Gauge `num_requests_waiting`: choices in the queue and sessions that stepped back.
    pub num_requests_waiting: usize,
    /// Gauge `kv_cache_usage_perc`, 0–1: pages that sessions hold.
    pub kv_cache_usage: f64,
    /// `cache_config_info{block_size}`.
    pub block_size: usize,
    /// `cache_config_info{num_gpu_blocks}`: pages in all.
    pub num_blocks: usize,
    /// Gauge `motet:cached_pages`: pages that only the prefix cache holds.
    pub cached_pages: usize,
    /// Gauge `motet:checkpoints_used`.
    pub checkpoints_used: usize,

    /// Counter `num_preemptions`: sessions that stepped back into the queue.
    pub num_preemptions: u64,
    /// Counter `prompt_tokens`: of requests that started, counted once.
    pub prompt_tokens: u64,
    /// Counter `prompt_tokens_cached`, also source `local_cache_hit`.
    pub prompt_tokens_cached: u64,
    /// Source `local_compute`: prompt rows that were run.
    pub prompt_tokens_computed: u64,
    /// Counter `prompt_tokens_recomputed`: rows run again after stepping back.
    pub prompt_tokens_recomputed: u64,
    /// Counter `generation_tokens`.
    pub generation_tokens: u64,
    /// Counter `request_success{finished_reason="stop"}`: end tokens and cuts.
    pub finished_stop: u64,
    /// `finished_reason="length"`.
    pub finished_length: u64,
    /// `finished_reason="abort"`: readers that left.
    pub finished_abort: u64,
    /// `finished_reason="error"`.
    pub finished_error: u64,
    /// Counter `prefix_cache_queries`, in tokens.
    pub prefix_cache_queries: u64,
    /// Counter `prefix_cache_hits`, in tokens.
    pub prefix_cache_hits: u64,
    /// Counter `admission_rejections{reason="queue_full"}`.
    pub rejected_queue_full: u64,
    /// `reason="too_long"`: prompts beyond the context, and what never fits the pool.
    pub rejected_too_long: u64,
    /// `reason="invalid"`.
    pub rejected_invalid: u64,
    /// `reason="closed"`: draining or closed.
    pub rejected_closed: u64,
    /// The most drafts to a row: positions that are counted.
    pub draft_limit: usize,
    /// Counter `spec_decode_num_drafts`: rows of sessions that had drafts behind them.
    pub num_drafts: u64,
    /// Counter `spec_decode_num_draft_tokens`.
    pub num_draft_tokens: u64,
    /// Counter `spec_decode_num_accepted_tokens`: drafts that were chosen and whose rows counted.
    pub num_accepted_tokens: u64,
    /// Drafts by their number in their step.
    pub drafted_per_position: [u64; MAX_DRAFTS],
    /// Counter `spec_decode_num_accepted_tokens_per_pos{position}`.
    pub accepted_per_position: [u64; MAX_DRAFTS],
    /// Counter `motet:drafts_fallen_out`: times that drafts stopped agreeing with the network
    /// ([`FallenOut`](crate::FallenOut)).
    pub drafts_fallen_out: u64,
    /// Counter `motet:steps`.
    pub steps: u64,
    /// Counter `motet:failed_steps`.
    pub failed_steps: u64,

    /// Histogram `request_prompt_tokens`.
    pub request_prompt_tokens: Histogram,
    /// Histogram `request_generation_tokens`.
    pub request_generation_tokens: Histogram,
    /// Histogram `request_params_max_tokens`.
    pub request_params_max_tokens: Histogram,
    /// Histogram `request_prefill_kv_computed_tokens`.
    pub request_prefill_kv_computed_tokens: Histogram,
    /// Histogram `request_params_n`.
    pub request_params_n: Histogram,
    /// Histogram `request_num_preemptions`.
    pub request_num_preemptions: Histogram,
    /// Histogram `motet:request_draft_acceptance`, 0–1: of the drafts of an answer that had any, those that were chosen.
    pub draft_acceptance: Histogram,
    /// Histogram `iteration_tokens_total`: rows per step.
    pub iteration_tokens: Histogram,
    /// Histogram `motet:step_seconds`.
    pub step_seconds: Histogram,
    /// Counter `motet:stage_busy_seconds{stage}`: how long each stage has been at work on steps that did not fail.
    pub stage_busy: Vec<Duration>,
    /// Histogram `time_to_first_token_seconds`.
    pub time_to_first_token: Histogram,
    /// Histogram `inter_token_latency_seconds`: between two steps that brought tokens of an answer, once however many
    /// came, as vLLM counts it: what a reader waits for. By tokens counts `time_per_output_token`.
    pub inter_token_latency: Histogram,
    /// Histogram `request_time_per_output_token_seconds`.
    pub time_per_output_token: Histogram,
    /// Histogram `e2e_request_latency_seconds`.
    pub e2e_latency: Histogram,
    /// Histogram `request_queue_time_seconds`.
    pub queue_time: Histogram,
    /// Histogram `request_inference_time_seconds`.
    pub inference_time: Histogram,
    /// Histogram `request_prefill_time_seconds`.
    pub prefill_time: Histogram,
    /// Histogram `request_decode_time_seconds`.
    pub decode_time: Histogram,
}

impl MetricsSnapshot {
    pub(crate) fn new(context: usize, num_blocks: usize, drafts: usize, stages: usize) -> Self {
        let (latency, request, tokens) =
            (Histogram::new(LATENCY), Histogram::new(REQUEST), Histogram::up_to(context));
        Self {
            num_requests_running: 0,
            num_requests_waiting: 0,
            kv_cache_usage: 0.0,
            block_size: 64,
            num_blocks,
            cached_pages: 0,
            checkpoints_used: 0,
            num_preemptions: 0,
            prompt_tokens: 0,
            prompt_tokens_cached: 0,
            prompt_tokens_computed: 0,
            prompt_tokens_recomputed: 0,
            generation_tokens: 0,
            finished_stop: 0,
            finished_length: 0,
            finished_abort: 0,
            finished_error: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            rejected_queue_full: 0,
            rejected_too_long: 0,
            rejected_invalid: 0,
            rejected_closed: 0,
            draft_limit: drafts,
            num_drafts: 0,
            num_draft_tokens: 0,
            num_accepted_tokens: 0,
            drafted_per_position: [0; MAX_DRAFTS],
            accepted_per_position: [0; MAX_DRAFTS],
            drafts_fallen_out: 0,
            steps: 0,
            failed_steps: 0,
            request_prompt_tokens: tokens.clone(),
            request_generation_tokens: tokens.clone(),
            request_params_max_tokens: tokens.clone(),
            request_prefill_kv_computed_tokens: tokens,
            request_params_n: Histogram::new(CHOICES),
            request_num_preemptions: Histogram::new(PREEMPTIONS),
            draft_acceptance: Histogram::new(SHARES),
            iteration_tokens: Histogram::new(STEP_TOKENS),
            step_seconds: latency.clone(),
            stage_busy: vec![Duration::ZERO; stages],
            time_to_first_token: Histogram::new(FIRST_TOKEN),
            inter_token_latency: latency.clone(),
            time_per_output_token: latency,
            e2e_latency: request.clone(),
            queue_time: request.clone(),
            inference_time: request.clone(),
            prefill_time: request.clone(),
            decode_time: request,
        }
    }
}

/// What happens to sessions, as it is counted.
impl MetricsSnapshot {
    /// A session has a place for the first time.
    pub(crate) fn started(&mut self, session: &Session, now: Duration) {
        let (task, cached) = (&session.task, session.read as u64);
        self.prompt_tokens += task.prompt as u64;
        self.prompt_tokens_cached += cached;
        self.prefix_cache_queries += task.prompt as u64;
        self.prefix_cache_hits += cached;
        self.queue_time.time(now.saturating_sub(task.arrived));
        self.request_prompt_tokens.observe(task.prompt as f64);
        self.request_params_max_tokens.observe(task.answer as f64);
        if session.age.1 == 0 {
            self.request_params_n.observe(1.0 + session.forks.len() as f64);
        }
    }

    /// A step has run `rows` rows, for so long in each stage.
    pub(crate) fn stepped(&mut self, rows: usize, stages: &[Duration]) {
        let took = stages.iter().sum();
        self.stage_busy.iter_mut().zip(stages).for_each(|(busy, &took)| *busy += took);
        self.steps += 1;
        self.iteration_tokens.observe(rows as f64);
        self.step_seconds.time(took);
    }

    /// Of `drafts` drafts behind a row, the first `accepted` were chosen.
    pub(crate) fn drafted(&mut self, drafts: usize, accepted: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += drafts as u64;
        self.num_accepted_tokens += accepted as u64;
        self.drafted_per_position[..drafts].iter_mut().for_each(|count| *count += 1);
        self.accepted_per_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }

    /// The last `rows` rows before `session.read` have been run.
    pub(crate) fn rows_were_run(&mut self, session: &Session, rows: usize) {
        let from = session.read - rows;
        let again = session.furthest.min(session.read).saturating_sub(from);
        let new_from = from + again;
        let new_in_prompt = session.task.prompt.min(session.read).saturating_sub(new_from);
        self.prompt_tokens_recomputed += again as u64;
        self.prompt_tokens_computed += new_in_prompt as u64;
    }

    /// A step has chosen `tokens` tokens of an answer, the first or the next ones.
    pub(crate) fn chosen(&mut self, tokens: usize, times: &mut Times, arrived: Duration, now: Duration) {
        self.generation_tokens += tokens as u64;
        match times.first_token {
            None => {
                times.first_token = Some(now);
                self.time_to_first_token.time(now.saturating_sub(arrived));
                self.prefill_time.time(now.saturating_sub(times.started));
            }
            Some(_) => self.inter_token_latency.time(now.saturating_sub(times.last_token)),
        }
        times.last_token = now;
    }

    /// An answer is complete.
    pub(crate) fn finished(&mut self, session: &Session, reason: FinishReason, now: Duration) {
        match reason {
            FinishReason::EndToken(_) | FinishReason::Cut => self.finished_stop += 1,
            FinishReason::Length => self.finished_length += 1,
        }
        let (task, times) = (&session.task, &session.times);
        self.request_generation_tokens.observe(session.generated as f64);
        let computed = task.prompt - session.cached.unwrap_or(0);
        self.request_prefill_kv_computed_tokens.observe(computed as f64);
        self.request_num_preemptions.observe(session.preemptions as f64);
        if session.drafted > 0 {
            self.draft_acceptance.observe(session.accepted as f64 / session.drafted as f64);
        }
        self.e2e_latency.time(now.saturating_sub(task.arrived));
        self.inference_time.time(now.saturating_sub(times.started));
        if let Some(first) = times.first_token {
            let decoding = now.saturating_sub(first);
            self.decode_time.time(decoding);
            if session.generated > 1 {
                self.time_per_output_token.time(decoding / (session.generated as u32 - 1));
            }
        }
    }
}
