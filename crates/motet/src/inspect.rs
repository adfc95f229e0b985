//! `motet inspect`: what a model file holds, and the program that runs it. Reads the header only.
//!
//! What can be said of any GGUF file is said even where network, tokenizer or template are unknown; the error comes
//! after it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use clap::Args;
use motet_gguf::{Metadata, ModelFile, Strings, TensorInfo, Value};
use motet_model::Network;
use motet_model::program::{Op, Place, StateKind};
use motet_text::{ChatTemplate, Tokenizer};
use serde::Serialize;

use crate::listing::Listing;
use crate::output::say;
use crate::{Outcome, bytes, model};

/// Arguments of `motet inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A GGUF file or the name of a pulled model; without it the built-in demonstration model
    file: Option<PathBuf>,
    /// List the network's program: operations, buffers, weights, state
    #[arg(long)]
    program: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(crate) fn run(&self) -> Outcome {
        let file = model::open_file(self.file.as_deref())?;
        let network = Network::from_gguf(&file);
        let found = network.as_ref().ok();
        let text = || {
            let tokenizer = Tokenizer::from_gguf(file.metadata())?;
            ChatTemplate::from_gguf(file.metadata(), &tokenizer)
        };
        let unusable: Outcome = match &network {
            Err(error) => Err(error.to_string().into()),
            Ok(_) => text().map(drop).map_err(Into::into),
        };
        let report = Report {
            file: FileFacts::of(&file),
            network: found.map(NetworkFacts::of),
            program: found.filter(|_| self.program).map(|network| Listing::of(&network.trunk, |_| true)),
            draft: found.filter(|_| self.program).and_then(|n| n.draft.as_ref()).map(|program| {
                Listing::of(program, |place| matches!(place, Place::Keep | Place::Feed | Place::Draft))
            }),
            error: unusable.as_ref().err().map(ToString::to_string),
        };
        match self.json {
            true => say!("{}\n", serde_json::to_string_pretty(&report)?)?,
            false => say!("{report}")?,
        }
        unusable
    }
}

