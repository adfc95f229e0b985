//! A program as people read it: operations by layer with buffers, weights and state; equal layers are told once.

use std::fmt;

use motet_model::layout::manifest;
use motet_model::program::{Op, Place, Program, StateKind, Weight, WeightKind};
use serde::Serialize;

use crate::bytes;

/// A program, folded.
#[derive(Debug, Serialize)]
pub(crate) struct Listing {
    groups: Vec<Group>,
    weights: usize,
    weight_bytes: u64,
}

/// Operations of the input, the output, or of all layers that are alike.
#[derive(Debug, Serialize)]
struct Group {
    place: &'static str,
    layers: Vec<usize>,
    operations: Vec<Operation>,
}

/// One operation.
#[derive(Debug, Serialize, PartialEq)]
struct Operation {
    name: &'static str,
    reads: Vec<Row>,
    writes: Vec<Row>,
    weights: Vec<WeightFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<String>,
}

/// A row buffer.
#[derive(Debug, Serialize, PartialEq)]
struct Row {
    buffer: String,
    width: usize,
}

/// A weight; of a layer's weight the name behind `blk.N.`.
#[derive(Debug, Serialize, PartialEq)]
struct WeightFacts {
    tensor: String,
    /// As the program declares it.
    kind: &'static str,
    /// The input dimension first.
    shape: Vec<usize>,
    format: &'static str,
    bytes: u64,
}

impl Listing {
    /// Lists the operations of a program that stand in some places.
    pub(crate) fn of(program: &Program, places: impl Fn(Place) -> bool) -> Self {
        let ops: Vec<usize> = (0..program.ops.len()).filter(|&op| places(program.ops[op].0)).collect();
        let mut parts: Vec<(Place, Vec<Operation>)> = Vec::new();
        for (place, op) in ops.iter().map(|&op| &program.ops[op]) {
            let operation = Operation::of(program, *place, op);
            match parts.last_mut().filter(|(last, _)| last == place) {
                Some((_, operations)) => operations.push(operation),
                None => parts.push((*place, vec![operation])),
            }
        }
        let mut groups: Vec<Group> = Vec::new();
        for (place, operations) in parts {
            let (place, layer) = match place {
                Place::Input => ("input", None),
                Place::Layer(layer) => ("layer", Some(layer)),
                Place::Output => ("output", None),
                Place::Keep => ("keep", None),
                Place::Recall => ("recall", None),
                Place::Feed => ("feed", None),
                Place::Draft => ("draft", None),
            };
            let alike = |group: &&mut Group| group.place == place && group.operations == operations;
            match groups.iter_mut().find(alike) {
                Some(group) => group.layers.extend(layer),
                None => groups.push(Group { place, layers: layer.into_iter().collect(), operations }),
            }
        }
        let weights = manifest(program, &ops);
        let weight_bytes = weights.iter().map(|id| program.weights[id.0].file_bytes()).sum();
        Self { groups, weights: weights.len(), weight_bytes }
    }
}

impl Operation {
    fn of(program: &Program, place: Place, op: &Op) -> Self {
        let touches = op.touches();
        let row = |id: motet_model::program::BufferId| {
            let buffer = &program.buffers[id.0];
            Row { buffer: buffer.name.clone(), width: buffer.width }
        };
        let block = match place {
            Place::Layer(layer) => format!("blk.{layer}."),
            _ => String::new(),
        };
        let mut reads: Vec<Row> = Vec::new();
        for id in touches.reads {
            let row = row(id);
            if !reads.contains(&row) {
                reads.push(row);
            }
        }
        Self {
            name: op.name(),
            reads,
            writes: touches.writes.into_iter().map(row).collect(),
            weights: touches
                .weights
                .iter()
                .map(|id| WeightFacts::of(&program.weights[id.0], &block))
                .collect(),
            state: touches.state.map(|id| describe(&program.states[id.0].kind)),
        }
    }
}

impl WeightFacts {
    fn of(weight: &Weight, block: &str) -> Self {
        Self {
            tensor: weight.tensor.strip_prefix(block).unwrap_or(&weight.tensor).to_owned(),
            kind: match weight.kind {
                WeightKind::Matrix => "matrix",
                WeightKind::Experts => "experts",
                WeightKind::Table => "table",
                WeightKind::Vector => "vector",
            },
            shape: weight.shape.clone(),
            format: weight.format.name(),
            bytes: weight.file_bytes(),
        }
    }
}

/// A piece of session state in words.
fn describe(kind: &StateKind) -> String {
    match *kind {
        StateKind::Kv { heads, key_dim, value_dim, window } => {
            let window = window.map_or(String::new(), |w| format!(", window {w}"));
            format!("KV: {heads} heads, key {key_dim}, value {value_dim}{window}")
        }
        StateKind::Convolution { kernel, channels } => {
            format!("convolution: [{}, {channels}]", kernel.saturating_sub(1))
        }
        StateKind::Delta { heads, key_dim, value_dim } => {
            format!("delta: [{heads}, {key_dim}, {value_dim}]")
        }
        StateKind::Recent { rows, width } => format!("last rows: [{rows}, {width}]"),
    }
}

/// `0–2, 4, 6–7`
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut().filter(|(_, last)| last + 1 == number) {
            Some((_, last)) => *last = number,
            None => runs.push((number, number)),
        }
    }
    let run = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}–{last}"),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = |rows: &[Row]| {
            let row = |Row { buffer, width }: &Row| format!("{buffer} [{width}]");
            rows.iter().map(row).collect::<Vec<_>>().join(" + ")
        };
        for group in &self.groups {
            match group.layers[..] {
                [] => writeln!(f, "  {}", group.place)?,
                [layer] => writeln!(f, "  layer {layer}")?,
                _ => writeln!(f, "  layers {}, each", ranges(&group.layers))?,
            }
            for op in &group.operations {
                let arrow = if op.reads.is_empty() { "→" } else { " →" };
                let flow = match op.writes.is_empty() {
                    true => format!("{} → logits", rows(&op.reads)),
                    false => format!("{}{arrow} {}", rows(&op.reads), rows(&op.writes)),
                };
                writeln!(f, "    {:<14}{flow}", op.name)?;
                for w in &op.weights {
                    let bytes = bytes::show(w.bytes);
                    writeln!(f, "{:18}{} {:?} {}, {bytes}", "", w.tensor, w.shape, w.format)?;
                }
                if let Some(state) = &op.state {
                    writeln!(f, "{:18}{state}", "")?;
                }
            }
        }
        writeln!(f, "  {} weights, {}", self.weights, bytes::show(self.weight_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use motet_model::Network;

    #[test]
    fn runs_of_numbers_are_folded() {
        assert_eq!(ranges(&[0, 1, 2, 4, 6, 7]), "0–2, 4, 6–7");
        assert_eq!(ranges(&[3]), "3");
    }

    /// Folding loses nothing: every operation and every layer of the built-in model is in exactly one group.
    #[test]
    fn folding_keeps_every_operation() {
        let file = crate::model::open_file(None).expect("the built-in model opens");
        let network = Network::from_gguf(&file).expect("and has a network");
        let listing = Listing::of(&network.trunk, |_| true);
        let unfolded: usize = listing.groups.iter().map(|g| g.operations.len() * g.layers.len().max(1)).sum();
        assert_eq!(unfolded, network.trunk.ops.len());
        let mut layers: Vec<usize> = listing.groups.iter().flat_map(|g| g.layers.clone()).collect();
        layers.sort_unstable();
        assert_eq!(layers, (0..network.layers).collect::<Vec<_>>());
        assert!(listing.groups.len() < network.layers + 2, "nothing was folded");
    }
}
