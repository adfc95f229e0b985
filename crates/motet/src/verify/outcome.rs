//! What came of one way to run conversations: what was compared, what was seen to be done, and what the way says and was
//! not seen.

use serde::Serialize;

use super::matrix::{CHUNK, CONVERSATIONS, DRAFTS, Drafting, Named, PREFIX, Reuse, Way};
use super::transcript::Difference;

/// What came of one way.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) way: Way,
    /// Rows of logits compared.
    pub(super) rows: usize,
    /// Rows that differ.
    pub(super) differing: usize,
    /// Where, for each conversation that differs.
    pub(super) differences: Vec<Found>,
    #[serde(flatten)]
    pub(super) observed: Observed,
    /// What the way says and the run did not do.
    pub(super) missed: Vec<Missed>,
    pub(super) seconds: f64,
}

/// What a run was seen to do.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Observed {
    /// Most conversations in one step.
    pub(super) together: usize,
    /// Most rows of one conversation in one step.
    pub(super) largest_chunk: usize,
    /// How often a conversation stepped back into the queue.
    pub(super) steps_back: u64,
    /// Tokens that were drafted, and those of them that were chosen.
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// Conversations that found pages of an earlier one.
    pub(super) found_prefixes: usize,
    /// Free pages filled with NaN before their first use.
    pub(super) fresh_pages: usize,
    /// The same of pages that conversations had given back.
    pub(super) returned_pages: usize,
}

/// A value of the way that the run did not live up to.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Missed {
    pub(super) dimension: &'static str,
    pub(super) reason: String,
}

/// A conversation that differs or failed.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) conversation: usize,
    pub(super) rows: usize,
    #[serde(flatten)]
    pub(super) first: Option<Difference>,
    pub(super) failure: Option<String>,
}

impl Outcome {
    /// The values of the way that the run lived up to.
    pub(super) fn met(&self) -> Vec<Named> {
        let missed = |value: &Named| self.missed.iter().any(|missed| missed.dimension == value.0);
        self.way.values().into_iter().filter(|value| !missed(value)).collect()
    }
}

impl Observed {
    /// What the way says and was not seen; `prefixes` conversations could have found theirs.
    pub(super) fn missed(&self, way: Way, prefixes: usize) -> Vec<Missed> {
        let mut missed = Vec::new();
        let mut miss = |dimension, reason| missed.push(Missed { dimension, reason });
        // Where conversations step back, some wait for others.
        if way.reuse != Reuse::SteppingBack && self.together != way.conversations {
            miss(CONVERSATIONS.0, format!("at most {} conversations ran in one step", self.together));
        }
        if !(way.least_chunk()..=way.chunk).contains(&self.largest_chunk) {
            miss(CHUNK.0, format!("the largest chunk had {} rows", self.largest_chunk));
        }
        if way.reuse == Reuse::SteppingBack && self.steps_back == 0 {
            miss(PREFIX, "no conversation stepped back".into());
        }
        if way.reuse == Reuse::Warm && (self.found_prefixes < prefixes || prefixes == 0) {
            miss(PREFIX, format!("{} of {prefixes} conversations found their prefix", self.found_prefixes));
        }
        let drafts = way.drafts.is_some_and(|(drafting, _)| drafting != Drafting::Off);
        if drafts != (self.drafted > 0) {
            miss(DRAFTS, format!("{} tokens were drafted", self.drafted));
        }
        missed
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::Matrix;
    use super::*;
    use motet_cpu::Isa;

    #[test]
    fn what_was_not_seen_is_missed() {
        let way = Matrix::new(vec![Isa::Scalar], false)
            .product()
            .into_iter()
            .find(|way| (way.conversations, way.chunk, way.reuse) == (4, 32, Reuse::SteppingBack));
        let way = way.unwrap();
        let seen = Observed {
            together: 4,
            largest_chunk: 32,
            steps_back: 1,
            drafted: 0,
            accepted: 0,
            found_prefixes: 3,
            fresh_pages: 0,
            returned_pages: 0,
        };
        let missed = |observed: Observed, reuse| -> Vec<&str> {
            observed.missed(Way { reuse, ..way }, 3).iter().map(|missed| missed.dimension).collect()
        };
        for reuse in [Reuse::Cold, Reuse::Warm, Reuse::SteppingBack] {
            assert!(missed(seen, reuse).is_empty());
            assert_eq!(missed(Observed { largest_chunk: 7, ..seen }, reuse), ["chunk"]);
            assert_eq!(missed(Observed { largest_chunk: 33, ..seen }, reuse), ["chunk"]);
        }
        assert_eq!(missed(Observed { together: 3, ..seen }, Reuse::Cold), ["conversations"]);
        assert_eq!(missed(Observed { found_prefixes: 2, ..seen }, Reuse::Warm), ["prefix"]);
        assert_eq!(missed(Observed { steps_back: 0, ..seen }, Reuse::SteppingBack), ["prefix"]);
        assert_eq!(missed(Observed { drafted: 1, ..seen }, Reuse::Cold), ["drafts"]);
        let with_drafts = Way { drafts: Some((Drafting::Adaptive, 7)), reuse: Reuse::Cold, ..way };
        assert_eq!(seen.missed(with_drafts, 3)[0].reason, "0 tokens were drafted");
    }
}
