//! Which tokens may come, grammars apart: no end before so many, only some, never some sequences.

use std::sync::Arc;

use motet_engine::{Advance, Broken, Constraint, ConstraintMaker, MAX_DRAFTS};

/// Texts that a request may forbid.
pub(crate) const MAX_BAD_WORDS: usize = 256;

/// The limits of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TokenLimits {
    /// Tokens that come before the answer may end by itself.
    pub(crate) at_least: usize,
    /// The tokens that may come; `None`: all.
    pub(crate) allowed: Option<Vec<u32>>,
    /// Sequences of tokens that may not come.
    pub(crate) bad_words: Vec<Vec<u32>>,
}

impl TokenLimits {
    /// Holds answers to the limits, and to the form `inside` if there is one; `None` where nothing is limited. `ends` are
    /// the tokens that end an answer, of `vocab` tokens.
    pub(crate) fn around(
        self,
        inside: Option<ConstraintMaker>,
        ends: &[u32],
        vocab: usize,
    ) -> Option<ConstraintMaker> {
        if self == TokenLimits::default() {
            return inside;
        }
        let mut may = vec![0u64; vocab.div_ceil(64)];
        match &self.allowed {
            Some(only) => only.iter().chain(ends).for_each(|&token| set(&mut may, token)),
            None => (0..vocab as u32).for_each(|token| set(&mut may, token)),
        }
        let longest = self.bad_words.iter().map(Vec::len).max().unwrap_or(0);
        let rules = Arc::new(Rules {
            at_least: self.at_least,
            may,
            ends: ends.into(),
            bad_words: self.bad_words,
            remembered: longest + MAX_DRAFTS,
        });
        Some(Box::new(move || {
            Box::new(Limited {
                inside: inside.as_ref().map(|make| make()),
                count: 0,
                recent: Vec::with_capacity(2 * rules.remembered),
                unlimited: vec![0; rules.may.len()],
                rules: rules.clone(),
            })
        }))
    }
}

/// The limits as a step needs them.
struct Rules {
    at_least: usize,
    /// The tokens that may come at all.
    may: Vec<u64>,
    ends: Box<[u32]>,
    bad_words: Vec<Vec<u32>>,
    /// How many of the last tokens matter.
    remembered: usize,
}

/// An answer within its limits.
struct Limited {
    rules: Arc<Rules>,
    inside: Option<Box<dyn Constraint>>,
    /// Tokens so far, and the last of them.
    count: usize,
    recent: Vec<u32>,
    /// Room for what the form alone would allow.
    unlimited: Vec<u64>,
}

impl Constraint for Limited {
    fn mask(&mut self, allowed: &mut [u64]) -> Result<(), Broken> {
        let rules = &*self.rules;
        match &mut self.inside {
            Some(inside) if inside.asleep() => allowed.copy_from_slice(&rules.may),
            Some(inside) => inside.mask(allowed)?,
            None => allowed.copy_from_slice(&rules.may),
        }
        self.unlimited.copy_from_slice(allowed);
        allowed.iter_mut().zip(&rules.may).for_each(|(word, may)| *word &= may);
        if self.count < rules.at_least {
            rules.ends.iter().for_each(|&end| clear(allowed, end));
        }
        for word in &rules.bad_words {
            if let Some((&last, before)) = word.split_last()
                && self.recent.ends_with(before)
            {
                clear(allowed, last);
            }
        }
        // A form that leaves no other way has the last word.
        if allowed.iter().all(|&word| word == 0) {
            allowed.copy_from_slice(&self.unlimited);
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Advance {
        let advance = self.inside.as_mut().map_or(Advance::GoesOn, |inside| inside.advance(token));
        if advance != Advance::Refused {
            if self.recent.len() == 2 * self.rules.remembered {
                self.recent.drain(..self.rules.remembered);
            }
            self.count += 1;
            self.recent.push(token);
        }
        advance
    }

    fn roll_back(&mut self, tokens: usize) {
        self.count -= tokens;
        self.recent.truncate(self.recent.len().saturating_sub(tokens));
        if let Some(inside) = &mut self.inside {
            inside.roll_back(tokens);
        }
    }
}

fn set(words: &mut [u64], token: u32) {
    if let Some(word) = words.get_mut(token as usize / 64) {
        *word |= 1 << (token % 64);
    }
}

fn clear(words: &mut [u64], token: u32) {
    if let Some(word) = words.get_mut(token as usize / 64) {
        *word &= !(1 << (token % 64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 130;

    fn limited(limits: TokenLimits) -> Box<dyn Constraint> {
        limits.around(None, &[129], VOCAB).unwrap()()
    }

    /// The tokens that may come next.
    fn next(constraint: &mut dyn Constraint) -> Vec<u32> {
        let mut words = vec![0; VOCAB.div_ceil(64)];
        constraint.mask(&mut words).unwrap();
        (0..VOCAB as u32 + 62).filter(|&token| words[token as usize / 64] >> (token % 64) & 1 == 1).collect()
    }

    #[test]
    fn without_limits_there_is_no_constraint() {
        assert!(TokenLimits::default().around(None, &[129], VOCAB).is_none());
    }

    #[test]
    fn the_end_may_come_once_there_are_enough_tokens() {
        let mut constraint = limited(TokenLimits { at_least: 2, ..TokenLimits::default() });
        assert_eq!(next(&mut *constraint), (0..129).collect::<Vec<_>>());
        constraint.advance(5);
        constraint.advance(5);
        assert_eq!(next(&mut *constraint), (0..130).collect::<Vec<_>>());
        constraint.roll_back(1);
        assert_eq!(next(&mut *constraint), (0..129).collect::<Vec<_>>());
    }

    #[test]
    fn only_allowed_tokens_and_the_end_may_come() {
        let mut constraint =
            limited(TokenLimits { allowed: Some(vec![3, 70]), at_least: 1, ..TokenLimits::default() });
        assert_eq!(next(&mut *constraint), [3, 70]);
        constraint.advance(70);
        assert_eq!(next(&mut *constraint), [3, 70, 129]);
    }

    #[test]
    fn a_bad_word_never_becomes_complete() {
        let bad_words = vec![vec![9], vec![1, 2, 3]];
        let mut constraint = limited(TokenLimits { bad_words, ..TokenLimits::default() });
        let all_but = |tokens: &[u32]| (0..130).filter(|token| !tokens.contains(token)).collect::<Vec<_>>();
        // Long enough that the oldest tokens are forgotten.
        for _ in 0..100 {
            constraint.advance(1);
        }
        assert_eq!(next(&mut *constraint), all_but(&[9]));
        constraint.advance(2);
        assert_eq!(next(&mut *constraint), all_but(&[9, 3]));
        constraint.advance(7);
        assert_eq!(next(&mut *constraint), all_but(&[9]));
        constraint.roll_back(1);
        assert_eq!(next(&mut *constraint), all_but(&[9, 3]));
    }
}
