//! Cutting text into the words inside which byte-level BPE may join.
//!
//! Models define this step by regular expressions with look-ahead. The ones in use are all built from a few shapes, so
//! they are written here as data ([`Rule`]) and matched by hand: no backtracking over long runs, no automata of the
//! Unicode classes in memory. The expression that a list of rules stands for is given beside it; the tests compare with
//! a regular-expression engine.

use unicode_general_category::{GeneralCategory, get_general_category};

use crate::TextError;

/// One alternative of an expression. The first that matches at a position wins, as in a regular expression.
#[derive(Debug)]
enum Rule {
    /// `'(?:s|t|re|ve|m|ll|d)`, in any case or in lower case only.
    Contraction { any_case: bool },
    /// `lead? body{least,most} tail*`
    Run { lead: Class, body: Class, least: usize, most: usize, tail: Class },
    /// `first rest+`
    Pair { first: Class, rest: Class },
    /// `lead? upper* lower+ | lead? upper+ lower*`, where letters without case, modifiers and marks are both; then a
    /// contraction if `contraction`. The lead is what is no letter, number or line end.
    CasedWord { contraction: bool },
    /// `\s*[\r\n]+`
    LineEnds,
    /// `\s+(?!\S)|\s+`: all white space, but for the last one before something else.
    Blanks,
}

/// A set of characters: those of some kinds, and some ranges besides.
#[derive(Debug, Clone, Copy)]
struct Class {
    kinds: u16,
    ranges: &'static [(char, char)],
}

const UPPER: u16 = 1; // Lu, Lt
const LOWER: u16 = 1 << 1; // Ll
const OTHER_LETTER: u16 = 1 << 2; // Lm, Lo
const MARK: u16 = 1 << 3;
const NUMBER: u16 = 1 << 4;
const PUNCTUATION: u16 = 1 << 5;
const SYMBOL: u16 = 1 << 6;
const SPACE: u16 = 1 << 7; // ' ' itself
const LINE_END: u16 = 1 << 8; // \r and \n
const OTHER_BLANK: u16 = 1 << 9;
const SLASH: u16 = 1 << 10; // '/', which is punctuation
const REST: u16 = 1 << 11; // control characters, unassigned and so on
const ALL: u16 = (1 << 12) - 1;

const LETTER: u16 = UPPER | LOWER | OTHER_LETTER;
const BLANK: u16 = SPACE | LINE_END | OTHER_BLANK;
const PUNCT: u16 = PUNCTUATION | SLASH;

const fn kinds(kinds: u16) -> Class {
    Class { kinds, ranges: &[] }
}
const fn except(kinds: u16) -> Class {
    Class { kinds: ALL & !kinds, ranges: &[] }
}
const fn ranges(ranges: &'static [(char, char)]) -> Class {
    Class { kinds: 0, ranges }
}

const NOTHING: Class = kinds(0);
const ANY_NUMBER: usize = usize::MAX;

/// `lead? body+ tail*`
const fn run(lead: Class, body: Class, tail: Class) -> Rule {
    Rule::Run { lead, body, least: 1, most: ANY_NUMBER, tail }
}
/// `body{least,most}`
const fn group(body: Class, least: usize, most: usize) -> Rule {
    Rule::Run { lead: NOTHING, body, least, most, tail: NOTHING }
}

/// Rules of one pass; a later pass cuts further what the passes before it made. What no rule matches stays together.
type Pass = &'static [Rule];

