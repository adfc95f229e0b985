//! How many drafts pay: chosen for each session and step from what was measured.
//!
//! A draft costs a row, and a pass of whatever drafts; it is worth the probability that it and all before it are chosen.
//! What is expected of a step is its tokens by its time, and the drafts that make this greatest are taken, none
//! included. Times come from steps like these, probabilities from the drafts before. What was never measured is expected
//! to be as cheap as it can be (no dearer than fewer rows), so it is tried when that would pay; and a small share of the
//! time goes to choices that do not seem the best, so that what has become better is noticed: to other numbers, and now
//! and then to none, with which all are compared. Nothing here changes a token.

use crate::drafts::MAX_DRAFTS;
use motet_model::Slot;
use std::time::Duration;

/// The share of the time that may be lost to trying what does not seem the best.
const CURIOSITY: f64 = 0.001;

/// What is expected follows what the last two measurements agree on by this share, and gets so much longer at most: delays
/// come from anywhere, and nothing is done in less time than it takes.
const FOLLOWED: f64 = 0.3;
const LONGER: f64 = 1.02;

/// One step of so many goes without drafts, so that they are compared with the machine as it is now.
const COMPARED: usize = 128;

/// Where no drafts are best beside so many rows, the next choices are none as well: choosing takes time too.
const REST: u32 = 7;

/// Of so many first measurements the least counts; before there are so many, none does.
const FEW: u32 = 3;

/// What is expected of a first draft before any was made.
const FIRST: f64 = 0.7;

/// How many standard deviations a hopeful mind adds to what was seen.
const HOPEFUL: f64 = 2.0;

/// How often drafts were chosen that had a chance to be, by their number in their step; old ones count less and less.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chances {
    chosen: [f64; MAX_DRAFTS],
    trials: [f64; MAX_DRAFTS],
    /// About how many drafts back it remembers.
    memory: f64,
}

impl Chances {
    /// Of one session.
    pub(crate) fn of_session() -> Self {
        Self::new(200.0)
    }

    fn new(memory: f64) -> Self {
        Self { chosen: [0.0; MAX_DRAFTS], trials: [0.0; MAX_DRAFTS], memory }
    }

    /// Of `drafts` drafts the first `accepted` were chosen; those behind the first refusal had no chance.
    pub(crate) fn learn(&mut self, drafts: usize, accepted: usize) {
        let kept = 1.0 - 1.0 / self.memory;
        for depth in 0..drafts.min(accepted + 1) {
            let chosen = f64::from(u8::from(depth < accepted));
            self.chosen[depth] = kept * self.chosen[depth] + chosen;
            self.trials[depth] = kept * self.trials[depth] + 1.0;
        }
    }

    /// The probability that a draft with a chance is chosen, if `before` was expected before all trials; and `hope`
    /// standard deviations more.
    fn of(&self, depth: usize, before: f64, hope: f64) -> f64 {
        const WEIGHT: f64 = 8.0;
        let trials = self.trials[depth] + WEIGHT;
        let mean = (self.chosen[depth] + WEIGHT * before) / trials;
        (mean + hope * (mean * (1.0 - mean) / trials).sqrt()).min(1.0)
    }
}

/// Times by a count.
#[derive(Debug, Clone)]
struct Times {
    measured: Vec<Measured>,
    /// Seconds that are expected, everywhere.
    expected: Vec<f64>,
}

/// What was measured at one count.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    seconds: f64,
    times: u32,
    /// The last measurement.
    last: f64,
}

impl Times {
    /// For counts up to `most`.
    fn new(most: usize) -> Self {
        Self { measured: vec![Measured::default(); most + 1], expected: vec![0.0; most + 1] }
    }

    fn measure(&mut self, count: usize, took: f64) {
        let Some(Measured { seconds, times, last }) = self.measured.get_mut(count) else { return };
        *seconds = match *times {
            0 => took,
            1..FEW => seconds.min(took),
            _ => {
                let agreed = seconds.clamp(took.min(*last), took.max(*last));
                (*seconds + FOLLOWED * (agreed - *seconds)).min(LONGER * *seconds)
            }
        };
        (*times, *last) = (times.saturating_add(1), took);
        self.fill();
    }

