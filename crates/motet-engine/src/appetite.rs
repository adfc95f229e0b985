//! How many drafts pay, and where from: chosen for each session and step from what was measured.
//!
//! A draft costs a row, and the head's a pass of it; it is worth the probability that it and all before it are chosen.
//! What is expected of a step is its tokens by its time, and the drafts that make this greatest are taken, none
//! included. Times come from steps like these, probabilities from the drafts before. What was never measured is expected
//! to be as cheap as it can be (no dearer than fewer rows), so it is tried when that would pay; and a small share of the
//! time goes to choices that do not seem the best, so that what has become better is noticed: to other numbers, and now
//! and then to none, with which all are compared. Nothing here changes a token.

mod chances;
mod times;

pub(crate) use chances::Chances;
use times::Times;

use crate::drafts::{MAX_DRAFTS, Source};
use motet_model::Slot;
use std::time::Duration;

/// The share of the time that may be lost to trying what does not seem the best.
const CURIOSITY: f64 = 0.001;

/// One step of so many goes without drafts, so that they are compared with the machine as it is now.
const COMPARED: usize = 128;

/// Where no drafts are best beside so many rows, the next choices are none as well, for choosing takes time too: so many at
/// first, and twice as many and one each time that it is so again, up to the greatest number.
const REST: u32 = 7;
const LONGEST_REST: u32 = 63;

/// What is expected of a first draft before any was made.
const FIRST: f64 = 0.7;

/// How many standard deviations a hopeful mind adds to what was seen.
const HOPEFUL: f64 = 2.0;

/// What is known of times and chances, and the choice that follows.
#[derive(Debug)]
pub(crate) struct Appetite {
    /// Steps without prompts, by rows.
    steps: Times,
    /// Passes of the head, by sessions.
    passes: Times,
    /// Over all sessions, by their source.
    chances: [Chances; 2],
    /// Choices made so far.
    choices: usize,
    rest: Rest,
    /// Seconds that may be lost to curiosity.
    credit: f64,
    /// Whether hope was tried last, or another number.
    hopeful: bool,
    /// Which session tries which number of drafts next.
    turn: usize,
    /// The drafts of each session that seem best, and their source.
    sure: Vec<(Source, usize)>,
    /// Drafts that could be made, the likeliest first: probability, number in its step, session.
    offers: Vec<(f64, usize, usize)>,
}

/// Choices that are none without being made.
#[derive(Debug, Clone, Copy, Default)]
struct Rest {
    /// Beside so many rows.
    rows: usize,
    /// How many it was to be, and how many are left.
    all: u32,
    left: u32,
}

impl Rest {
    fn again(self, rows: usize) -> Self {
        let all = if rows == self.rows { (2 * self.all + 1).clamp(REST, LONGEST_REST) } else { REST };
        Self { rows, all, left: all }
    }
}

/// A session that could have drafts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) slot: Slot,
    /// Drafts that it can have from each source.
    pub(crate) most: [usize; 2],
    /// Drafts that a look-up may find in another step.
    findable: usize,
    /// Where it shall have them from, and how many.
    pub(crate) source: Source,
    pub(crate) drafts: usize,
}

impl Wish {
    /// Of a session that can have so many drafts from the head, and so many that were looked up of those that may be
    /// found: none yet.
    pub(crate) fn new(slot: Slot, head: usize, looked_up: usize, findable: usize) -> Self {
        let mut wish = Self { slot, most: [head, looked_up], findable, source: Source::Head, drafts: 0 };
        wish.start_afresh();
        wish
    }

    /// No drafts, to be looked up if there are any to be had.
    fn start_afresh(&mut self) {
        self.source = if self.most[Source::LookUp as usize] > 0 { Source::LookUp } else { Source::Head };
        self.drafts = 0;
    }

    /// Drafts that it can have from its source.
    pub(crate) fn most(&self) -> usize {
        self.most[self.source as usize]
    }

