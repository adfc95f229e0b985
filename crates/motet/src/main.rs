//! The command line: puts models, the CPU device, the engine and the server together.
//!
//! One file per command. What a command prints for people goes to standard output, what it says about itself to
//! standard error; an error ends with status 1 and one clear sentence.

#![allow(clippy::print_stdout, reason = "this is the command line")]

mod bench;
mod bytes;
mod chat;
mod corpus;
mod imatrix;
mod inspect;
mod listing;
mod model;
mod options;
mod output;
mod perplexity;
mod plan;
mod pull;
mod run;
mod serve;
mod verify;

#[cfg(not(panic = "unwind"))]
compile_error!(
    "a panic on a compute thread is the error of its step: profiles must keep `panic = \"unwind\"`"
);

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::{OutputError, note};

/// What a command comes to.
type Outcome = Result<(), Box<dyn Error>>;

/// Many conversations, one engine: serves open-weight language models (GGUF) to several clients at once.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve OpenAI's HTTP interface
    #[command(allow_negative_numbers = true)]
    Serve(serve::Serve),
    /// Answer one or several prompts at once
    #[command(allow_negative_numbers = true)]
    Run(run::Run),
    /// Talk with a model in the terminal
    #[command(allow_negative_numbers = true)]
    Chat(chat::Chat),
    /// Say what a model would use, to the byte, without loading it
    #[command(allow_negative_numbers = true)]
    Plan(plan::PlanCommand),
    /// Check that conversations do not change each other, bit for bit
    #[command(allow_negative_numbers = true)]
    Verify(verify::Verify),
    /// Measure how surprised a model is by a text
    #[command(allow_negative_numbers = true)]
    Perplexity(perplexity::Perplexity),
    /// Measure tokens per second
    #[command(allow_negative_numbers = true)]
    Bench(bench::Bench),
    /// Measure which columns of the weights matter, for quantising
    #[command(allow_negative_numbers = true)]
    Imatrix(imatrix::Imatrix),
    /// Say what a model file holds and how it is run
    Inspect(inspect::Inspect),
    /// Bring a model to this machine
    Pull(pull::Pull),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(command) => command.run(),
        Command::Run(command) => command.run(),
        Command::Chat(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Verify(command) => command.run(),
        Command::Perplexity(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Imatrix(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Pull(command) => command.run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.downcast_ref::<OutputError>().is_some_and(OutputError::reader_left) => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            note!("motet: {}", in_full(&*error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, but for what it says of them itself.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        let what = deeper.to_string();
        if !text.contains(&what) {
            text = format!("{text}: {what}");
        }
        cause = deeper.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Problem {
        #[error("the file: {0}")]
        Tells(#[source] std::io::Error),
        #[error("the file")]
        Leaves(#[source] std::io::Error),
    }

    #[test]
    fn every_cause_is_told_once() {
        let cause = || std::io::Error::other("is gone");
        assert_eq!(in_full(&Problem::Tells(cause())), "the file: is gone");
        assert_eq!(in_full(&Problem::Leaves(cause())), "the file: is gone");
    }
}