    /// More rows never take less time, and by the row never more. What is not known is taken to be as little as it can
    /// be.
    fn fill(&mut self) {
        let mut above = f64::INFINITY;
        for (expected, measured) in self.expected.iter_mut().zip(&self.measured).rev() {
            above = if measured.times > 0 { above.min(measured.seconds) } else { above };
            *expected = above;
        }
        let (mut at_below, mut below) = (0, 0.0);
        for at in 1..self.measured.len() {
            if self.is_known(at) {
                let own = f64::max(self.expected[at], below);
                for between in at_below + 1..at {
                    self.expected[between] = f64::max(own * between as f64 / at as f64, below);
                }
                (at_below, below) = (at, own);
            }
            self.expected[at] = below;
        }
    }

    /// Whether it was measured often enough to be believed.
    fn is_known(&self, count: usize) -> bool {
        self.measured.get(count).is_some_and(|measured| measured.times >= FEW)
    }

    /// Seconds; 0 before anything was measured.
    fn of(&self, count: usize) -> f64 {
        self.expected[count.min(self.expected.len() - 1)]
    }
}

/// What is known of times and chances, and the choice that follows.
#[derive(Debug)]
pub(crate) struct Appetite {
    /// Steps without prompts, by rows.
    steps: Times,
    /// Passes of the drafter, by sessions.
    passes: Times,
    /// Over all sessions.
    chances: Chances,
    /// Choices made so far.
    choices: usize,
    /// Beside so many rows, so many more choices are none.
    rests: (usize, u32),
    /// Seconds that may be lost to curiosity.
    credit: f64,
    /// Whether hope was tried last, or another number.
    hopeful: bool,
    /// Which session tries which number of drafts next.
    turn: usize,
    /// The drafts of each session that seem best.
    sure: Vec<usize>,
    /// Drafts that could be made, the likeliest first: probability, number in its step, session.
    offers: Vec<(f64, usize, usize)>,
}

/// A session that could have drafts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) slot: Slot,
    /// Drafts that it can have.
    pub(crate) most: usize,
    /// Drafts that it shall have.
    pub(crate) drafts: usize,
}

impl Appetite {
    /// For `sessions` sessions with at most `drafts` drafts each.
    pub(crate) fn new(sessions: usize, drafts: usize) -> Self {
        Self {
            steps: Times::new(sessions * (1 + drafts)),
            passes: Times::new(sessions),
            chances: Chances::new(1000.0),
            choices: 0,
            rests: (0, 0),
            credit: 0.0,
            hopeful: false,
            turn: 0,
            sure: Vec::with_capacity(sessions),
            offers: Vec::with_capacity(sessions * drafts),
        }
    }

    /// A step without prompts took so long.
    pub(crate) fn stepped(&mut self, rows: usize, took: Duration) {
        self.steps.measure(rows, took.as_secs_f64());
    }

    /// The drafter took so long for `sessions` sessions, up to `deepest` drafts each.
    pub(crate) fn drafted(&mut self, sessions: usize, deepest: usize, took: Duration) {
        self.passes.measure(sessions, took.as_secs_f64() / deepest.max(1) as f64);
    }

    /// Of a session's drafts the first `accepted` were chosen.
    pub(crate) fn learn(&mut self, drafts: usize, accepted: usize) {
        self.chances.learn(drafts, accepted);
    }

