//! Ids are llama.cpp's, for both algorithms and both settings, on every text.

mod common;

use motet_text::Special;

#[test]
fn ids_are_llama_cpps() {
    let texts = common::texts();
    for model in common::MODELS {
        let tokenizer = common::tokenizer(model);
        for (setting, special) in [("special", Special::Parse), ("text", Special::AsText)] {
            let expected = common::ids(&format!("{model}.ids.{setting}.xz"));
            assert_eq!(expected.len(), texts.len());
            for (text, expected) in texts.iter().zip(&expected) {
                assert_eq!(&tokenizer.encode(text, special), expected, "{model}, {setting}: {text:?}");
            }
        }
    }
}
