//! Whether what drafts still agrees with the network, over all answers: a head that stops doing so costs time and says
//! nothing, for tokens never depend on it.
//!
//! The drafts of one answer resemble each other, so answers are what is counted: of each, the share of its steps with
//! drafts whose first draft was chosen (which does not depend on how many there were). A drafter has fallen out if the
//! mean of the last answers is less than half of the long-run mean. So many answers are taken that this half is at least
//! [`ERRORS`] standard errors, by the spread that was seen between answers: chance alone does not get there. Nothing
//! here changes what is drafted; how many drafts pay is the appetite's.

use std::fmt;

/// Steps with drafts that an answer must have had to count.
const STEPS: usize = 8;
/// How many standard errors lie between the long-run mean and its half, at least.
const ERRORS: f64 = 8.0;
/// Answers that are compared, at least.
const FEWEST: f64 = 16.0;
/// The long-run mean is that of so many times the answers that are compared, before anything is compared with it,
const KNOWN: f64 = 4.0;
/// and remembers about so many times as many.
const MEMORY: f64 = 64.0;
/// From this share of the long-run mean on a drafter that fell out agrees again. If it stays below for as many answers as
/// the long run has, that is the long run from then on.
const AGAIN: f64 = 0.75;

/// A drafter that used to agree with the network no longer does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FallenOut {
    /// The share of steps whose first draft was chosen, in the long run.
    pub before: f64,
    /// The same over the last answers.
    pub now: f64,
    /// How many answers those are.
    pub answers: usize,
}

impl fmt::Display for FallenOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, now) = (100.0 * self.before, 100.0 * self.now);
        write!(
            f,
            "drafts have stopped agreeing with the model: the first one came true in {now:.0} % of the steps of the last \
             {} answers, and in {before:.0} % before. Answers are what they are without drafts, but come no faster. If \
             conversations are of the same kind as before, this is a fault of motet or of the model's draft head, worth a \
             report; --drafts off or --look-up does without the head",
            self.answers
        )
    }
}

/// What was seen of answers.
#[derive(Debug, Default)]
pub(crate) struct Agreement {
    /// Of the long run.
    long: Sums,
    /// Of the answers since the last comparison.
    last: Sums,
    /// Of those since it fell out, if it has: they are no part of the long run.
    since: Option<Sums>,
}

/// Sums over answers.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    answers: f64,
    shares: f64,
    squares: f64,
}

impl Sums {
    fn mean(self) -> f64 {
        self.shares / self.answers.max(1.0)
    }

    /// Answers over which half of the mean is [`ERRORS`] standard errors.
    fn enough(self) -> f64 {
        let (n, mean) = (self.answers.max(2.0), self.mean());
        let variance = (self.squares - n * mean * mean).max(0.0) / (n - 1.0);
        (4.0 * ERRORS * ERRORS * variance / (mean * mean)).max(FEWEST)
    }

    fn add(&mut self, other: Sums, kept: f64) {
        self.answers = kept * self.answers + other.answers;
        self.shares = kept * self.shares + other.shares;
        self.squares = kept * self.squares + other.squares;
    }
}

