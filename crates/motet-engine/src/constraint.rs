//! What may come next: an answer that must keep to a form, such as a grammar.
//!
//! The engine knows no forms. It asks which tokens may be chosen in each row, also behind drafts that may not come true,
//! tells what was chosen, and takes back what was not.

/// Makes a [`Constraint`] for one choice of a request.
pub type ConstraintMaker = Box<dyn Fn() -> Box<dyn Constraint> + Send>;

/// What a token does to an answer that is constrained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    /// More may follow.
    GoesOn,
    /// The answer is complete with it.
    Ends,
    /// It may not stand here; nothing has changed.
    Refused,
}

/// Why an answer can't keep to its form any longer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Broken {
    /// What failed, without anything of the answer.
    pub what: String,
}

/// The form of one answer, and how far the answer has come.
///
/// It runs on the engine's thread between two steps, so it must be quick, must not block and must not call the engine.
/// End tokens are tokens like others: where the answer may end by itself, they must be allowed.
pub trait Constraint: Send {
    /// Whether every token may come next, so that nobody need ask.
    fn asleep(&self) -> bool {
        false
    }

    /// Sets the bits of the tokens that may come next: token `t` is bit `t % 64` of word `t / 64`. All are 0 before, and
    /// at least one must be 1 afterwards.
    ///
    /// # Errors
    /// The form can't be kept to from here on; the answer ends with [`StreamError::Form`](crate::StreamError::Form).
    fn mask(&mut self, allowed: &mut [u64]) -> Result<(), Broken>;

    /// A token comes next.
    fn advance(&mut self, token: u32) -> Advance;

    /// Appends the tokens that are the only ones that may come next, one after the other, at most `most`; fewer or none
    /// where that is not known at once.
    fn forced(&mut self, most: usize, out: &mut Vec<u32>) {
        let _ = (most, out);
    }

    /// The last `tokens` tokens did not come after all. They were no more than the drafts of one step.
    fn roll_back(&mut self, tokens: usize);
}
