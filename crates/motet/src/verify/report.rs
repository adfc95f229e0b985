//! What is said of all runs: a table for people, JSON for programs.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::matrix::{Matrix, Way};
use super::runs::{Found, Outcome};

/// All that was found out.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) instruction_sets: Vec<&'static str>,
    /// What was made smaller than the matrix says.
    pub(super) limits: Option<String>,
    pub(super) seconds: f64,
    /// Ways that ran.
    pub(super) runs: usize,
    /// Rows of logits compared.
    pub(super) rows: usize,
    /// Rows that differ.
    pub(super) differing: usize,
    /// Pairs of values that met in a run, of all.
    pub(super) pairs: (usize, usize),
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

impl Report {
    /// Sums up. The way for `model`, the outcomes, and what was left out.
    pub(super) fn new(
        model: String,
        instruction_sets: Vec<&'static str>,
        limits: Option<String>,
        seconds: f64,
        matrix: &Matrix,
        outcomes: Vec<Outcome>,
        left_out: Vec<Way>,
    ) -> Self {
        let mut values: Vec<Line> = Vec::new();
        for (dimension, value) in matrix.values() {
            let has = |way: &Way| way.values().contains(&(dimension, value.clone()));
            let with = || outcomes.iter().filter(|o| has(&o.way));
            values.push(Line {
                dimension,
                runs: with().count(),
                rows: with().map(|o| o.rows).sum(),
                differing: with().map(|o| o.differing).sum(),
                left_out: left_out.iter().filter(|way| has(way)).count(),
                value,
            });
        }
        let met = |ways: &mut dyn Iterator<Item = Way>| {
            let mut pairs = BTreeSet::new();
            for way in ways {
                let values = way.values();
                for (i, a) in values.iter().enumerate() {
                    pairs.extend(values[..i].iter().map(|b| (a.clone(), b.clone())));
                }
            }
            pairs.len()
        };
        let all = met(&mut matrix.covering().into_iter());
        Self {
            model,
            instruction_sets,
            limits,
            seconds,
            runs: outcomes.len(),
            rows: outcomes.iter().map(|o| o.rows).sum(),
            differing: outcomes.iter().map(|o| o.differing).sum(),
            pairs: (met(&mut outcomes.iter().map(|o| o.way)), all),
            values,
            outcomes,
            left_out,
        }
    }

    /// Whether rows were compared and no conversation differs or failed.
    pub(super) fn passed(&self) -> bool {
        self.rows > 0 && self.outcomes.iter().all(|o| o.differing == 0 && o.differences.is_empty())
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conversation {}", self.conversation)?;
        if let Some(first) = &self.first {
            write!(f, ", position {}", first.position)?;
            for (name, row) in [("alone", first.alone), ("here", first.found)] {
                match row {
                    Some(row) => write!(f, ", {name} token {} ({:016x})", row.token, row.digest)?,
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
        writeln!(f, "{}, {}", self.model, self.instruction_sets.join(", "))?;
        if let Some(limits) = &self.limits {
            writeln!(f, "{limits}")?;
        }
        writeln!(f, "{:<32}{:>8}{:>10}{:>12}", "", "runs", "rows", "differences")?;
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
        writeln!(
            f,
            "{} of {} pairs of values met, in {:.0} s; every row was compared with the conversation alone, bit for bit.",
            self.pairs.0, self.pairs.1, self.seconds
        )?;
        let mut reasons: BTreeMap<&str, Vec<&Way>> = BTreeMap::new();
        for outcome in &self.outcomes {
            if let Some(reason) = &outcome.not_exercised {
                reasons.entry(reason).or_default().push(&outcome.way);
            }
        }
        for (reason, ways) in reasons {
            for way in ways {
                writeln!(f, "Not exercised: {way}: {reason}")?;
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