    /// Whether it can have drafts from either source.
    fn has_both(&self) -> bool {
        self.most.iter().all(|&most| most > 0)
    }
}

impl Appetite {
    /// For `sessions` sessions with at most `drafts` drafts each.
    pub(crate) fn new(sessions: usize, drafts: usize) -> Self {
        Self {
            steps: Times::new(sessions * (1 + drafts)),
            passes: Times::new(sessions),
            chances: [Chances::new(1000.0); 2],
            choices: 0,
            rest: Rest::default(),
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

    /// The head took so long for `sessions` sessions, up to `deepest` drafts each.
    pub(crate) fn drafted(&mut self, sessions: usize, deepest: usize, took: Duration) {
        self.passes.measure(sessions, took.as_secs_f64() / deepest.max(1) as f64);
    }

    /// Of a session's drafts from this source the first `accepted` were chosen.
    pub(crate) fn learn(&mut self, source: Source, drafts: usize, accepted: usize) {
        self.chances[source as usize].learn(drafts, accepted);
    }

    /// Whether a step with `rows` rows, in which no prompt is read, is to be chosen for; the others go without drafts.
    pub(crate) fn is_asked(&mut self, rows: usize) -> bool {
        if !self.steps.is_known(rows) {
            return false; // steps without drafts come first
        }
        self.choices += 1;
        self.credit += CURIOSITY * self.steps.of(rows);
        let rests = self.rest.rows == rows && self.rest.left > 0;
        if rests || self.choices.is_multiple_of(COMPARED) {
            self.rest.left = self.rest.left.saturating_sub(1);
            return false;
        }
        true
    }

    /// Chooses source and number of each wish's drafts, for a step with `rows` rows beside them. `price`: the seconds of
    /// such a step by drafts, where prompts are read in it; `None` if none are, which [`Appetite::is_asked`] is about.
    pub(crate) fn choose<'s>(
        &mut self,
        rows: usize,
        wishes: &mut [Wish],
        chances: impl Fn(Slot) -> &'s [Chances; 2],
        price: Option<&dyn Fn(usize) -> f64>,
    ) {
        if wishes.is_empty() {
            return;
        }
        let prices = Prices { rows, price };
        let rate = self.take_best(&prices, wishes, &chances, 0.0);
        if price.is_none() {
            let none = wishes.iter().all(|wish| wish.drafts == 0)
                && !self.would_pay_if_found(&prices, wishes, &chances);
            self.rest = if none { self.rest.again(rows) } else { Rest::default() };
            self.be_curious(&prices, wishes, &chances, rate);
        }
    }

    /// Whether drafts would pay if every look-up found some. Leaves no drafts chosen.
    fn would_pay_if_found<'s>(
        &mut self,
        prices: &Prices<'_>,
        wishes: &mut [Wish],
        chances: &impl Fn(Slot) -> &'s [Chances; 2],
    ) -> bool {
        let swap = |wish: &mut Wish| {
            std::mem::swap(&mut wish.most[Source::LookUp as usize], &mut wish.findable);
        };
        if wishes.iter().all(|wish| wish.findable == wish.most[Source::LookUp as usize]) {
            return false;
        }
        wishes.iter_mut().for_each(swap);
        self.take_best(prices, wishes, chances, 0.0);
        let pays = wishes.iter().any(|wish| wish.drafts > 0);
        wishes.iter_mut().for_each(|wish| {
            swap(wish);
            wish.start_afresh();
        });
        pays
    }

