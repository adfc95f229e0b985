//! The ways in which conversations can run, and a set of them in which every two values meet.
//!
//! Nothing here knows an engine. The covering set is greedy and without chance: the same on every call.

use std::collections::BTreeSet;
use std::fmt;

use motet_cpu::Isa;
use serde::{Serialize, Serializer};

/// Conversations that run at once.
const CONVERSATIONS: [usize; 4] = [1, 2, 4, 8];
/// Rows of a prompt per step.
const CHUNKS: [usize; 4] = [1, 7, 32, 512];
/// Compute threads.
const THREADS: [usize; 2] = [1, 2];

/// What a conversation finds in memory when it begins or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reuse {
    /// Nothing.
    Cold,
    /// Pages of an earlier conversation that began alike.
    Warm,
    /// The pool is too small for all: conversations step back into the queue and are read again.
    SteppingBack,
}

/// How conversations arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Arrival {
    /// One behind the other, without waiting.
    AtOnce,
    /// Each when the one before it has got its first token.
    Staggered,
    /// Without waiting, the last first.
    Reversed,
}

/// One way to run conversations: a value of every dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Way {
    pub(super) conversations: usize,
    pub(super) chunk: usize,
    pub(super) threads: usize,
    #[serde(serialize_with = "isa_name")]
    pub(super) isa: Isa,
    pub(super) reuse: Reuse,
    pub(super) arrival: Arrival,
}

fn isa_name<S: Serializer>(isa: &Isa, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(isa.name())
}

impl fmt::Display for Reuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reuse::Cold => "cold",
            Reuse::Warm => "warm",
            Reuse::SteppingBack => "stepping back",
        })
    }
}

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arrival::AtOnce => "at once",
            Arrival::Staggered => "staggered",
            Arrival::Reversed => "reversed",
        })
    }
}

