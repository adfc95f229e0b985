//! A text cut into chunks, each read by the model from its first token on, as llama.cpp's tools do it: what
//! `perplexity` and `imatrix` share.
//!
//! Every row of every chunk is computed: a request for the prompt's own scores takes nothing from the prefix cache.

use std::collections::VecDeque;
use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use motet_engine::{Engine, Event, Options, Request, SamplingOptions};
use motet_model::KvFormat;
use motet_text::{Special, Tokenizer};

use crate::Outcome;

/// Which text, and how it is cut.
#[derive(Debug, Clone, Args)]
pub(crate) struct CorpusArgs {
    /// A text file
    #[arg(long, short)]
    pub(crate) file: PathBuf,
    /// Tokens of a chunk
    #[arg(long, short, default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..=1 << 20))]
    pub(crate) ctx: u32,
    /// Chunks at most [default: all]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Option<u32>,
}

impl CorpusArgs {
    /// The chunks, all of `ctx` tokens; what is left at the end of the text is not read.
    ///
    /// # Errors
    /// The file can't be read as text, or it is shorter than a chunk.
    pub(crate) fn chunks(&self, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
        let shown = self.file.display();
        let bytes = std::fs::read(&self.file).map_err(|e| format!("{shown}: {e}"))?;
        let text = String::from_utf8(bytes).map_err(|_| format!("{shown} is not a text in UTF-8"))?;
        // The line break that ends a file is not part of its text, as llama.cpp has it.
        let tokens = tokenizer.encode_prompt(text.strip_suffix('\n').unwrap_or(&text), Special::AsText);
        let chunks = cut(&tokens, self.ctx as usize, tokenizer.bos(), self.chunks.map(|n| n as usize));
        if chunks.is_empty() {
            let (found, ctx) = (tokens.len(), self.ctx);
            return Err(format!("{shown} has {found} tokens, a chunk takes {ctx}; lower --ctx").into());
        }
        Ok(chunks)
    }

    /// An engine that reads `sessions` chunks at once, in the largest batches.
    pub(crate) fn options(&self, sessions: usize, kv: KvFormat) -> Options {
        let rows = Options::default().rows;
        Options {
            sessions,
            context: Some(self.ctx as usize),
            kv,
            rows,
            prefill_chunk: Some(rows),
            ..Options::default()
        }
    }
}

/// Whole chunks of `ctx` tokens, at most so many. Where the text begins with `bos`, every chunk does: in the place of
/// its own first token.
fn cut(tokens: &[u32], ctx: usize, bos: Option<u32>, most: Option<usize>) -> Vec<Vec<u32>> {
    let begins = bos.filter(|&bos| tokens.first() == Some(&bos));
    let chunks = tokens.chunks_exact(ctx).take(most.unwrap_or(usize::MAX));
    chunks
        .map(|chunk| {
            let mut chunk = chunk.to_vec();
            if let Some(bos) = begins {
                chunk[0] = bos;
            }
            chunk
        })
        .collect()
}

/// Reads all chunks, `at_once` of them at a time. `each` is told, chunk by chunk in order, the log-probabilities of
/// its tokens from the second on.
///
/// # Errors
/// The engine's and those of `each`.
pub(crate) fn read(
    engine: &Engine,
    chunks: Vec<Vec<u32>>,
    at_once: usize,
    mut each: impl FnMut(&[f32]) -> Outcome,
) -> Outcome {
    let mut running = VecDeque::with_capacity(at_once);
    let mut waiting = chunks.into_iter();
    let mut logprobs = Vec::new();
    loop {
        for chunk in waiting.by_ref().take(at_once - running.len()) {
            let mut request = Request::new(chunk);
            request.sampling = SamplingOptions::greedy();
            request.max_tokens = Some(0);
            request.prompt_logprobs = Some(0);
            running.push_back(engine.submit(request)?);
        }
        let Some(mut stream) = running.pop_front() else { return Ok(()) };
        logprobs.clear();
        while let Some(event) = stream.blocking_next() {
            match event {
                Event::Prompt(scored) => {
                    logprobs.push(scored.logprob.ok_or("the engine left out a log-probability")?);
                }
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        each(&logprobs)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_into_whole_chunks() {
        let tokens: Vec<u32> = (10..21).collect();
        assert_eq!(cut(&tokens, 4, None, None), [[10, 11, 12, 13], [14, 15, 16, 17]]);
        assert_eq!(cut(&tokens, 4, None, Some(1)), [[10, 11, 12, 13]]);
        assert_eq!(cut(&tokens, 12, None, None), [[0; 12]; 0]);
    }

    #[test]
    fn every_chunk_begins_as_the_text_does() {
        let tokens: Vec<u32> = (10..21).collect();
        assert_eq!(cut(&tokens, 4, Some(10), None), [[10, 11, 12, 13], [10, 15, 16, 17]]);
        // The model has such a token, but its prompts don't begin with it.
        assert_eq!(cut(&tokens, 4, Some(2), None), [[10, 11, 12, 13], [14, 15, 16, 17]]);
    }
}
