//! `motet plan`: the bytes that a model would use, without loading it.

use clap::Args;
use motet_engine::{Machine, Plan};
use motet_model::Network;

use crate::options::{EngineArgs, ModelArgs};
use crate::{Outcome, model};

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
        let file = model::open_file(self.model.model.as_deref())?;
        let network = Network::from_gguf(&file)?;
        let device = model::device(self.model.threads())?;
        let plan = Plan::new(&network, &self.engine.options(), Machine::here(), &device)?;
        if self.json {
            println!("{}", serde_json::to_string_pretty(&plan)?);
        } else {
            println!("{plan}");
        }
        Ok(())
    }
}
