//! The built-in model's draft head and the network choose with the same noise: how often they choose the same token.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Bench, GREEDY, Way};
use motet_cpu::Isa;
use motet_gguf::ModelFile;
use motet_model::batch::{Sampling, Want};
use motet_model::{KvFormat, PAGE};

/// Soft-max.
fn probabilities(logits: &[f32]) -> Vec<f64> {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let e: Vec<f64> = logits.iter().map(|&l| (f64::from(l) - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|e| e / sum).collect()
}

/// The probability that two races with the same noise have the same winner: Σᵢ 1 / Σⱼ max(pⱼ/pᵢ, qⱼ/qᵢ).
fn agreement(p: &[f64], q: &[f64]) -> f64 {
    // pⱼ/pᵢ is the greater where qⱼ/pⱼ is at most qᵢ/pᵢ: in this order, sums over all before and all behind.
    let mut order: Vec<usize> = (0..p.len()).filter(|&i| p[i] > 0.0 && q[i] > 0.0).collect();
    order.sort_unstable_by(|&a, &b| (q[a] * p[b]).total_cmp(&(q[b] * p[a])));
    let mut q_behind: f64 = order.iter().map(|&i| q[i]).sum();
    let (mut p_before, mut sum) = (0.0, 0.0);
    for &i in &order {
        (p_before, q_behind) = (p_before + p[i], q_behind - q[i]);
        sum += 1.0 / (p_before / p[i] + q_behind.max(0.0) / q[i]);
    }
    sum
}

#[test]
fn the_sum_is_its_formula() {
    let (p, q) = ([0.5, 0.3, 0.15, 0.05], [0.1, 0.35, 0.35, 0.2]);
    let term = |i: usize| 1.0 / (0..4).map(|j| f64::max(p[j] / p[i], q[j] / q[i])).sum::<f64>();
    assert!((agreement(&p, &q) - (0..4).map(term).sum::<f64>()).abs() < 1e-12);
    assert!((agreement(&p, &p) - 1.0).abs() < 1e-12);
}

#[test]
#[allow(clippy::print_stdout, reason = "the measured figures")]
fn drafts_are_accepted_as_often_as_the_two_distributions_allow() {
    const SESSIONS: usize = 16;
    const LENGTH: usize = 4 * PAGE;
    const ROUNDS: usize = 5;
    let file = ModelFile::open(&common::fixture("../../assets/motet-demo.gguf")).unwrap();
    let way = Way { isa: Isa::best(), threads: 2, kv: KvFormat::F16, chunk: 1 };
    let mut bench = Bench::with(true, &file, way, SESSIONS, LENGTH + PAGE);
    let (mut drafts, mut accepted, mut expected, mut overlap) = (0, 0, 0.0, 0.0);
    for round in 0..ROUNDS {
        // Conversations that the model makes up, each from another token on and with noise of its own.
        let sampling = |session: usize| Sampling {
            seed: (round * SESSIONS + session) as u64,
            temperature: 1.0,
            ..GREEDY
        };
        let mut texts: Vec<Vec<u32>> =
            (0..SESSIONS).map(|s| vec![(300 + round * SESSIONS + s) as u32]).collect();
        for at in 0..LENGTH {
            let mut drafted = Vec::new();
            if at > 0 {
                (0..SESSIONS).for_each(|s| bench.wish(s, &texts[s], 1, sampling(s)));
                drafted = bench.draft();
            }
            (0..SESSIONS).for_each(|s| bench.add(s, &texts[s], at, at + 1));
            for (s, ask) in bench.work.batch.asks.iter_mut().enumerate() {
                ask.want = Want::Sample(sampling(s));
            }
            let logits = bench.step();
            for (s, draft) in drafted.iter().enumerate() {
                let (p, q) = (probabilities(&logits[s]), probabilities(&draft.logits[0]));
                drafts += 1;
                accepted += usize::from(draft.tokens[0] == bench.answers[s]);
                expected += agreement(&p, &q);
                overlap += p.iter().zip(&q).map(|(p, q)| p.min(*q)).sum::<f64>();
            }
            texts.iter_mut().zip(&bench.answers).for_each(|(text, &token)| text.push(token));
        }
    }
    let share = |x: f64| x / drafts as f64;
    let (measured, expected, overlap) = (share(accepted as f64), share(expected), share(overlap));
    println!("{drafts} drafts: {measured:.4} accepted, {expected:.4} expected, Σ min(p, q) {overlap:.4}");
    assert!(drafts >= 20_000 && (measured - expected).abs() <= 0.01, "{measured:.4}, expected {expected:.4}");
    assert!(expected < overlap, "no coupling can beat the overlap");
}