/// How one family of models cuts text.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    names: &'static [&'static str],
    passes: &'static [Pass],
    /// A word that is a token is taken as it is, without looking at the merges.
    pub(crate) whole_words: bool,
    /// Whether a beginning-of-sequence token is usual where the file does not say.
    pub(crate) add_bos: bool,
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
const GPT2: Pass = &[
    Rule::Contraction { any_case: false },
    run(kinds(SPACE), kinds(LETTER), NOTHING),
    run(kinds(SPACE), kinds(NUMBER), NOTHING),
    run(kinds(SPACE), except(BLANK | LETTER | NUMBER), NOTHING),
    Rule::Blanks,
];

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?L+|\p{N}{1,N}| ?[^\s L\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
/// with L = `letter` and N = `digits`.
const fn cl100k(letter: u16, digits: usize) -> [Rule; 6] {
    [
        Rule::Contraction { any_case: true },
        run(except(LINE_END | LETTER | NUMBER), kinds(letter), NOTHING),
        group(kinds(NUMBER), 1, digits),
        run(kinds(SPACE), except(BLANK | letter | NUMBER), kinds(LINE_END)),
        Rule::LineEnds,
        Rule::Blanks,
    ]
}

/// `lead?[upper]*[lower]+C?|lead?[upper]+[lower]*C?|\p{N}{1,N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
/// with C the contractions, if any, and N = `digits`.
const fn o200k(contraction: bool, digits: usize) -> [Rule; 5] {
    [
        Rule::CasedWord { contraction },
        group(kinds(NUMBER), 1, digits),
        run(kinds(SPACE), except(BLANK | LETTER | NUMBER), kinds(LINE_END | SLASH)),
        Rule::LineEnds,
        Rule::Blanks,
    ]
}

const LLAMA3: Pass = &cl100k(LETTER, 3);
const QWEN2: Pass = &cl100k(LETTER, 1);
const QWEN35: Pass = &cl100k(LETTER | MARK, 1);

/// `[\p{P}$+<=>^~|]`
const DEFAULT_PUNCTUATION: Class =
    Class { kinds: PUNCT, ranges: &[('$', '$'), ('+', '+'), ('<', '>'), ('^', '^'), ('|', '|'), ('~', '~')] };

const ASCII_PUNCTUATION: Class = ranges(&[('!', '/'), (':', '@'), ('[', '`'), ('{', '~')]);

/// `[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
const DEEPSEEK3: Pass = &[
    Rule::Pair { first: ASCII_PUNCTUATION, rest: ranges(&[('A', 'Z'), ('a', 'z')]) },
    run(except(LINE_END | LETTER | PUNCT | SYMBOL), kinds(LETTER | MARK), NOTHING),
    run(kinds(SPACE), kinds(PUNCT | SYMBOL), kinds(LINE_END)),
    Rule::LineEnds,
    Rule::Blanks,
];

const DIGIT: Class = ranges(&[('0', '9')]);

const fn family(names: &'static [&'static str], passes: &'static [Pass]) -> PreTokenizer {
    PreTokenizer { names, passes, whole_words: false, add_bos: false }
}

/// Every pre-tokenizer there is, by the names that GGUF files give it.
static FAMILIES: &[PreTokenizer] = &[
    family(
        &[
            "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0",
            "mellum",
        ],
        &[GPT2],
    ),
    family(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[&[group(kinds(NUMBER), 1, 1)], GPT2],
    ),
    PreTokenizer {
        whole_words: true,
        add_bos: true,
        ..family(
            &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
            &[LLAMA3],
        )
    },
    family(&["chatglm-bpe", "dbrx", "smaug-bpe"], &[LLAMA3]),
    PreTokenizer { whole_words: true, ..family(&["glm4", "glm5"], &[LLAMA3]) },
    family(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "stablelm2",
            "hunyuan",
            "megrez",
            "solar-open",
            "grok-2",
            "kormo",
            "bailingmoe",
            "bailingmoe2",
            "llada-moe",
        ],
        &[QWEN2],
    ),
    family(&["qwen35"], &[QWEN35]),
    family(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[&o200k(true, 3)]),
    PreTokenizer { whole_words: true, add_bos: true, ..family(&["tekken"], &[&o200k(false, 1)]) },
    family(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[
            &[group(kinds(NUMBER), 1, 3)],
            &[group(ranges(&[('\u{4e00}', '\u{9fa5}'), ('\u{3040}', '\u{30ff}')]), 1, ANY_NUMBER)],
            DEEPSEEK3,
        ],
    ),
    family(
        &["deepseek-coder"],
        &[
            &[group(kinds(LINE_END), 1, 1)],
            &[run(kinds(BLANK), kinds(LETTER), NOTHING)],
            &[run(kinds(BLANK), kinds(PUNCT), NOTHING)],
            &[group(ranges(&[('\u{800}', '\u{9fa5}'), ('\u{ac00}', '\u{d7ff}')]), 1, ANY_NUMBER)],
            &[group(kinds(NUMBER), 1, 1)],
        ],
    ),
    family(
        &["default"],
        &[
            &[group(DEFAULT_PUNCTUATION, 1, ANY_NUMBER)],
            GPT2,
            &[group(kinds(NUMBER), 1, ANY_NUMBER)],
            &[group(DIGIT, 3, 3)],
        ],
    ),
];