/// All that is known.
#[derive(Debug, Serialize)]
struct Report {
    file: FileFacts,
    network: Option<NetworkFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<Listing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft: Option<Listing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// What the header says without knowing the network.
#[derive(Debug, Serialize)]
struct FileFacts {
    architecture: Option<String>,
    name: Option<String>,
    file_bytes: u64,
    /// Values in all tensors.
    parameters: u64,
    /// By bytes, most first.
    formats: Vec<FormatShare>,
    /// Numbers of the header, under the architecture's prefix.
    header: BTreeMap<String, i64>,
    vocabulary: Option<usize>,
    tokenizer: Option<String>,
    pre_tokenizer: Option<String>,
    /// The file's chat template; none: ChatML is used.
    chat_template: Option<String>,
    mtp: Option<Mtp>,
}

/// Tensors of one format.
#[derive(Debug, Serialize)]
struct FormatShare {
    format: &'static str,
    tensors: usize,
    bytes: u64,
}

/// The multi-token-prediction head, as it lies in the file.
#[derive(Debug, Serialize)]
struct Mtp {
    layers: usize,
    tensors: usize,
    bytes: u64,
}

impl FileFacts {
    fn of(file: &ModelFile) -> Self {
        let metadata = file.metadata();
        let text = |key| metadata.optional::<&str>(key).ok().flatten().map(str::to_owned);
        let architecture = text("general.architecture");
        let prefix = architecture.as_ref().map(|a| format!("{a}.")).unwrap_or_default();
        let mut formats: BTreeMap<_, FormatShare> = BTreeMap::new();
        for tensor in file.tensors() {
            let format = tensor.format.name();
            let share = formats.entry(tensor.format).or_insert(FormatShare { format, tensors: 0, bytes: 0 });
            share.tensors += 1;
            share.bytes += tensor.byte_len();
        }
        let mut formats: Vec<_> = formats.into_values().collect();
        formats.sort_by_key(|share| std::cmp::Reverse(share.bytes));
        let header = header_numbers(metadata, &prefix);
        Self {
            name: text("general.name"),
            file_bytes: file.file_bytes(),
            parameters: file.tensors().iter().map(TensorInfo::elements).sum(),
            formats,
            vocabulary: metadata
                .optional::<Strings<'_>>("tokenizer.ggml.tokens")
                .ok()
                .flatten()
                .map(|t| t.len()),
            tokenizer: text("tokenizer.ggml.model"),
            pre_tokenizer: text("tokenizer.ggml.pre"),
            chat_template: text("tokenizer.chat_template"),
            mtp: mtp(file, &header),
            header,
            architecture,
        }
    }
}

/// The whole numbers under the architecture's prefix.
fn header_numbers(metadata: &Metadata, prefix: &str) -> BTreeMap<String, i64> {
    let number = |value: Value<'_>| value.as_integer().and_then(|n| i64::try_from(n).ok());
    metadata
        .iter()
        .filter(|_| !prefix.is_empty())
        .filter_map(|(key, value)| Some((key.strip_prefix(prefix)?.to_owned(), number(value)?)))
        .collect()
}

/// The last `nextn_predict_layers` of the file's blocks are the MTP head.
fn mtp(file: &ModelFile, header: &BTreeMap<String, i64>) -> Option<Mtp> {
    let layers = *header.get("nextn_predict_layers").filter(|layers| **layers > 0)?;
    let first = header.get("block_count")?.checked_sub(layers)?;
    let block = |name: &str| -> Option<i64> { name.strip_prefix("blk.")?.split('.').next()?.parse().ok() };
    let tensors = file.tensors().iter().filter(|t| block(&t.name).is_some_and(|n| n >= first));
    let (mut count, mut bytes) = (0, 0);
    for tensor in tensors {
        count += 1;
        bytes += tensor.byte_len();
    }
    Some(Mtp { layers: usize::try_from(layers).ok()?, tensors: count, bytes })
}

/// What follows from the network's program.
#[derive(Debug, Serialize)]
struct NetworkFacts {
    /// Parameters of the trunk, a tied embedding once.
    parameters: u64,
    layers: usize,
    d_model: usize,
    vocabulary: usize,
    context: usize,
    attention: Vec<Attention>,
    /// Layers with recurrent state in place of keys and values.
    recurrent_layers: usize,
    /// In f16, all attention layers.
    kv_bytes_per_token: u64,
    recurrent_bytes_per_session: u64,
}

/// Attention layers of one shape.
#[derive(Debug, Serialize, PartialEq)]
struct Attention {
    layers: usize,
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    window: Option<u32>,
}

impl NetworkFacts {
    fn of(network: &Network) -> Self {
        let states = &network.trunk.states;
        let mut attention: Vec<Attention> = Vec::new();
        let mut kv_values = 0;
        for (_, op) in &network.trunk.ops {
            let Op::Attend { q, state, .. } = op else { continue };
            let StateKind::Kv { heads, key_dim, value_dim, window } = states[state.0].kind else { continue };
            kv_values += heads * (key_dim + value_dim);
            let like = Attention { layers: 1, heads: q.count, kv_heads: heads, key_dim, value_dim, window };
            match attention.iter_mut().find(|a| Attention { layers: 1, ..**a } == like) {
                Some(known) => known.layers += 1,
                None => attention.push(like),
            }
        }
        let delta = |kind: &StateKind| matches!(kind, StateKind::Delta { .. });
        Self {
            parameters: network.parameters(),
            layers: network.layers,
            d_model: network.d_model,
            vocabulary: network.vocab,
            context: network.context,
            attention,
            recurrent_layers: states.iter().filter(|state| delta(&state.kind)).count(),
            kv_bytes_per_token: 2 * kv_values as u64,
            recurrent_bytes_per_session: 4 * network.state(false).recurrent_floats as u64,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some(network) = &self.network {
            write!(f, "{network}")?;
        }
        if let Some(program) = &self.program {
            write!(f, "\nprogram\n{program}")?;
        }
        if let Some(draft) = &self.draft {
            write!(f, "\ndraft head (MTP)\n{draft}")?;
        }
        Ok(())
    }
}

/// One line: what, and its value.
fn line(f: &mut fmt::Formatter<'_>, what: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{what:<16}{value}")
}

impl fmt::Display for FileFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "(none)".into());
        line(f, "architecture", or_none(&self.architecture))?;
        line(f, "name", or_none(&self.name))?;
        line(f, "parameters", format!("{:.1} M", self.parameters as f64 / 1e6))?;
        line(f, "file", bytes::show(self.file_bytes))?;
        for (at, share) in self.formats.iter().enumerate() {
            let what = if at == 0 { "formats" } else { "" };
            let FormatShare { format, tensors, bytes } = share;
            line(f, what, format!("{format:<8}{tensors:>5} tensors  {}", bytes::show(*bytes)))?;
        }
        let vocabulary = self.vocabulary.map_or("(none)".into(), |n| n.to_string());
        line(f, "vocabulary", vocabulary)?;
        line(
            f,
            "tokenizer",
            format!("{}, pre-tokenizer {}", or_none(&self.tokenizer), or_none(&self.pre_tokenizer)),
        )?;
        let template = match &self.chat_template {
            Some(template) => {
                let first = template.lines().find(|l| !l.trim().is_empty()).unwrap_or_default();
                let short: String = first.chars().take(80).collect();
                format!("yes: {short}{}", if short.len() < template.trim().len() { " …" } else { "" })
            }
            None => "default (ChatML): the file has none".into(),
        };
        line(f, "chat template", template)?;
        match &self.mtp {
            Some(Mtp { layers, tensors, bytes }) => line(
                f,
                "MTP head",
                format!(
                    "{layers} layer(s), {tensors} tensors, {}; {} loaded where it drafts",
                    bytes::show(*bytes),
                    if *layers > 1 { "the first is" } else { "it is" }
                ),
            )?,
            None => line(f, "MTP head", "none")?,
        }
        for (key, value) in &self.header {
            line(f, "header", format!("{key} = {value}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for NetworkFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "context", format!("{} tokens", self.context))?;
        line(f, "layers", format!("{} of {} columns", self.layers, self.d_model))?;
        for Attention { layers, heads, kv_heads, key_dim, value_dim, window } in &self.attention {
            let window = window.map_or("all before".into(), |w| format!("window {w}"));
            let dims = format!("key {key_dim}, value {value_dim}");
            let text = format!("{layers} layers, {heads} heads, {kv_heads} KV heads, {dims}, {window}");
            line(f, "attention", text)?;
        }
        if self.recurrent_layers > 0 {
            line(f, "recurrent", format!("{} layers (gated delta)", self.recurrent_layers))?;
        }
        line(f, "KV per token", format!("{} (f16)", bytes::show(self.kv_bytes_per_token)))?;
        line(f, "state per session", format!(" {}", bytes::show(self.recurrent_bytes_per_session)))
    }
}
