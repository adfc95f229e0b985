//! How long a step of so many rows takes, measured while it runs: t(rows).
//!
//! A table of a few knots, each the running average of the steps near its number of rows. Between knots it is a
//! straight line; beyond the last one each further row is counted at that knot's average. Rows only get cheaper in
//! company, so a knot that says otherwise was measured in a bad moment: it counts as the one below it, row by row, and
//! is measured again because its number of rows is tried again.

use std::time::Duration;

/// Weight of a new measurement in a knot's average.
const NEW: f64 = 0.25;

/// Steps near one number of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Knot {
    rows: f64,
    seconds: f64,
}

/// Measured times by rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Costs {
    /// Knot `k` averages steps of 2ᵏ … 2ᵏ⁺¹ − 1 rows.
    knots: [Option<Knot>; 16],
}

impl Costs {
    /// Adds a measurement.
    pub(crate) fn measured(&mut self, rows: usize, took: Duration) {
        let (rows, seconds) = (rows.max(1), took.as_secs_f64());
        let knot = &mut self.knots[(rows.ilog2() as usize).min(15)];
        let new = Knot { rows: rows as f64, seconds };
        *knot = Some(knot.map_or(new, |old| Knot {
            rows: old.rows + NEW * (new.rows - old.rows),
            seconds: old.seconds + NEW * (new.seconds - old.seconds),
        }));
    }

    /// The time that `rows` rows will take; `None` before anything was measured.
    pub(crate) fn expected(&self, rows: usize) -> Option<Duration> {
        let rows = rows as f64;
        let mut below: Option<Knot> = None;
        for &(mut knot) in self.knots.iter().flatten() {
            if let Some(b) = below {
                knot.seconds = knot.seconds.min(b.seconds * knot.rows / b.rows);
            }
            if knot.rows >= rows {
                let seconds = below.map_or(knot.seconds, |b| {
                    let share = (rows - b.rows) / (knot.rows - b.rows);
                    b.seconds + share * (knot.seconds - b.seconds)
                });
                return Some(Duration::from_secs_f64(seconds));
            }
            below = Some(knot);
        }
        below.map(|last| Duration::from_secs_f64(last.seconds * rows / last.rows))
    }

    /// As [`Costs::expected`], but fewer rows than were ever measured are hoped to take less in proportion: so they are
    /// tried.
    pub(crate) fn hoped(&self, rows: usize) -> Option<Duration> {
        let least = self.knots.iter().flatten().next()?;
        let share = (rows as f64 / least.rows).min(1.0);
        Some(self.expected(rows)?.mul_f64(share))
    }

    /// The most rows, between `least` and `most`, that are expected to take no longer than `time`. Before anything
    /// was measured: a cautious few.
    pub(crate) fn rows_within(&self, time: Duration, least: usize, most: usize) -> usize {
        const CAUTIOUS: usize = 16;
        if self.knots.iter().all(Option::is_none) {
            return most.min(least.max(CAUTIOUS));
        }
        let fits = |rows| self.expected(rows).is_none_or(|t| t <= time);
        let (mut yes, mut no) = (least, most + 1);
        while yes + 1 < no {
            let middle = usize::midpoint(yes, no);
            if fits(middle) { yes = middle } else { no = middle }
        }
        yes.min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn times_lie_on_lines_between_measurements_and_grow_by_row_beyond_them() {
        let mut costs = Costs::default();
        assert_eq!(costs.expected(3), None);
        costs.measured(4, ms(10));
        costs.measured(16, ms(22));
        assert_eq!(costs.expected(1), Some(ms(10)));
        assert_eq!(costs.expected(4), Some(ms(10)));
        assert_eq!(costs.expected(10), Some(ms(16)));
        assert_eq!(costs.expected(32), Some(ms(44)));
    }

    #[test]
    fn the_rows_of_a_budget_are_those_whose_time_fits() {
        let mut costs = Costs::default();
        assert_eq!(costs.rows_within(ms(50), 1, 512), 16);
        costs.measured(4, ms(10));
        costs.measured(16, ms(22));
        assert_eq!(costs.rows_within(ms(16), 1, 512), 10);
        assert_eq!(costs.rows_within(ms(44), 1, 512), 32);
        assert_eq!(costs.rows_within(ms(44), 1, 20), 20);
        assert_eq!(costs.rows_within(ms(1), 5, 512), 5);
    }

    #[test]
    fn one_bad_moment_does_not_rule_out_its_number_of_rows_for_ever() {
        let mut costs = Costs::default();
        costs.measured(16, ms(500));
        for _ in 0..20 {
            let rows = costs.rows_within(ms(50), 1, 512);
            costs.measured(rows, ms(10 + rows as u64 / 10));
        }
        assert!(costs.rows_within(ms(50), 1, 512) >= 256, "{costs:?}");
    }

    #[test]
    fn a_slower_machine_is_noticed_within_a_few_steps() {
        let mut costs = Costs::default();
        costs.measured(8, ms(10));
        (0..10).for_each(|_| costs.measured(8, ms(20)));
        let now = costs.expected(8).unwrap();
        assert!(now > ms(19) && now <= ms(20), "{now:?}");
    }
}
