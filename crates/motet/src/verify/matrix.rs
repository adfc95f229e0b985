//! The ways in which conversations can run, and a set of them in which every two values meet.
//!
//! Nothing here knows an engine. The covering set is greedy and without chance: the same on every call. Pairs of values
//! that would take too long are never in it, and are named.

use std::collections::BTreeSet;
use std::fmt;

use motet_cpu::Isa;
use serde::{Serialize, Serializer};

/// Conversations that run at once.
pub(super) const CONVERSATIONS: (&str, [usize; 4]) = ("conversations", [1, 2, 4, 8]);
/// Rows of a prompt per step.
pub(super) const CHUNK: (&str, [usize; 4]) = ("chunk", [1, 7, 32, 512]);
/// Compute threads.
const THREADS: [usize; 2] = [1, 2];
/// What is found in memory.
pub(super) const PREFIX: &str = "prefix";
/// How drafts are made.
pub(super) const DRAFTS: &str = "drafts";
/// Where the scalar definition is too slow, at most so many conversations run in it.
pub(super) const FEW: usize = 2;

/// What a conversation finds in memory when it begins or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reuse {
    /// Nothing.
    Cold,
    /// Pages of an earlier conversation that began alike.
    Warm,
    /// The pool is too small for all, and an older conversation needs more of it: conversations step back into the
    /// queue and are read again.
    SteppingBack,
}

/// How conversations arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Arrival {
    /// One behind the other, without waiting.
    AtOnce,
    /// Each two steps behind the one before it.
    Staggered,
    /// Without waiting, the last first.
    Reversed,
}

/// How many tokens are drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Drafting {
    /// None.
    Off,
    /// So many, by the network's own head if it has one.
    Exactly(usize),
    /// As many as pay.
    Adaptive,
    /// Three, looked up in the conversation's own tokens.
    LookUp,
}

/// Heat by which all conversations choose, in tenths of a degree of temperature.
pub(super) type Heat = u8;

/// A value by the name of its dimension.
pub(super) type Named = (&'static str, String);

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
    /// How drafts are made, and the temperature of all conversations, where drafts are looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) drafts: Option<(Drafting, Heat)>,
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

impl fmt::Display for Drafting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Drafting::Off => f.write_str("off"),
            Drafting::Exactly(count) => write!(f, "{count}"),
            Drafting::Adaptive => f.write_str("adaptive"),
            Drafting::LookUp => f.write_str("look-up"),
        }
    }
}

impl Arrival {
    /// The numbers of `count` conversations in order of arrival.
    pub(super) fn order(self, count: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |place| if self == Arrival::Reversed { count - 1 - place } else { place })
    }
}

impl Way {
    /// Its values.
    pub(super) fn values(&self) -> Vec<Named> {
        let mut values = vec![
            (CONVERSATIONS.0, self.conversations.to_string()),
            (CHUNK.0, self.chunk.to_string()),
            ("threads", self.threads.to_string()),
            ("instructions", self.isa.to_string()),
            (PREFIX, self.reuse.to_string()),
            ("arrival", self.arrival.to_string()),
        ];
        if let Some((drafting, heat)) = self.drafts {
            values.push((DRAFTS, drafting.to_string()));
            values.push(("temperature", format!("{:.1}", f32::from(heat) / 10.0)));
        }
        values
    }

    /// Rows of a prompt's largest chunk in a run that is worth the name: more than the next smaller value allows.
    pub(super) fn least_chunk(&self) -> usize {
        CHUNK.1.iter().copied().filter(|&smaller| smaller < self.chunk).max().unwrap_or(0) + 1
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
    /// The scalar definition runs few conversations.
    slow_in_scalar: bool,
    /// Whether drafts are looked at.
    drafts: bool,
}

const REUSES: [Reuse; 3] = [Reuse::Cold, Reuse::Warm, Reuse::SteppingBack];
const ARRIVALS: [Arrival; 3] = [Arrival::AtOnce, Arrival::Staggered, Arrival::Reversed];
const DRAFTINGS: [Drafting; 6] = [
    Drafting::Off,
    Drafting::Exactly(1),
    Drafting::Exactly(2),
    Drafting::Exactly(3),
    Drafting::Adaptive,
    Drafting::LookUp,
];
const HEATS: [Heat; 3] = [0, 7, 10];

impl Matrix {
    /// The matrix over these instruction sets.
    pub(super) fn new(isas: Vec<Isa>, slow_in_scalar: bool) -> Self {
        Self { isas, slow_in_scalar, drafts: false }
    }