    /// Chooses `drafts` of each wish for a step with `rows` rows beside them. `price`: the seconds of such a step by
    /// drafts, where prompts are read in it; `None` if none are.
    pub(crate) fn choose<'s>(
        &mut self,
        rows: usize,
        wishes: &mut [Wish],
        chances: impl Fn(Slot) -> &'s Chances,
        price: Option<&dyn Fn(usize) -> f64>,
    ) {
        wishes.iter_mut().for_each(|wish| wish.drafts = 0);
        let prices = Prices { rows, price };
        if wishes.is_empty() || (price.is_none() && !self.steps.is_known(rows)) {
            return; // steps without drafts come first
        }
        if price.is_none() {
            self.choices += 1;
            self.credit += CURIOSITY * self.steps.of(rows);
            let rests = self.rests.0 == rows && self.rests.1 > 0;
            if rests || self.choices.is_multiple_of(COMPARED) {
                self.rests.1 = self.rests.1.saturating_sub(1);
                return;
            }
        }
        let rate = self.take_best(&prices, wishes, &chances, 0.0);
        if price.is_none() {
            let none = wishes.iter().all(|wish| wish.drafts == 0);
            self.rests = (rows, if none { REST } else { 0 });
            self.be_curious(&prices, wishes, &chances, rate);
        }
    }

    /// Takes another choice if what that loses against `rate` was saved before: in turn what is best for a hopeful
    /// mind, and another number of drafts for one session or for all.
    fn be_curious<'s>(
        &mut self,
        prices: &Prices<'_>,
        wishes: &mut [Wish],
        chances: &impl Fn(Slot) -> &'s Chances,
        rate: f64,
    ) {
        self.sure.clear();
        self.sure.extend(wishes.iter().map(|wish| wish.drafts));
        self.hopeful = !self.hopeful;
        if self.hopeful {
            self.take_best(prices, wishes, chances, HOPEFUL);
        } else {
            let most = wishes.iter().map(|wish| wish.most).max().unwrap_or(0);
            let (who, other) = (self.turn % (wishes.len() + 1), self.turn / (wishes.len() + 1) % (most + 1));
            // One session, or all.
            let whose = if who < wishes.len() { who..who + 1 } else { 0..who };
            wishes[whose].iter_mut().for_each(|wish| wish.drafts = other.min(wish.most));
            if wishes.iter().zip(&self.sure).all(|(wish, &drafts)| wish.drafts == drafts) {
                self.turn += 1;
                return;
            }
        }
        let tokens = prices.rows as f64 + wishes.iter().map(|w| self.promise(w, chances)).sum::<f64>();
        let lost = (self.seconds(prices, wishes) - tokens / rate).max(0.0);
        if lost <= self.credit {
            self.credit -= lost;
            self.turn += usize::from(!self.hopeful);
        } else {
            wishes.iter_mut().zip(&self.sure).for_each(|(wish, &drafts)| wish.drafts = drafts);
        }
    }

    /// What is expected to come of a session's drafts.
    fn promise<'s>(&self, wish: &Wish, chances: &impl Fn(Slot) -> &'s Chances) -> f64 {
        self.probabilities(chances(wish.slot), 0.0).take(wish.drafts).sum()
    }

    /// The probabilities that a session's first draft is chosen, its first two are, and so on.
    fn probabilities(&self, own: &Chances, hope: f64) -> impl Iterator<Item = f64> {
        let (mut all, mut through) = (FIRST, 1.0);
        (0..MAX_DRAFTS).map(move |depth| {
            all = self.chances.of(depth, all, 0.0);
            through *= own.of(depth, all, hope);
            through
        })
    }

    /// Takes the drafts, and as many passes, that make most tokens in the time; returns tokens by seconds.
    fn take_best<'s>(
        &mut self,
        prices: &Prices<'_>,
        wishes: &mut [Wish],
        chances: &impl Fn(Slot) -> &'s Chances,
        hope: f64,
    ) -> f64 {
        let mut offers = std::mem::take(&mut self.offers);
        offers.clear();
        for (i, wish) in wishes.iter_mut().enumerate() {
            wish.drafts = 0;
            // Hope goes a step at a time.
            let most = if hope > 0.0 { wish.most.min(self.sure[i] + 1) } else { wish.most };
            let probabilities = self.probabilities(chances(wish.slot), hope).take(most);
            offers.extend(probabilities.enumerate().map(|(depth, probability)| (probability, depth, i)));
        }
        offers.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let within = |deepest: usize| offers.iter().filter(move |offer| offer.1 < deepest);
        // Tokens by seconds, passes, and drafts taken of those within so many passes.
        let mut best = (prices.rows as f64 / prices.step(self, 0), 0, 0);
        for deepest in 1..=wishes.iter().map(|wish| wish.most).max().unwrap_or(0) {
            let (mut tokens, mut taken, mut drafting) = (prices.rows as f64, 0, 0);
            for &(probability, depth, _) in within(deepest) {
                tokens += probability;
                taken += 1;
                drafting += usize::from(depth == 0);
                let seconds = prices.step(self, taken) + deepest as f64 * self.passes.of(drafting);
                if tokens / seconds > best.0 {
                    best = (tokens / seconds, deepest, taken);
                }
            }
        }
        within(best.1).take(best.2).for_each(|&(_, _, i)| wishes[i].drafts += 1);
        self.offers = offers;
        best.0
    }

    /// What a step with these drafts takes, the drafting included.
    fn seconds(&self, prices: &Prices<'_>, wishes: &[Wish]) -> f64 {
        let deepest = wishes.iter().map(|wish| wish.drafts).max().unwrap_or(0);
        let drafting = wishes.iter().filter(|wish| wish.drafts > 0).count();
        let drafts = wishes.iter().map(|wish| wish.drafts).sum();
        prices.step(self, drafts) + deepest as f64 * self.passes.of(drafting)
    }
}

