//! Programs of the tiny models: everything in the file is used, layouts hold, bad headers are refused by name.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::path::PathBuf;

use motet_gguf::{Metadata, ModelFile, Value, Writer};
use motet_model::header::ModelError;
use motet_model::layout::{StateLayout, WorkspaceLayout, manifest, regions};
use motet_model::program::{Op, Place, RESIDUAL};
use motet_model::{Network, Program};

const MODELS: [&str; 8] = ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "glm4moe"];

fn tiny(name: &str) -> ModelFile {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny");
    ModelFile::open(&folder.join(format!("tiny-{name}-f32.gguf"))).unwrap()
}

fn network(name: &str) -> Network {
    Network::from_gguf(&tiny(name)).unwrap()
}

fn all_ops(program: &Program) -> Vec<usize> {
    (0..program.ops.len()).collect()
}

#[test]
fn trunk_and_draft_use_every_tensor_of_the_file() {
    for name in MODELS {
        let (file, network) = (tiny(name), network(name));
        let used: BTreeSet<_> = network.program(true).weights.iter().map(|w| w.tensor.as_str()).collect();
        let held: BTreeSet<_> = file.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(used, held, "{name}");
        assert_eq!(network.draft.is_some(), ["qwen35", "qwen35moe", "glm4moe"].contains(&name));
    }
}

/// A stage with the head computes the trunk as one without: same operations, same names for buffers, weights and state.
#[test]
fn the_head_stands_behind_the_trunk() {
    for name in MODELS {
        let network = network(name);
        let (trunk, both) = (&network.trunk, network.program(true));
        let in_trunk = |place| matches!(place, Place::Input | Place::Layer(_) | Place::Output);
        let (front, behind) = both.ops.split_at(trunk.ops.len());
        assert_eq!(front, trunk.ops, "{name}");
        assert!(front.iter().all(|(place, _)| in_trunk(*place)), "{name}");
        assert!(!behind.iter().any(|(place, _)| in_trunk(*place)), "{name}");
        assert!(both.states.starts_with(&trunk.states) && both.weights.starts_with(&trunk.weights), "{name}");
        let alone = WorkspaceLayout::of(trunk, &all_ops(trunk)).width;
        let together = WorkspaceLayout::of(both, &all_ops(both)).width;
        let head: usize = both.buffers[trunk.buffers.len()..].iter().map(|b| b.width).sum();
        assert!(together <= alone.max(head + 64 * 6), "{name}: {together} columns, {alone} without the head");
    }
}

#[test]
fn no_operation_overwrites_what_will_be_read() {
    for name in MODELS {
        let network = network(name);
        let program = network.program(true);
        let layout = WorkspaceLayout::of(program, &all_ops(program));
        let columns = |b: usize| layout.at[b].unwrap()..layout.at[b].unwrap() + program.buffers[b].width;
        // Who wrote each column last: a read of another buffer's columns is a read of lost values.
        let mut owner = vec![usize::MAX; layout.width];
        for (_, op) in &program.ops {
            let t = op.touches();
            for b in t.reads.iter().filter(|&&b| b != RESIDUAL) {
                let lost = columns(b.0).find(|&c| owner[c] != b.0);
                assert_eq!(lost, None, "{name}, {}: {:?}", op.name(), program.buffers[b.0].name);
            }
            for (b, o) in t.writes.iter().flat_map(|w| t.reads.iter().chain(&t.writes).map(move |r| (w, r))) {
                let (b, o) = (b.0, o.0);
                if b != o && b != RESIDUAL.0 && o != RESIDUAL.0 {
                    let (b, o) = (columns(b), columns(o));
                    assert!(
                        b.end <= o.start || o.end <= b.start,
                        "{name}, {}: inputs and outputs",
                        op.name()
                    );
                }
            }
            for b in t.writes.iter().filter(|&&b| b != RESIDUAL) {
                owner[columns(b.0)].fill(b.0);
            }
        }
        let sum: usize = program.buffers[1..].iter().map(|b| b.width).sum();
        assert!(layout.width < sum, "{name}: nothing is shared, {} columns of {sum}", layout.width);
    }
}

