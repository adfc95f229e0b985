//! How a network's layers are dealt to stages: consecutive ranges that hold every layer once.
//!
//! A balanced split follows the cost model ([`crate::cost`]) or costs that were measured; what stands before and behind
//! the layers belongs to the first and the last stage and counts there. Nothing here runs or loads anything.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::cost::Cost;
use crate::network::Network;
use crate::program::{Op, Place};

/// Stages that a network may be split into at most.
pub const MAX_STAGES: usize = 64;

/// The layers of each stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    ranges: Vec<Range<usize>>,
}

/// The stages that a person asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stages {
    /// So many, of the same cost as far as whole layers allow.
    Balanced(usize),
    /// These layers each.
    Layers(Vec<Range<usize>>),
}

/// Costs of a network's parts, in any unit.
#[derive(Debug, Clone, PartialEq)]
pub struct PartCosts {
    /// What stands before the layers.
    pub input: f64,
    /// Each layer.
    pub layers: Vec<f64>,
    /// What stands behind the layers.
    pub output: f64,
}

/// Why there is no such split.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// More stages than layers, or none.
    #[error("{stages} stages for {layers} layers: expected 1 to {}", (*layers).min(MAX_STAGES))]
    Count {
        /// Asked for.
        stages: usize,
        /// There are.
        layers: usize,
    },
    /// Costs that are not those of this network.
    #[error("{found} costs of layers, expected {layers}, one for each layer")]
    Costs {
        /// Given.
        found: usize,
        /// Layers of the network.
        layers: usize,
    },
    /// The ranges leave something out or overlap.
    #[error(
        "stage {stage} begins with layer {found}, expected {expected}: stages hold all layers, each once, in order"
    )]
    Gap {
        /// Which stage, from 0.
        stage: usize,
        /// Where it begins.
        found: usize,
        /// Where it should.
        expected: usize,
    },
    /// They end too early or too late.
    #[error("the last stage ends with layer {found}, expected {}, the network's last", layers - 1)]
    End {
        /// The last stage's last layer.
        found: usize,
        /// Layers of the network.
        layers: usize,
    },
}

impl Split {
    /// One stage with all layers.
    pub fn whole(network: &Network) -> Self {
        Self { ranges: std::iter::once(0..network.layers).collect() }
    }

    /// Checks ranges that were chosen by hand.
    ///
    /// # Errors
    /// They don't hold each of `layers` layers once and in order.
    pub fn of(ranges: &[Range<usize>], layers: usize) -> Result<Self, SplitError> {
        let mut expected = 0;
        for (stage, range) in ranges.iter().enumerate() {
            if range.start != expected || range.is_empty() {
                return Err(SplitError::Gap { stage, found: range.start, expected });
            }
            expected = range.end;
        }
        if ranges.is_empty() || ranges.len() > MAX_STAGES {
            return Err(SplitError::Count { stages: ranges.len(), layers });
        }
        if expected != layers {
            return Err(SplitError::End { found: expected - 1, layers });
        }
        Ok(Self { ranges: ranges.to_vec() })
    }

    /// The split whose dearest stage is cheapest; of equal ones that with the earliest borders.
    ///
    /// # Errors
    /// [`SplitError::Count`].
    pub fn balanced(costs: &PartCosts, stages: usize) -> Result<Self, SplitError> {
        let layers = costs.layers.len();
        if stages == 0 || stages > layers.min(MAX_STAGES) {
            return Err(SplitError::Count { stages, layers });
        }
        // cost(a..b) of a stage with these layers, and what stands before or behind them.
        let stage_cost = |a: usize, b: usize| {
            let input = if a == 0 { costs.input } else { 0.0 };
            let output = if b == layers { costs.output } else { 0.0 };
            input + costs.layers[a..b].iter().sum::<f64>() + output
        };
        // dearest[end]: the dearest stage of the best split of layers 0..end into so many stages, and its last border.
        let mut dearest: Vec<f64> = (0..=layers).map(|end| stage_cost(0, end)).collect();
        let mut borders: Vec<Vec<usize>> = Vec::new();
        for stage in 1..stages {
            let mut next = vec![f64::INFINITY; layers + 1];
            let mut from = vec![0; layers + 1];
            for end in stage + 1..=layers {
                for (border, &before) in dearest.iter().enumerate().take(end).skip(stage) {
                    let cost = before.max(stage_cost(border, end));
                    if cost < next[end] {
                        (next[end], from[end]) = (cost, border);
                    }
                }
            }
            dearest = next;
            borders.push(from);
        }
        let mut ranges = Vec::with_capacity(stages);
        let mut end = layers;
        for from in borders.iter().rev() {
            ranges.push(from[end]..end);
            end = from[end];
        }
        ranges.push(0..end);
        ranges.reverse();
        Ok(Self { ranges })
    }