    /// The same with drafts and temperatures.
    pub(super) fn with_drafts(self) -> Self {
        Self { drafts: true, ..self }
    }

    fn sizes(&self) -> Vec<usize> {
        let isas = self.isas.len();
        let mut sizes =
            vec![CONVERSATIONS.1.len(), CHUNK.1.len(), THREADS.len(), isas, REUSES.len(), ARRIVALS.len()];
        if self.drafts {
            sizes.extend([DRAFTINGS.len(), HEATS.len()]);
        }
        sizes
    }

    fn way(&self, values: &[usize]) -> Way {
        Way {
            conversations: CONVERSATIONS.1[values[0]],
            chunk: CHUNK.1[values[1]],
            threads: THREADS[values[2]],
            isa: self.isas[values[3]],
            reuse: REUSES[values[4]],
            arrival: ARRIVALS[values[5]],
            drafts: self.drafts.then(|| (DRAFTINGS[values[6]], HEATS[values[7]])),
        }
    }

    /// Whether two values may meet, the lower dimension first.
    fn allows(&self, (x, y): (Value, Value)) -> bool {
        let is_crowd = x.0 == 0 && CONVERSATIONS.1[x.1] > FEW;
        let is_scalar = self.isas == [Isa::Scalar] || (y.0 == 3 && self.isas[y.1] == Isa::Scalar);
        !(self.slow_in_scalar && is_crowd && is_scalar)
    }

    /// Every two values that may meet, and those that may not.
    pub(super) fn pairs(&self) -> (Vec<[Named; 2]>, Vec<[Named; 2]>) {
        let (may, may_not): (Vec<_>, Vec<_>) = all_pairs(&self.sizes()).partition(|&pair| self.allows(pair));
        let names = |pairs: Vec<(Value, Value)>| {
            pairs.into_iter().map(|(x, y)| [self.name(x), self.name(y)]).collect()
        };
        (names(may), names(may_not))
    }

    fn name(&self, (dimension, v): Value) -> Named {
        let values: Vec<usize> = self.sizes().iter().map(|size| v.min(size - 1)).collect();
        self.way(&values).values()[dimension].clone()
    }

    /// Every way; nothing is too slow.
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

    /// All values.
    pub(super) fn values(&self) -> Vec<Named> {
        let sizes = self.sizes();
        let of = |dimension| (0..sizes[dimension]).map(move |v| (dimension, v));
        (0..sizes.len()).flat_map(of).map(|value| self.name(value)).collect()
    }

    /// Few ways in which every value meets every value of every other dimension that it may meet, most pairs first.
    /// Where the scalar definition is slow, one way of it comes first, so that there always is one, and the others
    /// last, so that little is left out.
    pub(super) fn covering(&self) -> Vec<Way> {
        let rows = covering(&self.sizes(), |pair| self.allows(pair));
        let mut ways: Vec<Way> = rows.iter().map(|values| self.way(values)).collect();
        if self.slow_in_scalar {
            ways.sort_by_key(|way| way.isa == Isa::Scalar);
            if let Some(first) = ways.iter().position(|way| way.isa == Isa::Scalar) {
                ways[..=first].rotate_right(1);
            }
        }
        ways
    }
}

/// A value: dimension and index.
type Value = (usize, usize);

/// The pairs of values that meet in a row, the lower dimension first.
fn pairs(row: &[usize]) -> impl Iterator<Item = (Value, Value)> {
    let value = |dimension: usize| (dimension, row[dimension]);
    (0..row.len()).flat_map(move |a| (a + 1..row.len()).map(move |b| (value(a), value(b))))
}

/// All pairs of values of different dimensions, the lower dimension first.
fn all_pairs(sizes: &[usize]) -> impl Iterator<Item = (Value, Value)> {
    let values = |dimension: usize| (0..sizes[dimension]).map(move |v| (dimension, v));
    let dimensions = (0..sizes.len()).flat_map(|a| (a + 1..sizes.len()).map(move |b| (a, b)));
    dimensions.flat_map(move |(a, b)| values(a).flat_map(move |x| values(b).map(move |y| (x, y))))
}

/// Rows of values, one for each dimension, in which all pairs that are allowed meet and no others. Each row begins with
/// a pair that has not met, and takes in every other dimension the value that meets most of what it has not met yet.
fn covering(sizes: &[usize], allows: impl Fn((Value, Value)) -> bool) -> Vec<Vec<usize>> {
    let values = |dimension: usize| (0..sizes[dimension]).map(move |v| (dimension, v));
    let mut open: BTreeSet<(Value, Value)> = all_pairs(sizes).filter(|&pair| allows(pair)).collect();
    let mut rows = Vec::new();
    while let Some(&(x, y)) = open.first() {
        let mut chosen = vec![x, y];
        for dimension in (0..sizes.len()).filter(|&d| d != x.0 && d != y.0) {
            let pair = |value: Value, other: Value| (other.min(value), other.max(value));
            let new = |value: Value| chosen.iter().filter(|&&o| open.contains(&pair(value, o))).count();
            // Where several meet as many, they take turns.
            let turn = |v: usize| (v + sizes[dimension] - rows.len() % sizes[dimension]) % sizes[dimension];
            let allowed = values(dimension).filter(|&v| chosen.iter().all(|&o| allows(pair(v, o))));
            let best = allowed.max_by_key(|&value| (new(value), usize::MAX - turn(value.1)));
            chosen.extend(best);
        }
        assert_eq!(chosen.len(), sizes.len(), "a pair that is allowed but can't meet: {x:?}, {y:?}");
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
            let rows = covering(&sizes, |_| true);
            assert!(rows.iter().all(|row| row.iter().zip(sizes).all(|(&v, size)| v < size)));
            assert!(all_pairs_meet(&sizes, &rows));
            // The least is the product of the two largest dimensions, 16.
            assert!((16..=24).contains(&rows.len()), "{} rows", rows.len());
            assert!(!all_pairs_meet(&sizes, &rows[1..]), "the first row adds nothing");
        }
    }

