//! `motet chat`: a conversation in the terminal, or from a pipe.
//!
//! Every turn sends the whole conversation; the engine's prefix cache makes that cheap. Answers go to standard output,
//! everything else to standard error.

use std::error::Error;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use motet_engine::{Engine, Event, FinishReason, Request, SubmitError};
use motet_text::Conversation;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::Outcome;
use crate::model::{self, Model};
use crate::options::{EngineArgs, ModelArgs};
use crate::output::{OutputError, note, say};
use crate::run::SamplingArgs;

const HELP: &str = "\
/reset  forget the conversation
/exit   end (so does the end of input, or Ctrl-C twice)
/help   this
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a message of several lines.
Ctrl-C stops an answer.";

/// Arguments of `motet chat`.
#[derive(Debug, Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// What the model is told before the conversation
    #[arg(long, short)]
    system: Option<String>,
    /// Tokens of an answer at most
    #[arg(long, short = 'n')]
    max_tokens: Option<usize>,
}

/// What was typed.
#[derive(Debug, PartialEq)]
enum Input {
    Message(String),
    Reset,
    Help,
    Unknown(String),
    /// Ctrl-C at the prompt.
    Interrupt,
    End,
}

impl Chat {
    pub(crate) fn run(self) -> Outcome {
        let model = Model::open(self.model.model.as_deref())?;
        let device = self.engine.device(self.model.threads())?;
        let plan = model::plan(&model.weights.network, &self.engine.options(), &device)?;
        let engine = model.weights.start(plan, device);
        engine.wait_until_loaded()?;

        let terminal = std::io::stdin().is_terminal();
        let stop = Arc::new(AtomicBool::new(false));
        if terminal {
            // In a pipe Ctrl-C ends the program as usual.
            signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&stop))?;
            note!("{}: /help says what can be typed", model.name);
        }
        let mut editor = DefaultEditor::new()?;
        let mut messages = self.beginning();
        let mut interrupted = false;
        loop {
            let input = read(|prompt| editor.readline(prompt))?;
            let again = std::mem::replace(&mut interrupted, input == Input::Interrupt);
            match input {
                Input::Message(text) => {
                    let _ = editor.add_history_entry(&text);
                    messages.push(json!({ "role": "user", "content": text }));
                    match self.answer(&model, &engine, &messages, &stop) {
                        Ok(answer) => messages.push(json!({ "role": "assistant", "content": answer })),
                        Err(error) if terminal && !error.is::<OutputError>() => {
                            messages.pop();
                            note!("motet: {error}");
                            if let Some(SubmitError::TooLong { .. }) = error.downcast_ref() {
                                note!("/reset begins a new conversation; --ctx gives it more room");
                            }
                        }
                        Err(error) => return Err(error),
                    }
                }
                Input::Reset => messages = self.beginning(),
                Input::Help => note!("{HELP}"),
                Input::Unknown(command) => note!("there is no {command}; /help says what there is"),
                Input::Interrupt if !again => note!("Ctrl-C again ends the program"),
                Input::Interrupt | Input::End => return Ok(()),
            }
        }
    }

    /// A conversation before its first turn.
    fn beginning(&self) -> Vec<Value> {
        self.system.iter().map(|system| json!({ "role": "system", "content": system })).collect()
    }

    /// Prints the answer to a conversation as it comes, and returns it. `stop` ends it early.
    fn answer(
        &self,
        model: &Model,
        engine: &Engine,
        messages: &[Value],
        stop: &AtomicBool,
    ) -> Result<String, Box<dyn Error>> {
        let conversation = Conversation { messages, tools: None, add_generation_prompt: true, kwargs: None };
        let rendered = model.template.render(&conversation)?;
        let (prompt, marks) = model.tokenizer.encode_prompt_of(&rendered.prompt, &[], &rendered.marks);
        let mut request = Request::new(prompt);
        request.marks = marks;
        request.sampling = self.sampling.options();
        request.max_tokens = self.max_tokens;
        request.end_tokens = model.tokenizer.ends().to_vec();

        stop.store(false, Ordering::Relaxed);
        let mut stream = engine.submit(request)?;
        let mut text = model.tokenizer.stream();
        let mut answer = String::new();
        let mut show = |piece: &str| {
            answer.push_str(piece);
            say!("{piece}")
        };
        let mut reason = None;
        while !stop.load(Ordering::Relaxed) {
            match stream.try_next() {
                Some(Event::Token { scored, .. }) => show(text.push(scored.token))?,
                Some(Event::Finished { reason: why, .. }) => reason = Some(why),
                Some(Event::Failed(error)) => return Err(error.into()),
                Some(_) => {}
                None if stream.is_over() => break,
                // Looking often, not waiting: Ctrl-C also works before the first token.
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        show(text.finish())?;
        say!("\n")?;
        if reason == Some(FinishReason::Length) {
            note!("(the answer was cut at its limit of tokens)");
        }
        Ok(answer)
    }
}

/// Reads lines until they are a message or a command.
fn read(mut line: impl FnMut(&str) -> Result<String, ReadlineError>) -> Result<Input, ReadlineError> {
    let mut message = String::new();
    let mut quoted = false;
    loop {
        let prompt = if message.is_empty() && !quoted { "> " } else { ". " };
        let line = match line(prompt) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => return Ok(Input::Interrupt),
            // A message that the end of input cuts short is a message.
            Err(ReadlineError::Eof) if !message.trim().is_empty() => return Ok(Input::Message(message)),
            Err(ReadlineError::Eof) => return Ok(Input::End),
            Err(error) => return Err(error),
        };
        let mut line = line.trim_end();
        if message.is_empty() && !quoted {
            match line.trim() {
                "" => continue,
                "/reset" => return Ok(Input::Reset),
                "/exit" => return Ok(Input::End),
                "/help" => return Ok(Input::Help),
                command if command.starts_with('/') => return Ok(Input::Unknown(command.into())),
                _ => {}
            }
            if let Some(rest) = line.strip_prefix("\"\"\"") {
                (quoted, line) = (true, rest);
                if line.is_empty() {
                    continue;
                }
            }
        }
        let (end, text) = match quoted {
            true => line.strip_suffix("\"\"\"").map_or((false, line), |text| (true, text)),
            false => line.strip_suffix('\\').map_or((true, line), |text| (false, text)),
        };
        message.push_str(text);
        if end {
            let message = message.trim_end_matches('\n');
            return Ok(Input::Message(message.into()));
        }
        message.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<Input> {
        let mut lines = text.lines().map(str::to_owned);
        let mut inputs = Vec::new();
        loop {
            let input = read(|_| lines.next().ok_or(ReadlineError::Eof)).expect("no other errors");
            inputs.push(input);
            if inputs.last() == Some(&Input::End) {
                return inputs;
            }
        }
    }

    #[test]
    fn lines_become_messages_and_commands() {
        let message = |text: &str| Input::Message(text.into());
        assert_eq!(
            all("a\n\n b \n/reset\n/help\n/what"),
            [
                message("a"),
                message(" b"),
                Input::Reset,
                Input::Help,
                Input::Unknown("/what".into()),
                Input::End
            ]
        );
        assert_eq!(all("a\\\nb\n/exit\nc"), [message("a\nb"), Input::End]);
        assert_eq!(
            all("\"\"\"\na\n\n/reset\nb\n\"\"\"\nc"),
            [message("a\n\n/reset\nb"), message("c"), Input::End]
        );
        assert_eq!(all("\"\"\"a\"\"\""), [message("a"), Input::End]);
        assert_eq!(all("a\\"), [message("a\n"), Input::End]);
    }
}