    /// The layers of each stage.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.ranges.len()
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.ranges.iter().enumerate() {
            write!(f, "{}{}-{}", if i == 0 { "" } else { "," }, range.start, range.end - 1)?;
        }
        Ok(())
    }
}

impl Default for Stages {
    fn default() -> Self {
        Stages::Balanced(1)
    }
}

impl Stages {
    /// The split of a network; where the layers are not given, balanced by the costs that were measured, or else by its
    /// cost model.
    ///
    /// # Errors
    /// [`SplitError`].
    pub fn split(
        &self,
        network: &Network,
        draft_head: bool,
        measured: Option<&PartCosts>,
    ) -> Result<Split, SplitError> {
        let layers = network.layers;
        match (self, measured) {
            (Stages::Layers(ranges), _) => Split::of(ranges, layers),
            (Stages::Balanced(_), Some(costs)) if costs.layers.len() != layers => {
                Err(SplitError::Costs { found: costs.layers.len(), layers })
            }
            (Stages::Balanced(1), _) => Ok(Split::whole(network)),
            (Stages::Balanced(stages), Some(costs)) => Split::balanced(costs, *stages),
            (Stages::Balanced(stages), None) => Split::balanced(&PartCosts::of(network, draft_head), *stages),
        }
    }
}

/// Neither a number of stages nor ranges of layers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} are no stages: expected a number (2), or each stage's layers (0-13,14-29)")]
pub struct NoStages {
    /// What was given.
    pub found: String,
}

impl FromStr for Stages {
    type Err = NoStages;

    fn from_str(text: &str) -> Result<Self, NoStages> {
        let wrong = || NoStages { found: text.into() };
        if let Ok(stages) = text.parse::<usize>() {
            return if stages > 0 { Ok(Stages::Balanced(stages)) } else { Err(wrong()) };
        }
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
            (first <= last && last < usize::MAX).then(|| first..last + 1)
        };
        text.split(',').map(range).collect::<Option<_>>().map(Stages::Layers).ok_or_else(wrong)
    }
}

impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stages::Balanced(stages) => write!(f, "{stages}"),
            Stages::Layers(ranges) => Split { ranges: ranges.clone() }.fmt(f),
        }
    }
}

/// Not the costs of a network's parts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{found:?} are no costs: expected numbers from 0 on: what stands before the layers, each layer, what stands behind"
)]
pub struct NoCosts {
    /// What was given.
    pub found: String,
}

impl FromStr for PartCosts {
    type Err = NoCosts;

    fn from_str(text: &str) -> Result<Self, NoCosts> {
        let number = |n: &str| n.trim().parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
        let numbers: Option<Vec<f64>> = text.split(',').map(number).collect();
        match numbers.as_deref() {
            Some([input, layers @ .., output]) if !layers.is_empty() => {
                Ok(Self { input: *input, layers: layers.to_vec(), output: *output })
            }
            _ => Err(NoCosts { found: text.into() }),
        }
    }
}

impl PartCosts {
    /// Rows and their position at which the cost model is asked: next tokens of many conversations, and a part of a
    /// prompt beside them.
    const ROWS: usize = 32;
    /// Of them those that want logits: the next tokens.
    const LOGITS: usize = 16;
    /// See [`PartCosts::ROWS`].
    const POSITION: usize = 512;