    #[test]
    fn the_product_has_every_way_once() {
        let matrix = Matrix::new(vec![Isa::Scalar, Isa::Avx2], false);
        let all = matrix.product();
        assert_eq!(all.len(), 4 * 4 * 2 * 2 * 3 * 3);
        assert!(all.iter().enumerate().all(|(i, way)| !all[..i].contains(way)));
        assert!(matrix.covering().iter().all(|way| all.contains(way)));
        // 4·4 + (4 + 4)·(2 + 2 + 3 + 3) + 2·2 + (2 + 2)·(3 + 3) + 3·3 pairs.
        assert_eq!((matrix.pairs().0.len(), matrix.pairs().1.len()), (133, 0));
        assert_eq!(matrix.values().len(), 4 + 4 + 2 + 2 + 3 + 3);
    }

    #[test]
    fn drafts_meet_every_temperature_and_every_number_of_conversations() {
        let matrix = Matrix::new(vec![Isa::Scalar, Isa::Avx2], false).with_drafts();
        let ways = matrix.covering();
        for drafting in DRAFTINGS {
            let with = || ways.iter().filter(|way| way.drafts.is_some_and(|d| d.0 == drafting));
            assert!(HEATS.iter().all(|&heat| with().any(|way| way.drafts == Some((drafting, heat)))));
            assert!(CONVERSATIONS.1.iter().all(|&count| with().any(|way| way.conversations == count)));
        }
        // The least is 6 · 4.
        assert!((24..=36).contains(&ways.len()), "{} ways", ways.len());
        assert_eq!(ways[0].values().len(), 8);
    }

    #[test]
    fn where_scalar_is_slow_it_never_meets_crowds_and_one_way_of_it_comes_first() {
        let matrix = Matrix::new(vec![Isa::Scalar, Isa::Avx2, Isa::Avx512], true);
        let (may, may_not) = matrix.pairs();
        let named = |conversations: &str| {
            [(CONVERSATIONS.0, conversations.to_owned()), ("instructions", "scalar".to_owned())]
        };
        assert_eq!(may_not, [named("4"), named("8")]);
        let ways = matrix.covering();
        let met = |[a, b]: &[Named; 2]| ways.iter().any(|w| w.values().contains(a) && w.values().contains(b));
        assert!(may.iter().all(met));
        assert!(!may_not.iter().any(met));
        let scalar: Vec<bool> = ways.iter().map(|way| way.isa == Isa::Scalar).collect();
        assert!(scalar[0] && scalar[1..].is_sorted() && scalar.ends_with(&[true]));
        assert!(scalar.iter().filter(|&&s| s).count() <= 6, "{scalar:?}");
        // A CPU with nothing but the scalar definition.
        let only = Matrix::new(vec![Isa::Scalar], true);
        assert!(only.covering().iter().all(|way| way.conversations <= FEW));
    }
}
