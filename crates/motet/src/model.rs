//! From a path to a model: file, network, tokenizer, template. Reads headers only; the engine loads the weights.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use motet_cpu::{CpuDevice, CpuOptions};
use motet_engine::{Engine, Machine, Options, Plan};
use motet_gguf::{GgufError, ModelFile};
use motet_model::{Device, DeviceError, Limits, Network, Observer, Split, Stage};
use motet_text::{ChatTemplate, Tokenizer};

use crate::{bytes, pull};

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
    /// A name that `motet pull` knows.
    #[error("{0} is not on this machine yet; motet pull {0} fetches it")]
    NotPulled(String),
    /// Something is wrong with the file.
    #[error(transparent)]
    File(#[from] GgufError),
}

/// Opens a model file, a pulled model by its name, or the built-in model.
///
/// # Errors
/// What is wrong with the file, or that there is none.
pub(crate) fn open_file(path: Option<&Path>) -> Result<ModelFile, OpenError> {
    match path {
        None => Ok(ModelFile::from_static(BUILT_IN)?),
        Some(path) => Ok(ModelFile::open(&find(path)?)?),
    }
}

/// The file that is meant. A path that exists wins.
fn find(path: &Path) -> Result<PathBuf, OpenError> {
    if path.exists() {
        return Ok(path.to_owned());
    }
    let name = path.display().to_string();
    pull::pulled(path).ok_or(if pull::knows(&name) {
        OpenError::NotPulled(name)
    } else {
        OpenError::Missing(name)
    })
}

/// What the model in a file is called: the file's name without its ending and, of a split model, without its number.
fn name_of(path: &Path) -> String {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = name.rsplit_once("-of-").and_then(|(first, count)| {
        let (whole, part) = first.rsplit_once('-')?;
        (number(part) && number(count)).then_some(whole)
    });
    whole.unwrap_or(&name).to_owned()
}

/// A model whose header has been read and checked.
pub(crate) struct Model {
    /// What it is called when it is served.
    pub(crate) name: String,
    /// What it is called as well: the file's name, and the name that stands in it.
    pub(crate) aliases: Vec<String>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
    pub(crate) weights: Weights,
}

/// What the engine needs of a model: its network, and the file to load weights from.
#[derive(Clone)]
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
        let found = path.map(find).transpose()?;
        let file = open_file(found.as_deref())?;
        let path = found.unwrap_or_else(|| Path::new(BUILT_IN_NAME).with_extension("gguf"));
        let network = Arc::new(Network::from_gguf(&file)?);
        let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata())?);
        let template = ChatTemplate::from_gguf(file.metadata(), &tokenizer)?;
        let stem = |path: &Path| Some(path.file_stem()?.to_string_lossy().into_owned());
        let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let aliases = [stem(&path), file_name, network.name.clone()].into_iter().flatten().collect();
        let name = name_of(&path);
        Ok(Self { name, aliases, tokenizer, template, weights: Weights { file: Arc::new(file), network } })
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
        let (weights, split, limits) = (self.clone(), plan.split().clone(), plan.limits().clone());
        Engine::start(plan, move || {
            let mut stages = weights.prepare(&device, &split, &limits)?;
            if let [stage] = &mut stages[..] {
                stage.observe(observer);
            }
            Ok(stages)
        })
    }

    /// The stages with these weights, loaded.
    ///
    /// # Errors
    /// What the device says.
    pub(crate) fn prepare(
        &self,
        device: &CpuDevice,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Box<dyn Stage>>, DeviceError> {
        let stages = device.prepare(&self.network, &self.file, split, limits)?;
        self.file.release_all();
        Ok(stages)
    }
}

/// Plans an engine that this machine has room for.
///
/// # Errors
/// Those of [`Plan::new`]; the plan does not fit this machine.
pub(crate) fn plan(network: &Network, options: &Options, device: &CpuDevice) -> Result<Plan, Box<dyn Error>> {
    let plan = Plan::new(network, options, Machine::here(), device)?;
    match plan.machine.memory {
        Some(there) if !plan.fits => Err(too_large(&plan, there).into()),
        _ => Ok(plan),
    }
}

/// Why a plan is refused on a machine that has `there` bytes to spare, and what helps.
fn too_large(plan: &Plan, there: u64) -> String {
    let advice = match plan.smallest_memory <= there {
        true => format!("lower --sessions or --ctx, or set --memory to at least {}", plan.smallest_memory),
        false => format!(
            "nothing less than {} would do; lower --ctx, or take a smaller model",
            bytes::show(plan.smallest_memory)
        ),
    };
    format!(
        "{} of memory are needed, but this machine has {} to spare; {advice}",
        bytes::show(plan.most),
        bytes::show(there)
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_like_its_file() {
        for (path, name) in [
            ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
            ("big-Q4_K_M-00001-of-00003.gguf", "big-Q4_K_M"),
            ("one-of-many.gguf", "one-of-many"),
            ("plain", "plain"),
        ] {
            assert_eq!(name_of(Path::new(path)), name);
        }
    }

    #[test]
    fn the_built_in_model_answers_to_all_its_names() {
        let model = Model::open(None).expect("the built-in model opens");
        assert_eq!(model.name, BUILT_IN_NAME);
        assert!(model.aliases.contains(&"motet-demo.gguf".to_owned()), "{:?}", model.aliases);
        assert!(model.aliases.contains(&model.weights.network.name.clone().expect("the file names it")));
    }

    #[test]
    fn a_plan_that_does_not_fit_is_refused_with_what_helps() {
        let model = Model::open(None).expect("the built-in model opens");
        let device = device(Some(1)).expect("a CPU");
        let plan = |memory| {
            let machine = Machine { memory: Some(memory) };
            Plan::new(&model.weights.network, &Options::default(), machine, &device).expect("a plan")
        };
        let least = plan(u64::MAX).smallest_memory;
        assert!(too_large(&plan(least), least).ends_with(&format!("set --memory to at least {least}")));
        assert!(too_large(&plan(least - 1), least - 1).contains("a smaller model"));
    }
}
