//! Where a step's time goes: wall time, bytes and multiply-adds of every region, by number of rows.
//!
//! With the feature `profile` a stage prints its table to the standard error when it is dropped. Without it a
//! [`Watch`] is nothing: this must never cost a build for users anything.

#[cfg(feature = "profile")]
pub(super) use on::{Profile, Watch};

#[cfg(not(feature = "profile"))]
pub(super) use off::{Profile, Watch};

/// Nothing is measured.
#[cfg(not(feature = "profile"))]
mod off {
    use crate::stage::lines::Lines;
    use crate::stage::run::Region;
    use motet_model::program::Program;

    #[derive(Default)]
    pub(in crate::stage) struct Profile {}

    pub(in crate::stage) struct Watch;

    impl Watch {
        pub(in crate::stage) fn start() -> Self {
            Self
        }

        pub(in crate::stage) fn region(
            self,
            _: &mut Profile,
            _: &Program,
            _: &Region,
            _: &Lines<'_>,
            _: usize,
        ) {
        }

        pub(in crate::stage) fn other(self, _: &mut Profile, _: &'static str, _: usize) {}
    }
}

#[cfg(feature = "profile")]
mod on {
    use crate::stage::lines::Lines;
    use crate::stage::run::Region;
    use motet_model::cost::Cost;
    use motet_model::program::{Op, Program};
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    /// Rows of the step, what was done, and how it went.
    #[derive(Default)]
    pub(in crate::stage) struct Profile {
        /// By rows of the step and name.
        lines: BTreeMap<(usize, String), Line>,
    }

    #[derive(Default)]
    struct Line {
        times: u64,
        took: Duration,
        cost: Cost,
    }

    /// Runs from [`Watch::start`] until it is told what has been done.
    pub(in crate::stage) struct Watch(Instant);

    impl Watch {
        pub(in crate::stage) fn start() -> Self {
            Self(Instant::now())
        }

        /// A region of the program was run on `rows` rows of the batch.
        pub(in crate::stage) fn region(
            self,
            profile: &mut Profile,
            program: &Program,
            region: &Region,
            lines: &Lines<'_>,
            rows: usize,
        ) {
            let took = self.0.elapsed();
            let last = |s: &motet_model::batch::Segment| s.first_position as usize + s.rows.len() / 2;
            let position = lines.segments.iter().map(last).sum::<usize>() / lines.segments.len().max(1);
            let mut cost = Cost::default();
            region.ops.iter().for_each(|&op| cost += program.cost(op, rows, position));
            profile.add(lines.tokens.len(), name(program, region), took, cost);
        }

        /// Something else was done to a batch of `rows` rows.
        pub(in crate::stage) fn other(self, profile: &mut Profile, name: &'static str, rows: usize) {
            let took = self.0.elapsed();
            profile.add(rows, name.into(), took, Cost::default());
        }
    }

    impl Profile {
        fn add(&mut self, rows: usize, name: String, took: Duration, cost: Cost) {
            let line = self.lines.entry((rows, name)).or_default();
            line.times += 1;
            line.took += took;
            line.cost += cost;
        }
    }

    /// Kinds of operations, and of which weights.
    fn name(program: &Program, region: &Region) -> String {
        let mut names: Vec<String> = Vec::new();
        for &op in &region.ops {
            let op = &program.ops[op].1;
            let weight = match op {
                Op::Linear { weight, .. } | Op::Head { weight, .. } | Op::ExpertLinear { weight, .. } => {
                    let tensor = &program.weights[weight.0].tensor;
                    Some(tensor.trim_end_matches(".weight").rsplit('.').next().unwrap_or(tensor))
                }
                _ => None,
            };
            let name = weight.unwrap_or(op.name());
            if names.last().is_none_or(|last| last != name) {
                names.push(name.into());
            }
        }
        names.join(", ")
    }

    impl Drop for Profile {
        #[allow(clippy::print_stderr, reason = "this is what the feature is for")]
        fn drop(&mut self) {
            let mut by_rows: BTreeMap<usize, Vec<(&str, &Line)>> = BTreeMap::new();
            for ((rows, name), line) in &self.lines {
                by_rows.entry(*rows).or_default().push((name, line));
            }
            let all: Duration = self.lines.values().map(|l| l.took).sum();
            for (rows, mut lines) in by_rows {
                let total: Duration = lines.iter().map(|(_, l)| l.took).sum();
                if total < all / 50 {
                    continue;
                }
                lines.sort_by_key(|(_, line)| std::cmp::Reverse(line.took));
                eprintln!("{rows} rows, {:.3} s", total.as_secs_f64());
                eprintln!(
                    "{:>7} {:>8} {:>9} {:>8} {:>8}  what",
                    "share", "times", "µs each", "GB/s", "GMAC/s"
                );
                for (name, line) in lines {
                    let seconds = line.took.as_secs_f64();
                    eprintln!(
                        "{:>6.1}% {:>8} {:>9.1} {:>8.1} {:>8.1}  {name}",
                        100.0 * seconds / total.as_secs_f64(),
                        line.times,
                        1e6 * seconds / line.times as f64,
                        (line.cost.weight_bytes + 2.0 * line.cost.state_values) / seconds / 1e9,
                        line.cost.multiply_adds / seconds / 1e9,
                    );
                }
            }
        }
    }
}
