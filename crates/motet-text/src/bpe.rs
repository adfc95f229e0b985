//! Byte-level byte-pair encoding (GGUF model "gpt2").
//!
//! Files write each byte as a printable character (GPT-2's alphabet); here tokens are the bytes themselves, so that a
//! token is its own text, and a merge is a pair of ids.

use std::collections::HashSet;

use crate::TextError;
use crate::merge::{Join, Merger, Symbol};
use crate::pieces::{NONE, Pieces};
use crate::pretokenize::PreTokenizer;
use crate::table::{Table, hash_pair};
use crate::vocabulary::{Vocabulary, kind};

/// The merges as pairs of ids, and how text is cut into words.
#[derive(Debug)]
pub(crate) struct Bpe {
    pre: &'static PreTokenizer,
    /// The rules, best first.
    rules: Vec<Rule>,
    by_pair: Table,
    /// The token of each byte, [`NONE`] where the vocabulary lacks it.
    bytes: [u32; 256],
}

#[derive(Debug, Clone, Copy)]
struct Rule {
    left: u32,
    right: u32,
    joined: u32,
}

impl Rule {
    fn joins(&self, left: u32, right: u32) -> bool {
        (self.left, self.right) == (left, right)
    }
}

impl Bpe {
    pub(crate) fn new(vocabulary: &Vocabulary<'_>) -> Result<(Bpe, Pieces), TextError> {
        let pre = PreTokenizer::named(vocabulary.pre.unwrap_or("default"))?;
        let alphabet = Alphabet::new();
        let pieces = pieces(vocabulary, &alphabet);

        let reader = RuleReader::new(vocabulary, &pieces, &alphabet);
        let mut rules = Vec::with_capacity(vocabulary.merges.len());
        for (index, &rule) in vocabulary.merges.iter().enumerate() {
            rules.extend(reader.read(index, rule)?);
        }
        let mut by_pair = Table::for_entries(rules.len());
        for (rank, rule) in (0..).zip(&rules) {
            by_pair.insert(hash_pair(rule.left, rule.right), rank, |other| {
                rules[other as usize].joins(rule.left, rule.right)
            });
        }
        let bytes = std::array::from_fn(|byte| pieces.find(&[byte as u8]).unwrap_or(NONE));
        Ok((Bpe { pre, rules, by_pair, bytes }, pieces))
    }

    /// Whether a beginning-of-sequence token is usual for this kind of model.
    pub(crate) fn adds_bos(&self) -> bool {
        self.pre.add_bos
    }

    /// Appends the ids of a text without special tokens. A byte that has no token is left out.
    pub(crate) fn encode(&self, pieces: &Pieces, text: &str, ids: &mut Vec<u32>) {
        let mut merger = Merger::default();
        self.pre.split(text, &mut |word| {
            if self.pre.whole_words
                && let Some(id) = pieces.find(word.as_bytes())
            {
                return ids.push(id);
            }
            let symbols =
                (0..).zip(word.bytes()).map(|(at, byte)| Symbol::new(at, at + 1, self.bytes[byte as usize]));
            let join = |left: &Symbol, right: &Symbol| {
                let is_it = |rank| self.rules[rank as usize].joins(left.id, right.id);
                let rank = self.by_pair.find(hash_pair(left.id, right.id), is_it)?;
                Some(Join { priority: rank, id: self.rules[rank as usize].joined })
            };
            merger.run(symbols, join, |symbol| {
                if symbol.id != NONE {
                    ids.push(symbol.id);
                }
            });
        });
    }
}

/// All tokens as bytes. Ordinary tokens can be found by their bytes, then user-defined ones; control tokens cannot.
fn pieces(vocabulary: &Vocabulary<'_>, alphabet: &Alphabet) -> Pieces {
    let tokens = &vocabulary.tokens;
    let mut pieces = Pieces::with_capacity(tokens.len(), tokens.iter().map(|token| token.len()).sum());
    let mut ordinary = Vec::with_capacity(tokens.len());
    for (&token, &kind) in tokens.iter().zip(&vocabulary.types) {
        let special = matches!(kind, kind::UNKNOWN | kind::CONTROL | kind::USER_DEFINED);
        let is_ordinary = !special && token.chars().all(|c| alphabet.byte(c).is_some());
        if is_ordinary {
            pieces.push(token.chars().filter_map(|c| alphabet.byte(c)));
        } else {
            pieces.push(token.bytes());
        }
        ordinary.push(is_ordinary);
    }
    for id in (0..).zip(&ordinary).filter_map(|(id, &ordinary)| ordinary.then_some(id)) {
        pieces.index(id);
    }
    for (id, _) in (0..).zip(&vocabulary.types).filter(|&(_, &kind)| kind == kind::USER_DEFINED) {
        pieces.index(id);
    }
    pieces
}

/// Reads rules, "left right" each. What they join is looked up by its text, whatever the type of the token.
struct RuleReader<'a> {
    pieces: &'a Pieces,
    alphabet: &'a Alphabet,
    /// Tokens that cannot be found by their bytes. No rule may make one: text would become a control token.
    special: HashSet<&'a str>,
}

impl<'a> RuleReader<'a> {
    fn new(vocabulary: &'a Vocabulary<'_>, pieces: &'a Pieces, alphabet: &'a Alphabet) -> Self {
        let tokens = vocabulary.tokens.iter().zip(&vocabulary.types);
        let special = tokens.filter(|(_, kind)| matches!(**kind, kind::CONTROL | kind::UNKNOWN));
        let special = special.map(|(&token, _)| token).collect();
        RuleReader { pieces, alphabet, special }
    }

    /// The rule, none if it needs or makes a special token. The space that parts the two is the first one after the
    /// first character.
    fn read(&self, index: usize, rule: &str) -> Result<Option<Rule>, TextError> {
        let missing =
            |part: &str| TextError::Merge { index, rule: rule.to_owned(), missing: part.to_owned() };
        let first = rule.chars().next().map_or(0, char::len_utf8);
        let gap = rule[first..].find(' ').ok_or_else(|| missing(rule))? + first;
        let (left, right) = (&rule[..gap], &rule[gap + 1..]);
        let mut ids = [NONE; 3];
        for (id, part) in ids.iter_mut().zip([left, right, &[left, right].concat()]) {
            *id = match self.find(part) {
                Some(found) => found,
                None if self.special.contains(part) => return Ok(None),
                None => return Err(missing(part)),
            };
        }
        let [left, right, joined] = ids;
        Ok(Some(Rule { left, right, joined }))
    }

    fn find(&self, part: &str) -> Option<u32> {
        let bytes = part.chars().map(|c| self.alphabet.byte(c)).collect::<Option<Vec<u8>>>()?;
        self.pieces.find(&bytes)
    }
}

/// GPT-2's printable characters for the 256 bytes: the printable ones of Latin-1 stand for themselves, the others, in
/// order, for U+0100 and after.
struct Alphabet {
    bytes: [Option<u8>; 0x144],
}

impl Alphabet {
    fn new() -> Alphabet {
        let mut bytes = [None; 0x144];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable { usize::from(byte) } else { next };
            next += usize::from(!printable);
            bytes[code] = Some(byte);
        }
        Alphabet { bytes }
    }

    fn byte(&self, c: char) -> Option<u8> {
        self.bytes.get(c as usize).copied().flatten()
    }
}