/// The names of all supported pre-tokenizers.
pub fn pre_tokenizers() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.names).copied()
}

impl PreTokenizer {
    /// The pre-tokenizer a file names.
    pub(crate) fn named(name: &str) -> Result<&'static PreTokenizer, TextError> {
        FAMILIES.iter().find(|family| family.names.contains(&name)).ok_or_else(|| {
            TextError::UnsupportedPreTokenizer {
                found: name.to_owned(),
                supported: pre_tokenizers().collect(),
            }
        })
    }

    /// Calls `word` for each word of `text`, in order; the words make up the text.
    pub(crate) fn split<'t>(&self, text: &'t str, word: &mut impl FnMut(&'t str)) {
        split(self.passes, text, word);
    }
}

fn split<'t>(passes: &[Pass], text: &'t str, word: &mut impl FnMut(&'t str)) {
    let Some((rules, rest)) = passes.split_first() else { return word(text) };
    let mut start = 0;
    let mut at = 0;
    while at < text.len() {
        let end = match_at(rules, text, at);
        if end == at {
            at = after(text, at);
            continue;
        }
        if start < at {
            split(rest, &text[start..at], word);
        }
        split(rest, &text[at..end], word);
        (start, at) = (end, end);
    }
    if start < text.len() {
        split(rest, &text[start..], word);
    }
}

/// The end of the first rule's match at `at`; `at` if none matches.
fn match_at(rules: &[Rule], text: &str, at: usize) -> usize {
    rules.iter().map(|rule| rule.end(text, at)).find(|&end| end > at).unwrap_or(at)
}

impl Rule {
    /// The end of the match at `at`; `at` if there is none.
    fn end(&self, text: &str, at: usize) -> usize {
        match *self {
            Rule::Contraction { any_case } => at + contraction(&text[at..], any_case),
            Rule::Run { lead, body, least, most, tail } => with_lead(lead, text, at, |from| {
                let (end, count) = body.span(text, from, most);
                (count >= least).then(|| tail.span(text, end, ANY_NUMBER).0)
            }),
            Rule::Pair { first, rest } => {
                let (middle, _) = first.span(text, at, 1);
                let (end, count) = rest.span(text, middle, ANY_NUMBER);
                if middle > at && count > 0 { end } else { at }
            }
            Rule::CasedWord { contraction: allowed } => {
                let lead = except(LINE_END | LETTER | NUMBER);
                let mut end = with_lead(lead, text, at, |from| upper_then_lower(text, from));
                if end == at {
                    end = with_lead(lead, text, at, |from| upper_alone(text, from));
                }
                if allowed && end > at {
                    end += contraction(&text[end..], true);
                }
                end
            }
            Rule::LineEnds => {
                let (blanks, _) = kinds(BLANK).span(text, at, ANY_NUMBER);
                text[at..blanks].rfind(['\r', '\n']).map_or(at, |last| at + last + 1)
            }
            Rule::Blanks => {
                let (end, count) = kinds(BLANK).span(text, at, ANY_NUMBER);
                let last = text[at..end].chars().next_back().map_or(0, char::len_utf8);
                if count > 1 && end < text.len() { end - last } else { end }
            }
        }
    }
}

/// Tries `rest` after one character of `lead`, then without it.
fn with_lead(lead: Class, text: &str, at: usize, rest: impl Fn(usize) -> Option<usize>) -> usize {
    let (after_lead, found) = lead.span(text, at, 1);
    let led = if found == 1 { rest(after_lead) } else { None };
    led.or_else(|| rest(at)).unwrap_or(at)
}

const UPPER_OR_BOTH: Class = kinds(UPPER | OTHER_LETTER | MARK);
const LOWER_OR_BOTH: Class = kinds(LOWER | OTHER_LETTER | MARK);

