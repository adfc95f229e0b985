//! `motet verify`: that conversations do not change each other, checked on any model.
//!
//! Each conversation runs alone once; then they run together in many ways, and every row of logits must have the bits
//! that it has alone. `matrix` says in which ways, `conversation` what is said, `runs` lets them run, `transcript`
//! compares, `witness` saw what the device was made to do, `outcome` holds that against the way, `report` sums up.

mod conversation;
mod matrix;
mod outcome;
mod report;
mod runs;
mod transcript;
mod witness;

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_engine::{Machine, Plan};
use motet_model::Stages;
use motet_text::Tokenizer;

use self::conversation::Vocabulary;
use self::matrix::{Matrix, Way};
use self::report::Report;
#[cfg(test)]
use self::report::Verdict;
use self::runs::{Prepare, Prepared, Runs, Setting, Subject};
use crate::Outcome;
use crate::model::{self, Model};
use crate::output::{note, say};

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
    /// Also with drafts, from none to three, adaptive and looked up, at temperatures 0, 0.7 and 1
    #[arg(long)]
    drafts: bool,
    /// Stages behind which conversations run together: a number, or each stage's layers (0-13,14-29)
    #[arg(long, default_value_t = Stages::default(), value_name = "STAGES")]
    stages: Stages,
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
        let prepare = |setting| prepare(&model, setting);
        let slow_in_scalar = model.weights.network.parameters() > SLOW_IN_SCALAR;
        let matrix = Matrix::new(Isa::available(), slow_in_scalar);
        let matrix = if self.drafts { matrix.with_drafts() } else { matrix };
        let ways = if self.full { matrix.product() } else { matrix.covering() };
        let subject = subject(&model, &prepare, slow_in_scalar, self.drafts);
        let subject = Subject { stages: self.stages.clone(), ..subject };
        let runs = Runs::new(subject, deadline);
        let (outcomes, left_out) = examine(runs, ways)?;
        let seconds = begun.elapsed().as_secs_f64();
        let report = Report::new(model.name.clone(), seconds, &matrix, outcomes, left_out);
        match self.json {
            true => say!("{}\n", serde_json::to_string_pretty(&report)?)?,
            false => say!("{report}")?,
        }
        Ok(report.verdict()?)
    }
}

/// What there is to know of a model, with or without its draft head.
fn subject<'a>(model: &Model, prepare: Prepare<'a>, slow_in_scalar: bool, head: bool) -> Subject<'a> {
    let network = &model.weights.network;
    Subject {
        prepare,
        vocabulary: vocabulary(&model.tokenizer, network.vocab),
        stages: Stages::default(),
        context: network.context,
        recurrent: 4 * network.state(head).recurrent_floats as u64,
        slow_in_scalar,
    }
}

/// The tokens that are neither special nor beyond the tokenizer.
fn vocabulary(tokenizer: &Tokenizer, len: usize) -> Vocabulary {
    let special =
        |token| tokenizer.is_control(token) || tokenizer.is_hidden(token) || tokenizer.is_end(token);
    Vocabulary::new(len.min(tokenizer.vocab_len()), special)
}

/// Plans stages on the CPU and loads them.
fn prepare(model: &Model, setting: Setting) -> Result<Prepared, Box<dyn Error>> {
    let device = CpuDevice::new(CpuOptions { threads: setting.threads, isa: setting.isa });
    let mut options = setting.options;
    if setting.tight {
        let plan = Plan::new(&model.weights.network, &options, Machine::here(), &device)?;
        options.memory = Some(plan.smallest_memory);
    }
    let plan = model::plan(&model.weights.network, &options, &device)?;
    let stages = model.weights.prepare(&device, plan.split(), plan.limits())?;
    Ok((plan, stages))
}

/// Runs the ways: what came of them, and those that the time did not suffice for.
fn examine(mut runs: Runs<'_>, ways: Vec<Way>) -> Result<(Vec<outcome::Outcome>, Vec<Way>), Box<dyn Error>> {
    let count = ways.len();
    let (mut outcomes, mut left_out) = (Vec::new(), Vec::new());
    for (number, way) in ways.into_iter().enumerate() {
        match runs.run(way)? {
            Some(outcome) => {
                let (rows, differing, seconds) = (outcome.rows, outcome.differing, outcome.seconds);
                note!("{:>3}/{count} {way}: {rows} rows, {differing} differ, {seconds:.1} s", number + 1);
                outcomes.push(outcome);
            }
            None => left_out.push(way),
        }
    }
    Ok((outcomes, left_out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use motet_model::batch::StateOp;
    use motet_model::device::Observer;
    use motet_model::{DeviceError, InFlight, Slot, Stage};

    /// A stage that is exact but for one bit: where several conversations share a step, the logits of the last row asked
    /// for differ.
    struct Saboteur(Box<dyn Stage>);

    impl Stage for Saboteur {
        fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
            self.0.reserve(rows)
        }

        fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
            self.0.step(work)?;
            if work.batch.segments.len() > 1
                && let Some(answer) = work.answers.last_mut()
            {
                answer.digest ^= 1;
            }
            Ok(())
        }

        fn change(&mut self, changes: &[StateOp]) {
            self.0.change(changes);
        }

        fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
            self.0.commit(kept)
        }

        fn poison(&mut self, pool: usize, page: u32) {
            self.0.poison(pool, page);
        }

        fn observe(&mut self, observer: Option<Box<dyn Observer>>) {
            self.0.observe(observer);
        }
    }

    fn report(prepare: Prepare<'_>, model: &Model) -> Report {
        let matrix = Matrix::new(vec![Isa::best()], false);
        let ways = matrix.covering().into_iter().filter(|way| way.conversations <= 2).collect();
        let (outcomes, left_out) =
            examine(Runs::new(subject(model, prepare, false, false), None), ways).unwrap();
        Report::new(model.name.clone(), 1.0, &matrix, outcomes, left_out)
    }

    #[test]
    fn a_bit_that_depends_on_company_is_found_and_fails_the_command() {
        let model = Model::open(None).unwrap();
        let faithful = report(&|setting| prepare(&model, setting), &model);
        assert_eq!(faithful.verdict(), Ok(()), "{faithful}");
        let sabotaged = |setting| {
            let (plan, stages) = prepare(&model, setting)?;
            let sabotaged = stages.into_iter().map(|stage| Box::new(Saboteur(stage)) as Box<dyn Stage>);
            Ok((plan, sabotaged.collect()))
        };
        let report = report(&sabotaged, &model);
        assert_eq!(report.verdict(), Err(Verdict::Differ));
        for outcome in &report.outcomes {
            // An older conversation is company as well.
            let has_company = outcome.observed.together > 1;
            assert_eq!(outcome.differing > 0, has_company, "{}", outcome.way);
        }
        assert!(report.to_string().contains("DIFFERENCE"));
    }
}
