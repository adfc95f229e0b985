//! `motet verify`: that conversations do not change each other, checked on any model.
//!
//! Each conversation runs alone once; then they run together in many ways, and every row of logits must have the bits
//! that it has alone. `matrix` says in which ways, `conversation` what is said, `runs` lets them run, `transcript`
//! compares, `report` sums up.

mod conversation;
mod matrix;
mod report;
mod runs;
mod transcript;

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_engine::{Engine, Machine, Options, Plan};
use motet_text::Tokenizer;

use self::conversation::Vocabulary;
use self::matrix::Matrix;
use self::report::Report;
use self::runs::{Runs, Setting, Subject};
use crate::Outcome;
use crate::model::Model;

/// Seconds if nobody says how many.
const BUDGET: u64 = 300;
/// A model with more parameters is too slow for whole conversations in the scalar definition.
const SLOW_IN_SCALAR: u64 = 20_000_000;

/// Arguments of `motet verify`.
#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// A GGUF file (of a split model the first part); without it the built-in demonstration model
    #[arg(long, short)]
    model: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Seconds that it may take; what there is no time for is named [default: 300, with --full no limit]
    #[arg(long, value_name = "SECONDS")]
    budget: Option<u64>,
    /// All ways instead of a set in which every two values meet; on the built-in model
    #[arg(long, conflicts_with = "model")]
    full: bool,
}

impl Verify {
    pub(crate) fn run(&self) -> Outcome {
        let begun = Instant::now();
        let budget = self.budget.or((!self.full).then_some(BUDGET));
        let deadline = budget.map(|seconds| begun + Duration::from_secs(seconds));
        let model = Model::open(self.model.as_deref())?;
        let network = &model.weights.network;
        let slow_in_scalar = network.parameters() > SLOW_IN_SCALAR;
        let start = |setting| start(&model, setting);
        let subject = Subject {
            start: &start,
            vocabulary: vocabulary(&model.tokenizer, network.vocab),
            context: network.context,
            recurrent: 4 * network.state().recurrent_floats as u64,
            slow_in_scalar,
        };
        let limits = slow_in_scalar.then(|| {
            "The scalar definition is slow for a model of this size: there at most 2 conversations of 96 tokens run."
                .to_owned()
        });
        let isas = Isa::available();
        let names = isas.iter().map(|isa| isa.name()).collect();
        let matrix = Matrix::new(isas);
        let mut ways = if self.full { matrix.product() } else { matrix.covering() };
        if slow_in_scalar {
            // What takes longest comes last, so that little is left out.
            ways.sort_by_key(|way| way.isa == Isa::Scalar);
        }
        let count = ways.len();
        let mut runs = Runs::new(subject, deadline);
        let (mut outcomes, mut left_out) = (Vec::new(), Vec::new());
        for (number, way) in ways.into_iter().enumerate() {
            match runs.run(way)? {
                Some(outcome) => {
                    eprintln!(
                        "{:>3}/{count} {way}: {} rows, {} differ, {:.1} s",
                        number + 1,
                        outcome.rows,
                        outcome.differing,
                        outcome.seconds
                    );
                    outcomes.push(outcome);
                }
                None => left_out.push(way),
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let report = Report::new(model.name.clone(), names, limits, seconds, &matrix, outcomes, left_out);
        if self.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        } else {
            print!("{report}");
        }
        match report.passed() {
            true => Ok(()),
            false if report.rows == 0 => {
                Err("nothing could be compared within the budget; give it more".into())
            }
            false => Err("conversations differ from what they are alone".into()),
        }
    }
}

/// The tokens that are neither special nor beyond the tokenizer.
fn vocabulary(tokenizer: &Tokenizer, len: usize) -> Vocabulary {
    let special =
        |token| tokenizer.is_control(token) || tokenizer.is_hidden(token) || tokenizer.is_end(token);
    Vocabulary::new(len.min(tokenizer.vocab_len()), special)
}

/// An engine over the CPU.
fn start(model: &Model, setting: Setting) -> Result<Engine, Box<dyn Error>> {
    let device = CpuDevice::new(CpuOptions { threads: setting.threads, isa: setting.isa });
    let plan = |options: &Options| Plan::new(&model.weights.network, options, Machine::here(), &device);
    let mut options = setting.options;
    if setting.tight {
        options.memory = Some(plan(&options)?.smallest_memory);
    }
    let engine = model.weights.start(plan(&options)?, device.clone());
    engine.wait_until_loaded()?;
    Ok(engine)
}