#[test]
fn what_a_region_touches_lies_apart_and_operations_keep_their_order() {
    for name in MODELS {
        let network = network(name);
        let program = network.program(true);
        let (ops, layout) = (all_ops(program), WorkspaceLayout::of(program, &all_ops(program)));
        let regions = regions(program, &ops);
        assert_eq!(regions.iter().cloned().flatten().collect::<Vec<_>>(), ops, "{name}");
        assert!(regions.len() < ops.len(), "{name}: nothing runs together");
        for region in regions {
            let touched: BTreeSet<usize> = region
                .flat_map(|op| {
                    let t = program.ops[op].1.touches();
                    t.reads.into_iter().chain(t.writes).map(|b| b.0)
                })
                .filter(|&b| b != RESIDUAL.0)
                .collect();
            let mut columns: Vec<_> =
                touched.iter().map(|&b| (layout.at[b].unwrap(), program.buffers[b].width)).collect();
            columns.sort_unstable();
            assert!(columns.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{name}: {columns:?}");
        }
    }
}

#[test]
fn stages_divide_the_operations_and_their_weights() {
    for name in MODELS {
        let network = network(name);
        let all = network.layers;
        let (first, last) = (network.trunk.slice(0..1, all), network.trunk.slice(1..all, all));
        let both: Vec<usize> = first.iter().chain(&last).copied().collect();
        assert_eq!(both, all_ops(&network.trunk), "{name}");
        assert!(matches!(network.trunk.ops[first[0]].1, Op::Embed { .. }));
        assert!(matches!(network.trunk.ops[*last.last().unwrap()].1, Op::Head { .. }));
        let layers = |ops: &[usize]| {
            let names =
                manifest(&network.trunk, ops).into_iter().map(|w| network.trunk.weights[w.0].tensor.clone());
            names.filter(|n| n.starts_with("blk.")).collect::<BTreeSet<_>>()
        };
        assert!(layers(&first).is_disjoint(&layers(&last)), "{name}");
    }
}

#[test]
fn state_is_what_the_architecture_says() {
    let kinds = |name| {
        let layout: StateLayout = network(name).state(false);
        let pools = layout.pools.iter().map(|p| (p.window, p.states.len())).collect::<Vec<_>>();
        (pools, layout.recurrent_floats)
    };
    // make_tiny.py: 4 layers; gemma3 slides over 8 positions in three of four layers.
    assert_eq!(kinds("llama"), (vec![(None, 4)], 0));
    assert_eq!(kinds("gemma3"), (vec![(None, 1), (Some(8), 3)], 0));
    // Three gated delta layers: 3 inputs of 2·2·16 + 4·16 channels, 4 heads of 16 × 16.
    assert_eq!(kinds("qwen35"), (vec![(None, 1)], 3 * (3 * 128 + 4 * 16 * 16)));
    // With the head a layer of keys and values more, in the same pool, and the last 32 hidden rows of 64.
    let with_head = network("qwen35").state(true);
    assert_eq!(with_head.pools.iter().map(|p| (p.window, p.states.len())).collect::<Vec<_>>(), [(None, 2)]);
    assert_eq!(with_head.recurrent_floats, 3 * (3 * 128 + 4 * 16 * 16) + 32 * 64);
    assert_eq!(kinds("glm4moe"), (vec![(None, 3)], 0));
    assert_eq!(network("glm4moe").state(true).recurrent_floats, 32 * 64);
}

/// The tiny llama with one key replaced and one tensor left out.
fn changed(key: &str, value: Value<'_>, without: &str) -> Result<Network, ModelError> {
    let file = tiny("llama");
    let metadata: &Metadata = file.metadata();
    let mut writer = Writer::new();
    for (k, v) in metadata.iter() {
        writer.put(k, if k == key { value } else { v }).unwrap();
    }
    for t in file.tensors().iter().filter(|t| t.name != without) {
        writer.tensor(&t.name, &t.shape, t.format, file.bytes(t)).unwrap();
    }
    Network::from_gguf(&ModelFile::from_vec(writer.to_bytes()).unwrap())
}

#[test]
fn bad_headers_are_refused_by_name() {
    let message = |r: Result<Network, ModelError>| r.unwrap_err().to_string();
    let unknown = message(changed("general.architecture", Value::String("mamba"), ""));
    assert!(unknown.contains("mamba") && unknown.contains("qwen35"), "{unknown}");
    let missing = message(changed("", Value::Bool(true), "blk.1.attn_k.weight"));
    assert!(missing.contains("blk.1.attn_k.weight"), "{missing}");
    let misshapen = message(changed("llama.feed_forward_length", Value::U32(97), ""));
    assert!(misshapen.contains("ffn_gate") && misshapen.contains("97"), "{misshapen}");
    let absurd = message(changed("llama.block_count", Value::U32(u32::MAX), ""));
    assert!(absurd.contains("llama.block_count"), "{absurd}");
    let heads = message(changed("llama.attention.head_count_kv", Value::U32(3), ""));
    assert!(heads.contains("head_count_kv") && heads.contains('3'), "{heads}");
    let rope = message(changed("llama.rope.dimension_count", Value::U32(7), ""));
    assert!(rope.contains("rope.dimension_count"), "{rope}");
}
