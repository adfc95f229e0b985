//! The cost of operations in bytes moved and multiply-adds: what balances stages, bounds latency, and tells a
//! profile how far from the limit an operation runs.
//!
//! Weights count once per step, whatever the number of rows; experts by their expectation over uniform routing.

use crate::program::{Op, Program, StateKind};

/// Bytes and multiply-adds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Bytes of weights read, in the file's formats.
    pub weight_bytes: f64,
    /// Values of session state read.
    pub state_values: f64,
    /// Multiply-adds.
    pub multiply_adds: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, o: Self) {
        self.weight_bytes += o.weight_bytes;
        self.state_values += o.state_values;
        self.multiply_adds += o.multiply_adds;
    }
}

impl Program {
    /// The cost of operation `op` for `rows` rows that stand at position `position`. For `Head`, the rows that
    /// want logits.
    pub fn cost(&self, op: usize, rows: usize, position: usize) -> Cost {
        let op = &self.ops[op].1;
        let r = rows as f64;
        let weights = |share: f64| -> f64 {
            op.touches().weights.iter().map(|w| self.weights[w.0].file_bytes() as f64 * share).sum()
        };
        match op {
            Op::Embed { table, .. } => {
                let w = &self.weights[table.0];
                Cost { weight_bytes: w.file_bytes() as f64 / w.shape[1] as f64 * r, ..Cost::default() }
            }
            Op::Linear { weight, .. } | Op::Head { weight, .. } => Cost {
                weight_bytes: weights(1.0),
                multiply_adds: self.weights[weight.0].len() as f64 * r,
                ..Cost::default()
            },
            Op::ExpertLinear { weight, out, .. } => {
                let w = &self.weights[weight.0];
                let (experts, used) = (w.shape[2] as f64, out.count as f64);
                // The share of experts that at least one of the rows chose.
                let touched = 1.0 - (1.0 - used / experts).powf(r);
                Cost {
                    weight_bytes: weights(touched),
                    multiply_adds: w.len() as f64 / experts * used * r,
                    ..Cost::default()
                }
            }
            Op::Attend { q, v, state, .. } => {
                let StateKind::Kv { heads, key_dim, value_dim, window } = self.states[state.0].kind else {
                    return Cost::default();
                };
                let keys = window.map_or(position + 1, |w| (position + 1).min(w as usize)) as f64;
                Cost {
                    state_values: keys * (heads * (key_dim + value_dim)) as f64 * r,
                    multiply_adds: keys * (q.count * (q.dim + v.dim)) as f64 * r,
                    ..Cost::default()
                }
            }
            Op::Delta { state, .. } => {
                let values = self.states[state.0].kind.recurrent_floats() as f64 * r;
                Cost { state_values: 2.0 * values, multiply_adds: 3.0 * values, ..Cost::default() }
            }
            Op::Convolve { weight, .. } => {
                let values = self.weights[weight.0].len() as f64 * r;
                Cost { state_values: values, multiply_adds: values, weight_bytes: weights(1.0) }
            }
            _ => Cost { weight_bytes: weights(1.0), ..Cost::default() },
        }
    }
}
