//! `motet imatrix`: which columns of each weight matter, from the inputs that a text gives them; what llama.cpp's
//! quantiser takes (`llama-quantize --imatrix`).
//!
//! For every product of a layer: the sum over all rows of the squares of its input, column by column, and the number
//! of rows; for experts one of each per expert. The formats are those of llama.cpp's `llama-imatrix`, GGUF and the
//! older `.dat`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::{Args, ValueEnum};
use motet_gguf::{Format, ModelFile, Value, Writer};
use motet_model::{KvFormat, Observer};

use crate::Outcome;
use crate::corpus::{self, CorpusArgs};
use crate::model::{self, Model};
use crate::options::ModelArgs;
use crate::output::say;
use crate::perplexity::Surprise;

/// Arguments of `motet imatrix`.
#[derive(Debug, Args)]
pub(crate) struct Imatrix {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    corpus: CorpusArgs,
    /// The file to write
    #[arg(long, short)]
    output: PathBuf,
    /// gguf, or dat as older programs read it
    #[arg(long, value_enum, default_value_t = FileFormat::Gguf)]
    format: FileFormat,
}

/// How the sums are written.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum FileFormat {
    Gguf,
    Dat,
}

impl Imatrix {
    pub(crate) fn run(&self) -> Outcome {
        // A file that cannot be written is told before the work, not after it. What is there stays until the end.
        let path = self.output.display();
        let refused = |error: std::io::Error| format!("{path}: {error}");
        OpenOptions::new().write(true).create(true).truncate(false).open(&self.output).map_err(refused)?;
        let model = Model::open(self.model.model.as_deref())?;
        let chunks = self.corpus.chunks(&model.tokenizer)?;
        let origin = Origin {
            dataset: self.corpus.file.display().to_string(),
            chunks: chunks.len() as u32,
            chunk_size: self.corpus.ctx,
        };
        let device = model::device(self.model.threads())?;
        // One chunk at a time, so that sums don't depend on how chunks share batches.
        let options = self.corpus.options(1, KvFormat::F16);
        let plan = model::plan(&model.weights.network, &options, &device)?;
        let sums = Arc::new(Mutex::new(Sums::of(&model.weights.file)));
        let engine = model.weights.start_observed(plan, device, Box::new(Watcher(Arc::clone(&sums))));
        engine.wait_until_loaded()?;

        let mut surprise = Surprise::default();
        corpus::read(&engine, chunks, 1, |logprobs| {
            surprise.chunk(logprobs);
            Ok(())
        })?;
        engine.close();
        let sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match self.format {
            FileFormat::Gguf => sums.gguf(&origin)?,
            FileFormat::Dat => sums.dat(&origin),
        };
        std::fs::write(&self.output, bytes).map_err(refused)?;
        say!("{path}: {} weights, {} chunks\n{surprise}\n", sums.by_weight.len(), origin.chunks)?;
        Ok(())
    }
}

/// What the sums were taken from.
struct Origin {
    dataset: String,
    chunks: u32,
    chunk_size: u32,
}

/// The inputs of one weight.
#[derive(Debug, Clone, PartialEq)]
struct Inputs {
    /// Σ x², `[matrices, width]`.
    squares: Vec<f64>,
    /// Rows, `[matrices]`: one matrix, or one per expert.
    rows: Vec<u64>,
}

/// The inputs of all weights of the layers, by the weight's name.
#[derive(Debug, Default)]
struct Sums {
    /// Matrices in each weight that has several.
    experts: BTreeMap<String, usize>,
    by_weight: BTreeMap<String, Inputs>,
}

impl Sums {
    /// Nothing yet, for the weights of this file.
    fn of(file: &ModelFile) -> Self {
        let stacked = file.tensors().iter().filter(|t| t.shape.len() > 2);
        let experts =
            stacked.map(|t| (t.name.clone(), t.shape[2..].iter().product::<u64>() as usize)).collect();
        Self { experts, by_weight: BTreeMap::new() }
    }

    /// Adds rows `[rows, width]`. The embedding and the head are left out, as llama.cpp does.
    fn add(&mut self, tensor: &str, expert: Option<usize>, rows: &[f32], width: usize) {
        if !tensor.starts_with("blk.") {
            return;
        }
        if !self.by_weight.contains_key(tensor) {
            let matrices = self.experts.get(tensor).copied().unwrap_or(1);
            let none = Inputs { squares: vec![0.0; matrices * width], rows: vec![0; matrices] };
            self.by_weight.insert(tensor.to_owned(), none);
        }
        let Some(inputs) = self.by_weight.get_mut(tensor) else { return };
        let expert = expert.unwrap_or(0);
        let squares = &mut inputs.squares[expert * width..][..width];
        for row in rows.chunks_exact(width) {
            squares.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
            inputs.rows[expert] += 1;
        }
    }

    /// The file that `llama-imatrix` writes: `NAME.in_sum2` (F32 `[width, matrices]`) and `NAME.counts` (F32
    /// `[1, matrices]`), sorted by name.
    fn gguf(&self, origin: &Origin) -> Result<Vec<u8>, Box<dyn Error>> {
        let mut file = Writer::new();
        file.put("general.type", Value::String("imatrix"))?;
        file.put_strings("imatrix.datasets", [origin.dataset.as_str()])?;
        file.put("imatrix.chunk_count", Value::U32(origin.chunks))?;
        file.put("imatrix.chunk_size", Value::U32(origin.chunk_size))?;
        for (name, inputs) in &self.by_weight {
            let matrices = inputs.rows.len() as u64;
            let width = inputs.squares.len() as u64 / matrices;
            let squares = floats(inputs.squares.iter().map(|&sum| sum as f32));
            let counts = floats(inputs.rows.iter().map(|&rows| rows as f32));
            file.tensor(&format!("{name}.in_sum2"), &[width, matrices], Format::F32, squares)?;
            file.tensor(&format!("{name}.counts"), &[1, matrices], Format::F32, counts)?;
        }
        Ok(file.to_bytes())
    }

