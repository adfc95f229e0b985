//! `motet plan`: the bytes that `motet serve` would use for a model, without loading it.

use clap::Args;
use motet_engine::{Machine, Plan};

use crate::Outcome;
use crate::model::Model;
use crate::options::{EngineArgs, ModelArgs};
use crate::output::say;

/// Arguments of `motet plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanCommand {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl PlanCommand {
    pub(crate) fn run(&self) -> Outcome {
        // All of the model is looked at: what cannot be served needs no plan.
        let network = Model::open(self.model.model.as_deref())?.weights.network;
        let device = self.engine.device(self.model.threads())?;
        let plan = Plan::new(&network, &self.engine.served_options(), Machine::here(), &device)?;
        if self.json {
            say!("{}\n", serde_json::to_string_pretty(&plan)?)?;
        } else {
            say!("{plan}")?;
        }
        Ok(())
    }
}
