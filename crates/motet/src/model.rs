//! From a path to a model: file, network, tokenizer, template. Reads headers only; the engine loads the weights.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use motet_cpu::{CpuDevice, CpuOptions};
use motet_engine::{Engine, Plan};
use motet_gguf::{GgufError, ModelFile};
use motet_model::{Device, Network, Observer};
use motet_text::{ChatTemplate, Tokenizer};

use crate::pull;

/// The built-in model: a demonstration that starts at once. See `assets/MODEL_CARD.md`.
static BUILT_IN: &[u8] = include_bytes!("../../../assets/motet-demo.gguf");

/// The name of the built-in model.
pub(crate) const BUILT_IN_NAME: &str = "motet-demo";

/// Why there is no model file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// Neither a file nor a name.
    #[error(
        "{0} is neither a file nor the name of a pulled model; motet pull --list shows names that can be pulled"
    )]
    Missing(String),
    /// Something is wrong with the file.
    #[error(transparent)]
    File(#[from] GgufError),
}

/// Opens a model file, a pulled model by its name, or the built-in model. A path that exists wins.
///
/// # Errors
/// What is wrong with the file, or that there is none.
pub(crate) fn open_file(path: Option<&Path>) -> Result<ModelFile, OpenError> {
    let Some(path) = path else { return Ok(ModelFile::from_static(BUILT_IN)?) };
    if path.exists() {
        return Ok(ModelFile::open(path)?);
    }
    match pull::pulled(path) {
        Some(pulled) => Ok(ModelFile::open(&pulled)?),
        None => Err(OpenError::Missing(path.display().to_string())),
    }
}

/// A model whose header has been read and checked.
pub(crate) struct Model {
    /// What it is called when it is served: the file's stem.
    pub(crate) name: String,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
    pub(crate) weights: Weights,
}

/// What the engine needs of a model: its network, and the file to load weights from.
pub(crate) struct Weights {
    pub(crate) file: Arc<ModelFile>,
    pub(crate) network: Arc<Network>,
}

impl Model {
    /// Opens a model file, or the built-in model.
    ///
    /// # Errors
    /// What is wrong with the file, its network, its tokenizer or its template.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, Box<dyn Error>> {
        let file = open_file(path)?;
        let stem = path.and_then(Path::file_stem).map(|s| s.to_string_lossy().into_owned());
        let name = stem.unwrap_or_else(|| BUILT_IN_NAME.into());
        let network = Arc::new(Network::from_gguf(&file)?);
        let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata())?);
        let template = ChatTemplate::from_gguf(file.metadata(), &tokenizer)?;
        Ok(Self { name, tokenizer, template, weights: Weights { file: Arc::new(file), network } })
    }
}

impl Weights {
    /// An engine that runs this model by `plan`; its weights are being loaded when this returns.
    pub(crate) fn start(&self, plan: Plan, device: CpuDevice) -> Engine {
        self.start_with(plan, device, None)
    }

    /// The same; `observer` watches every step.
    pub(crate) fn start_observed(
        &self,
        plan: Plan,
        device: CpuDevice,
        observer: Box<dyn Observer>,
    ) -> Engine {
        self.start_with(plan, device, Some(observer))
    }

    fn start_with(&self, plan: Plan, device: CpuDevice, observer: Option<Box<dyn Observer>>) -> Engine {
        let (network, file, limits) =
            (Arc::clone(&self.network), Arc::clone(&self.file), plan.limits().clone());
        Engine::start(plan, move || {
            let mut stage = device.prepare(&network, &file, 0..network.layers, &limits)?;
            file.release_all();
            stage.observe(observer);
            Ok(stage)
        })
    }
}

/// The CPU with the defaults of this machine, or so many threads.
///
/// # Errors
/// `MOTET_ISA` names something this CPU does not have.
pub(crate) fn device(threads: Option<usize>) -> Result<CpuDevice, Box<dyn Error>> {
    let mut options = CpuOptions::from_env()?;
    if let Some(threads) = threads {
        options.threads = threads;
    }
    Ok(CpuDevice::new(options))
}