impl Way {
    /// Its values by name of the dimension.
    pub(super) fn values(&self) -> [(&'static str, String); 6] {
        [
            ("conversations", self.conversations.to_string()),
            ("chunk", self.chunk.to_string()),
            ("threads", self.threads.to_string()),
            ("instructions", self.isa.to_string()),
            ("prefix", self.reuse.to_string()),
            ("arrival", self.arrival.to_string()),
        ]
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.values().into_iter().enumerate() {
            write!(f, "{}{name} {value}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// All values of all dimensions.
#[derive(Debug, Clone)]
pub(super) struct Matrix {
    isas: Vec<Isa>,
}

const REUSES: [Reuse; 3] = [Reuse::Cold, Reuse::Warm, Reuse::SteppingBack];
const ARRIVALS: [Arrival; 3] = [Arrival::AtOnce, Arrival::Staggered, Arrival::Reversed];

impl Matrix {
    /// The matrix over these instruction sets.
    pub(super) fn new(isas: Vec<Isa>) -> Self {
        Self { isas }
    }

    fn sizes(&self) -> [usize; 6] {
        [CONVERSATIONS.len(), CHUNKS.len(), THREADS.len(), self.isas.len(), REUSES.len(), ARRIVALS.len()]
    }

    fn way(&self, values: &[usize]) -> Way {
        Way {
            conversations: CONVERSATIONS[values[0]],
            chunk: CHUNKS[values[1]],
            threads: THREADS[values[2]],
            isa: self.isas[values[3]],
            reuse: REUSES[values[4]],
            arrival: ARRIVALS[values[5]],
        }
    }

    /// Every way.
    pub(super) fn product(&self) -> Vec<Way> {
        let mut all = vec![Vec::new()];
        for size in self.sizes() {
            all = all
                .iter()
                .flat_map(|values| (0..size).map(move |v| [values.as_slice(), &[v]].concat()))
                .collect();
        }
        all.iter().map(|values| self.way(values)).collect()
    }

    /// The names of all dimensions and values.
    pub(super) fn values(&self) -> Vec<(&'static str, String)> {
        let sizes = self.sizes();
        let alike = |dimension: usize, v: usize| {
            self.way(&sizes.map(|size| v.min(size - 1))).values()[dimension].clone()
        };
        (0..sizes.len()).flat_map(|d| (0..sizes[d]).map(move |v| (d, v))).map(|(d, v)| alike(d, v)).collect()
    }

    /// Few ways in which every value meets every value of every other dimension, most pairs first.
    pub(super) fn covering(&self) -> Vec<Way> {
        covering(&self.sizes()).iter().map(|values| self.way(values)).collect()
    }
}

/// A value: dimension and index.
type Value = (usize, usize);

/// The pairs of values that meet in a row, the lower dimension first.
fn pairs(row: &[usize]) -> impl Iterator<Item = (Value, Value)> {
    let value = |dimension: usize| (dimension, row[dimension]);
    (0..row.len()).flat_map(move |a| (a + 1..row.len()).map(move |b| (value(a), value(b))))
}

/// Rows of values, one for each dimension, in which all pairs meet. Each row begins with a pair that has not met, and
/// takes in every other dimension the value that meets most of what it has not met yet.
fn covering(sizes: &[usize]) -> Vec<Vec<usize>> {
    let values = |dimension: usize| (0..sizes[dimension]).map(move |v| (dimension, v));
    let dimensions = 0..sizes.len();
    let mut open: BTreeSet<(Value, Value)> = dimensions
        .clone()
        .flat_map(|a| (a + 1..sizes.len()).map(move |b| (a, b)))
        .flat_map(|(a, b)| values(a).flat_map(move |x| values(b).map(move |y| (x, y))))
        .collect();
    let mut rows = Vec::new();
    while let Some(&(x, y)) = open.first() {
        let mut chosen = vec![x, y];
        for dimension in dimensions.clone().filter(|&d| d != x.0 && d != y.0) {
            let new = |value: Value| {
                chosen.iter().filter(|&&other| open.contains(&(other.min(value), other.max(value)))).count()
            };
            // Where several meet as many, they take turns.
            let turn = |v: usize| (v + sizes[dimension] - rows.len() % sizes[dimension]) % sizes[dimension];
            let best = values(dimension).max_by_key(|&value| (new(value), usize::MAX - turn(value.1)));
            chosen.extend(best);
        }
        chosen.sort_unstable();
        let row: Vec<usize> = chosen.into_iter().map(|(_, value)| value).collect();
        for pair in pairs(&row) {
            open.remove(&pair);
        }
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pairs, counted without the code under test.
    fn all_pairs_meet(sizes: &[usize], rows: &[Vec<usize>]) -> bool {
        (0..sizes.len()).all(|a| {
            (0..a).all(|b| {
                (0..sizes[a]).all(|x| (0..sizes[b]).all(|y| rows.iter().any(|r| r[a] == x && r[b] == y)))
            })
        })
    }

    #[test]
    fn every_pair_of_values_meets_in_few_rows() {
        for sizes in [[4, 4, 2, 1, 3, 3], [4, 4, 2, 2, 3, 3], [4, 4, 2, 3, 3, 3]] {
            let rows = covering(&sizes);
            assert!(rows.iter().all(|row| row.iter().zip(sizes).all(|(&v, size)| v < size)));
            assert!(all_pairs_meet(&sizes, &rows));
            // The least is the product of the two largest dimensions, 16.
            assert!((16..=24).contains(&rows.len()), "{} rows", rows.len());
            assert!(!all_pairs_meet(&sizes, &rows[1..]), "the first row adds nothing");
        }
    }

    #[test]
    fn the_product_has_every_way_once() {
        let matrix = Matrix::new(vec![Isa::Scalar, Isa::Avx2]);
        let all = matrix.product();
        assert_eq!(all.len(), 4 * 4 * 2 * 2 * 3 * 3);
        assert!(all.iter().enumerate().all(|(i, way)| !all[..i].contains(way)));
        assert!(matrix.covering().iter().all(|way| all.contains(way)));
    }
}
