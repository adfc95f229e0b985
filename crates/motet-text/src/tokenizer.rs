//! The tokenizer of a model: special tokens are cut out first, the rest goes to the algorithm.
//!
//! Built once from a model file, then shared; nothing in it changes. A control token comes out of a text only where the
//! caller says so; never by joining, whatever the text.

use std::ops::Range;
use std::sync::Arc;

use motet_gguf::Metadata;

use crate::TextError;
use crate::bpe::Bpe;
use crate::detokenizer::Detokenizer;
use crate::ends::{is_shown, mark_ends};
use crate::pieces::Pieces;
use crate::sentencepiece::SentencePiece;
use crate::special::{Names, cut};
use crate::vocabulary::{Vocabulary, kind};
use crate::wordpiece::WordPiece;

/// What a special token's name in a text means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// The token: every word of the text is the caller's own. (Of a rendered template only some are, see
    /// [`encode_prompt_of`](Tokenizer::encode_prompt_of).)
    Parse,
    /// Just these characters: the text is somebody's words. (User-defined tokens are words, and always found.)
    AsText,
}

/// Text to ids and back, for one vocabulary.
#[derive(Debug)]
pub struct Tokenizer {
    pieces: Pieces,
    algorithm: Algorithm,
    /// Control tokens, found where a template writes them; user-defined ones, found everywhere.
    control: Names,
    words: Names,
    flags: Vec<u8>,
    ends: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    /// Ends every prompt.
    last: Option<u32>,
}

#[derive(Debug)]
enum Algorithm {
    Bpe(Box<Bpe>),
    SentencePiece(Box<SentencePiece>),
    WordPiece(WordPiece),
}

const CONTROL: u8 = 1;
const HIDDEN: u8 = 2;

