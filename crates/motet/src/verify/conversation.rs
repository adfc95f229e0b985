//! The conversations that are compared: pseudo-random tokens of any vocabulary, some beginning alike, each with its
//! own way to choose tokens.

use motet_engine::{Request, SamplingOptions};
use motet_model::PAGE;

/// Tokens of the prompts. Some end on a page border, some just behind one.
const LENGTHS: [usize; MOST] = [700, 40, 190, 411, 64, 129, 257, 320];
/// Conversations at most.
pub(super) const MOST: usize = 8;
/// Conversations `.1` begin with as many (`.2`) tokens of conversation `.0`.
const ALIKE: [(usize, usize, usize); 3] = [(0, 3, 330), (2, 6, 128), (3, 7, 64)];
/// Where the instruction set is slow for the model: prompt and answer. Behind a page that was found, more than 32 tokens
/// of the prompt are left, so that a chunk of 512 is larger than one of 32.
const SHORT: (usize, usize) = (98, 10);
/// Tokens of a text that comes again and again.
pub(super) const REPEATED: usize = 24;
/// A bias against which no other token stands.
const ONLY: f32 = 100.0;
/// Pages of a prompt that a forerunner shares if it shares only its beginning.
const BEGINNING: usize = 2;

/// How long conversations are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Extent {
    /// Prompts of 40 to 700 tokens.
    Whole,
    /// Some hundred tokens each.
    Short,
}

/// A prompt and how its answer is made.
#[derive(Debug, Clone)]
pub(super) struct Conversation {
    pub(super) prompt: Vec<u32>,
    pub(super) answer: usize,
    pub(super) sampling: SamplingOptions,
}

/// Tokens that a prompt may consist of.
pub(super) struct Vocabulary(Vec<u32>);

impl Vocabulary {
    /// Those of `0..len` that are not special.
    pub(super) fn new(len: usize, special: impl Fn(u32) -> bool) -> Self {
        Self((0..len as u32).filter(|&token| !special(token)).collect())
    }

    /// Pseudo-random tokens: SplitMix64 (Steele, Lea, Flood 2014).
    fn tokens(&self, seed: u64, count: usize) -> Vec<u32> {
        let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        (0..count).map(|_| self.0[(next() % self.0.len() as u64) as usize]).collect()
    }
}

impl Conversation {
    /// `count` conversations in contexts of at most `context` positions. The first are the same for any count.
    pub(super) fn all(vocabulary: &Vocabulary, extent: Extent, count: usize, context: usize) -> Vec<Self> {
        let mut all: Vec<Self> =
            (0..MOST).map(|number| Self::new(vocabulary, extent, number, context)).collect();
        for (from, to, shared) in ALIKE {
            let shared = shared.min(all[from].prompt.len()).min(all[to].prompt.len());
            let (head, tail) = all.split_at_mut(to);
            tail[0].prompt[..shared].copy_from_slice(&head[from].prompt[..shared]);
        }
        all.truncate(count);
        all
    }

    fn new(vocabulary: &Vocabulary, extent: Extent, number: usize, context: usize) -> Self {
        let (prompt, answer) = match extent {
            Extent::Whole => (LENGTHS[number], 16 + 11 * number % 33),
            Extent::Short => SHORT,
        };
        let prompt = prompt.min(context.saturating_sub(answer)).max(1);
        let (greedy, warm) =
            (SamplingOptions::greedy(), SamplingOptions { temperature: 0.8, ..SamplingOptions::default() });
        let sampling = match number % 4 {
            0 => warm,
            1 => greedy,
            2 => SamplingOptions { top_k: 40, top_p: 0.9, repetition_penalty: 1.1, ..warm },
            _ => SamplingOptions { frequency_penalty: 0.5, presence_penalty: 0.25, min_p: 0.02, ..warm },
        };
        let number = number as u64;
        Self {
            prompt: vocabulary.tokens(number + 1, prompt),
            answer,
            sampling: SamplingOptions { seed: Some(1000 + number), ..sampling },
        }
    }

    /// A conversation that is older than all others and fills `pages` pages, `steps` steps behind its first token: in
    /// a pool that is full then, it makes another step back.
    pub(super) fn elder(vocabulary: &Vocabulary, pages: usize, steps: usize) -> Self {
        let prompt = (pages * PAGE).saturating_sub(steps).max(1);
        Self {
            prompt: vocabulary.tokens(77, prompt),
            answer: steps + PAGE,
            sampling: SamplingOptions::greedy(),
        }
    }

    /// The same for drafts: in the end the prompt repeats itself, so that there is something to look up, and the
    /// temperature is `tenths` tenths. A short answer has no tokens but these: all of them can be looked up.
    pub(super) fn repeat_at(&mut self, tenths: u8) {
        self.sampling.temperature = f32::from(tenths) / 10.0;
        let len = self.prompt.len();
        for at in REPEATED.max(len.saturating_sub(3 * REPEATED))..len {
            self.prompt[at] = self.prompt[at - REPEATED];
        }
        if self.answer <= SHORT.1 {
            let mut repeated = self.prompt[len.saturating_sub(REPEATED)..].to_vec();
            repeated.sort_unstable();
            repeated.dedup();
            self.sampling.logit_bias = repeated.into_iter().map(|token| (token, ONLY)).collect();
        }
    }

    /// Pages of prompt and answer.
    pub(super) fn pages(&self) -> usize {
        (self.prompt.len() + self.answer).div_ceil(PAGE)
    }

    /// Pages of the prompt.
    pub(super) fn prompt_pages(&self) -> usize {
        self.prompt.len().div_ceil(PAGE)
    }

    /// A request with digests of all rows that are run.
    pub(super) fn request(&self) -> Request {
        Request {
            sampling: self.sampling.clone(),
            max_tokens: Some(self.answer),
            digests: true,
            ..Request::new(self.prompt.clone())
        }
    }

    /// A request of somebody else that begins alike, with the same first page or two, the first half, or the whole
    /// prompt, and then something else.
    pub(super) fn forerunner(&self, number: usize, vocabulary: &Vocabulary) -> Request {
        let pages = self.prompt.len() / PAGE;
        let shared = match number % 3 {
            0 => PAGE * pages.min(BEGINNING),
            1 => self.prompt.len(),
            _ => PAGE * (pages / 2).max(1),
        };
        let mut prompt = self.prompt[..shared].to_vec();
        prompt.extend(vocabulary.tokens(500 + number as u64, self.prompt.len() - shared));
        Request {
            marks: vec![shared],
            sampling: SamplingOptions::greedy(),
            max_tokens: Some(1),
            ..Request::new(prompt)
        }
    }

    /// Whether a forerunner leaves something that can be found again.
    pub(super) fn can_be_warm(&self) -> bool {
        self.prompt.len() > PAGE
    }
}
