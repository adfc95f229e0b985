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
mod perplexity;
mod plan;
mod pull;
mod run;
mod serve;
mod verify;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    Serve(serve::Serve),
    /// Answer one or several prompts at once
    Run(run::Run),
    /// Talk with a model in the terminal
    Chat(chat::Chat),
    /// Say what a model would use, to the byte, without loading it
    Plan(plan::PlanCommand),
    /// Check that conversations do not change each other, bit for bit
    Verify(verify::Verify),
    /// Measure how surprised a model is by a text
    Perplexity(perplexity::Perplexity),
    /// Measure tokens per second
    Bench(bench::Bench),
    /// Measure which columns of the weights matter, for quantising
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
        Err(error) => {
            eprint!("motet: {error}");
            let mut cause = error.source();
            while let Some(deeper) = cause {
                eprint!(": {deeper}");
                cause = deeper.source();
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}