    /// Takes another choice if what that loses against `rate` was saved before: in turn what is best for a hopeful
    /// mind, and another number of drafts for one session or for all.
    fn be_curious<'s>(
        &mut self,
        prices: &Prices<'_>,
        wishes: &mut [Wish],
        chances: &impl Fn(Slot) -> &'s [Chances; 2],
        rate: f64,
    ) {
        self.sure.clear();
        self.sure.extend(wishes.iter().map(|wish| (wish.source, wish.drafts)));
        self.hopeful = !self.hopeful;
        if self.hopeful {
            self.take_best(prices, wishes, chances, HOPEFUL);
        } else {
            let most = wishes.iter().map(Wish::most).max().unwrap_or(0);
            let (who, other) = (self.turn % (wishes.len() + 1), self.turn / (wishes.len() + 1) % (most + 1));
            // One session, or all.
            let whose = if who < wishes.len() { who..who + 1 } else { 0..who };
            wishes[whose].iter_mut().for_each(|wish| wish.drafts = other.min(wish.most()));
            if wishes.iter().zip(&self.sure).all(|(wish, &(_, drafts))| wish.drafts == drafts) {
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
            wishes.iter_mut().zip(&self.sure).for_each(|(wish, &sure)| (wish.source, wish.drafts) = sure);
        }
    }

    /// What is expected to come of a session's drafts.
    fn promise<'s>(&self, wish: &Wish, chances: &impl Fn(Slot) -> &'s [Chances; 2]) -> f64 {
        self.probabilities(wish.source, chances(wish.slot), 0.0).take(wish.drafts).sum()
    }

    /// The probabilities that a session's first draft from a source is chosen, its first two are, and so on.
    fn probabilities(&self, source: Source, own: &[Chances; 2], hope: f64) -> impl Iterator<Item = f64> {
        let (of_all, own) = (&self.chances[source as usize], own[source as usize]);
        let (mut all, mut through) = (FIRST, 1.0);
        (0..MAX_DRAFTS).map(move |depth| {
            all = of_all.of(depth, all, 0.0);
            through *= own.of(depth, all, hope);
            through
        })
    }

    /// Takes the drafts that make most tokens in the time, and as many passes of the head: each session's from the source
    /// whose first draft is the likelier, or looked up wherever some were found, which costs no pass. Returns tokens by
    /// seconds.
    fn take_best<'s>(
        &mut self,
        prices: &Prices<'_>,
        wishes: &mut [Wish],
        chances: &impl Fn(Slot) -> &'s [Chances; 2],
        hope: f64,
    ) -> f64 {
        let mut best = Best { rate: prices.rows as f64 / prices.step(self, 0), passes: 0, drafts: 0 };
        if wishes.iter().any(Wish::has_both) {
            self.offer(wishes, true, chances, hope);
            best = self.best_of_offers(prices, wishes, best);
        }
        self.offer(wishes, false, chances, hope);
        let looked_up = self.best_of_offers(prices, wishes, best);
        if best.drafts > 0 && looked_up.rate == best.rate {
            self.offer(wishes, true, chances, hope);
        }
        best = looked_up;
        let mut left = best.drafts;
        for &(_, depth, i) in &self.offers {
            let taken = left > 0 && best.has(&wishes[i], depth);
            wishes[i].drafts += usize::from(taken);
            left -= usize::from(taken);
        }
        best.rate
    }

    /// Lines up the drafts that could be made: of the likelier source, or looked up wherever some were found.
    fn offer<'s>(
        &mut self,
        wishes: &mut [Wish],
        likelier: bool,
        chances: &impl Fn(Slot) -> &'s [Chances; 2],
        hope: f64,
    ) {
        let mut offers = std::mem::take(&mut self.offers);
        offers.clear();
        for (i, wish) in wishes.iter_mut().enumerate() {
            let own = chances(wish.slot);
            wish.start_afresh();
            let first = |source| self.probabilities(source, own, hope).next();
            if likelier && wish.has_both() && first(Source::Head) > first(Source::LookUp) {
                wish.source = Source::Head;
            }
            // Hope goes a step at a time.
            let most = if hope > 0.0 { wish.most().min(self.sure[i].1 + 1) } else { wish.most() };
            let probabilities = self.probabilities(wish.source, own, hope).take(most);
            offers.extend(probabilities.enumerate().map(|(depth, probability)| (probability, depth, i)));
        }
        offers.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        self.offers = offers;
    }

    /// The likeliest of the offers, as many as pay most, if that is better than `so_far`.
    fn best_of_offers(&self, prices: &Prices<'_>, wishes: &[Wish], so_far: Best) -> Best {
        let mut best = so_far;
        let most = prices.most_drafts(self);
        for passes in 0..=wishes.iter().map(|wish| wish.most[Source::Head as usize]).max().unwrap_or(0) {
            let (mut tokens, mut drafts, mut drafting) = (prices.rows as f64, 0, 0);
            for &(probability, depth, i) in &self.offers {
                let candidate = Best { rate: 0.0, passes, drafts };
                if !candidate.has(&wishes[i], depth) {
                    continue;
                }
                if drafts == most {
                    break;
                }
                tokens += probability;
                drafts += 1;
                drafting += usize::from(depth == 0 && wishes[i].source == Source::Head);
                let seconds = prices.step(self, drafts) + passes as f64 * self.passes.of(drafting);
                if tokens / seconds > best.rate {
                    best = Best { rate: tokens / seconds, passes, drafts };
                }
            }
        }
        best
    }

    /// What a step with these drafts takes, the drafting included.
    fn seconds(&self, prices: &Prices<'_>, wishes: &[Wish]) -> f64 {
        let by_head = || wishes.iter().filter(|wish| wish.source == Source::Head && wish.drafts > 0);
        let passes = by_head().map(|wish| wish.drafts).max().unwrap_or(0);
        let drafts = wishes.iter().map(|wish| wish.drafts).sum();
        prices.step(self, drafts) + passes as f64 * self.passes.of(by_head().count())
    }
}

