//! Texts come back from their ids, whole and in pieces.

mod common;

use motet_text::Special;

#[test]
fn texts_come_back() {
    for model in common::MODELS {
        let tokenizer = common::tokenizer(model);
        let mut lost = 0;
        for text in common::texts() {
            let ids = tokenizer.encode(&text, Special::AsText);
            // Gemma takes '▁' for a space; SmolLM2 has no tokens for some bytes.
            let lossy = text.contains('▁')
                || ids.iter().map(|&id| tokenizer.piece(id).len()).sum::<usize>() < text.len();
            lost += usize::from(lossy);
            assert!(lossy || tokenizer.decode(&ids) == text, "{model}: {text:?}");

            let mut stream = tokenizer.stream();
            let mut streamed: String = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
            streamed.push_str(stream.finish());
            assert_eq!(streamed, tokenizer.decode(&ids), "{model}");
        }
        assert!(lost < 100, "{model}: {lost} texts with bytes that have no token");
    }
}

#[test]
fn a_stream_of_any_tokens_is_the_lossy_text_of_their_bytes() {
    for model in common::MODELS {
        let tokenizer = common::tokenizer(model);
        // A stride that is prime to the vocabulary's size visits tokens in a wild order.
        let ids: Vec<u32> = (0..20_000u32).map(|i| (i * 7919) % tokenizer.vocab_len() as u32).collect();
        let shown = ids.iter().filter(|&&id| !tokenizer.is_hidden(id));
        let bytes: Vec<u8> = shown.flat_map(|&id| tokenizer.piece(id).to_vec()).collect();
        let mut stream = tokenizer.stream();
        let mut streamed: String = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
        streamed.push_str(stream.finish());
        assert_eq!(streamed, String::from_utf8_lossy(&bytes), "{model}");
        assert!(streamed.contains(char::REPLACEMENT_CHARACTER));
    }
}
