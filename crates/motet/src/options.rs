//! The options that commands share: which model, and how the engine is sized.

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use motet_cpu::CpuDevice;
use motet_engine::{Drafts, Options};
use motet_model::{KvFormat, PartCosts, Stages};
use motet_server::ServerOptions;

use crate::{bytes, model};

/// Which model.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    /// A GGUF file (of a split model the first part); without it the built-in demonstration model
    #[arg(long, short)]
    pub(crate) model: Option<PathBuf>,
    /// Compute threads [default: one per physical core]
    #[arg(long, short, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

impl ModelArgs {
    /// The threads asked for.
    pub(crate) fn threads(&self) -> Option<usize> {
        self.threads.map(usize::from)
    }
}

/// How the engine is sized.
#[derive(Debug, Clone, Args)]
pub(crate) struct EngineArgs {
    /// Conversations that run at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) sessions: u32,
    /// Tokens of each conversation at most [default: what the model was trained for, at most 8192]
    #[arg(long)]
    pub(crate) ctx: Option<usize>,
    /// Memory of the whole process at most, such as 4GiB; what weights and workspace leave goes to the conversations
    /// [default: room for all sessions at full length]
    #[arg(long, value_parser = bytes::parse, value_name = "BYTES")]
    pub(crate) memory: Option<u64>,
    /// Format of keys and values: f16, f32 or q8_0
    #[arg(long, default_value_t = KvFormat::F16, value_name = "FORMAT")]
    pub(crate) kv: KvFormat,
    /// Milliseconds that a step may take while somebody waits for the next token
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) step_ms: u64,
    /// Tokens drafted for each conversation and step: off, auto (as many as pay, looked up where the text repeats itself,
    /// else by the model's draft head) or 1 to 16 (by the head if the model has one)
    #[arg(long, default_value_t = Drafts::Off, value_name = "NUMBER")]
    pub(crate) drafts: Drafts,
    /// Look drafts up in the conversation's own tokens, even if the model has a draft head
    #[arg(long)]
    pub(crate) look_up: bool,
    /// Split the layers into stages that work at the same time, each with its own weights and threads: a number, or each
    /// stage's layers (0-13,14-29)
    #[arg(long, default_value_t = Stages::default(), value_name = "STAGES")]
    pub(crate) stages: Stages,
    /// Measured costs, in any unit, by which --stages balances them: of what stands before the layers, of each layer, of
    /// what stands behind them [default: the cost model's]
    #[arg(long, value_name = "COST,COST,…")]
    pub(crate) layer_costs: Option<PartCosts>,
    /// Processors of each stage, a thread to each (0-3;4-7) [default: --threads divided among the stages, not pinned]
    #[arg(long, value_name = "CORES")]
    pub(crate) stage_cores: Option<StageCores>,
    /// Memory for saved recurrent states [default: a quarter of the pool]
    #[arg(long, value_parser = bytes::parse, value_name = "BYTES")]
    pub(crate) checkpoint_memory: Option<u64>,
}

impl EngineArgs {
    /// The limits of the server that suit them: a connection for each conversation that can run or wait, and some for
    /// those that are kept open or only look.
    pub(crate) fn server_options(&self) -> ServerOptions {
        let options = self.options();
        ServerOptions { max_connections: options.sessions + options.queue + 128, ..ServerOptions::default() }
    }

    /// As the engine takes them under a server.
    pub(crate) fn served_options(&self) -> Options {
        Options { front_end: self.server_options().memory(), ..self.options() }
    }

    /// The CPU with so many threads, or with each stage on its processors.
    ///
    /// # Errors
    /// Those of [`model::device`].
    pub(crate) fn device(&self, threads: Option<usize>) -> Result<CpuDevice, Box<dyn Error>> {
        let device = model::device(threads)?;
        Ok(match &self.stage_cores {
            Some(StageCores(cores)) => device.pinned(cores.clone()),
            None => device,
        })
    }

    /// As the engine takes them.
    pub(crate) fn options(&self) -> Options {
        Options {
            sessions: self.sessions as usize,
            context: self.ctx,
            memory: self.memory,
            checkpoint_memory: self.checkpoint_memory,
            kv: self.kv,
            step: Duration::from_millis(self.step_ms),
            drafts: self.drafts,
            look_up: self.look_up,
            stages: self.stages.clone(),
            layer_costs: self.layer_costs.clone(),
            ..Options::default()
        }
    }
}

/// The processors of each stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StageCores(pub(crate) Vec<Vec<usize>>);

impl FromStr for StageCores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?}: expected the processors of each stage, such as 0-3;4-7 or 0,2;1,3");
        let part = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
            (first <= last && last < 1 << 16).then(|| (first..=last).collect::<Vec<_>>())
        };
        let stage = |stage: &str| Some(stage.split(',').map(part).collect::<Option<Vec<_>>>()?.concat());
        text.split(';').map(stage).collect::<Option<_>>().map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processors_of_stages_are_lists_and_ranges() {
        assert_eq!("0;1".parse(), Ok(StageCores(vec![vec![0], vec![1]])));
        assert_eq!("0-2,8;4".parse(), Ok(StageCores(vec![vec![0, 1, 2, 8], vec![4]])));
        for wrong in ["", "0;", ";", "3-1", "a", "0,,1", "0-99999999"] {
            assert!(wrong.parse::<StageCores>().is_err(), "{wrong}");
        }
    }
}
