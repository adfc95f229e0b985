//! What is said of all runs: a table for people, JSON for programs.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::matrix::{Matrix, Named, Way};
use super::outcome::{Found, Outcome};
use super::transcript::Row;

/// Why the command fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Verdict {
    /// A row differs, or a conversation failed.
    #[error("conversations differ from what they are alone")]
    Differ,
    /// There was no time.
    #[error("nothing could be compared within the budget; give it more")]
    Nothing,
}

/// All that was found out.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) seconds: f64,
    /// Ways that ran.
    pub(super) runs: usize,
    /// Rows of logits compared.
    pub(super) rows: usize,
    /// Rows that differ.
    pub(super) differing: usize,
    /// Free pages that were filled with NaN before their first use, and after conversations gave them back.
    pub(super) nan_pages: (usize, usize),
    /// Pairs of values that were seen to meet in a run, of all.
    pub(super) pairs: (usize, usize),
    /// Pairs that did not meet, and why.
    pub(super) pairs_left_out: Vec<PairLeftOut>,
    /// By dimension and value.
    pub(super) values: Vec<Line>,
    pub(super) outcomes: Vec<Outcome>,
    /// Ways that the time did not suffice for.
    pub(super) left_out: Vec<Way>,
}

/// The runs with one value.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    dimension: &'static str,
    value: String,
    runs: usize,
    rows: usize,
    differing: usize,
    left_out: usize,
}

/// Two values that did not meet.
#[derive(Debug, Serialize)]
pub(super) struct PairLeftOut {
    values: [Named; 2],
    reason: &'static str,
}

impl Report {
    /// Sums up what came of the ways of a matrix, and what there was no time for.
    pub(super) fn new(
        model: String,
        seconds: f64,
        matrix: &Matrix,
        outcomes: Vec<Outcome>,
        left_out: Vec<Way>,
    ) -> Self {
        let values = matrix.values().into_iter().map(|value| {
            let has = |way: &Way| way.values().contains(&value);
            let with = || outcomes.iter().filter(|o| has(&o.way));
            Line {
                dimension: value.0,
                runs: with().count(),
                rows: with().map(|o| o.rows).sum(),
                differing: with().map(|o| o.differing).sum(),
                left_out: left_out.iter().filter(|way| has(way)).count(),
                value: value.1.clone(),
            }
        });
        let values = values.collect();
        let met: Vec<Vec<Named>> = outcomes.iter().map(Outcome::met).collect();
        let meet = |way: &[Named], pair: &[Named; 2]| pair.iter().all(|value| way.contains(value));
        let (may, may_not) = matrix.pairs();
        let all = may.len() + may_not.len();
        let not_met = may.into_iter().filter(|pair| !met.iter().any(|way| meet(way, pair))).map(|values| {
            let ran = outcomes.iter().any(|outcome| meet(&outcome.way.values(), &values));
            PairLeftOut { values, reason: if ran { "not seen in a run" } else { "no time" } }
        });
        let too_slow = may_not
            .into_iter()
            .map(|values| PairLeftOut { values, reason: "too slow with a model of this size" });
        let pairs_left_out: Vec<PairLeftOut> = too_slow.chain(not_met).collect();
        Self {
            model,
            seconds,
            runs: outcomes.len(),
            rows: outcomes.iter().map(|o| o.rows).sum(),
            differing: outcomes.iter().map(|o| o.differing).sum(),
            nan_pages: (
                outcomes.iter().map(|o| o.observed.fresh_pages).sum(),
                outcomes.iter().map(|o| o.observed.returned_pages).sum(),
            ),
            pairs: (all - pairs_left_out.len(), all),
            pairs_left_out,
            values,
            outcomes,
            left_out,
        }
    }

    /// Whether rows were compared and no conversation differs or failed.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn verdict(&self) -> Result<(), Verdict> {
        if self.outcomes.iter().any(|o| o.differing > 0 || !o.differences.is_empty()) {
            return Err(Verdict::Differ);
        }
        if self.rows == 0 { Err(Verdict::Nothing) } else { Ok(()) }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conversation {}", self.conversation)?;
        if let Some(first) = &self.first {
            write!(f, ", position {}", first.position)?;
            for (name, row) in [("alone", first.alone), ("here", first.found)] {
                match row {
                    Some(Row { digest, token: Some(token) }) => {
                        write!(f, ", {name} {digest:016x} and token {token}")?;
                    }
                    Some(Row { digest, token: None }) => write!(f, ", {name} {digest:016x}")?,
                    None => write!(f, ", {name} nothing")?,
                }
            }
            write!(f, ", {} rows differ", self.rows)?;
        }
        match &self.failure {
            Some(failure) => write!(f, ", failed: {failure}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<32}{:>8}{:>10}{:>12}", self.model, "runs", "rows", "differences")?;
        let mut before = "";
        for line in &self.values {
            let name = if line.dimension == before { "" } else { line.dimension };
            before = line.dimension;
            writeln!(
                f,
                "{name:<16}{:<16}{:>8}{:>10}{:>12}",
                line.value, line.runs, line.rows, line.differing
            )?;
        }
        writeln!(f, "{:<32}{:>8}{:>10}{:>12}", "in all", self.runs, self.rows, self.differing)?;
        let (fresh, returned) = self.nan_pages;
        let Self { seconds, pairs: (met, all), .. } = self;
        writeln!(
            f,
            "Every row that was run was compared with the conversation alone, bit for bit. Free pages were filled with \
             NaN before every step: {fresh} before their first use, {returned} that conversations had given back."
        )?;
        let sum = |count: fn(&Outcome) -> u64| self.outcomes.iter().map(count).sum::<u64>();
        let (drafted, accepted) = (sum(|o| o.observed.drafted), sum(|o| o.observed.accepted));
        if drafted > 0 {
            writeln!(f, "{drafted} tokens were drafted, {accepted} of them were chosen.")?;
        }
        writeln!(f, "{met} of {all} pairs of values were seen to meet, in {seconds:.0} s.")?;
        let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for PairLeftOut { values: [(a, x), (b, y)], reason } in &self.pairs_left_out {
            by_reason.entry(reason).or_default().push(format!("{a} {x} with {b} {y}"));
        }
        for (reason, pairs) in by_reason {
            writeln!(f, "Left out, {reason}: {}", pairs.join("; "))?;
        }
        for outcome in &self.outcomes {
            for missed in &outcome.missed {
                writeln!(f, "Not as it should be: {}: {}", outcome.way, missed.reason)?;
            }
        }
        for way in &self.left_out {
            writeln!(f, "Left out for lack of time: {way}")?;
        }
        for outcome in &self.outcomes {
            for found in &outcome.differences {
                writeln!(f, "DIFFERENCE: {}: {found}", outcome.way)?;
            }
        }
        Ok(())
    }
}