impl Agreement {
    /// An answer has ended in which `steps` steps had drafts that could be compared, and of `agreed` of them the first
    /// draft was chosen. Says if that shows that the drafter has fallen out: once, until it agrees again.
    pub(crate) fn ended(&mut self, steps: usize, agreed: usize) -> Option<FallenOut> {
        if steps < STEPS {
            return None;
        }
        let share = agreed as f64 / steps as f64;
        self.last.add(Sums { answers: 1.0, shares: share, squares: share * share }, 1.0);
        let enough = self.long.enough();
        // Before the long run is known it takes every answer.
        if self.long.answers < KNOWN * enough {
            self.long.add(std::mem::take(&mut self.last), 1.0);
            return None;
        }
        if self.last.answers < enough {
            return None;
        }
        let (last, before) = (std::mem::take(&mut self.last), self.long.mean());
        let now = last.mean();
        match &mut self.since {
            None if now < before / 2.0 => {
                self.since = Some(last);
                return Some(FallenOut { before, now, answers: last.answers as usize });
            }
            Some(since) if now < AGAIN * before => {
                since.add(last, 1.0);
                if since.answers >= self.long.answers {
                    (self.long, self.since) = (*since, None);
                }
            }
            _ => {
                self.since = None;
                let most = MEMORY * enough;
                let full = self.long.answers + last.answers > most;
                self.long.add(last, if full { 1.0 - last.answers / most } else { 1.0 });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SplitMix64, in 0..1.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
        }

        /// Of `steps` steps, those that agree if each does so with probability `chance`.
        fn agreed(&mut self, steps: usize, chance: f64) -> usize {
            (0..steps).filter(|_| self.next() < chance).count()
        }

        /// An answer of any length.
        fn steps(&mut self) -> usize {
            8 + (self.next() * 40.0) as usize
        }
    }

    /// How often a drafter that is as right as ever seems to fall out: never, in thousands of long lives, whether all
    /// answers are alike or each has its own chance.
    #[test]
    fn chance_alone_is_no_reason() {
        for (mean, spread) in [(0.05, 0.0), (0.2, 0.1), (0.5, 0.0), (0.5, 0.5), (0.7, 0.3), (0.95, 0.05)] {
            for seed in 0..500 {
                let (mut agreement, random) = (Agreement::default(), &mut Random(seed));
                for _ in 0..1000 {
                    let chance = mean + spread * (2.0 * random.next() - 1.0);
                    let steps = random.steps();
                    let fallen = agreement.ended(steps, random.agreed(steps, chance));
                    assert_eq!(fallen, None, "mean {mean}, spread {spread}, seed {seed}");
                }
            }
        }
    }

    #[test]
    fn a_fall_is_told_once_and_again_after_it_has_recovered() {
        for (high, low) in [(0.3, 0.05), (0.7, 0.0), (0.7, 0.25), (0.95, 0.4)] {
            for seed in 0..200 {
                let (mut agreement, random) = (Agreement::default(), &mut Random(seed));
                let mut told = Vec::new();
                for (era, (chance, answers)) in
                    [(high, 600), (low, 300), (high, 600), (low, 300)].into_iter().enumerate()
                {
                    for _ in 0..answers {
                        let steps = random.steps();
                        let fallen = agreement.ended(steps, random.agreed(steps, chance));
                        told.extend(fallen.map(|fallen| (era, fallen)));
                    }
                }
                let eras: Vec<usize> = told.iter().map(|t| t.0).collect();
                assert_eq!(eras, [1, 3], "{high} to {low}, seed {seed}");
                let FallenOut { before, now, answers } = told[0].1;
                assert!(
                    (before - high).abs() < 0.1 && now < before / 2.0 && answers >= 16,
                    "{:?}",
                    told[0].1
                );
            }
        }
    }

    #[test]
    fn what_stays_low_becomes_what_is_known() {
        let (mut agreement, random) = (Agreement::default(), &mut Random(1));
        let mut told = Vec::new();
        for (era, chance) in [0.9, 0.4, 0.1].into_iter().enumerate() {
            for _ in 0..1500 {
                told.extend(
                    agreement.ended(20, random.agreed(20, chance)).map(|fallen| (era, fallen.before)),
                );
            }
        }
        let [(1, first), (2, second)] = told[..] else { panic!("{told:?}") };
        assert!((first - 0.9).abs() < 0.02 && (second - 0.4).abs() < 0.02, "{told:?}");
    }

    #[test]
    fn what_never_agreed_or_is_seen_too_seldom_cannot_fall_out() {
        let mut agreement = Agreement::default();
        assert!((0..5000).all(|_| agreement.ended(50, 0).is_none()));
        let mut agreement = Agreement::default();
        assert!((0..5000).all(|i| agreement.ended(7, if i < 2500 { 7 } else { 0 }).is_none()));
    }
}