/// `upper* lower+`: all that can be upper, given back until a lower one follows.
fn upper_then_lower(text: &str, from: usize) -> Option<usize> {
    let (mut middle, _) = UPPER_OR_BOTH.span(text, from, ANY_NUMBER);
    loop {
        let (end, count) = LOWER_OR_BOTH.span(text, middle, ANY_NUMBER);
        if count > 0 {
            return Some(end);
        }
        middle -= text[from..middle].chars().next_back()?.len_utf8();
    }
}

/// `upper+ lower*`
fn upper_alone(text: &str, from: usize) -> Option<usize> {
    let (middle, count) = UPPER_OR_BOTH.span(text, from, ANY_NUMBER);
    (count > 0).then(|| LOWER_OR_BOTH.span(text, middle, ANY_NUMBER).0)
}

/// Bytes of the contraction that `text` begins with, 0 if it begins with none. In any case, 'ſ' is an s.
fn contraction(text: &str, any_case: bool) -> usize {
    let mut chars = text.chars();
    if chars.next() != Some('\'') {
        return 0;
    }
    let fold = |c: char| match c {
        'ſ' if any_case => 's',
        c if any_case => c.to_ascii_lowercase(),
        c => c,
    };
    let Some(first) = chars.next() else { return 0 };
    let second = chars.next().map(fold);
    match (fold(first), second) {
        ('s' | 't' | 'm' | 'd', _) => 1 + first.len_utf8(),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => 3,
        _ => 0,
    }
}

impl Class {
    fn holds(self, c: char) -> bool {
        self.kinds & kind_of(c) != 0 || self.ranges.iter().any(|&(first, last)| (first..=last).contains(&c))
    }

    /// The end, and the length in characters, of the run of this class at `at`, at most `most` of them.
    fn span(self, text: &str, at: usize, most: usize) -> (usize, usize) {
        let mut count = 0;
        for (offset, c) in text[at..].char_indices() {
            if count == most || !self.holds(c) {
                return (at + offset, count);
            }
            count += 1;
        }
        (text.len(), count)
    }
}

/// Where the character at `at` ends.
fn after(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(0, char::len_utf8)
}

fn kind_of(c: char) -> u16 {
    if c.is_ascii() { ASCII_KINDS[c as usize] } else { kind_beyond_ascii(c) }
}

fn kind_beyond_ascii(c: char) -> u16 {
    use GeneralCategory as C;
    if c.is_whitespace() {
        return OTHER_BLANK;
    }
    match get_general_category(c) {
        C::UppercaseLetter | C::TitlecaseLetter => UPPER,
        C::LowercaseLetter => LOWER,
        C::ModifierLetter | C::OtherLetter => OTHER_LETTER,
        C::NonspacingMark | C::SpacingMark | C::EnclosingMark => MARK,
        C::DecimalNumber | C::LetterNumber | C::OtherNumber => NUMBER,
        C::ConnectorPunctuation
        | C::DashPunctuation
        | C::OpenPunctuation
        | C::ClosePunctuation
        | C::InitialPunctuation
        | C::FinalPunctuation
        | C::OtherPunctuation => PUNCTUATION,
        C::MathSymbol | C::CurrencySymbol | C::ModifierSymbol | C::OtherSymbol => SYMBOL,
        _ => REST,
    }
}

static ASCII_KINDS: [u16; 128] = {
    let mut kinds = [REST; 128];
    let mut code = 0;
    while code < 128 {
        kinds[code] = match code as u8 {
            b' ' => SPACE,
            b'\r' | b'\n' => LINE_END,
            b'\t' | 0x0b | 0x0c => OTHER_BLANK,
            b'/' => SLASH,
            b'0'..=b'9' => NUMBER,
            b'A'..=b'Z' => UPPER,
            b'a'..=b'z' => LOWER,
            b'$' | b'+' | b'<'..=b'>' | b'^' | b'`' | b'|' | b'~' => SYMBOL,
            b'!'..=b'~' => PUNCTUATION,
            _ => REST,
        };
        code += 1;
    }
    kinds
};

#[cfg(test)]
mod tests;