    /// The older file. All numbers are little-endian i32 or f32: how many weights; for each the length of its name,
    /// the name, chunks (rounded up), how many values, and the mean squares times chunks; then the chunks, and the
    /// length of the data set's name and that. An expert that saw no row has mean 1.
    fn dat(&self, origin: &Origin) -> Vec<u8> {
        let mut out = Vec::new();
        let number = |out: &mut Vec<u8>, n: u64| out.extend((n as i32).to_le_bytes());
        let text = |out: &mut Vec<u8>, text: &str| {
            number(out, text.len() as u64);
            out.extend(text.as_bytes());
        };
        number(&mut out, self.by_weight.len() as u64);
        for (name, inputs) in &self.by_weight {
            text(&mut out, name);
            let most = inputs.rows.iter().copied().max().unwrap_or(0);
            let chunks = most.div_ceil(u64::from(origin.chunk_size));
            number(&mut out, chunks);
            number(&mut out, inputs.squares.len() as u64);
            let width = inputs.squares.len() / inputs.rows.len();
            let means = inputs.squares.iter().enumerate().map(|(i, &sum)| match inputs.rows[i / width] {
                0 => 1.0,
                rows => sum / rows as f64,
            });
            out.extend(floats(means.map(|mean| (mean * chunks as f64) as f32)));
        }
        number(&mut out, u64::from(origin.chunks));
        text(&mut out, &origin.dataset);
        out
    }
}

fn floats(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

/// Adds what a stage multiplies.
struct Watcher(Arc<Mutex<Sums>>);

impl Observer for Watcher {
    fn product(&mut self, tensor: &str, expert: Option<usize>, rows: &[f32], width: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).add(tensor, expert, rows, width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One matrix of three columns with two rows, one of two experts with one row for the second.
    fn sums() -> Sums {
        let mut sums = Sums::default();
        sums.experts.insert("blk.0.ffn_up_exps.weight".into(), 2);
        sums.add("blk.0.attn_q.weight", None, &[1.0, 2.0, 3.0, -1.0, 0.5, 0.0], 3);
        sums.add("blk.0.ffn_up_exps.weight", Some(1), &[3.0, 4.0], 2);
        sums.add("token_embd.weight", None, &[1.0], 1);
        sums
    }

    fn origin() -> Origin {
        Origin { dataset: "a.txt".into(), chunks: 1, chunk_size: 2 }
    }

    fn read(file: &ModelFile, name: &str) -> (Vec<u64>, Vec<f32>) {
        let tensor = file.tensor(name).expect(name);
        assert_eq!(tensor.format, Format::F32);
        let floats = file.bytes(tensor).chunks_exact(4);
        (tensor.shape.clone(), floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    #[test]
    fn squares_are_summed_by_column_and_expert() {
        let file = ModelFile::from_vec(sums().gguf(&origin()).expect("a file")).expect("a GGUF file");
        assert_eq!(file.tensors().len(), 4);
        let dense = "blk.0.attn_q.weight";
        assert_eq!(read(&file, &format!("{dense}.in_sum2")), (vec![3, 1], vec![2.0, 4.25, 9.0]));
        assert_eq!(read(&file, &format!("{dense}.counts")), (vec![1, 1], vec![2.0]));
        let experts = "blk.0.ffn_up_exps.weight";
        assert_eq!(read(&file, &format!("{experts}.in_sum2")), (vec![2, 2], vec![0.0, 0.0, 9.0, 16.0]));
        assert_eq!(read(&file, &format!("{experts}.counts")), (vec![1, 2], vec![0.0, 1.0]));
        let keys = file.metadata();
        assert_eq!(keys.required::<&str>("general.type").expect("a key"), "imatrix");
        assert_eq!(keys.required::<u64>("imatrix.chunk_count").expect("a key"), 1);
        assert_eq!(keys.required::<u64>("imatrix.chunk_size").expect("a key"), 2);
    }

    #[test]
    fn the_older_file_holds_means_times_chunks() {
        let mut expected = Vec::new();
        let number = |out: &mut Vec<u8>, n: i32| out.extend(n.to_le_bytes());
        number(&mut expected, 2);
        number(&mut expected, 19);
        expected.extend(b"blk.0.attn_q.weight");
        number(&mut expected, 1);
        number(&mut expected, 3);
        expected.extend([1.0f32, 2.125, 4.5].iter().flat_map(|v| v.to_le_bytes()));
        number(&mut expected, 24);
        expected.extend(b"blk.0.ffn_up_exps.weight");
        number(&mut expected, 1);
        number(&mut expected, 4);
        expected.extend([1.0f32, 1.0, 9.0, 16.0].iter().flat_map(|v| v.to_le_bytes()));
        number(&mut expected, 1);
        number(&mut expected, 5);
        expected.extend(b"a.txt");
        assert_eq!(sums().dat(&origin()), expected);
    }
}