impl Tokenizer {
    /// The tokenizer that a model file describes.
    ///
    /// # Errors
    /// A key that is missing or of the wrong type, an algorithm or pre-tokenizer that is not supported, a vocabulary
    /// that contradicts itself.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, TextError> {
        Tokenizer::new(Vocabulary::from_gguf(metadata)?)
    }

    /// The tokenizer of a vocabulary.
    ///
    /// # Errors
    /// As [`from_gguf`](Self::from_gguf).
    pub fn new(vocabulary: Vocabulary<'_>) -> Result<Tokenizer, TextError> {
        let mut vocabulary = vocabulary.checked()?;
        let ends = mark_ends(&mut vocabulary);
        let (algorithm, pieces, adds_bos) = match vocabulary.model {
            "gpt2" => {
                let (bpe, pieces) = Bpe::new(&vocabulary)?;
                let adds_bos = bpe.adds_bos();
                (Algorithm::Bpe(Box::new(bpe)), pieces, adds_bos)
            }
            "llama" => {
                let (sentencepiece, pieces) = SentencePiece::new(&vocabulary)?;
                (Algorithm::SentencePiece(Box::new(sentencepiece)), pieces, true)
            }
            "bert" => {
                let (wordpiece, pieces) = WordPiece::new(&vocabulary)?;
                (Algorithm::WordPiece(wordpiece), pieces, true)
            }
            found => return Err(TextError::UnsupportedModel { found: found.to_owned() }),
        };
        let flags = vocabulary.tokens.iter().zip(&vocabulary.types).map(|(token, &kind)| {
            let hidden = matches!(kind, kind::CONTROL | kind::UNKNOWN) && !is_shown(token);
            u8::from(kind == kind::CONTROL) * CONTROL + u8::from(hidden) * HIDDEN
        });
        Ok(Tokenizer {
            flags: flags.collect(),
            control: Names::new(&vocabulary, &[kind::CONTROL, kind::UNKNOWN])?,
            words: Names::new(&vocabulary, &[kind::USER_DEFINED])?,
            ends,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            add_bos: vocabulary.add_bos.unwrap_or(adds_bos),
            last: match algorithm {
                Algorithm::WordPiece(_) => {
                    vocabulary.separator.filter(|_| vocabulary.add_sep.unwrap_or(true))
                }
                _ => vocabulary.eos.filter(|_| vocabulary.add_eos.unwrap_or(false)),
            },
            pieces,
            algorithm,
        })
    }

    /// The ids of a text, and nothing before or after them.
    ///
    /// # Panics
    /// If the text has 4 GiB or more.
    pub fn encode(&self, text: &str, special: Special) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_parts(text, &all_text(text, special), true, &mut ids, |_, _| {});
        ids
    }

    /// The ids of a text that goes on where another one ended: somebody's words, and no space is put before them.
    ///
    /// # Panics
    /// If the text has 4 GiB or more.
    pub fn encode_onwards(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_parts(text, &all_text(text, Special::AsText), false, &mut ids, |_, _| {});
        ids
    }

    /// The ids of a whole prompt: with the beginning- and end-of-sequence tokens that the model is used to, unless the
    /// text has them already.
    ///
    /// # Panics
    /// If the text has 4 GiB or more.
    pub fn encode_prompt(&self, text: &str, special: Special) -> Vec<u32> {
        self.encode_prompt_of(text, &all_text(text, special), &[]).0
    }

    /// As [`encode_prompt`](Self::encode_prompt), of a prompt that a template wrote around what came with the request:
    /// `text` are the bytes that came, ascending and apart from each other. The name of a control token that holds one of
    /// them is just these characters; what the template wrote by itself is the token.
    ///
    /// Also, for each of `marks` (byte offsets in the prompt, ascending), how many of the ids end at or before it.
    /// Inside a stretch of text this counts the bytes of its tokens, so where they do not spell it out (a byte without
    /// a token, '▁' for a space) a mark may be a few tokens off; after a special token it is exact again.
    ///
    /// # Panics
    /// If the text has 4 GiB or more.
    pub fn encode_prompt_of(
        &self,
        prompt: &str,
        text: &[Range<usize>],
        marks: &[usize],
    ) -> (Vec<u32>, Vec<usize>) {
        let mut ids = Vec::with_capacity(prompt.len() / 3);
        let mut counts = Vec::with_capacity(marks.len());
        let mut marks = marks.iter().copied().peekable();
        self.encode_parts(prompt, text, true, &mut ids, |part, ids| {
            let spelled: usize = ids[part.ids.clone()].iter().map(|&id| self.piece(id).len()).sum();
            // A space that was put before the text is no part of it.
            let added = spelled.saturating_sub(part.text.len());
            let mut count = part.ids.start;
            let mut end = part.text.start;
            while let Some(mark) = marks.next_if(|&mark| mark < part.text.end) {
                while let Some(&id) = ids.get(count) {
                    let added = if count == part.ids.start { added } else { 0 };
                    let next = (end + self.piece(id).len()).saturating_sub(added);
                    if next > mark {
                        break;
                    }
                    (end, count) = (next, count + 1);
                }
                counts.push(count);
            }
        });
        counts.extend(marks.map(|_| ids.len()));

        if let Some(bos) = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
            counts.iter_mut().for_each(|count| *count += 1);
        }
        if let Some(last) = self.last.filter(|last| ids.last() != Some(last)) {
            ids.push(last);
        }
        (ids, counts)
    }

    /// Appends the ids of a prompt, which `begins` one or goes on, and of which some bytes are text; `encoded` is told of
    /// each special token and each stretch between them.
    fn encode_parts(
        &self,
        prompt: &str,
        text: &[Range<usize>],
        mut begins: bool,
        ids: &mut Vec<u32>,
        mut encoded: impl FnMut(Encoded, &[u32]),
    ) {
        assert!(u32::try_from(prompt.len()).is_ok_and(|length| length < u32::MAX), "a text of 4 GiB or more");
        cut(&self.control, &self.words, prompt, text, |range, token| {
            let first = ids.len();
            match (token, &self.algorithm) {
                (Some(id), _) => ids.push(id),
                (None, Algorithm::Bpe(bpe)) => bpe.encode(&self.pieces, &prompt[range.clone()], ids),
                (None, Algorithm::SentencePiece(sentencepiece)) => {
                    sentencepiece.encode(&self.pieces, &prompt[range.clone()], begins, ids);
                }
                (None, Algorithm::WordPiece(wordpiece)) => {
                    wordpiece.encode(&self.pieces, &prompt[range.clone()], ids);
                }
            }
            begins = token.is_some();
            encoded(Encoded { text: range, ids: first..ids.len() }, ids);
        });
    }

    /// The text of ids from its beginning on, without control tokens, and with U+FFFD for bytes that are no UTF-8.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &id in ids.iter().filter(|&&id| !self.is_hidden(id)) {
            bytes.extend_from_slice(self.piece(id));
        }
        // The space that `encode` put before the text.
        let added = match &self.algorithm {
            Algorithm::SentencePiece(sentencepiece) => sentencepiece.space_prefix,
            Algorithm::WordPiece(_) => true,
            Algorithm::Bpe(_) => false,
        };
        let bytes = bytes.strip_prefix(b" ").filter(|_| added).unwrap_or(&bytes);
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Decodes ids one by one, as they are sampled.
    pub fn stream(self: &Arc<Self>) -> Detokenizer {
        Detokenizer::new(Arc::clone(self))
    }

    /// The bytes of a token, a control token's being its name; no bytes for an id outside the vocabulary.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// Number of tokens.
    pub fn vocab_len(&self) -> usize {
        self.pieces.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether the token ends an answer.
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// The tokens that end an answer, ascending.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Whether the token is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.has(id, CONTROL)
    }

    /// Whether the token is left out of decoded text.
    pub fn is_hidden(&self, id: u32) -> bool {
        self.has(id, HIDDEN)
    }

    fn has(&self, id: u32, flag: u8) -> bool {
        self.flags.get(id as usize).is_some_and(|flags| flags & flag != 0)
    }
}

/// A special token, or the text between two of them, and its ids.
struct Encoded {
    text: Range<usize>,
    ids: Range<usize>,
}

/// Which bytes of a text are just characters.
fn all_text(text: &str, special: Special) -> Vec<Range<usize>> {
    match special {
        Special::Parse => Vec::new(),
        Special::AsText => std::iter::once(0..text.len()).collect(),
    }
}
