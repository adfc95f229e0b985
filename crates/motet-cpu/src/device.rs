//! The CPU as a device: its options, what a stage would take, and how one is prepared.

use std::ops::Range;

use motet_gguf::ModelFile;
use motet_model::device::{Device, DeviceError, Footprint, Limits, Stage};
use motet_model::network::Network;

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
        let ops = network.trunk.slice(layers, network.layers);
        let weights = WeightsLayout::of(&network.trunk, &ops)?;
        let sizes = Sizes::of(network, &ops, limits, self.options.threads)?;
        Ok(Footprint {
            weights: weights.bytes as u64,
            workspace_parts: sizes.parts(limits.batch.rows),
            page: sizes.pages.iter().map(|p| p.stride as u64).collect(),
            recurrent: 4 * sizes.recurrent_floats as u64,
            rollback: sizes.rollback.bytes() as u64,
            ..Footprint::default()
        })
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
        let ops = network.trunk.slice(layers, network.layers);
        let sizes = Sizes::of(network, &ops, limits, self.options.threads)?;
        let weights = WeightsLayout::of(&network.trunk, &ops)?.load(&network.trunk, file, &mut pool)?;
        Ok(Box::new(CpuStage::new(network, ops, limits, sizes, weights, pool, self.options.isa)?))
    }
}
