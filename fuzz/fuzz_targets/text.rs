//! Any text to ids and back, any ids to text, stop strings across any borders.
//!
//! The first two bytes choose the vocabulary and how the text is cut; the rest is the text, and the ids.

#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use motet_gguf::ModelFile;
use motet_text::{Special, Stops, Tokenizer};

/// Byte-level BPE and SentencePiece, as real models have them.
static TOKENIZERS: LazyLock<[Arc<Tokenizer>; 2]> = LazyLock::new(|| {
    [
        tokenizer(include_bytes!("../../crates/motet-text/tests/fixtures/tokenizer/smollm2.gguf.xz")),
        tokenizer(include_bytes!("../../crates/motet-text/tests/fixtures/tokenizer/gemma3.gguf.xz")),
    ]
});

fn tokenizer(mut compressed: &[u8]) -> Arc<Tokenizer> {
    let mut bytes = Vec::new();
    lzma_rs::xz_decompress(&mut compressed, &mut bytes).expect("a whole xz file");
    let model = ModelFile::from_vec(bytes).expect("a whole model file");
    Arc::new(Tokenizer::from_gguf(model.metadata()).expect("a supported vocabulary"))
}

fuzz_target!(|bytes: &[u8]| {
    let [which, size, bytes @ ..] = bytes else { return };
    let tokenizer = &TOKENIZERS[usize::from(which % 2)];
    let text = String::from_utf8_lossy(bytes);
    round_trip(tokenizer, &text);
    marks(tokenizer, &text, usize::from(*size));
    any_ids(tokenizer, bytes);
    stops(&text, usize::from(*size));
});

/// A text comes back from its ids, unless some of its bytes have no token; a control token never comes out of it.
fn round_trip(tokenizer: &Arc<Tokenizer>, text: &str) {
    let ids = tokenizer.encode(text, Special::AsText);
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_len() && !tokenizer.is_control(id)));
    let spelled: usize = ids.iter().map(|&id| tokenizer.piece(id).len()).sum();
    // Gemma takes '▁' for a space.
    if spelled >= text.len() && !text.contains('▁') {
        assert_eq!(tokenizer.decode(&ids), text);
    }
    let mut stream = tokenizer.stream();
    let mut streamed: String = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
    streamed.push_str(stream.finish());
    assert_eq!(streamed, tokenizer.decode(&ids));
}

/// Marks change no id, and count up.
fn marks(tokenizer: &Tokenizer, text: &str, size: usize) {
    let marks: Vec<usize> = (0..=text.len()).step_by(size + 1).collect();
    let (ids, counts) = tokenizer.encode_prompt_of(text, &[], &marks);
    assert_eq!(ids, tokenizer.encode_prompt(text, Special::Parse));
    assert_eq!(counts.len(), marks.len());
    assert!(counts.is_sorted() && counts.last().is_none_or(|&last| last <= ids.len()));
}

/// A stream of any ids is the lossy text of their bytes: what is handed out is whole characters.
fn any_ids(tokenizer: &Arc<Tokenizer>, bytes: &[u8]) {
    let number = |bytes: &[u8]| bytes.iter().fold(0, |number, &byte| number << 8 | u32::from(byte));
    // Now and then beyond the vocabulary.
    let ids: Vec<u32> = bytes.chunks(3).map(|b| number(b) % (tokenizer.vocab_len() as u32 + 9)).collect();
    let shown = ids.iter().filter(|&&id| !tokenizer.is_hidden(id));
    let spelled: Vec<u8> = shown.flat_map(|&id| tokenizer.piece(id)).copied().collect();
    let mut stream = tokenizer.stream();
    let mut streamed: String = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
    streamed.push_str(stream.finish());
    assert_eq!(streamed, String::from_utf8_lossy(&spelled));
}

/// The lines but the last are stop strings of the last. The cut is where one is complete first, however the text comes.
fn stops(text: &str, size: usize) {
    let mut stops: Vec<&str> = text.split('\n').take(8).collect();
    let Some(text) = stops.pop() else { return };
    let mut watch = Stops::new(stops.iter().map(|stop| stop.to_string()));
    let (mut through, mut hit) = (String::new(), None);
    let mut chars = text.chars();
    while hit.is_none() && !chars.as_str().is_empty() {
        let piece: String = chars.by_ref().take(size % 5 + 1).collect();
        let until = watch.push(&piece);
        through.push_str(until.text);
        hit = until.hit.map(str::to_owned);
    }
    if hit.is_none() {
        through.push_str(watch.finish());
    }

    let ended = |end: usize| {
        let complete = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(**stop));
        complete.max_by_key(|stop| stop.len()).map(|stop| (&text[..end - stop.len()], stop.to_string()))
    };
    let expected = (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(ended);
    match expected {
        Some((before, stop)) => assert_eq!((through.as_str(), hit), (before, Some(stop))),
        None => assert_eq!((through.as_str(), hit), (text, None)),
    }
}