/// The likeliest offers.
#[derive(Debug, Clone, Copy)]
struct Best {
    /// Tokens by seconds.
    rate: f64,
    /// Passes of the head.
    passes: usize,
    /// Drafts, of those that so many passes give and those that were looked up.
    drafts: usize,
}

impl Best {
    /// Whether the draft with this number in its step is to be had with so many passes.
    fn has(&self, wish: &Wish, depth: usize) -> bool {
        wish.source == Source::LookUp || depth < self.passes
    }
}

/// What a step takes, by the drafts in it.
struct Prices<'p> {
    /// Rows beside the drafts.
    rows: usize,
    price: Option<&'p dyn Fn(usize) -> f64>,
}

impl Prices<'_> {
    /// The unknown is entered step by step: twice the rows that are known at most.
    fn most_drafts(&self, appetite: &Appetite) -> usize {
        match self.price {
            Some(_) => usize::MAX,
            None => (2 * appetite.steps.known).saturating_sub(self.rows),
        }
    }

    fn step(&self, appetite: &Appetite, drafts: usize) -> f64 {
        self.price.map_or_else(|| appetite.steps.of(self.rows + drafts), |price| price(drafts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine and conversations as they truly are.
    struct World<'w> {
        /// Milliseconds of a step by rows, and of a pass of the head.
        step: &'w dyn Fn(usize) -> f64,
        pass: f64,
        /// Of each session, the probability that a draft of the head with a chance is chosen, by its number.
        chances: Vec<&'w dyn Fn(usize) -> f64>,
        /// How often something is found that could be looked up, and the probability that a draft of it is chosen.
        looked_up: (f64, f64),
    }

    const MOST: usize = 6;

    /// The drafts of a session in a step.
    type Choice = (Source, usize);

    impl World<'_> {
        /// What is expected of a session with so many drafts: exactly.
        fn tokens(&self, session: usize, (source, drafts): Choice) -> f64 {
            let through = |depth| (0..=depth).map(|d| self.chance(session, source, d)).product::<f64>();
            1.0 + (0..drafts).map(through).sum::<f64>()
        }

        fn chance(&self, session: usize, source: Source, depth: usize) -> f64 {
            match source {
                Source::Head => (self.chances[session])(depth),
                Source::LookUp => self.looked_up.1,
            }
        }

        fn seconds(&self, choices: &[Choice]) -> f64 {
            let rows = choices.len() + choices.iter().map(|choice| choice.1).sum::<usize>();
            ((self.step)(rows) + passes(choices) as f64 * self.pass) / 1000.0
        }

        /// Whether something is found for each session, in a step.
        fn found(&self, random: &mut u64) -> Vec<bool> {
            (0..self.chances.len()).map(|_| chance(random) < self.looked_up.0).collect()
        }

        /// Tokens by seconds if `choice` of the sessions for whom something was found or not is made in every step.
        fn fixed(&self, choice: impl Fn(bool) -> Choice) -> f64 {
            let (mut tokens, mut seconds, mut random) = (0.0, 0.0, 99);
            for _ in 0..if self.looked_up.0 > 0.0 { 20_000 } else { 1 } {
                let choices: Vec<Choice> = self.found(&mut random).into_iter().map(&choice).collect();
                tokens +=
                    (0..choices.len()).map(|session| self.tokens(session, choices[session])).sum::<f64>();
                seconds += self.seconds(&choices);
            }
            tokens / seconds
        }

        /// Tokens by seconds of so many steps that choose: drafts succeed by chance, tokens count as expected.
        fn adaptive(&self, steps: usize, seed: u64) -> f64 {
            let count = self.chances.len();
            let mut appetite = Appetite::new(count, MOST);
            let mut sessions = vec![[Chances::of_session(); 2]; count];
            let (mut tokens, mut seconds, mut random) = (0.0, 0.0, seed);
            let findable = if self.looked_up.0 > 0.0 { MOST } else { 0 };
            for _ in 0..steps {
                let found = if self.looked_up.0 > 0.0 { self.found(&mut random) } else { vec![false; count] };
                let wish =
                    |slot| Wish::new(Slot(slot as u32), MOST, if found[slot] { MOST } else { 0 }, findable);
                let mut wishes: Vec<Wish> = (0..count).map(wish).collect();
                if appetite.is_asked(count) {
                    appetite.choose(count, &mut wishes, |slot| &sessions[slot.0 as usize], None);
                }
                let choices: Vec<Choice> = wishes.iter().map(|w| (w.source, w.drafts)).collect();
                let deepest = passes(&choices);
                if deepest > 0 {
                    let took = Duration::from_secs_f64(deepest as f64 * self.pass / 1000.0);
                    let drafting =
                        choices.iter().filter(|(source, d)| *source == Source::Head && *d > 0).count();
                    appetite.drafted(drafting, deepest, took);
                }
                let rows = count + choices.iter().map(|choice| choice.1).sum::<usize>();
                // One step in 50 is held up.
                let delay = if chance(&mut random) < 0.02 { 3.0 } else { 1.0 };
                appetite.stepped(rows, Duration::from_secs_f64(delay * (self.step)(rows) / 1000.0));
                for (session, &(source, drafts)) in choices.iter().enumerate().filter(|(_, c)| c.1 > 0) {
                    let mut accepted = 0;
                    while accepted < drafts && chance(&mut random) < self.chance(session, source, accepted) {
                        accepted += 1;
                    }
                    sessions[session][source as usize].learn(drafts, accepted);
                    appetite.learn(source, drafts, accepted);
                }
                tokens += (0..count).map(|session| self.tokens(session, choices[session])).sum::<f64>();
                seconds += self.seconds(&choices);
            }
            tokens / seconds
        }
    }

    /// The head's passes for these drafts.
    fn passes(choices: &[Choice]) -> usize {
        choices.iter().filter(|(source, _)| *source == Source::Head).map(|choice| choice.1).max().unwrap_or(0)
    }

    /// The least ratio so far, and where it was.
    struct Least(f64, String);

    impl Least {
        fn take(&mut self, ratio: f64, what: &str) {
            if ratio < self.0 {
                *self = Self(ratio, what.to_owned());
            }
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
        let (mut of_off, mut of_best) = (Least(f64::MAX, String::new()), Least(f64::MAX, String::new()));
        for ((table, step), mix) in steps.iter().flat_map(|s| mixes.iter().map(move |m| (s, m))) {
            let cases = [0, 1].into_iter().flat_map(|seed| [1, 2, 4, 8].map(|count| (seed, count)));
            for (pass, (seed, count)) in
                [0.0, 3.0].into_iter().flat_map(|p| cases.clone().map(move |c| (p, c)))
            {
                let chances = (0..count).map(|i| mix[i % mix.len()]).collect();
                let world = World { step, pass, chances, looked_up: (0.0, 0.0) };
                let off = world.fixed(|_| (Source::Head, 0));
                let best = (1..=MOST).map(|k| world.fixed(|_| (Source::Head, k))).fold(off, f64::max);
                let adaptive = world.adaptive(20_000, 1000 * seed + count as u64);
                let what = format!(
                    "{table}, chances {:?}, {count} sessions, a pass {pass} ms",
                    mix.iter().map(|c| c(0)).collect::<Vec<_>>()
                );
                of_off.take(adaptive / off, &what);
                of_best.take(adaptive / best, &what);
            }
        }
        assert!(of_off.0 >= 0.995, "{} of off: {}", of_off.0, of_off.1);
        assert!(of_best.0 >= 0.97, "{} of the best number: {}", of_best.0, of_best.1);
    }

    /// Fixed are the number of drafts and where they come from: all from the head, or looked up where something was found
    /// and the head's elsewhere, or none elsewhere.
    #[test]
    fn of_two_sources_it_takes_what_pays() {
        let steps: [(&str, &dyn Fn(usize) -> f64); 3] = [
            ("rows cost a little", &|rows| 8.0 + 2.0 * rows as f64),
            ("rows cost much", &|rows| 4.0 + 8.0 * rows as f64),
            ("a knee", &|rows| f64::max(10.0, 1.5 * rows as f64)),
        ];
        let heads: [&dyn Fn(usize) -> f64; 3] = [&|_| 0.1, &|_| 0.6, &|_| 0.95];
        let (mut of_off, mut of_best) = (Least(f64::MAX, String::new()), Least(f64::MAX, String::new()));
        for ((table, step), head) in steps.iter().flat_map(|s| heads.iter().map(move |h| (s, h))) {
            let cases = [(0.3, 0.9), (0.9, 0.9), (0.9, 0.2)].into_iter();
            for (looked_up, pass, count) in
                cases.flat_map(|l| [(l, 0.5, 1), (l, 3.0, 4), (l, 0.5, 8), (l, 3.0, 8)])
            {
                let world = World { step, pass, chances: vec![head; count], looked_up };
                let none = (Source::Head, 0);
                let off = world.fixed(|_| none);
                let fixed = (1..=MOST).flat_map(|k| {
                    let (of_head, of_look_up) = ((Source::Head, k), (Source::LookUp, k));
                    let either = |found: bool| if found { of_look_up } else { of_head };
                    let found = |found: bool| if found { of_look_up } else { none };
                    [world.fixed(|_| of_head), world.fixed(either), world.fixed(found)]
                });
                let best = fixed.fold(off, f64::max);
                let adaptive = world.adaptive(20_000, count as u64);
                let chance = head(0);
                let what =
                    format!("{table}, {count} sessions, head {chance}, a pass {pass} ms, {looked_up:?}");
                of_off.take(adaptive / off, &what);
                of_best.take(adaptive / best, &what);
            }
        }
        assert!(of_off.0 >= 0.995, "{} of off: {}", of_off.0, of_off.1);
        assert!(of_best.0 >= 0.97, "{} of the best: {}", of_best.0, of_best.1);
    }
}
