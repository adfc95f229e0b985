//! A network: what the header of a model file says, as programs.

use crate::arch;
use crate::header::{Header, ModelError};
use crate::layout::StateLayout;
use crate::program::{Program, Weight};
use motet_gguf::ModelFile;

/// A model that can be run: its sizes and its programs.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// The architecture's name.
    pub architecture: String,
    /// The model's own name, if it has one.
    pub name: Option<String>,
    /// Tokens.
    pub vocab: usize,
    /// Columns of the residual stream.
    pub d_model: usize,
    /// Trunk layers.
    pub layers: usize,
    /// Positions it was trained for.
    pub context: usize,
    /// The network proper: tokens in, logits out.
    pub trunk: Program,
    /// The trunk with the multi-token-prediction head behind it, if the file holds one: one program, whose operations
    /// begin with the trunk's.
    pub draft: Option<Program>,
}

impl Network {
    /// Builds the programs from a model file's header and checks every tensor they name. Reads no weights.
    ///
    /// # Errors
    /// An unknown architecture, a missing or absurd key, a missing or misshapen tensor.
    pub fn from_gguf(file: &ModelFile) -> Result<Self, ModelError> {
        let header = Header::new(file)?;
        let network = arch::build(&header)?;
        for weight in network.program(true).weights.iter() {
            check_format(weight)?;
        }
        Ok(network)
    }

    /// The program that a stage runs, with the network's draft head (if there is one) or without.
    pub fn program(&self, draft_head: bool) -> &Program {
        match &self.draft {
            Some(merged) if draft_head => merged,
            _ => &self.trunk,
        }
    }

    /// What a session must remember, with or without the network's draft head.
    pub fn state(&self, draft_head: bool) -> StateLayout {
        StateLayout::of(self.program(draft_head))
    }

    /// Parameters of the trunk (a tied embedding counts once).
    pub fn parameters(&self) -> u64 {
        self.trunk.weights.iter().map(|w| w.len() as u64).sum()
    }
}

/// Rows must consist of whole blocks of their format.
fn check_format(weight: &Weight) -> Result<(), ModelError> {
    let block = weight.format.block_len();
    if !weight.shape[0].is_multiple_of(block) {
        return Err(ModelError::Value {
            key: weight.tensor.clone(),
            found: format!("rows of {} values in {}", weight.shape[0], weight.format.name()),
            expected: format!("a multiple of {block}"),
        });
    }
    Ok(())
}
