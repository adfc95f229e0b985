//! The CPU as a device: its options, what a stage would take, and how one is prepared.

use std::ops::Range;

use motet_gguf::ModelFile;
use motet_model::device::{Device, DeviceError, DraftShare, Footprint, Limits, Stage};
use motet_model::network::Network;
use motet_model::program::Program;

use crate::isa::{Isa, IsaError};
use crate::pool::{Pool, PoolOptions, default_threads};
use crate::stage::{CpuStage, Sizes};
use crate::weights::WeightsLayout;

/// How the CPU is used.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Threads that compute, the stage's own included. Default: one for each physical core.
    pub threads: usize,
    /// The instruction set; the bits are the same on all. Default: what `MOTET_ISA` says, else the best.
    pub isa: Isa,
}

impl CpuOptions {
    /// The defaults of this machine and environment.
    ///
    /// # Errors
    /// If `MOTET_ISA` names an instruction set that is unknown or not available.
    pub fn from_env() -> Result<Self, IsaError> {
        Ok(Self { threads: default_threads(), isa: Isa::from_env()? })
    }
}

/// The CPU.
#[derive(Debug, Clone)]
pub struct CpuDevice {
    options: CpuOptions,
}

impl CpuDevice {
    /// A device with these options.
    pub fn new(options: CpuOptions) -> Self {
        Self { options }
    }
}

/// The device's name in errors.
pub(crate) const NAME: &str = "cpu";

pub(crate) fn unsupported(what: impl Into<String>) -> DeviceError {
    DeviceError::Unsupported { device: NAME.into(), what: what.into() }
}

/// The program that a stage is asked to run.
fn program<'n>(network: &'n Network, limits: &Limits) -> Result<&'n Program, DeviceError> {
    match limits.draft_head && network.draft.is_none() {
        true => Err(unsupported("a draft head, which the model does not have")),
        false => Ok(network.program(limits.draft_head)),
    }
}

impl CpuDevice {
    /// A footprint without the draft head's share.
    fn taken(
        &self,
        network: &Network,
        layers: Range<usize>,
        limits: &Limits,
    ) -> Result<Footprint, DeviceError> {
        let program = program(network, limits)?;
        let ops = program.slice(layers, network.layers);
        let weights = WeightsLayout::of(program, &ops)?;
        let sizes = Sizes::of(network, &ops, limits, self.options.threads)?;
        Ok(Footprint {
            weights: weights.bytes as u64,
            workspace_parts: sizes.parts(limits.batch.rows),
            page: sizes.pages.iter().map(|p| p.stride as u64).collect(),
            recurrent: 4 * sizes.recurrent_floats as u64,
            rollback: sizes.rollback.bytes() as u64,
            draft: DraftShare::default(),
        })
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        let threads = self.options.threads;
        format!("{NAME} {}, {threads} thread{}", self.options.isa, if threads == 1 { "" } else { "s" })
    }

    fn footprint(
        &self,
        network: &Network,
        layers: Range<usize>,
        limits: &Limits,
    ) -> Result<Footprint, DeviceError> {
        let taken = self.taken(network, layers.clone(), limits)?;
        let draft = match limits.draft_head {
            false => DraftShare::default(),
            true => {
                let trunk = self.taken(network, layers, &Limits { draft_head: false, ..limits.clone() })?;
                let pages = taken.page.iter().zip(&trunk.page);
                DraftShare {
                    weights: taken.weights - trunk.weights,
                    page: pages.map(|(with, without)| with - without).collect(),
                    recurrent: taken.recurrent - trunk.recurrent,
                }
            }
        };
        Ok(Footprint { draft, ..taken })
    }

    fn prepare(
        &self,
        network: &Network,
        file: &ModelFile,
        layers: Range<usize>,
        limits: &Limits,
    ) -> Result<Box<dyn Stage>, DeviceError> {
        let spawn = |e: crate::pool::PoolError| unsupported(e.to_string());
        let mut pool = Pool::new(PoolOptions { threads: self.options.threads, ..PoolOptions::default() })
            .map_err(spawn)?;
        let program = program(network, limits)?;
        let ops = program.slice(layers, network.layers);
        let sizes = Sizes::of(network, &ops, limits, self.options.threads)?;
        let weights = WeightsLayout::of(program, &ops)?.load(program, file, &mut pool)?;
        Ok(Box::new(CpuStage::new(network, ops, limits, sizes, weights, pool, self.options.isa)?))
    }
}