    /// By the cost model: a stage moves bytes and multiplies, and on a core of today some sixteen multiply-adds take as
    /// long as a byte.
    pub fn of(network: &Network, draft_head: bool) -> Self {
        let program = network.program(draft_head);
        let weigh = |cost: Cost| cost.weight_bytes + 2.0 * cost.state_values + cost.multiply_adds / 16.0;
        let mut costs = Self { input: 0.0, layers: vec![0.0; network.layers], output: 0.0 };
        for (op, (place, what)) in program.ops.iter().enumerate() {
            let rows = if matches!(what, Op::Head { .. }) { Self::LOGITS } else { Self::ROWS };
            let part = match *place {
                Place::Input => &mut costs.input,
                Place::Layer(layer) => &mut costs.layers[layer],
                Place::Output | Place::Keep | Place::Recall | Place::Feed | Place::Draft => &mut costs.output,
            };
            *part += weigh(program.cost(op, rows, Self::POSITION));
        }
        costs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(input: f64, layers: &[f64], output: f64) -> PartCosts {
        PartCosts { input, layers: layers.to_vec(), output }
    }

    /// The dearest stage of a split.
    fn dearest(costs: &PartCosts, split: &Split) -> f64 {
        let layers = costs.layers.len();
        let cost = |r: &Range<usize>| {
            costs.layers[r.clone()].iter().sum::<f64>()
                + if r.start == 0 { costs.input } else { 0.0 }
                + if r.end == layers { costs.output } else { 0.0 }
        };
        split.ranges().iter().map(cost).fold(0.0, f64::max)
    }

    /// All splits of `layers` layers into `stages` stages.
    fn all(layers: usize, stages: usize, from: usize) -> Vec<Vec<Range<usize>>> {
        if stages == 1 {
            return vec![std::iter::once(from..layers).collect()];
        }
        let ends = from + 1..=layers - (stages - 1);
        let with = |end: usize| {
            let rest = all(layers, stages - 1, end);
            rest.into_iter().map(move |rest| std::iter::once(from..end).chain(rest).collect())
        };
        ends.flat_map(with).collect()
    }

    #[test]
    fn a_balanced_split_has_the_cheapest_dearest_stage_of_all_splits() {
        let mut random = 7u64;
        for layers in 1..=9 {
            for stages in 1..=layers {
                let mut next = || {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    f64::from((random >> 40) as u16 % 50)
                };
                let by_layer: Vec<f64> = (0..layers).map(|_| 1.0 + next()).collect();
                let costs = costs(next(), &by_layer, next());
                let best = all(layers, stages, 0)
                    .iter()
                    .map(|ranges| dearest(&costs, &Split::of(ranges, layers).unwrap()))
                    .fold(f64::INFINITY, f64::min);
                let split = Split::balanced(&costs, stages).unwrap();
                assert_eq!(split.stages(), stages);
                assert_eq!(Split::of(split.ranges(), layers), Ok(split.clone()), "all layers, each once");
                assert_eq!(dearest(&costs, &split), best, "{costs:?} in {split}");
            }
        }
    }

    #[test]
    fn an_expensive_head_leaves_the_last_stage_fewer_layers() {
        let split = Split::balanced(&costs(0.0, &[1.0; 30], 4.0), 2).unwrap();
        assert_eq!(split.to_string(), "0-16,17-29");
    }

    #[test]
    fn what_people_write_is_understood_or_refused() {
        assert_eq!("2".parse(), Ok(Stages::Balanced(2)));
        assert_eq!("0-13,14-29".parse(), Ok(Stages::Layers(vec![0..14, 14..30])));
        assert_eq!("0,1".parse(), Ok(Stages::Layers(vec![0..1, 1..2])));
        for wrong in ["0", "", "two", "3-1", "0-13;14-29", "0-13,", "-1"] {
            assert!(wrong.parse::<Stages>().is_err(), "{wrong}");
        }
        assert_eq!(Split::of(&[0..14, 14..30], 30).unwrap().ranges(), [0..14, 14..30]);
        let gap = SplitError::Gap { stage: 1, found: 15, expected: 14 };
        assert_eq!(Split::of(&[0..14, 15..30], 30), Err(gap));
        assert_eq!(Split::of(&[0..14, 14..29], 30), Err(SplitError::End { found: 28, layers: 30 }));
        assert!(Split::balanced(&costs(0.0, &[1.0; 3], 0.0), 4).is_err());
        assert_eq!("0.1, 2,3.5,4".parse(), Ok(costs(0.1, &[2.0, 3.5], 4.0)));
        for wrong in ["", "1,2", "1,2,x", "1,-2,3", "1,inf,3"] {
            assert!(wrong.parse::<PartCosts>().is_err(), "{wrong}");
        }
    }
}