/// What a step takes, by the drafts in it.
struct Prices<'p> {
    /// Rows beside the drafts.
    rows: usize,
    price: Option<&'p dyn Fn(usize) -> f64>,
}

impl Prices<'_> {
    fn step(&self, appetite: &Appetite, drafts: usize) -> f64 {
        self.price.map_or_else(|| appetite.steps.of(self.rows + drafts), |price| price(drafts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine and conversations as they truly are.
    struct World<'w> {
        /// Milliseconds of a step by rows, and of a pass of the drafter by sessions.
        step: &'w dyn Fn(usize) -> f64,
        pass: f64,
        /// Of each session, the probability that a draft with a chance is chosen, by its number.
        chances: Vec<&'w dyn Fn(usize) -> f64>,
    }

    const MOST: usize = 6;

    impl World<'_> {
        /// What is expected of a session with so many drafts: exactly.
        fn tokens(&self, session: usize, drafts: usize) -> f64 {
            let through = |depth| (0..=depth).map(|d| (self.chances[session])(d)).product::<f64>();
            1.0 + (0..drafts).map(through).sum::<f64>()
        }

        fn seconds(&self, drafts: &[usize]) -> f64 {
            let rows = drafts.len() + drafts.iter().sum::<usize>();
            let passes = drafts.iter().max().map_or(0, |&d| d);
            ((self.step)(rows) + passes as f64 * self.pass) / 1000.0
        }

        /// Tokens by seconds if every session has so many drafts in every step.
        fn fixed(&self, drafts: usize) -> f64 {
            let all = vec![drafts; self.chances.len()];
            let tokens: f64 = (0..all.len()).map(|session| self.tokens(session, drafts)).sum();
            tokens / self.seconds(&all)
        }

        /// Tokens by seconds of so many steps that choose: drafts succeed by chance, tokens count as expected.
        fn adaptive(&self, steps: usize, seed: u64) -> f64 {
            let count = self.chances.len();
            let mut appetite = Appetite::new(count, MOST);
            let mut sessions = vec![Chances::of_session(); count];
            let (mut tokens, mut seconds, mut random) = (0.0, 0.0, seed);
            for _ in 0..steps {
                let wish = |slot| Wish { slot: Slot(slot), most: MOST, drafts: 0 };
                let mut wishes: Vec<Wish> = (0..count as u32).map(wish).collect();
                appetite.choose(count, &mut wishes, |slot| &sessions[slot.0 as usize], None);
                let drafts: Vec<usize> = wishes.iter().map(|w| w.drafts).collect();
                let deepest = drafts.iter().max().map_or(0, |&d| d);
                if deepest > 0 {
                    let took = Duration::from_secs_f64(deepest as f64 * self.pass / 1000.0);
                    let drafting = drafts.iter().filter(|&&d| d > 0).count();
                    appetite.drafted(drafting, deepest, took);
                }
                let rows = count + drafts.iter().sum::<usize>();
                // One step in 50 is held up.
                let delay = if chance(&mut random) < 0.02 { 3.0 } else { 1.0 };
                appetite.stepped(rows, Duration::from_secs_f64(delay * (self.step)(rows) / 1000.0));
                for (session, &drafts) in drafts.iter().enumerate().filter(|(_, d)| **d > 0) {
                    let mut accepted = 0;
                    while accepted < drafts && chance(&mut random) < (self.chances[session])(accepted) {
                        accepted += 1;
                    }
                    sessions[session].learn(drafts, accepted);
                    appetite.learn(drafts, accepted);
                }
                tokens += (0..count).map(|session| self.tokens(session, drafts[session])).sum::<f64>();
                seconds += self.seconds(&drafts);
            }
            tokens / seconds
        }
    }

    /// In 0..1 (SplitMix64).
    fn chance(state: &mut u64) -> f64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn never_much_worse_than_none_and_nearly_as_good_as_the_best_number() {
        let steps: [(&str, &dyn Fn(usize) -> f64); 6] = [
            ("rows are free", &|_| 10.0),
            ("rows cost a little", &|rows| 8.0 + 2.0 * rows as f64),
            ("rows cost all", &|rows| 10.0 * rows as f64),
            ("stairs of four", &|rows| 10.0 * rows.div_ceil(4) as f64),
            ("a knee", &|rows| f64::max(10.0, 1.5 * rows as f64)),
            ("company costs", &|rows| if rows == 1 { 10.0 } else { 15.0 + 0.2 * rows as f64 }),
        ];
        let never: &dyn Fn(usize) -> f64 = &|_| 0.0;
        let half: &dyn Fn(usize) -> f64 = &|_| 0.5;
        let often: &dyn Fn(usize) -> f64 = &|_| 0.8;
        let nearly: &dyn Fn(usize) -> f64 = &|_| 0.95;
        let fading: &dyn Fn(usize) -> f64 = &|depth| 0.9 * 0.5_f64.powi(depth as i32);
        let mixes: [&[&dyn Fn(usize) -> f64]; 6] =
            [&[never], &[half], &[often], &[nearly], &[fading], &[never, nearly]];
        let (mut least_of_off, mut least_of_best) = ((f64::MAX, String::new()), (f64::MAX, String::new()));
        for ((table, step), mix) in steps.iter().flat_map(|s| mixes.iter().map(move |m| (s, m))) {
            let cases = [0, 1].into_iter().flat_map(|seed| [1, 2, 4, 8].map(|count| (seed, count)));
            for (pass, (seed, count)) in
                [0.0, 3.0].into_iter().flat_map(|p| cases.clone().map(move |c| (p, c)))
            {
                let chances = (0..count).map(|i| mix[i % mix.len()]).collect();
                let world = World { step, pass, chances };
                let off = world.fixed(0);
                let best = (1..=MOST).map(|k| world.fixed(k)).fold(off, f64::max);
                let adaptive = world.adaptive(20_000, 1000 * seed + count as u64);
                let what = format!(
                    "{table}, chances {:?}, {count} sessions, a pass {pass} ms",
                    mix.iter().map(|c| c(0)).collect::<Vec<_>>()
                );
                if adaptive / off < least_of_off.0 {
                    least_of_off = (adaptive / off, what.clone());
                }
                if adaptive / best < least_of_best.0 {
                    least_of_best = (adaptive / best, what);
                }
            }
        }
        assert!(least_of_off.0 >= 0.995, "{} of off: {}", least_of_off.0, least_of_off.1);
        assert!(least_of_best.0 >= 0.97, "{} of the best number: {}", least_of_best.0, least_of_best.1);
    }
}
