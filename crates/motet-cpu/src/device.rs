//! The CPU as a device: its options, what a stage would take, and how one is prepared.

use std::ops::Range;

use motet_gguf::ModelFile;
use motet_model::device::{Device, DeviceError, DraftShare, Footprint, Limits, Stage};
use motet_model::network::Network;
use motet_model::program::Program;
use motet_model::split::Split;

use crate::isa::{Isa, IsaError};
use crate::pool::{Pool, PoolOptions, default_threads, pin_current_thread};
use crate::stage::{CpuStage, Machine, Sizes};
use crate::weights::{Loaded, WeightsLayout};

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

/// The CPU: each stage is some of its threads.
#[derive(Debug, Clone)]
pub struct CpuDevice {
    options: CpuOptions,
    /// The processors of each stage; none: the system places the threads.
    cores: Vec<Vec<usize>>,
}

impl CpuDevice {
    /// A device with these options, whose stages divide its threads among them.
    pub fn new(options: CpuOptions) -> Self {
        Self { options, cores: Vec::new() }
    }

    /// The same with each stage's threads pinned to processors of its own, a thread to each; the memory of a stage is
    /// first touched there.
    pub fn pinned(self, cores: Vec<Vec<usize>>) -> Self {
        Self { cores, ..self }
    }

    /// The threads of stage `stage` of `stages`, and the processors they are pinned to.
    fn place(&self, stage: usize, stages: usize) -> Result<Place<'_>, DeviceError> {
        if !self.cores.is_empty() {
            return match self.cores.get(stage).map(Vec::as_slice) {
                Some(cores @ [_, ..]) if self.cores.len() == stages => {
                    Ok(Place { threads: cores.len(), cores: Some(cores) })
                }
                _ => {
                    let found = self.cores.len();
                    Err(unsupported(format!(
                        "{stages} stages on {found} lists of processors: expected one list, not empty, for each"
                    )))
                }
            };
        }
        let all = self.options.threads;
        let more = usize::from(stage < all % stages);
        Ok(Place { threads: (all / stages + more).max(1), cores: None })
    }
}

/// Where a stage's threads run.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    threads: usize,
    cores: Option<&'a [usize]>,
}

impl Place<'_> {
    /// Runs `work` on the stage's first processor, so that what it writes first lies near it.
    fn run<T: Send>(self, work: impl FnOnce() -> Result<T, DeviceError> + Send) -> Result<T, DeviceError> {
        let Some(&[core, ..]) = self.cores else { return work() };
        let pinned = move || {
            if !pin_current_thread(core) {
                return Err(unsupported(format!(
                    "processor {core}: the system does not let a thread run there"
                )));
            }
            work()
        };
        let joined = std::thread::scope(|scope| scope.spawn(pinned).join());
        joined.unwrap_or_else(|_| Err(DeviceError::Panic("while a stage was being loaded".into())))
    }

    fn pool(self) -> Result<Pool, DeviceError> {
        let options = PoolOptions {
            threads: self.threads,
            cores: self.cores.map(<[usize]>::to_vec),
            ..PoolOptions::default()
        };
        Pool::new(options).map_err(|e| unsupported(e.to_string()))
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
    /// Footprints without the draft head's share.
    fn taken(
        &self,
        network: &Network,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Footprint>, DeviceError> {
        let program = program(network, limits)?;
        let mut held = Vec::new();
        let stage = |(stage, layers): (usize, &Range<usize>)| {
            let place = self.place(stage, split.stages())?;
            let ops = program.slice(layers.clone(), network.layers);
            let weights = WeightsLayout::of(program, &ops, &held)?;
            let sizes = Sizes::of(network, &ops, limits, place.threads)?;
            held.extend(weights.held(program));
            Ok(Footprint {
                weights: weights.bytes as u64,
                workspace_parts: sizes.parts(limits.batch.rows),
                page: sizes.pages.iter().map(|p| p.stride as u64).collect(),
                recurrent: 4 * sizes.recurrent_floats as u64,
                rollback: sizes.rollback.bytes() as u64,
                draft: DraftShare::default(),
            })
        };
        split.ranges().iter().enumerate().map(stage).collect()
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
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Footprint>, DeviceError> {
        let taken = self.taken(network, split, limits)?;
        if !limits.draft_head {
            return Ok(taken);
        }
        let trunk = self.taken(network, split, &Limits { draft_head: false, ..limits.clone() })?;
        let with_share = |(taken, trunk): (Footprint, Footprint)| {
            let pages = taken.page.iter().zip(&trunk.page);
            let draft = DraftShare {
                weights: taken.weights - trunk.weights,
                page: pages.map(|(with, without)| with - without).collect(),
                recurrent: taken.recurrent - trunk.recurrent,
            };
            Footprint { draft, ..taken }
        };
        Ok(taken.into_iter().zip(trunk).map(with_share).collect())
    }

    fn prepare(
        &self,
        network: &Network,
        file: &ModelFile,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Box<dyn Stage>>, DeviceError> {
        let program = program(network, limits)?;
        let (mut held, mut loaded) = (Vec::new(), vec![Loaded::Elsewhere; program.weights.len()]);
        let mut stages: Vec<Box<dyn Stage>> = Vec::with_capacity(split.stages());
        for (stage, layers) in split.ranges().iter().enumerate() {
            let place = self.place(stage, split.stages())?;
            let stage = place.run(|| {
                let mut pool = place.pool()?;
                let ops = program.slice(layers.clone(), network.layers);
                let sizes = Sizes::of(network, &ops, limits, place.threads)?;
                let layout = WeightsLayout::of(program, &ops, &held)?;
                let weights = layout.load(program, file, &mut pool, &loaded)?;
                for id in layout.held(program) {
                    held.push(id);
                    loaded[id.0] = weights[id.0].clone();
                }
                let core = place.cores.map(|cores| cores[0]);
                CpuStage::new(
                    network,
                    ops,
                    limits,
                    sizes,
                    Machine::new(program, weights, pool, self.options.isa, core)?,
                )
            })?;
            stages.push(Box::new(stage));
        }
        Ok(stages)
    }
}
