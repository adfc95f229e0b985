//! Tiny models of every architecture against transformers and a float64 reference (`tools/expected_values.py`).

#![allow(clippy::print_stdout, reason = "the measured differences")]

mod common;

use common::{Way, expected, logits, prompt, tiny};
use motet_cpu::Isa;
use motet_gguf::Format;
use motet_model::KvFormat;

/// Architecture and the greatest difference allowed with float weights.
const MODELS: [(&str, f32); 8] = [
    ("llama", 1e-4),
    ("qwen2", 1e-4),
    ("qwen3", 1e-4),
    ("qwen3moe", 1e-4),
    ("gemma3", 1e-3),
    ("qwen35", 1e-4),
    ("qwen35moe", 1e-4),
    ("glm4moe", 1e-4),
];

/// The prompts for which there are expected values.
fn prompts(name: &str, format: Format) -> &'static [&'static str] {
    match (name, format) {
        ("qwen35moe" | "glm4moe", Format::F32) => &["a", "b"],
        ("qwen35moe" | "glm4moe", _) => &[],
        _ => &["a", "b", "c", "d"],
    }
}

const WAY: Way = Way { isa: Isa::Scalar, threads: 1, kv: KvFormat::F32, chunk: 512 };

fn way() -> Way {
    Way { isa: Isa::best(), ..WAY }
}

fn compare_floats(format: Format, suffix: &str) {
    for (name, bound) in MODELS {
        let file = tiny(name, format);
        for p in prompts(name, format) {
            let want = expected(&format!("tiny-{name}-{suffix}.{p}.logits"));
            let got = logits(&file, way(), &prompt(p));
            assert_eq!(got.len(), want.len());
            let differences = got.iter().flatten().zip(want.iter().flatten()).map(|(a, b)| (a - b).abs());
            let worst = differences.fold(0.0, f32::max);
            println!("{name} {suffix} {p}: {worst:.1e}");
            assert!(worst <= bound, "{name} {suffix}, prompt {p}: {worst:e} > {bound:e}");
        }
    }
}

#[test]
fn f32_weights_give_the_logits_of_transformers() {
    compare_floats(Format::F32, "f32");
}

#[test]
fn f16_weights_give_the_logits_of_the_float64_reference() {
    compare_floats(Format::F16, "f16");
}

/// Root mean square of the difference over that of the expected logits.
fn relative_rms(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (mut difference, mut whole) = (0.0, 0.0);
    for (a, b) in got.iter().flatten().zip(want.iter().flatten()) {
        difference += square(a - b);
        whole += square(*b);
    }
    (difference / whole).sqrt()
}

/// The rows before the first for which the choice of experts is a near tie: from there on rounding decides which
/// of two right answers comes out, and a row's keys carry it on.
fn before_a_routing_tie(name: &str, prompt: &str, rows: usize) -> usize {
    const NEAR: f32 = 5e-4;
    if name != "qwen3moe" {
        return rows;
    }
    let margins = expected(&format!("tiny-{name}-q8_0.{prompt}.routing_margin"));
    margins.iter().position(|m| m[0] < NEAR).unwrap_or(rows)
}

#[test]
fn q8_0_weights_are_near_the_reference_with_and_without_quantised_activations() {
    for (name, _) in MODELS {
        let file = tiny(name, Format::Q8_0);
        for &p in prompts(name, Format::Q8_0) {
            let got = logits(&file, way(), &prompt(p));
            let want = expected(&format!("tiny-{name}-q8_0.{p}.logits"));
            let certain = before_a_routing_tie(name, p, got.len());
            let off = relative_rms(&got[..certain], &want[..certain]);
            println!("{name} q8_0 {p}: {:.4} % over {certain} of {} rows", 100.0 * off, got.len());
            // Where x / d is within f32 rounding of a half, one side rounds an activation the other way: a step of
            // 1/127 in one value of one row, which later rows see through its keys. It happens once in some 10⁵
            // values: most prompts are exact, the others off by some 0.2 %; expert weights and recurrences make it 1 %.
            let bound = if matches!(name, "qwen3moe" | "qwen35") { 0.01 } else { 0.003 };
            assert!(certain > 0 && off <= bound, "{name}, prompt {p}: {:.4} % from this rule", 100.0 * off);
            let exact = if p == "b" { expected(&format!("tiny-{name}-q8_0.b.logits_exact")) } else { want };
            let off = relative_rms(&got, &exact);
            println!("{name} q8_0 {p}: {:.3} % over all rows", 100.0 * off);
            assert!(off <= 0.08, "{name}, prompt {p}: {:.3} % from exact activations", 100.0 * off);
        }
    }
}
