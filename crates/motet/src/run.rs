//! `motet run`: one or several prompts at once, answers to standard output.

use clap::Args;
use motet_engine::{Event, FinishReason, Options, Request, SamplingOptions, Stream};
use motet_text::{Conversation, Detokenizer, Special};
use serde_json::json;

use crate::Outcome;
use crate::model::{self, Model};
use crate::options::{EngineArgs, ModelArgs};
use crate::output::{note, say};

/// Arguments of `motet run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// What to answer; several are answered at once
    #[arg(long, short, required = true)]
    prompt: Vec<String>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// Tokens of an answer at most
    #[arg(long, short = 'n')]
    max_tokens: Option<usize>,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub(crate) struct SamplingArgs {
    /// 0 takes the most likely token
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    /// Tokens kept by rank; 0 keeps all
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Tokens kept by cumulated probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Tokens kept that are at least so likely, as a share of the likeliest
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Makes a random answer repeatable
    #[arg(long)]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// As the engine takes them.
    pub(crate) fn options(&self) -> SamplingOptions {
        SamplingOptions {
            seed: self.seed,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            ..SamplingOptions::greedy()
        }
    }
}

impl Run {
    pub(crate) fn run(self) -> Outcome {
        let model = Model::open(self.model.model.as_deref())?;
        let device = self.engine.device(self.model.threads())?;
        let prompts = self.prompt.len();
        let options = Options { queue: prompts.max(Options::default().queue), ..self.engine.options() };
        let plan = model::plan(&model.weights.network, &options, &device)?;
        let engine = model.weights.start(plan, device);
        let mut streams = Vec::new();
        for prompt in &self.prompt {
            let mut request = Request::new(self.tokens(&model, prompt)?);
            request.sampling = self.sampling.options();
            request.max_tokens = self.max_tokens;
            request.end_tokens = model.tokenizer.ends().to_vec();
            // What is wrong with a request is told before the weights are there.
            streams.push(engine.submit(request)?);
        }
        engine.wait_until_loaded()?;
        // One answer is printed as it comes; of several each follows its prompt, when it is complete.
        let alone = streams.len() == 1;
        for (stream, prompt) in streams.into_iter().zip(&self.prompt) {
            if !alone {
                say!("> {prompt}\n")?;
            }
            print_answer(stream, model.tokenizer.stream())?;
        }
        Ok(())
    }

    fn tokens(&self, model: &Model, prompt: &str) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
        if self.raw {
            return Ok(model.tokenizer.encode_prompt(prompt, Special::AsText));
        }
        let messages = [json!({ "role": "user", "content": prompt })];
        let rendered = model.template.render(&Conversation {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            kwargs: None,
        })?;
        Ok(model.tokenizer.encode_prompt(&rendered.prompt, Special::Parse))
    }
}

/// Prints an answer as it comes and a line break behind it.
fn print_answer(mut stream: Stream, mut text: Detokenizer) -> Outcome {
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Token { scored, .. } => say!("{}", text.push(scored.token))?,
            Event::Finished { reason, .. } => {
                say!("{}\n", text.finish())?;
                if reason == FinishReason::Length {
                    note!("(the answer was cut at its limit of tokens)");
                }
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}
